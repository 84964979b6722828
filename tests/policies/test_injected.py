"""Networks of one's own in ActorCritic and ActorOnly: Flax modules in the place of an MLP's config."""

from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases
from flax import nnx
from own_policies import OBS
from tiny import EVALUATED, STEPS, tiny

import ejax
from ejax.algorithms import grpo, ppo
from ejax.config import ConfigError
from ejax.distributions import ActionSpec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import make_optimizer
from ejax.play.saved_policy import evaluate_run
from ejax.policies import MLP, ActorCritic, ActorOnly, NetworkConfig, evaluate_actions, get_action
from ejax.policies.heads import uses_dropout
from ejax.policies.mlp import consistent_dropout
from ejax.rollout import reset, unroll
from ejax.store.checkpoint import CheckpointError
from ejax.trainer import Trainer
from ejax.types import make_train_state

KEY = jax.random.key(0)
TWO = ActionSpec("normal", (2,))
SMALL = NetworkConfig(hidden_sizes=(8,), activation="tanh")
ROWS = jax.random.normal(KEY, (5, OBS))


def sequential(size: int, activation: Any = nn.tanh) -> nn.Module:
    return nn.Sequential([nn.Dense(8), activation, nn.Dense(size)])  # a list, as in Flax's own examples


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, dropout_seed: jax.Array | None = None) -> jax.Array:
        x = nn.Dense(8)(x)
        return nn.Dense(2)(x if dropout_seed is None else consistent_dropout(x, dropout_seed, layer=0, p=0.5))


class Averaging(nn.Module):
    """Has running averages, and moves them where it is observed."""

    @nn.compact
    def __call__(self, x: jax.Array, observe: Any = False) -> jax.Array:
        return nn.Dense(1)(nn.BatchNorm(use_running_average=observe is False, momentum=0.9)(x))


class NnxNetwork(nnx.Module):
    def __init__(self, size: int, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(OBS, 8, rngs=rngs), nnx.Linear(8, size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.hidden(x)))


KINDS = {
    "linen": lambda: ActorCritic(TWO, sequential(2), sequential(1), initial_log_std=-0.5, actor_obs_normalization=True),
    "nnx": lambda: ActorCritic(TWO, nnx.bridge.to_linen(NnxNetwork, 2), nnx.bridge.to_linen(NnxNetwork, 1)),
    "one_of_two": lambda: ActorCritic(TWO, SMALL, sequential(1)),
    "dropout_and_averages": lambda: ActorCritic(TWO, Dropping(), Averaging()),
}


