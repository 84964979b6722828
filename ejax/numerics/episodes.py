"""Statistics over finished episodes, kept on the device with the environments."""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct

from ejax.numerics.platforms import unrolled_scan
from ejax.runtime.sharding import num_shards
from ejax.types import Array, Metrics

WINDOW = 100
"""Episodes in the moving averages: EmbodiChain's ``charts/*_avg_100``."""


@struct.dataclass(kw_only=True)
class EpisodeStats:
    """Returns and lengths of the episodes under way [N], and a ring of the last ``WINDOW`` finished ones."""

    current_return: Array
    current_length: Array
    returns: Array
    lengths: Array
    successes: Array
    num_episodes: Array
    """Episodes finished since the start of training, int32."""


def init_episode_stats(num_envs: int) -> EpisodeStats:
    return EpisodeStats(
        current_return=jnp.zeros(num_envs),
        current_length=jnp.zeros(num_envs),
        returns=jnp.zeros(WINDOW),
        lengths=jnp.zeros(WINDOW),
        successes=jnp.zeros(WINDOW),
        num_episodes=jnp.zeros((), jnp.int32),
    )


def drop_current_episodes(stats: EpisodeStats) -> EpisodeStats:
    """Forget the episodes under way after a forced reset: they never end."""
    return replace(
        stats, current_return=jnp.zeros_like(stats.current_return), current_length=jnp.zeros_like(stats.current_length)
    )


def track_episodes(
    stats: EpisodeStats, reward: Array, done: Array, success: Array, valid: Array | None = None
) -> EpisodeStats:
    """Add one rollout, all [T, N]; ``success`` counts where ``done``, if the return is finite. ``valid`` False: the
    step was not a transition; it has no length, and an episode that it ends is not counted."""
    valid = jnp.ones_like(done) if valid is None else valid
    counted_reward, counted_step = jnp.where(valid, reward, 0.0), valid.astype(jnp.float32)

    def one_step(
        carry: tuple[Array, Array], step: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        episode_return, length = carry
        reward_t, step_t, done_t = step
        episode_return, length = episode_return + reward_t, length + step_t
        running = (jnp.where(done_t, 0.0, episode_return), jnp.where(done_t, 0.0, length))
        return running, (episode_return, length)

    start = (stats.current_return, stats.current_length)
    running, (returns, lengths) = unrolled_scan(one_step, start, (counted_reward, counted_step, done))

    # finished episodes in time order; only the last WINDOW of them are kept
    ended = done & valid
    order, total = _order(ended), ended.sum()
    kept = ended & (order >= total - WINDOW)
    slot = jnp.where(kept, (stats.num_episodes + order) % WINDOW, WINDOW)  # WINDOW lies outside, and is dropped
    taken = (jnp.arange(WINDOW) - stats.num_episodes) % WINDOW < total

    def put(ring: Array, values: Array) -> Array:
        # added up, not set: a sum of what each device has needs no copy of the rollout on all of them
        return jnp.where(taken, jnp.zeros_like(ring).at[slot].add(values.astype(ring.dtype), mode="drop"), ring)

    return EpisodeStats(
        current_return=running[0],
        current_length=running[1],
        returns=put(stats.returns, returns),
        lengths=put(stats.lengths, lengths),
        successes=put(stats.successes, jnp.where(jnp.isfinite(returns), success, jnp.minimum(success, 0.0))),
        num_episodes=stats.num_episodes + total,
    )


def _order(flag: Array) -> Array:
    num_steps, num_envs = flag.shape
    # within what each device has, and then over the few numbers that are left of it
    parts = flag.astype(jnp.int32).reshape(num_steps, num_shards(), -1)
    counts = parts.sum(axis=2).reshape(-1)
    before = (jnp.cumsum(counts) - counts).reshape(num_steps, -1, 1)
    return (before + jnp.cumsum(parts, axis=2) - parts).reshape(num_steps, num_envs)


def episode_metrics(stats: EpisodeStats) -> Metrics:
    """Compute EmbodiChain's charts; NaN while no episode has finished."""
    count = jnp.minimum(stats.num_episodes, WINDOW)
    counts = jnp.arange(WINDOW) < count

    def mean(ring: Array) -> Array:
        return jnp.where(count > 0, jnp.sum(ring * counts) / jnp.maximum(count, 1), jnp.nan)

    return {
        "charts/episode_reward_avg_100": mean(stats.returns),
        "charts/episode_length_avg_100": mean(stats.lengths),
        "charts/success_rate_avg_100": mean(stats.successes),
        "charts/num_episodes": stats.num_episodes.astype(jnp.float32),
    }
