"""Advantages and returns over time-major arrays [T, N]. Pure, jitted, differentiable."""

from functools import partial

import jax
import jax.numpy as jnp

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
    """Generalized advantage estimation.

        δₜ = rₜ + γ·V(s'ₜ)·(1 − terminatedₜ) − V(sₜ)
        Aₜ = δₜ + γλ·(1 − doneₜ)·Aₜ₊₁,  done = terminated ∨ truncated

    Args:
        reward, value, next_value: [T, N] float. ``next_value[t]`` is V of the true next observation, also where the
            episode ended at t.
        terminated, truncated: [T, N] bool.
        gamma, gae_lambda: in [0, 1].

    Returns:
        ``(advantage, value_target)``, [T, N]; value_target = advantage + value.

    Raises:
        ValueError: an array is not [T, N], or they differ in shape.

    Source: Schulman et al. 2016, eq. 11-16, with Pardo et al. 2018 for time limits.
    """
    _check_time_major(reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated)
    delta = reward + gamma * next_value * (1.0 - terminated) - value
    decay = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def backward(advantage: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        delta_t, decay_t = step
        advantage = delta_t + decay_t * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(backward, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantage, advantage + value


def normalize(x: Array, weight: Array | None = None) -> Array:
    """(x − mean) / max(std, 1e-8) with the unbiased std, as ``torch.Tensor.std`` gives it.

    Where there is one element the std is undefined: the result is then zero, not NaN.

    Args:
        x: any shape.
        weight: same shape, 1 for elements that count and 0 for padding. None: all count.
    """
    weight = jnp.ones_like(x) if weight is None else weight
    count = jnp.maximum(weight.sum(), 1.0)
    mean = (x * weight).sum() / count
    centered = (x - mean) * weight
    std = jnp.sqrt(jnp.square(centered).sum() / jnp.maximum(count - 1.0, 1.0))
    return centered / jnp.maximum(std, 1e-8)


def _check_time_major(**arrays: Array) -> None:
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 2 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"gae needs arrays of one shape [T, N] (time, environments); got {given}")
