"""Advantages and returns over time-major arrays [T, N]. Pure, jitted, differentiable."""

from functools import partial

import jax
import jax.numpy as jnp

from ejax.numerics.checks import check_time_major
from ejax.numerics.platforms import unrolled_scan
from ejax.types import Array


@partial(jax.jit, static_argnames=("gamma", "gae_lambda"))
def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """Estimate advantages by generalized advantage estimation: ``(advantage, value_target)``.

        δₜ = rₜ + γ·V(s'ₜ)·(1 − terminatedₜ) − V(sₜ)
        Aₜ = δₜ + γλ·(1 − doneₜ)·Aₜ₊₁,  done = terminated ∨ truncated,  value_target = A + V

    ``next_value[t]`` is V of the true next observation, also where the episode ended at t. All arrays are [T, N], else
    ValueError; ``terminated`` and ``truncated`` are bool, or not 0 where they are true.

    Source: Schulman et al. 2016, eq. 11-16, with Pardo et al. 2018 for time limits.
    """
    flags = {"terminated": terminated, "truncated": truncated}
    steps = reward, *_ = _steps(flags, reward=reward, value=value, next_value=next_value)

    # δ and the target are formed inside the scan: each array then passes through memory once
    def backward(advantage: Array, step: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        reward_t, value_t, next_value_t, terminated_t, truncated_t = step
        delta = reward_t + gamma * _unless(terminated_t, next_value_t) - value_t
        advantage = delta + gamma * gae_lambda * _unless(terminated_t | truncated_t, advantage)
        return advantage, (advantage, advantage + value_t)

    return unrolled_scan(backward, jnp.zeros_like(reward[0]), steps, reverse=True)[1]


@partial(jax.jit, static_argnames=("gamma", "gae_lambda", "rho_clip", "c_clip"))
def vtrace(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    log_ratio: Array,
    *,
    gamma: float,
    gae_lambda: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Array, Array]:
    """Estimate ``(advantage, value_target)`` by V-trace, as ``gae`` on-policy, for steps that another policy took.

        ρₜ = min(ρ̄, exp(log_ratioₜ)),  cₜ = λ·min(c̄, exp(log_ratioₜ)),  log_ratio = log π(action) − log μ(action)
        δₜ = ρₜ·(rₜ + γ·V(s'ₜ)·(1 − terminatedₜ) − V(sₜ))
        vₜ − V(sₜ) = δₜ + γ·cₜ·(1 − doneₜ)·(vₜ₊₁ − V(sₜ₊₁)),  v the value_target
        Aₜ = rₜ + γ·(1 − terminatedₜ)·v'ₜ − V(sₜ),  v'ₜ = V(s'ₜ) + λ·(vₜ₊₁ − V(sₜ₊₁)) while the episode continues

    ρ̄, c̄ > 0 are the clips; π learns, and has the values; μ acted. With log_ratio = 0 both results are
    ``gae``'s. A is not multiplied by ρ: the surrogate's ratio, or its weight, does that. All arrays are [T, N], else
    ValueError.

    Source: Espeholt et al. 2018, eq. 1 and remark 2.
    """
    flags = {"terminated": terminated, "truncated": truncated}
    numbers = {"reward": reward, "value": value, "next_value": next_value, "log_ratio": log_ratio}
    reward, value, next_value, log_ratio, terminated, truncated = _steps(flags, **numbers)
    ratio = jnp.exp(log_ratio)

    def backward(excess: Array, step: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        reward_t, value_t, next_value_t, terminated_t, truncated_t, ratio_t = step
        error = reward_t + gamma * _unless(terminated_t, next_value_t) - value_t
        following = gamma * gae_lambda * _unless(terminated_t | truncated_t, excess)
        advantage = error + following
        excess = jnp.minimum(ratio_t, rho_clip) * error + jnp.minimum(ratio_t, c_clip) * following
        return excess, (advantage, excess + value_t)

    steps = (reward, value, next_value, terminated, truncated, ratio)
    return unrolled_scan(backward, jnp.zeros_like(reward[0]), steps, reverse=True)[1]


@partial(jax.jit, static_argnames="gamma")
def discounted_returns(reward: Array, done: Array, *, gamma: float) -> Array:
    """Compute Gₜ = rₜ + γ·Gₜ₊₁·(1 − doneₜ), without a bootstrap at the end. All [T, N]."""
    reward, done = _steps({"done": done}, reward=reward)

    def backward(following: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_t, done_t = step
        following = reward_t + gamma * _unless(done_t, following)
        return following, following

    return unrolled_scan(backward, jnp.zeros_like(reward[0]), (reward, done), reverse=True)[1]


@jax.jit
def first_episode_mask(done: Array) -> Array:
    """Return 1 until and including an environment's first done, 0 after it. [T, N] bool -> [T, N] float32."""
    (done,) = _steps({"done": done})
    ended_before = jnp.cumsum(done, axis=0) - done.astype(jnp.int32)  # the step that ends an episode is of it
    return (ended_before == 0).astype(jnp.float32)


@partial(jax.jit, static_argnames=("group_size", "eps"))
def group_advantages(step_return: Array, mask: Array, *, group_size: int, eps: float) -> Array:
    """Compute (G − μ) / (σ + eps) within each group at each time step, over members whose mask is not 0; 0 elsewhere.

    Groups are ``group_size`` consecutive environments of [T, N]; ValueError: N is not divisible by it. σ is the
    population's standard deviation. A lone member has advantage 0, and so have all members of a group whose returns are
    equal but for rounding: EmbodiChain divides what rounding left of G − μ by eps.
    """
    step_return, mask = _steps({"mask": mask}, step_return=step_return)
    num_steps, num_envs = step_return.shape
    if group_size < 1 or num_envs % group_size:
        raise ValueError(f"num_envs ({num_envs}) must be divisible by group_size ({group_size})")
    counts = mask.reshape(num_steps, -1, group_size)
    grouped, alive = jnp.where(counts, step_return.reshape(counts.shape), 0.0), counts.astype(step_return.dtype)
    count = jnp.maximum(alive.sum(axis=-1, keepdims=True), 1.0)  # a group whose members have all ended has none
    centered = grouped - (grouped * alive).sum(axis=-1, keepdims=True) / count
    variance = (jnp.square(centered) * alive).sum(axis=-1, keepdims=True) / count
    advantage = centered / (jnp.sqrt(variance) + eps) * alive
    return jnp.where(_differ(grouped, counts, axis=-1), advantage, 0.0).reshape(step_return.shape)


def normalize(x: Array, weight: Array | None = None, *, offset: float = 0.0) -> Array:
    """Compute (x − mean) / (std + offset) with the unbiased std, as ``torch.Tensor.std`` gives it. Zero, not NaN,
    where one element leaves the std undefined, or all are equal but for rounding. ``weight``: 1 for elements that
    count, 0 for padding."""
    weight = jnp.ones_like(x) if weight is None else weight
    count = jnp.maximum(weight.sum(), 1.0)
    x = jnp.where(weight > 0, x, 0.0)  # padding may be anything
    mean = (x * weight).sum() / count
    centered = (x - mean) * weight
    std = jnp.sqrt(jnp.square(centered).sum() / jnp.maximum(count - 1.0, 1.0))  # unbiased, as torch's
    return jnp.where(_differ(x, weight > 0), centered / jnp.maximum(std + offset, jnp.finfo(x.dtype).tiny), 0.0)


def explained_variance(value: Array, target: Array, valid: Array | None = None) -> Array:
    """Compute 1 − Var[target − value] / Var[target], over the elements that are ``valid``: 1 for a perfect critic. NaN:
    the targets are equal but for rounding."""
    share = jnp.var(target - value, where=valid) / jnp.var(target, where=valid)
    return jnp.where(_differ(target, True if valid is None else valid > 0).all(), 1.0 - share, jnp.nan)


def _differ(x: Array, counts: Array | bool, axis: int | None = None) -> Array:
    """Test that the elements that count differ by more than 4 units in the last place of the largest; NaN differs."""
    high = jnp.max(x, axis, keepdims=True, where=counts, initial=-jnp.inf)
    low = jnp.min(x, axis, keepdims=True, where=counts, initial=jnp.inf)
    spread, largest = high - low, jnp.maximum(jnp.abs(high), jnp.abs(low))
    return ~((spread <= 4 * jnp.finfo(x.dtype).eps * largest) & (spread < jnp.inf))


def _steps(flags: dict[str, Array], **numbers: Array) -> tuple[Array, ...]:
    """Return ``numbers`` in one type, of 32 bits or more, and ``flags`` as bool. ValueError: not all are [T, N]."""
    check_time_major("returns need", **numbers, **flags)
    dtype = jnp.result_type(*numbers.values(), jnp.float32)
    return *(x.astype(dtype) for x in numbers.values()), *(x.astype(bool) for x in flags.values())


def _unless(ended: Array, number: Array) -> Array:
    """Return 0 where an episode ended, also where ``number`` is NaN: 0 times NaN would be NaN."""
    return jnp.where(ended, jnp.zeros_like(number), number)
