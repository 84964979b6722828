"""Rewards divided by the deviation of discounted returns."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GRPO, tiny

from ejax.config import ConfigError, parse_config
from ejax.numerics.reward_scale import drop_current_rewards, init_reward_scale, scale_rewards
from ejax.run import RunResult, train

GAMMA = 0.9
RNG = np.random.default_rng(0)


def same(a: RunResult, b: RunResult) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a.params, b.params))


def by_hand(rollouts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """All discounted returns so far, and the last rollout's rewards divided by their deviation."""
    running, seen = np.zeros(rollouts[0][0].shape[1]), []
    for reward, done in rollouts:
        for reward_t, done_t in zip(reward, done, strict=True):
            running = GAMMA * running + reward_t
            seen.append(running)
            running = np.where(done_t, 0.0, running)
    returns = np.array(seen)
    return returns, rollouts[-1][0] / np.sqrt(returns.var() + 1e-8)


def test_two_rollouts_are_scaled_as_by_hand() -> None:
    rollouts = [(RNG.normal(3.0, 2.0, (5, 3)), RNG.random((5, 3)) < 0.3) for _ in range(2)]
    scale = init_reward_scale(3)
    for reward, done in rollouts:
        scale, scaled = scale_rewards(scale, jnp.asarray(reward), jnp.asarray(done), gamma=GAMMA)
    returns, expected = by_hand(rollouts)
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)
    np.testing.assert_allclose(scale.moments[1], returns.mean(), rtol=1e-5)
    np.testing.assert_allclose(scale.discounted, np.where(rollouts[1][1][-1], 0.0, returns[-1]), rtol=1e-5)


def test_steps_that_are_no_transitions_do_not_count() -> None:
    reward, done = RNG.normal(size=(6, 2)), np.zeros((6, 2), bool)
    valid = np.ones((6, 2), bool)
    done[2], valid[3] = True, False  # the step after an episode only resets
    scale, scaled = scale_rewards(init_reward_scale(2), reward, done, valid, gamma=GAMMA)
    kept = np.delete(np.arange(6), 3)
    _, expected = by_hand([(reward[kept], done[kept])])
    np.testing.assert_allclose(np.asarray(scaled)[kept], expected, rtol=1e-5)
    assert scale.moments[0] == 10


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1e-3, 1e6, 1e12])
def test_rewards_are_the_same_in_every_unit(unit: float) -> None:
    rollouts = [(RNG.normal(1.0, 2.0, (5, 3)), RNG.random((5, 3)) < 0.3) for _ in range(2)]
    rollouts += [(np.ones((1, 3)), np.zeros((1, 3), bool))]
    ones = scales = init_reward_scale(3)
    for reward, done in rollouts:
        ones, expected = scale_rewards(ones, jnp.asarray(reward), jnp.asarray(done), gamma=GAMMA)
        scales, scaled = scale_rewards(scales, jnp.asarray(unit * reward), jnp.asarray(done), gamma=GAMMA)
        np.testing.assert_allclose(scaled, expected, rtol=1e-5)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_a_first_return_that_does_not_vary_is_cut_in_every_unit(unit: float) -> None:
    _, scaled = scale_rewards(init_reward_scale(3), jnp.full((1, 3), -unit), jnp.zeros((1, 3), bool), gamma=GAMMA)
    np.testing.assert_array_equal(scaled, -10.0)
    _, zeros = scale_rewards(init_reward_scale(3), jnp.zeros((1, 3)), jnp.zeros((1, 3), bool), gamma=GAMMA)
    assert not zeros.any()


def test_a_reward_that_stands_out_is_cut() -> None:
    reward = np.zeros((100, 10))
    reward[5, 5] = 1e6
    _, scaled = scale_rewards(init_reward_scale(10), reward, np.ones((100, 10), bool), gamma=GAMMA)
    assert scaled.max() == 10.0


def test_one_broken_reward_leaves_the_statistics_finite() -> None:
    reward = RNG.normal(size=(4, 2))
    reward[1, 0] = np.nan
    scale, scaled = scale_rewards(init_reward_scale(2), reward, np.zeros((4, 2), bool), gamma=GAMMA)
    assert np.isfinite(scale.moments[2]).all() and np.isfinite(scale.discounted).all()
    assert np.isfinite(scaled).sum() == 7


def test_nothing_is_discounted_across_a_forced_reset() -> None:
    scale, _ = scale_rewards(init_reward_scale(2), jnp.ones((3, 2)), jnp.zeros((3, 2), bool), gamma=GAMMA)
    assert scale.discounted.all()
    assert not drop_current_rewards(scale).discounted.any()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_run_with_scaled_rewards_resumes_to_the_same_bits_and_logs_rewards_as_they_come(
    mode: str, tmp_path: Path
) -> None:
    raw = tiny(tmp_path, collector={"mode": mode}, save_frequency_updates=1, normalize_reward=True, iterations=3)
    whole = train(parse_config(raw), run_dir=tmp_path / "whole")
    train(parse_config({**raw, "trainer": {**raw["trainer"], "iterations": 1}}), run_dir=tmp_path / "part")
    resumed = train(parse_config(raw), run_dir=tmp_path / "part", resume="latest")
    assert same(whole, resumed)
    raw["trainer"]["normalize_reward"] = False
    plain = train(parse_config(raw), run_dir=tmp_path / "plain")
    assert not same(whole, plain)
    tag = "charts/episode_reward_avg_100"  # of the first episodes, which both of them play alike
    assert whole.train_history[1][tag] == pytest.approx(plain.train_history[1][tag], rel=0.1)


@pytest.mark.parametrize("name", ["apg", "shac"])
def test_algorithms_without_rollouts_refuse_it(name: str) -> None:
    raw = tiny(normalize_reward=True)
    raw["algorithm"] = {"name": name, "cfg": {}}
    with pytest.raises(ConfigError, match=r"trainer.normalize_reward: got true, but"):
        parse_config(raw)


@pytest.mark.slow
def test_grpo_may_have_it(tmp_path: Path) -> None:
    raw = tiny(tmp_path, normalize_reward=True)
    raw["algorithm"] = GRPO
    assert train(parse_config(raw), run_dir=tmp_path / "run").finished
