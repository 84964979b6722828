"""Terms of policy-gradient losses, per row, and their weighted sums."""

import functools

import jax
import jax.numpy as jnp

from ejax.numerics.checks import check_one_shape
from ejax.types import Array

_check = functools.partial(check_one_shape, "a loss needs arrays of one shape, which [B] and [B, 1] are not")


def clipped_surrogate(
    log_ratio: Array, advantage: Array, clip_coef: float, clip_coef_high: float | None = None
) -> Array:
    """Compute −min(ρA, clip(ρ, 1 − ε, 1 + ε')A), with ρ = exp(log_ratio), ε = ``clip_coef``, ε' = ε unless given.
    All are of one shape. Source: Schulman et al. 2017, eq. 7; Yu et al. 2025 (DAPO) for ε' > ε."""
    _check(log_ratio=log_ratio, advantage=advantage)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_coef, 1.0 + (clip_coef if clip_coef_high is None else clip_coef_high))
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_loss(value: Array, target: Array) -> Array:
    """Compute (V − R)², without a ½: EmbodiChain's scale of ``vf_coef``. [B]."""
    _check(value=value, target=target)
    return jnp.square(value - target)


def clipped_value_loss(value: Array, old_value: Array, target: Array, clip_coef: float) -> Array:
    """Compute max((V − R)², (clip(V, V_old ± ε) − R)²). [B]. Source: OpenAI baselines' PPO2; EmbodiChain 0.3.2."""
    _check(value=value, old_value=old_value, target=target)
    clipped = old_value + jnp.clip(value - old_value, -clip_coef, clip_coef)  # the policy's ε, on the scale of values
    return jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))


def kl_k3(log_ratio: Array) -> Array:
    """Compute ρ − 1 − log ρ ≥ 0, an unbiased estimate of KL(old ‖ new) for rows drawn from old. [B]. Source: Schulman
    2020."""
    return jnp.exp(log_ratio) - 1.0 - log_ratio


def weighted_sums(
    terms: dict[str, Array], weight: Array, coefficients: dict[str, float]
) -> tuple[Array, dict[str, Array]]:
    """Compute Σ weight·term for every term, and their sum by ``coefficients``, the loss: ``(loss, sums)``, scalars. No
    gradient comes from ``sums``, nor from terms without a coefficient. ``weight`` has the shape of a term."""
    # one stack and one sum: reduced one by one, each term would be a separate kernel
    rows = jnp.stack([term if name in coefficients else jax.lax.stop_gradient(term) for name, term in terms.items()])
    sums = dict(zip(terms, jnp.sum(weight[None] * rows, axis=tuple(range(1, rows.ndim))), strict=True))
    loss = functools.reduce(jnp.add, [factor * sums[name] for name, factor in coefficients.items()])
    return loss, jax.lax.stop_gradient(sums)
