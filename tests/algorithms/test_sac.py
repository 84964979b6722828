"""SAC: its target and losses, the ratio of gradient steps to environment steps, TD3's options, whole runs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from flax.traverse_util import flatten_dict
from soft_actors_in_numpy import draw, mlp_critics, mlp_moments
from tiny import EPISODE, tiny, tiny_sac
from tiny import NETWORK as TINY
from whole_runs import assert_refused

from ejax.algorithms.off_policy import OffPolicyState, make_own
from ejax.algorithms.replay_buffer import Transition
from ejax.algorithms.sac import ALGORITHM, SACConfig, sac_step, sac_target, sac_update
from ejax.config import parse_config
from ejax.distributions import ActionSpec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies.actor_critic import ActorCritic
from ejax.policies.actor_q import ActorQ, load_actor_from
from ejax.policies.mlp import NetworkConfig
from ejax.rollout import reset, unroll
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint
from ejax.store.run_dir import open_run_directory
from ejax.training.build import build
from ejax.training.warm_start import start_from_policy
from ejax.types import TrainState, init_train_state

NETWORK = NetworkConfig(hidden_sizes=(6,), activation="tanh")
CONFIG = SACConfig(batch_size=8, gradient_steps=2, learning_starts=0, replay={"capacity": 64})
ROWS = 7


def make_policy(half_width: float = 2.0) -> ActorQ:
    return ActorQ(ActionSpec("tanh_normal", (2,), (-half_width,) * 2, (half_width,) * 2), NETWORK, NETWORK)


def make_state(policy: ActorQ, config: SACConfig = CONFIG) -> TrainState:
    return init_train_state(policy, ALGORITHM.make_optimizer(config), jax.random.key(3), jnp.zeros((1, 3)), target=True)


def make_batch(half_width: float = 2.0) -> Transition:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return Transition(
        obs=normal(ROWS, 3),
        action=half_width * jnp.tanh(normal(ROWS, 2)),
        reward=normal(ROWS),
        next_obs=normal(ROWS, 3),
        discount=jnp.asarray([0.99, 0.0, 0.99, 0.98, 0.0, 0.99, 0.97]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("ent_coef", ["auto", 0.3])
def test_the_target_is_the_formulas_and_termination_has_no_value(ent_coef: Any) -> None:
    policy, batch, key = make_policy(), make_batch(), jax.random.key(5)
    config = CONFIG.replace(ent_coef=ent_coef)
    state = make_state(policy)
    params = {**state.params["params"], "log_alpha": jnp.float32(-1.2)}
    state = replace(state, params={"params": params}, target=jax.tree.map(lambda x: 1.5 * x, state.target))
    y = sac_target(state, batch, key, policy=policy, config=config)

    mean, log_std = mlp_moments(params, batch.next_obs)
    action, log_prob = draw(mean, log_std, jax.random.normal(key, mean.shape))
    q = mlp_critics(state.target["params"]["critic"], batch.next_obs, action)[..., 0].min(0)
    alpha = np.exp(-1.2) if ent_coef == "auto" else ent_coef
    np.testing.assert_allclose(
        y, np.asarray(batch.reward) + np.asarray(batch.discount) * (q - alpha * log_prob), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(y[batch.discount == 0.0], batch.reward[batch.discount == 0.0])


def test_the_targets_action_is_td3s_with_clipped_noise() -> None:
    policy, batch, key = make_policy(), make_batch(), jax.random.key(5)
    config = CONFIG.replace(ent_coef=0.0, target_noise=0.4, target_noise_clip=0.3)
    state = make_state(policy)
    y = sac_target(state, batch, key, policy=policy, config=config)
    mean, _ = mlp_moments(state.params["params"], batch.next_obs)
    noise = np.clip(0.4 * np.asarray(jax.random.normal(key, mean.shape)), -0.3, 0.3)
    assert (np.abs(noise) == np.float32(0.3)).any()
    action = np.clip(np.tanh(mean) + noise, -1, 1)
    q = mlp_critics(state.target["params"]["critic"], batch.next_obs, action)[..., 0].min(0)
    np.testing.assert_allclose(y, batch.reward + batch.discount * q, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_step_does_not_depend_on_the_units_of_actions() -> None:
    steps = []
    for half_width in (1.0, 4.0):
        policy = make_policy(half_width)
        state = make_state(policy)
        given = {"policy": policy, "optimizer": ALGORITHM.make_optimizer(CONFIG), "config": CONFIG}
        steps.append(sac_step(state, make_batch(half_width), jax.random.key(1), **given))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *steps)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    policy = make_policy()
    state, batch = make_state(policy), make_batch()
    given = {"policy": policy, "optimizer": ALGORITHM.make_optimizer(CONFIG), "config": CONFIG}
    after, metrics = sac_step(state, replace(batch, obs=batch.obs * jnp.nan), jax.random.key(1), **given)
    assert metrics["skipped_fraction"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


ENV = PointMassRL()
RUN_POLICY = ActorQ(ActionSpec("tanh_normal", (2,), (-1.0,) * 2, (1.0,) * 2), NETWORK, NETWORK)


def updated(config: SACConfig, num_updates: int) -> tuple[TrainState, OffPolicyState, list[Any]]:
    optimizer = ALGORITHM.make_optimizer(config)
    envs = reset(ENV, jax.random.key(0), 4)
    state = init_train_state(RUN_POLICY, optimizer, jax.random.key(1), envs.obs, target=True)
    own, logs = make_own(config, RUN_POLICY, ENV, 4), []
    for i in range(num_updates):
        key_collect, key_update = jax.random.split(jax.random.key(i))
        rollout, envs = unroll(RUN_POLICY, ENV, state.params, envs, key_collect, num_steps=3)
        both = (state, own)
        (state, own), metrics = sac_update(
            both, rollout, key_update, policy=RUN_POLICY, optimizer=optimizer, config=config
        )
        logs.append(metrics)
    return state, own, logs


@pytest.mark.slow
def test_nothing_is_learned_before_learning_starts_and_nothing_is_caught_up_after() -> None:
    config = CONFIG.replace(learning_starts=30)
    state, _, logs = updated(config, 4)
    assert [float(log["replay_size"]) for log in logs] == [12.0, 24.0, 36.0, 48.0]
    assert [bool(np.isnan(log["critic_loss"])) for log in logs] == [True, True, False, False]
    # two updates of gradient_steps each
    assert int(state.opt_state["critic"][0].count) == 2 * config.gradient_steps
    assert int(state.step) == 4


@pytest.mark.slow
def test_the_actor_steps_once_in_policy_delay_steps_of_the_critics() -> None:
    state, _, logs = updated(CONFIG.replace(gradient_steps=6, policy_delay=3), 1)
    assert int(state.opt_state["critic"][0].count) == 6
    assert int(state.opt_state["actor"][0].count) == 2
    assert np.isfinite(logs[0]["actor_loss"])


def raw_run(tmp_path: Path, **trainer: Any) -> dict[str, Any]:
    """Make the config of a tiny run of SAC."""
    raw = tiny_sac(tmp_path, sac={"batch_size": 16, "replay": {"capacity": 100, "n_step": 2}}, **trainer)
    return raw | {"policy": raw["policy"] | {"actor": TINY, "critic": TINY}}  # whose actors are taken over


@cases(
    "changes key text",
    (["policy.squash_actions=false"], "policy.squash_actions", "acts between the bounds"),
    (["policy.name=actor_critic"], "policy.name", "values no actions; set policy.name to actor_q"),
    (["policy={name: flash_q, squash_actions: true}"], "policy.name", "whose statistics only flash_sac updates"),
    (["policy.cfg={num_bins: 51}"], "policy.cfg.num_bins", "give one value, not a distribution"),
    (["algorithm.cfg.replay.capacity=20"], "algorithm.cfg.replay.capacity", "a rollout has 32 rows"),
    (["algorithm.cfg.learning_starts=200"], "algorithm.cfg.learning_starts", "a buffer of 100 never holds"),
    (["algorithm.cfg.policy_delay=3"], "algorithm.cfg.policy_delay", "does not divide gradient_steps 2"),
    (["trainer.normalize_reward=true"], "trainer.normalize_reward", "does not learn from"),
    (["policy.actor.memory={type: gru}"], "policy.actor.memory", "has no memory"),
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: list[str], key: str, text: str) -> None:
    assert_refused(raw_run(tmp_path), changes, key, text)


@pytest.mark.slow
def test_the_actor_of_a_squashed_policy_is_taken_over_as_the_same_distribution() -> None:
    spec = ActionSpec("tanh_normal", (2,), (-3.0, -1.0), (1.0, 2.0))
    theirs = ActorCritic(spec, actor=NETWORK, critic=NETWORK, initial_log_std=-0.7)
    ours = ActorQ(spec, NETWORK, NETWORK, initial_log_std=-0.2)
    obs = jax.random.normal(jax.random.key(0), (5, 3))
    saved, own = (policy.init(jax.random.key(i), obs) for i, policy in enumerate((theirs, ours)))
    taken = load_actor_from(ours, own, flatten_dict(saved, sep="."), squashed=True)
    one, other = ours.apply(taken, obs)[0], theirs.apply(saved, obs)[0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, other)
    jax.tree.map(np.testing.assert_array_equal, taken["params"]["critic"], own["params"]["critic"])


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return the config of a run of PPO with an unbounded policy, and its folder."""
    folder = tmp_path_factory.mktemp("ppo")
    raw = tiny(folder, env_cfg={"max_episode_steps": EPISODE}, iterations=1)
    raw["policy"] |= {"actor_obs_normalization": True, "initial_log_std": -1.0}
    train(parse_config(raw), run_dir=folder / "run")
    return raw, folder / "run"


