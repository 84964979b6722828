"""Algorithms that hold their state: the numbers of the functions, in EmbodiChain's form."""

from typing import Any

import jax
import numpy as np
import pytest
from case_tables import refused
from gymnasium.spaces import Discrete, MultiDiscrete
from helpers.host_tasks import Drift, Linear
from helpers.tiny import NETWORK, NUM_ENVS, NUM_STEPS
from helpers.tiny import PPO as OPTIONS

import ejax
from ejax.algorithms.grpo import GRPOConfig
from ejax.algorithms.ppo import ALGORITHM, PPOConfig, ppo_update
from ejax.collectors.stateful import BaseAlgorithm, build_algo
from ejax.config import ConfigError
from ejax.envs.host.pure_host import PureHostEnv
from ejax.learner import GRPO, PPO
from ejax.optim import make_optimizer
from ejax.rollout import reset, unroll
from ejax.schema import registry
from ejax.trainer import Trainer
from ejax.training.policies import build_policy
from ejax.types import init_train_state

ENV = Drift()
POLICY = build_policy({"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}, ENV)
CFG = PPOConfig(batch_size=16, n_epochs=2)
LOOP = {"env": ENV, "policy": POLICY, "num_steps": NUM_STEPS}


def run(algorithm: BaseAlgorithm, num_updates: int, obs: Any = None) -> list[dict[str, float]]:
    algorithm.initialize_buffer(NUM_STEPS, NUM_ENVS)
    losses = []
    for _ in range(num_updates):
        algorithm.collect_rollout(obs=obs, **LOOP)
        losses.append(algorithm.update())
        obs = None
    return losses


def same_params(one: Any, other: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


def test_a_loop_of_methods_gives_the_bits_of_the_functions() -> None:
    algorithm = PPO(CFG, POLICY, seed=3)
    key = jax.random.key(3)
    start = reset(ENV, jax.random.key(9), NUM_ENVS)
    losses = run(algorithm, 3, start)

    optimizer, envs = make_optimizer(CFG.optimizer), start
    init = jax.jit(init_train_state, static_argnums=(0, 1))  # as a run makes its parameters
    state = init(POLICY, optimizer, jax.random.split(key)[0], envs.obs)
    for i in range(3):
        key_collect, key_update, _ = jax.random.split(jax.random.fold_in(key, i), 3)
        rollout, envs = unroll(POLICY, ENV, state.params, envs, key_collect, num_steps=NUM_STEPS)
        state, metrics = ppo_update(state, rollout, key_update, policy=POLICY, optimizer=optimizer, config=CFG)
        assert losses[i] == {name: float(x) for name, x in metrics.items()}
    assert algorithm.state is not None and same_params(algorithm.state, state)
    assert algorithm.num_updates == 3 and algorithm.device == jax.devices()[0]


def test_loops_and_objects_share_what_is_compiled() -> None:
    run(PPO(CFG, POLICY), 1)
    compiled = ppo_update._cache_size(), unroll._cache_size()
    run(PPO(CFG.to_dict(), POLICY, seed=1), 3)
    assert (ppo_update._cache_size(), unroll._cache_size()) == compiled


@pytest.mark.slow
def test_a_loop_learns_what_a_trainer_learns(tmp_path: Any) -> None:
    algorithm = build_algo("ppo", {**OPTIONS, "learning_rate": 0.01}, POLICY)
    trainer = Trainer(ENV, POLICY, algorithm, num_envs=NUM_ENVS, num_steps=NUM_STEPS, seed=0, console=False)
    result = trainer.train(2 * NUM_STEPS * NUM_ENVS, run_dir=tmp_path / "run")
    run(algorithm, 2)
    assert algorithm.state is not None
    pairs = zip(jax.tree.leaves(algorithm.state.params), jax.tree.leaves(result.params), strict=True)
    for mine, theirs in pairs:  # the trainer's program is another one, which rounds otherwise
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)


def test_a_schedule_gets_its_horizon() -> None:
    algorithm = build_algo("ppo", {"batch_size": 16, "n_epochs": 1, "lr_scheduler": {"name": "linear"}}, POLICY)
    algorithm.bind_schedule(total_updates=2)
    rates = [losses["learning_rate"] for losses in run(algorithm, 2)]
    assert rates == pytest.approx([1.5e-4, 0.0])


@pytest.mark.slow
def test_grpo_begins_each_rollout_with_groups_from_one_start() -> None:
    policy = Linear()
    algorithm = GRPO(GRPOConfig(batch_size=16, n_epochs=1, group_size=2), policy)
    rollouts = []
    for _ in range(2):
        algorithm.initialize_buffer(NUM_STEPS, NUM_ENVS)
        algorithm.collect_rollout(ENV, policy, None, NUM_STEPS)
        assert algorithm.rollout is not None
        rollouts.append(np.asarray(algorithm.rollout.obs[0]))
        algorithm.update()
    for first in rollouts:
        np.testing.assert_array_equal(first[::2], first[1::2])
        assert (first[:, 1] == 0.0).all() and first[0, 0] != first[2, 0]
    assert not np.array_equal(*rollouts)
    assert algorithm.state is not None and algorithm.state.reference is not None


@pytest.mark.slow
def test_host_environments_are_collected_step_by_step() -> None:
    env, steps = PureHostEnv(ENV, NUM_ENVS), []
    algorithm = PPO(CFG, POLICY)
    means = algorithm.collect_rollout(env, POLICY, None, NUM_STEPS, lambda *step: steps.append(float(step[2].mean())))
    assert len(steps) == NUM_STEPS and means["reward"] == pytest.approx(np.mean(steps))
    assert np.isfinite(algorithm.update()["loss"])


@pytest.mark.slow
def test_a_policy_with_dropout_drops_in_training() -> None:
    dropping = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "dropout_p": 0.5}}
    policy = build_policy({"name": "actor_only", "actor": dropping}, ENV)
    algorithm = PPO(CFG, policy)
    algorithm.initialize_buffer(NUM_STEPS, NUM_ENVS)
    algorithm.collect_rollout(ENV, policy, None, NUM_STEPS)
    assert algorithm.rollout is not None and algorithm.rollout.dropout_seed is not None