def test_modules_are_the_networks_of_actor_and_critic() -> None:
    policy = ActorCritic(TWO, sequential(2), sequential(1), initial_log_std=-0.5, actor_obs_normalization=True)
    params = policy.init(KEY, ROWS)
    assert set(params["params"]) == {"actor", "critic", "log_std"} and set(params["normalizer"]) == {
        "actor_obs_normalizer"
    }
    observed = {"actor_obs_normalizer": {"mean": jnp.ones(OBS), "variance": 4.0 * jnp.ones(OBS), "count": jnp.ones(())}}
    distribution, value = policy.apply({**params, "normalizer": observed}, ROWS)
    expected = sequential(2).apply({"params": params["params"]["actor"]}, (ROWS - 1.0) / 2.01)
    np.testing.assert_allclose(distribution.mean, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(distribution.log_std, np.full((5, 2), -0.5))
    np.testing.assert_array_equal(value, sequential(1).apply({"params": params["params"]["critic"]}, ROWS)[:, 0])
    action, log_prob, _ = get_action(policy, params, ROWS, KEY)
    np.testing.assert_allclose(evaluate_actions(policy, params, ROWS, action)[0], log_prob, rtol=1e-5)


def test_a_module_drops_units_where_it_has_dropout() -> None:
    with_dropout = NetworkConfig(hidden_sizes=(8,), dropout_p=0.5)
    for critic, expected in ((sequential(1), False), (MLP(SMALL, 1), False), (MLP(with_dropout, 1), True)):
        policy = ActorCritic(TWO, SMALL, critic)
        assert uses_dropout(policy) == expected
    assert uses_dropout(KINDS["dropout_and_averages"]())


def test_an_mlp_as_a_module_computes_what_its_config_does() -> None:
    of_module, of_config = ActorCritic(TWO, MLP(SMALL, 2), MLP(SMALL, 1)), ActorCritic(TWO, SMALL, SMALL)
    params = of_config.init(KEY, ROWS)
    chex.assert_trees_all_equal(of_module.init(KEY, ROWS), params)
    chex.assert_trees_all_equal(of_module.apply(params, ROWS), of_config.apply(params, ROWS))
    assert of_module != of_config and of_module == ActorCritic(TWO, MLP(SMALL, 2), MLP(SMALL, 1))


@cases(
    "actor error message",
    (sequential(3), ValueError, r"actor, a Sequential, gives \[5, 3\] for features \[5, 14\], must give \[5, 2\]"),
    ({"hidden_sizes": [8]}, TypeError, "actor must be a NetworkConfig or a Flax Linen module, got a FrozenDict"),
    (NnxNetwork(2, nnx.Rngs(0)), TypeError, r"got a NnxNetwork; for NNX, pass flax.nnx.bridge.to_linen"),
)
def test_a_network_that_does_not_fit_is_named(actor: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ActorOnly(TWO, actor).init(KEY, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_an_update_moves_every_parameter(name: str) -> None:
    algorithm, env = {"ppo": ppo, "grpo": grpo}[name].ALGORITHM, PointMassRL()
    policy = KINDS["linen"]() if name == "ppo" else ActorOnly(TWO, sequential(2))
    config = algorithm.Config(n_epochs=1, batch_size=8)
    optimizer = make_optimizer(config.optimizer)
    carry = reset(env, KEY, 4)
    params = policy.init(KEY, carry.obs)
    rollout, _ = unroll(policy, env, params, carry, KEY, num_steps=2)
    state = make_train_state(params, optimizer, reference=params if algorithm.keeps_reference(config) else None)
    state, _ = algorithm.update(state, rollout, KEY, policy=policy, optimizer=optimizer, config=config)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), params["params"], state.params["params"])
    assert all(jax.tree.leaves(moved))


def trainer_of(policy: Any, folder: Path, **keywords: Any) -> Trainer:
    raw = tiny(folder, **EVALUATED, **keywords)
    return Trainer(
        PointMassRL(max_episode_steps=8), policy, ppo.ALGORITHM, options=raw["algorithm"]["cfg"], **raw["trainer"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the policy has not learned")
def test_a_run_is_resumed_loaded_and_evaluated(kind: str, tmp_path: Path) -> None:
    trainer_of(KINDS[kind](), tmp_path).train(STEPS, run_dir=tmp_path / "run")
    resumed = trainer_of(KINDS[kind](), tmp_path).train(2 * STEPS, run_dir=tmp_path / "run", resume="latest")
    whole = trainer_of(KINDS[kind](), tmp_path).train(2 * STEPS, run_dir=tmp_path / "whole")
    chex.assert_trees_all_equal(resumed.params, whole.params)
    assert np.isfinite(evaluate_run(tmp_path / "run", num_episodes=2, num_envs=2)["eval/avg_reward"])
    mode = KINDS[kind]().apply(whole.params, ROWS)[0].mode()
    acted = ejax.load(tmp_path / "whole", checkpoint="latest").act(np.asarray(ROWS))
    np.testing.assert_allclose(np.clip(acted, -1.0, 1.0), np.clip(mode, -1.0, 1.0), rtol=1e-5, atol=1e-6)


def test_the_config_describes_modules_by_their_text(tmp_path: Path) -> None:
    policy = trainer_of(KINDS["one_of_two"](), tmp_path).config.policy
    assert policy.name == "ActorCritic" and policy.actor is not None and policy.actor.network_cfg == SMALL
    assert policy.cfg["critic"].startswith("Sequential( layers = [Dense( features = 8 ") and "0x" not in str(policy.cfg)
    assert trainer_of(KINDS["linen"](), tmp_path).config.policy.initial_log_std == -0.5


@pytest.mark.slow
def test_a_resume_with_another_module_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    def policy(activation: Any) -> ActorCritic:
        return ActorCritic(TWO, sequential(2, activation), sequential(1))

    trainer_of(policy(nn.tanh), tmp_path).train(STEPS, run_dir=tmp_path / "run")
    with pytest.raises((ConfigError, CheckpointError), match=r"policy\.cfg"):
        trainer_of(policy(nn.relu), tmp_path).train(2 * STEPS, run_dir=tmp_path / "run", resume="latest")


@pytest.mark.slow
@cases(
    "critic message",
    (nn.Sequential([nn.Dense(8), nn.Dropout(0.5, deterministic=False), nn.Dense(1)]), "PRNG for .dropout"),
    (nn.Sequential([nn.BatchNorm(use_running_average=True), nn.Dense(1)]), "batch_stats.* that would never move"),
    (nn.Sequential([nn.BatchNorm(use_running_average=False), nn.Dense(1)]), "immutable"),
)
def test_what_a_module_would_lose_or_repeat_is_refused(critic: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(ActorCritic(TWO, SMALL, critic), tmp_path).train(STEPS, run_dir=tmp_path / "run")
