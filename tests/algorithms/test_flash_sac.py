"""FlashSAC: its target over joint batches, its losses, the scale of its rewards, whole runs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soft_actors_in_numpy
from case_tables import cases, refused
from tiny import EPISODE, tiny
from whole_runs import assert_goes_on_with_the_same_bits, assert_refused

from ejax.algorithms.flash_sac import (
    ALGORITHM,
    FlashSACConfig,
    ReturnScale,
    flash_sac_step,
    flash_sac_update,
    soft_target,
    track_scale,
)
from ejax.algorithms.off_policy import OffPolicyState
from ejax.algorithms.replay_buffer import Transition, init_replay
from ejax.config import load_config, parse_config
from ejax.distributions import ActionSpec
from ejax.numerics.reward_scale import init_reward_scale
from ejax.numerics.value_bins import project_support
from ejax.policies.flash import FlashQ, unit_length
from ejax.training.build import build
from ejax.types import Rollout, TrainState, init_train_state

POLICY = FlashQ(
    ActionSpec("tanh_normal", (2,), (-2.0,) * 2, (2.0,) * 2),
    actor_width=6,
    critic_width=5,
    num_blocks=1,
    expansion=2,
    num_bins=11,
    log_std_range=(-4.0, 1.0),
)
SCALAR = POLICY.clone(num_bins=None)
CONFIG = FlashSACConfig(batch_size=8, learning_starts=0, replay={"capacity": 64}, lr_scheduler={"name": None})
OPTIMIZER = ALGORITHM.make_optimizer(CONFIG)
ROWS = 7
Z = np.linspace(-5.0, 5.0, 11)


def make_state(policy: FlashQ = POLICY) -> TrainState:
    begin = jax.jit(init_train_state, static_argnums=(0, 1), static_argnames="target")
    state = begin(policy, OPTIMIZER, jax.random.key(3), jnp.zeros((1, 3)), target=True)
    rng = np.random.default_rng(1)
    move = partial(jax.tree.map, lambda x: x + rng.uniform(0.0, 0.4, x.shape).astype(np.float32))
    params = {**state.params, "params": move(state.params["params"]), "batch_stats": move(state.params["batch_stats"])}
    params["params"]["log_alpha"] = jnp.float32(-0.7)
    return replace(state, params=params, target={**params, "params": move(params["params"])})


def make_batch() -> Transition:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return Transition(
        obs=normal(ROWS, 3),
        action=2.0 * jnp.tanh(normal(ROWS, 2)),
        reward=normal(ROWS),
        next_obs=normal(ROWS, 3),
        discount=jnp.asarray([0.99, 0.0, 0.99, 0.98, 0.0, 0.99, 0.97]),
    )


STATE, BATCH, KEY = make_state(), make_batch(), jax.random.key(5)
SCALE = ReturnScale(returns=replace(init_reward_scale(1), moments=(4.0, jnp.ones(1), jnp.full(1, 4.0))), largest=15.0)
step = jax.jit(flash_sac_step, static_argnums=4, static_argnames=("policy", "optimizer", "config"))
target_of = jax.jit(soft_target, static_argnames="policy")


def stepped(moves_actor: bool = True, policy: FlashQ = POLICY, state: TrainState = STATE, **changes: Any) -> Any:
    batch, config = replace(BATCH, **changes), CONFIG
    return step(state, SCALE, batch, KEY, moves_actor, policy=policy, optimizer=OPTIMIZER, config=config)


def project_in_a_loop(probability: np.ndarray, support: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Follow algorithm 1 of Bellemare et al. 2017, for one row."""
    made, width = np.zeros(len(z)), z[1] - z[0]
    for p, x in zip(probability, support, strict=True):
        b = (np.clip(x, z[0], z[-1]) - z[0]) / width
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        if lower == upper:
            made[lower] += p
        else:
            made[lower] += p * (upper - b)
            made[upper] += p * (b - lower)
    return made