@pytest.mark.slow
def test_the_actor_of_a_run_of_ppo_is_taken_over(ppo_run: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Its actions are not squashed: tanh bends them, and leaves small ones as they are."""
    ppo, run = ppo_run
    raw = raw_run(tmp_path, iterations=1)
    raw["policy"] |= {"init_from": str(run), "actor_obs_normalization": True}
    config = parse_config(raw)
    parts = build(config)
    state, notes = start_from_policy(parts, config)
    assert "the policy is that of" in notes[0]

    theirs = build(parse_config(ppo))
    directory, _ = open_run_directory(run)
    saved, _ = load_checkpoint(directory.find("latest", print), theirs.state)
    obs = jax.tree.map(lambda x: 0.01 * jax.random.normal(jax.random.key(0), (5, x.shape[-1])), saved.envs.obs)
    one, other = (p.policy.apply(s.train.params, obs)[0] for p, s in ((parts, state), (theirs, saved)))
    np.testing.assert_allclose(one.base.mean, other.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.base.log_std, other.log_std, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_another_actor_is_not_taken_over_in_part(ppo_run: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    raw = raw_run(tmp_path, iterations=1)
    raw["policy"] |= {"init_from": str(ppo_run[1]), "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [9]}}}
    config = parse_config(raw)
    refused(lambda: start_from_policy(build(config), config), match=r"linear_0.kernel is \(\d+, 8\), needed \(\d+, 9\)")
