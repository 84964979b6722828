"""Mean and variance of everything seen so far, rollout by rollout. Source: Chan et al. 1983."""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ejax.numerics.finite import all_finite
from ejax.types import Array

Moments: TypeAlias = tuple[Array, Array, Array]
"""Number of rows [], and their mean and variance [O]."""


def add_rows(old: Moments, rows: Array, counts: Array | None = None) -> Moments:
    """Add the moments of the rows [..., O] that count ([...] bool; None: all). Rows with a number that is not finite
    are left out, and all of them where the statistics would overflow."""

    def without_broken_rows() -> Moments:
        finite = jnp.isfinite(rows).all(axis=-1)
        safe = jnp.where(finite[..., None], rows, 0.0)
        new = _merge(old, _moments(safe, finite if counts is None else finite & counts))
        kept = all_finite(new)  # squares of finite numbers may not be
        return jax.tree.map(lambda x, y: jnp.where(kept, x, y), new, old)

    new = _merge(old, _moments(rows, counts))
    return jax.lax.cond(all_finite(new), lambda: new, without_broken_rows)


def _moments(rows: Array, counts: Array | None) -> Moments:
    axes = tuple(range(rows.ndim - 1))
    if counts is None:
        return jnp.float32(math.prod(rows.shape[:-1])), rows.mean(axis=axes), rows.var(axis=axes)
    weight = counts[..., None].astype(rows.dtype)
    added = weight.sum()
    mean = jnp.sum(weight * rows, axis=axes) / jnp.maximum(added, 1.0)
    deviation = rows - mean.reshape((1,) * len(axes) + mean.shape)
    return added, mean, jnp.sum(weight * jnp.square(deviation), axis=axes) / jnp.maximum(added, 1.0)


def _merge(old: Moments, added: Moments) -> Moments:
    (count, mean, variance), (row_count, row_mean, row_variance) = old, added
    total = count + row_count  # a float: exact up to 16.7 million rows, and a mean needs no more
    weight = row_count / jnp.maximum(total, 1.0)
    delta = row_mean - mean
    return (
        total,
        mean + weight * delta,
        variance + weight * (row_variance - variance + (1.0 - weight) * jnp.square(delta)),
    )