def test_the_documents_class_is_registered_and_trained_with() -> None:
    @ejax.register_algo("my_algo", override=True)
    class MyAlgorithm(BaseAlgorithm):
        record = ALGORITHM

        def collect_rollout(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {**super().collect_rollout(*args, **kwargs), "own": 1.0}

    try:
        algorithm = build_algo("my_algo", {"batch_size": 16}, POLICY)
        assert isinstance(algorithm, MyAlgorithm) and "my_algo" in ejax.get_registered_algo_names()
        assert algorithm.collect_rollout(ENV, POLICY, reset(ENV, jax.random.key(0), NUM_ENVS), NUM_STEPS)["own"] == 1.0
        trainer = Trainer(ENV, POLICY, algorithm, num_envs=NUM_ENVS, buffer_size=NUM_STEPS)
        assert trainer.config.algorithm.cfg == PPOConfig(batch_size=16)
    finally:
        del registry.ALGORITHMS["my_algo"]


def test_methods_alone_serve_loops_of_ones_own() -> None:
    class Mine(BaseAlgorithm):
        def update(self) -> dict[str, float]:
            return {"loss": 0.0}

    algorithm = Mine({"anything": 1}, POLICY)
    assert algorithm.update() == {"loss": 0.0}
    with pytest.raises(NotImplementedError, match="Mine has no record; override this method, or"):
        algorithm.collect_rollout(obs=None, **LOOP)
    with pytest.raises(ConfigError, match="algorithm: Mine has only methods, which no compiled program calls; set its"):
        Trainer(ENV, POLICY, algorithm)


@pytest.mark.parametrize("space", [Discrete(2), MultiDiscrete([2, 3])], ids=str)
def test_a_space_that_the_algorithm_does_not_take_is_refused(space: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drift, "action_space", space)
    algorithm = build_algo("reppo", {"batch_size": 16}, POLICY)
    algorithm.initialize_buffer(NUM_STEPS, NUM_ENVS)
    refused(algorithm.collect_rollout, obs=None, **LOOP, match="Box")


def test_a_policy_made_for_another_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drift, "action_space", Discrete(2))
    trainer = Trainer(ENV, POLICY, PPO(CFG, POLICY), num_envs=NUM_ENVS, num_steps=NUM_STEPS, console=False)
    algorithm = PPO(CFG, POLICY)
    algorithm.initialize_buffer(NUM_STEPS, NUM_ENVS)
    for begin in (trainer.train, lambda _: algorithm.collect_rollout(obs=None, **LOOP)):
        refused(begin, 64, match=r"policy: got ActorCritic, which acts by 1 numbers, .* Discrete\(2\); ")


def test_what_cannot_be_is_refused() -> None:
    algorithm = PPO({"batch_size": 16}, POLICY)
    refused(algorithm.update, word="call collect_rollout first")
    refused(algorithm.collect_rollout, obs=None, **LOOP, word="call initialize_buffer first")
    refused(algorithm.initialize_buffer, 2, 2, key="algorithm.cfg.batch_size", word="got 16, but a rollout has 4 rows")
    algorithm.initialize_buffer(NUM_STEPS, NUM_ENVS, obs_dim=2, action_dim=1)
    refused(algorithm.collect_rollout, ENV, POLICY, None, NUM_STEPS + 1, key="(8, 4)", word="got (9, 4)")
    refused(algorithm.collect_rollout, ENV, Linear(), None, NUM_STEPS, word="got another policy, Linear")
    for name in ("bc", "sac", "flash_sac"):
        with pytest.raises(NotImplementedError, match=r"Config does not learn from rollouts; Trainer\("):
            build_algo(name, {}, POLICY).collect_rollout(obs=None, **LOOP)
    refused(build_algo, "ppo", {}, POLICY, "cuda", key="device", word="Trainer(..., device")
