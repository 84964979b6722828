"""Rewards divided by how much returns vary: one learning rate and one value loss for small rewards and large ones."""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct

from ejax.numerics.kernels import unrolled_scan
from ejax.numerics.moments import Moments, add_rows, no_moments
from ejax.types import Array

_MOST = 10.0
"""A reward that is larger, once divided, is cut: the same bound as Stable-Baselines3's."""


@struct.dataclass(kw_only=True)
class RewardScale:
    """Carried from rollout to rollout."""

    discounted: Array
    """[N]: Rₜ = γ·Rₜ₋₁ + rₜ of the episodes under way."""
    moments: Moments
    """Moments of all Rₜ so far, each [1]."""


def init_reward_scale(num_envs: int) -> RewardScale:
    return RewardScale(discounted=jnp.zeros(num_envs), moments=no_moments(1))


def drop_current_rewards(scale: RewardScale) -> RewardScale:
    """After a forced reset: what the episodes under way had is not discounted into the next ones."""
    return replace(scale, discounted=jnp.zeros_like(scale.discounted))


def scale_rewards(
    scale: RewardScale, reward: Array, done: Array, valid: Array | None = None, *, gamma: float
) -> tuple[RewardScale, Array]:
    """``(the scale after this rollout, its rewards divided by the deviation of R [T, N])``, at most ±10.

    The rollout counts before it is divided, so that the first one is divided too. Means are not subtracted: that would
    reward, or punish, staying alive.

    Args:
        reward, done: [T, N].
        valid: [T, N] bool, False where a step was not a transition. None: all are.

    Source: Engstrom et al. 2020; ``VecNormalize`` of Stable-Baselines3, which moves the statistics at each step.
    """
    counted = reward if valid is None else jnp.where(valid, reward, 0.0)

    def one_step(discounted: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_t, done_t = step
        discounted = gamma * discounted + reward_t
        return jnp.where(done_t, 0.0, discounted), discounted

    running, discounted = unrolled_scan(one_step, scale.discounted, (counted, done))
    moments = add_rows(scale.moments, discounted[..., None], valid)
    deviation = jnp.sqrt(moments[2][0] + 1e-8)
    after = RewardScale(discounted=jnp.where(jnp.isfinite(running), running, 0.0), moments=moments)
    return after, jnp.clip(reward / deviation, -_MOST, _MOST)
