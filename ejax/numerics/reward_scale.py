"""Rewards divided by how much returns vary: one learning rate and one value loss for small rewards and large ones."""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct

from ejax.numerics.moments import Moments, add_rows
from ejax.numerics.platforms import unrolled_scan
from ejax.types import Array

_MOST = 10.0  # the largest reward after the division, as Stable-Baselines3's


@struct.dataclass(kw_only=True)
class RewardScale:
    discounted: Array
    """[N]: Rₜ = γ·Rₜ₋₁ + rₜ of the episodes under way."""
    moments: Moments
    """Moments of all Rₜ so far, each [1]."""


def init_reward_scale(num_envs: int) -> RewardScale:
    # of variance 0, to which that of small rewards is added without loss
    return RewardScale(discounted=jnp.zeros(num_envs), moments=(jnp.zeros(()), jnp.zeros(1), jnp.zeros(1)))


def drop_current_rewards(scale: RewardScale) -> RewardScale:
    """Discount nothing of the episodes under way into the next ones, after a forced reset."""
    return replace(scale, discounted=jnp.zeros_like(scale.discounted))


def scale_rewards(
    scale: RewardScale, reward: Array, done: Array, valid: Array | None = None, *, gamma: float
) -> tuple[RewardScale, Array]:
    """Divide a rollout's rewards [T, N] by the deviation of R, theirs included, to at most ±10. Means stay:
    subtracting them would reward, or punish, staying alive. ``valid`` False: the step was not a transition.

    Source: Engstrom et al. 2020; ``VecNormalize`` of Stable-Baselines3, which moves the statistics at each step.
    """
    after, _ = track_returns(scale, reward, done, valid, gamma=gamma)
    return after, jnp.clip(reward / deviation(after), -_MOST, _MOST)


def deviation(scale: RewardScale) -> Array:
    """Compute the deviation of R, [], the same in every unit of reward: at least 1e-4 of R's mean, for an R that hardly
    varies, where SB3 has 1e-4 itself; 1 before any reward."""
    square = jnp.maximum(scale.moments[2][0], 1e-8 * jnp.square(scale.moments[1][0]))
    return jnp.where(square > 0.0, jnp.sqrt(square), 1.0)


def track_returns(
    scale: RewardScale, reward: Array, done: Array, valid: Array | None = None, *, gamma: float
) -> tuple[RewardScale, Array]:
    """Add a rollout's R to the moments; R [T, N] besides."""
    counted = reward if valid is None else jnp.where(valid, reward, 0.0)

    def one_step(discounted: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_t, done_t = step
        discounted = gamma * discounted + reward_t
        return jnp.where(done_t, 0.0, discounted), discounted

    running, discounted = unrolled_scan(one_step, scale.discounted, (counted, done))
    moments = add_rows(scale.moments, discounted[..., None], valid)
    # a broken one would stay
    return RewardScale(discounted=jnp.where(jnp.isfinite(running), running, 0.0), moments=moments), discounted
