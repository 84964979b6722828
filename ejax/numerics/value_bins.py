"""Distributions over returns: probabilities of K equally spaced values from ``low`` to ``high``."""

import math

import jax
import jax.numpy as jnp

from ejax.numerics.platforms import by_platform
from ejax.types import Array


def bin_values(low: float, high: float, num_bins: int) -> Array:
    """Return the K values, [K]."""
    return jnp.linspace(low, high, num_bins)


def expected_value(logits: Array, low: float, high: float) -> Array:
    """Compute Σ softmax(logits)·value, [...], of logits [..., K]."""
    return jax.nn.softmax(logits) @ bin_values(low, high, logits.shape[-1])


def hl_gauss(value: Array, low: float, high: float, num_bins: int, *, sigma: float = 0.75) -> Array:
    """Project a number onto the bins, [...] -> [..., K]: the shares of a normal around it that lie between the bins'
    borders, which are half-way between two values.

    Args:
        value: limited to [low, high].
        sigma: the normal's deviation, in widths of a bin.

    Source: Imani and White 2018; Farebrother et al. 2024 for σ = 0.75.
    """
    width = (high - low) / (num_bins - 1)
    borders = jnp.linspace(low - width / 2.0, high + width / 2.0, num_bins + 1)
    distance = jnp.broadcast_to(borders, (*jnp.shape(value), num_bins + 1)) - jnp.clip(value, low, high)[..., None]
    below = jax.scipy.special.erf(distance / (math.sqrt(2.0) * sigma * width))
    # the shares outside the outermost borders are distributed among the bins
    return jnp.diff(below) / (below[..., -1:] - below[..., :1])


def project_support(probability: Array, support: Array, low: float, high: float) -> Array:
    """Project a distribution over other values onto the bins: mass at x goes to the two bins around it, by nearness,
    and to the last bin where x lies beyond it.

        pᵢ ← Σⱼ pⱼ·max(0, 1 − |xⱼ − zᵢ| / Δz)

    Args:
        probability, support: pⱼ and xⱼ, [B, K].

    Source: Bellemare et al. 2017, algorithm 1.
    """
    last = probability.shape[-1] - 1
    place = jnp.clip((support - low) * (last / (high - low)), 0.0, last)
    atom = jnp.arange(last + 1, dtype=place.dtype)

    def share(probability: Array, place: Array) -> Array:
        return probability[..., None] * jnp.maximum(1.0 - jnp.abs(place[..., None] - atom[(None,) * place.ndim]), 0.0)

    def by_value(probability: Array, place: Array) -> Array:
        start = jnp.zeros(probability.shape, probability.dtype)
        return jax.lax.scan(lambda sums, x: (sums + share(*x), None), start, (probability.T, place.T))[0]

    # no scatter, which adds in no fixed order on a GPU; a CPU would write all pairs to memory
    return by_platform(cpu=by_value, gpu=lambda *x: share(*x).sum(axis=-2))(probability, place)