def test_mass_goes_to_the_two_bins_around_it_by_nearness() -> None:
    rng = np.random.default_rng(2)
    probability, support = rng.dirichlet(np.ones(11), 20), rng.normal(scale=4.0, size=(20, 11))
    support[0], support[1] = Z, 9.0  # on the atoms, and beyond them
    got = project_support(jnp.asarray(probability), jnp.asarray(support), -5.0, 5.0)
    expected = [project_in_a_loop(p, x, Z) for p, x in zip(probability, support, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(got[0], probability[0], atol=1e-6)
    np.testing.assert_allclose(got[1], np.eye(11)[-1], atol=1e-6)


def next_action_in_numpy(params: Any, stats: Any, key: Any) -> tuple[np.ndarray, np.ndarray]:
    mean, log_std = soft_actors_in_numpy.actor(params, stats, BATCH.next_obs, (-4.0, 1.0))
    return soft_actors_in_numpy.draw(mean, log_std, jax.random.normal(key, mean.shape))


def joint(action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [s; s'] and [a; a'], the actions in [-1, 1]."""
    return np.concatenate([BATCH.obs, BATCH.next_obs]), np.concatenate([np.asarray(BATCH.action) / 2.0, action])


def target_in_numpy(state: TrainState, action: np.ndarray, log_prob: np.ndarray, reward: np.ndarray) -> np.ndarray:
    logits = soft_actors_in_numpy.critics(state.target["params"], None, *joint(action))[:, ROWS:]
    probability = soft_actors_in_numpy.softmax(logits)
    alpha, made = np.exp(float(state.params["params"]["log_alpha"])), []
    for i in range(ROWS):
        critic = (probability[:, i] @ Z).argmin()
        support = reward[i] + float(BATCH.discount[i]) * (Z - alpha * log_prob[i])
        made.append(project_in_a_loop(probability[critic, i], support, Z))
    return np.stack(made)


def test_the_target_is_the_distribution_of_the_lesser_critic_on_the_joint_batch_shifted_by_the_entropy() -> None:
    action, target = target_of(STATE, BATCH, KEY, policy=POLICY)
    unit, log_prob = next_action_in_numpy(STATE.params["params"], STATE.params["batch_stats"]["actor"], KEY)
    np.testing.assert_allclose(action, 2.0 * unit, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target, target_in_numpy(STATE, unit, log_prob, np.asarray(BATCH.reward)), atol=2e-4)
    # each critic is the lesser one somewhere
    logits = soft_actors_in_numpy.critics(STATE.target["params"], None, *joint(unit))[:, ROWS:]
    assert len(set((soft_actors_in_numpy.softmax(logits) @ Z).argmin(0))) == 2


def test_after_a_termination_all_mass_lies_around_the_reward() -> None:
    _, target = target_of(STATE, BATCH, KEY, policy=POLICY)
    for i in np.flatnonzero(np.asarray(BATCH.discount) == 0.0):
        assert np.count_nonzero(np.asarray(target[i]) > 1e-6) == 2
        np.testing.assert_allclose(target[i] @ Z, BATCH.reward[i], atol=1e-5)


def test_without_atoms_the_target_is_sacs() -> None:
    state = make_state(SCALAR)
    _, target = target_of(state, BATCH, KEY, policy=SCALAR)
    unit, log_prob = next_action_in_numpy(state.params["params"], state.params["batch_stats"]["actor"], KEY)
    q = soft_actors_in_numpy.critics(state.target["params"], None, *joint(unit))[:, ROWS:, 0].min(0)
    alpha = np.exp(float(state.params["params"]["log_alpha"]))
    np.testing.assert_allclose(target, BATCH.reward + BATCH.discount * (q - alpha * log_prob), rtol=1e-3, atol=1e-4)


def test_the_critics_loss_is_the_cross_entropy_on_the_joint_batch_of_scaled_rewards() -> None:
    _, _, metrics = stepped(moves_actor=False)
    # √4 = 2 < 15 / 5
    assert float(metrics["reward_divisor"]) == pytest.approx(3.0)
    _, key = jax.random.split(KEY)
    unit, log_prob = next_action_in_numpy(STATE.params["params"], STATE.params["batch_stats"]["actor"], key)
    target = target_in_numpy(STATE, unit, log_prob, np.asarray(BATCH.reward) / 3.0)
    logits = soft_actors_in_numpy.critics(STATE.params["params"], None, *joint(unit))[:, :ROWS]
    log_p = np.log(soft_actors_in_numpy.softmax(logits))
    assert float(metrics["critic_loss"]) == pytest.approx(-(target * log_p).sum(-1).mean(), rel=1e-3)


@pytest.mark.slow
def test_the_actors_loss_is_of_the_first_half_of_its_joint_batch_by_running_statistics_of_the_critics() -> None:
    _, _, metrics = stepped()
    key, _ = jax.random.split(KEY)
    params = STATE.params["params"]
    mean, log_std = soft_actors_in_numpy.actor(params, None, joint(np.zeros((ROWS, 2)))[0], (-4.0, 1.0))
    unit, log_prob = soft_actors_in_numpy.draw(mean[:ROWS], log_std[:ROWS], jax.random.normal(key, (ROWS, 2)))
    logits = soft_actors_in_numpy.critics(params, STATE.params["batch_stats"]["critic"], BATCH.obs, unit)
    q = (soft_actors_in_numpy.softmax(logits) @ Z).min(0)
    alpha, entropy = np.exp(-0.7), -log_prob.mean()
    target = 0.5 * 2 * np.log(2 * np.pi * np.e * 0.15**2)
    assert float(metrics["entropy"]) == pytest.approx(entropy, rel=1e-3)
    assert float(metrics["actor_loss"]) == pytest.approx(
        (alpha * log_prob - q).mean() + alpha * (entropy - target), rel=1e-3
    )


@pytest.mark.slow
def test_a_step_gives_weights_their_length_and_moves_the_target_by_tau() -> None:
    after, _, _ = stepped()
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        unit_length(after.params["params"]),
        after.params["params"],
    )
    for name in ("block_0", "output"):
        jax.tree.map(
            lambda old, new, mean: np.testing.assert_allclose(mean, 0.99 * old + 0.01 * new, rtol=1e-5, atol=1e-6),
            *(x["params"]["critic"][name] for x in (STATE.target, after.params, after.target)),
        )
    free, _, _ = stepped(policy=POLICY.clone(unit_rows=False))
    lengths = np.linalg.norm(free.params["params"]["critic"]["embed"]["kernel"], axis=-2)
    assert np.abs(lengths - 1.0).max() > 0.1


def test_each_network_moves_its_own_running_statistics_where_it_steps() -> None:
    moved = lambda state, name: jax.tree.leaves(  # noqa: E731
        jax.tree.map(
            lambda x, y: not np.array_equal(x, y), state.params["batch_stats"][name], STATE.params["batch_stats"][name]
        )
    )
    both, _, _ = stepped()
    assert all(moved(both, "actor")) and all(moved(both, "critic"))
    critics, _, _ = stepped(moves_actor=False)
    assert not any(moved(critics, "actor")) and all(moved(critics, "critic"))


def test_a_step_that_is_not_finite_changes_no_parameter_and_no_statistic_and_is_counted() -> None:
    state = replace(STATE, params={**STATE.params, "params": unit_length(STATE.params["params"])})
    after, _, metrics = stepped(state=state, obs=BATCH.obs * jnp.nan)
    assert metrics["skipped_fraction"] == 1.0
    for name in ("params", "batch_stats"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), after.params[name], state.params[name])


def test_rewards_are_divided_by_the_deviation_of_returns_or_the_largest_by_the_range() -> None:
    rng = np.random.default_rng(4)
    reward, done = rng.normal(size=(2, 6, 3)), rng.random((2, 6, 3)) < 0.2
    valid = rng.random((2, 6, 3)) < 0.8
    scale = ReturnScale(returns=init_reward_scale(3), largest=jnp.zeros(()))
    config = CONFIG.replace(gamma=0.9)
    running, seen = np.zeros(3), []
    for part in range(2):
        fields = dict.fromkeys(("obs", "action", "log_prob", "value", "next_value"), None)
        flags = {"terminated": jnp.asarray(done[part]), "truncated": jnp.zeros((6, 3), bool)}
        rollout = Rollout(reward=jnp.asarray(reward[part]), valid=jnp.asarray(valid[part]), **flags, **fields)
        scale = track_scale(scale, rollout, config)
        for t in range(6):
            running = 0.9 * running + np.where(valid[part, t], reward[part, t], 0.0)
            seen += running[valid[part, t]].tolist()
            running = np.where(done[part, t], 0.0, running)
    largest = np.abs(seen).max()
    assert float(scale.largest) == pytest.approx(largest, rel=1e-5)
    assert float(scale.divisor(100.0)) == pytest.approx(np.std(seen), rel=1e-4)
    assert float(scale.divisor(0.5)) == pytest.approx(largest / 0.5, rel=1e-5)
    assert np.std(seen) > largest / 100.0


def updated(config: FlashSACConfig, num_updates: int) -> tuple[list[bool], TrainState]:
    """Update from rollouts of 12 steps each."""
    policy = SCALAR.clone(num_blocks=0)  # little to compile
    rng, state, uniform = np.random.default_rng(6), make_state(policy), []
    scale = ReturnScale(returns=init_reward_scale(4), largest=jnp.zeros(()))
    own = OffPolicyState(replay=init_replay(config.replay, jnp.zeros((4, 3)), jnp.zeros((4, 2))), extra=scale)
    for i in range(num_updates):
        normal = lambda *shape: jnp.asarray(rng.normal(size=(3, 4, *shape)), jnp.float32)  # noqa: E731
        rollout = Rollout(
            obs=normal(3),
            next_obs=normal(3),
            action=normal(2),
            reward=normal(),
            terminated=normal() > 1.0,
            truncated=normal() > 1.0,
            **dict.fromkeys(("log_prob", "value", "next_value"), normal()),
        )
        given: Any = {"policy": policy, "optimizer": OPTIMIZER, "config": config}
        (state, own), _ = flash_sac_update((state, own), rollout, jax.random.key(i), **given)
        uniform.append(bool(state.params["exploration"]["uniform"]))
    return uniform, state


@pytest.mark.slow
def test_exploration_is_uniform_until_the_first_gradient_step_and_the_actor_steps_every_other_time() -> None:
    uniform, state = updated(CONFIG.replace(learning_starts=30, gradient_steps=4), 4)
    assert uniform == [True, True, False, False]
    assert int(state.opt_state["critic"][0].count) == 8
    assert int(state.opt_state["actor"][0].count) == 4


def raw_run(tmp_path: Path, **trainer: Any) -> dict[str, Any]:
    """Make the config of a tiny run of FlashSAC."""
    sizes = {"actor_width": 8, "critic_width": 8, "num_blocks": 1, "num_bins": 11}
    policy = {"name": "flash_q", "squash_actions": True, "cfg": sizes}
    cfg: dict[str, Any] = {"batch_size": 16, "gradient_steps": 2, "learning_starts": 40, "replay": {"capacity": 100}}
    # not the run's updates, which are part of the program, and fewer in the part of a run
    cfg["lr_scheduler"] = {"name": "cosine", "kwargs": {"eta_min": 1.5e-4, "T_max": 60}}
    algorithm = {"name": "flash_sac", "cfg": cfg}
    return tiny(tmp_path, env_cfg={"max_episode_steps": EPISODE}, **trainer) | {
        "policy": policy,
        "algorithm": algorithm,
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["device", "host", "async"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path, mode: str) -> None:
    raw = raw_run(tmp_path, iterations=6, collector={"mode": mode, "max_staleness": 0})
    assert_goes_on_with_the_same_bits(raw, tmp_path)


@cases(
    "changes key text",
    (["policy.squash_actions=false"], "policy.squash_actions", "acts between the bounds"),
    (["policy.cfg.num_bins=1"], "policy.cfg.num_bins", "use at least 2"),
    (["policy.cfg.longest_hold=0"], "policy.cfg.longest_hold", "use at least 1"),
    (["policy.actor_obs_normalization=true"], "policy.actor_obs_normalization", "normalizes its input by the batch"),
    (["policy.initial_log_std=-1.0"], "policy.initial_log_std", "in the middle of log_std_range"),
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: list[str], key: str, text: str) -> None:
    assert_refused(raw_run(tmp_path), changes, key, text)


def test_other_policies_are_refused(tmp_path: Path) -> None:
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    policy = {"name": "actor_q", "squash_actions": True, "actor": network, "critic": network}
    refused(lambda: build(parse_config(raw_run(tmp_path) | {"policy": policy})), match=r"set policy\.name to flash_q")


def test_the_shipped_config_has_one_gradient_step_for_each_environment_step() -> None:
    config = load_config("gymnasium/flash_sac")
    assert config.algorithm.cfg.gradient_steps == config.trainer.buffer_size * config.trainer.num_envs
