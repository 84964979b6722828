"""Episode statistics against a Python deque of 100."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.numerics.episodes import WINDOW, episode_metrics, init_episode_stats, track_episodes


@pytest.fixture(scope="module")
def track() -> Callable[..., Any]:
    return jax.jit(track_episodes)


class Deques:
    """EmbodiChain's bookkeeping: three deques of 100 and running sums."""

    def __init__(self, num_envs: int) -> None:
        self.episodes = deque(maxlen=100)
        self.returns, self.lengths, self.count = np.zeros(num_envs), np.zeros(num_envs), 0

    def add(self, reward: jax.Array, done: np.ndarray, success: np.ndarray) -> None:
        for t in range(len(reward)):
            self.returns += reward[t]
            self.lengths += 1
            for n in np.flatnonzero(done[t]):
                self.episodes.append((self.returns[n], self.lengths[n], success[t, n]))
                self.returns[n] = self.lengths[n] = 0
                self.count += 1

    def means(self) -> Any:
        return np.mean(self.episodes, axis=0) if self.episodes else np.full(3, np.nan)


def observed(stats: Any) -> tuple[list[Any], int]:
    names = ("charts/episode_reward_avg_100", "charts/episode_length_avg_100", "charts/success_rate_avg_100")
    metrics = episode_metrics(stats)
    return [metrics[name] for name in names], int(metrics["charts/num_episodes"])


def test_the_window_is_embodichains() -> None:
    assert WINDOW == 100


@pytest.mark.parametrize("end_rate", [0.02, 0.4])
def test_averages_are_those_of_the_last_100_episodes_after_every_rollout(track: Callable, end_rate: float) -> None:
    # 16 envs × 20 steps: with the higher rate more than 100 episodes end in each rollout, with the lower a few
    rng = np.random.default_rng(0)
    stats, expected = init_episode_stats(16), Deques(16)
    for _ in range(6):
        rollout = (
            rng.normal(size=(20, 16)).astype(np.float32),
            rng.random((20, 16)) < end_rate,
            rng.random((20, 16)) < 0.3,
        )
        stats = track(stats, *rollout)
        expected.add(*rollout)
        means, count = observed(stats)
        np.testing.assert_allclose(means, expected.means(), rtol=1e-4, atol=1e-5)
        assert count == expected.count
        np.testing.assert_allclose(stats.current_return, expected.returns, rtol=1e-4, atol=1e-5)
    assert count > 100 or end_rate < 0.1


def test_more_than_100_that_end_at_once_leave_the_last_100(track: Callable[..., Any]) -> None:
    stats = track(init_episode_stats(160), jnp.arange(160.0)[None], jnp.ones((1, 160), bool), jnp.ones((1, 160)))
    assert sorted(stats.returns.tolist()) == list(range(60, 160))
    assert stats.num_episodes == 160


def test_averages_are_nan_before_any_episode_ends() -> None:
    means, count = observed(init_episode_stats(4))
    assert np.isnan(means).all() and count == 0


def test_an_env_that_tells_no_success_has_none_on_average(track: Callable[..., Any]) -> None:
    stats = track(init_episode_stats(16), jnp.ones((20, 16)), jnp.ones((20, 16), bool), jnp.full((20, 16), jnp.nan))
    means, _ = observed(stats)
    assert means[0] == 1.0 and np.isnan(means[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_episode_whose_return_is_not_finite_is_no_success(track: Callable[..., Any], bad: float) -> None:
    reward = jnp.ones((20, 16)).at[2, 3].set(bad)
    done = jnp.zeros((20, 16), bool).at[9].set(True).at[19].set(True)
    stats = track(init_episode_stats(16), reward, done, jnp.ones((20, 16)))
    assert observed(stats)[0][2] == pytest.approx(31 / 32)  # that episode alone, and not the one after it
