"""Running observation normalization: statistics that are carried alongside the trained parameters."""

import math
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.finite import all_finite
from ejax.types import Array, Params, Policy, PyTree

Moments: TypeAlias = tuple[Array, Array, Array]
"""Number of rows [], and their mean and variance [O]."""


class ObsNormalizer(nn.Module):
    """(x − mean) / (std + 1e-2), with mean and variance over all rows observed so far.

    The statistics live in the collection ``normalizer`` and change only where ``observe`` is given, after an update,
    so that collection and update see the same policy. Source: the rule of EmbodiChain 0.3.2; Chan et al. 1983 for
    merging variances.
    """

    @nn.compact
    def __call__(self, x: Array, *, observe: bool | Array = False) -> Array:
        """
        Args:
            x: [..., O].
            observe: also add the rows of ``x`` to the statistics; needs ``mutable=["normalizer"]``. An array [...]
                bool: only the rows where it is true. Rows with a number that is not finite are left out, and all of
                them where the statistics would overflow: one such row would make every later observation NaN.
        """
        size = x.shape[-1:]
        mean = self.variable("normalizer", "mean", jnp.zeros, size)
        variance = self.variable("normalizer", "variance", jnp.ones, size)
        count = self.variable("normalizer", "count", jnp.zeros, ())
        per_feature = (1,) * (x.ndim - 1) + size
        normalized = (x - mean.value.reshape(per_feature)) / (jnp.sqrt(variance.value) + 1e-2).reshape(per_feature)
        if observe is False:
            return normalized
        old = (count.value, mean.value, variance.value)
        count.value, mean.value, variance.value = _add(old, x, None if observe is True else observe)
        return normalized


def update_normalizer(policy: Policy, params: Params, obs: PyTree, valid: Array | None = None) -> Params:
    """The parameters with ``obs`` added to their statistics; the same ones where the policy keeps none.

    Args:
        valid: rows of ``obs`` that count, in the shape of its leading axes. None: all.
    """
    if "normalizer" not in params:
        return params
    _, observed = policy.apply(params, obs, observe=True if valid is None else valid, mutable=["normalizer"])
    return {**params, **observed}


def _add(old: Moments, rows: Array, counts: Array | None) -> Moments:
    """The moments with those of the rows that count, without rows that are not finite.

    Args:
        rows: [..., O]; as they are, since rows in one axis would first have to be gathered from several devices.
        counts: [...] bool. None: all.
    """

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
    """The moments of both. Source: Chan et al. 1983."""
    (count, mean, variance), (row_count, row_mean, row_variance) = old, added
    total = count + row_count
    weight = row_count / jnp.maximum(total, 1.0)
    delta = row_mean - mean
    return (
        total,
        mean + weight * delta,
        variance + weight * (row_variance - variance + (1.0 - weight) * jnp.square(delta)),
    )
