"""Running observation normalization: statistics that are carried beside the trained parameters."""

import flax.linen as nn
import jax.numpy as jnp

from ejax.types import Array, Params, Policy, PyTree


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
                bool: only the rows where it is true.
        """
        size = x.shape[-1:]
        mean = self.variable("normalizer", "mean", jnp.zeros, size)
        variance = self.variable("normalizer", "variance", jnp.ones, size)
        count = self.variable("normalizer", "count", jnp.zeros, ())
        per_feature = (1,) * (x.ndim - 1) + size
        normalized = (x - mean.value.reshape(per_feature)) / (jnp.sqrt(variance.value) + 1e-2).reshape(per_feature)
        if observe is False:
            return normalized
        rows = x.reshape(-1, *size)
        if observe is True:
            added, row_mean, row_variance = jnp.float32(rows.shape[0]), rows.mean(axis=0), rows.var(axis=0)
        else:
            counts = observe.reshape(-1, 1).astype(x.dtype)
            added = counts.sum()
            row_mean = jnp.sum(counts * rows, axis=0) / jnp.maximum(added, 1.0)
            row_variance = jnp.sum(counts * jnp.square(rows - row_mean[None]), axis=0) / jnp.maximum(added, 1.0)
        count.value += added
        weight = added / jnp.maximum(count.value, 1.0)
        delta = row_mean - mean.value
        mean.value += weight * delta
        variance.value += weight * (row_variance - variance.value + (1.0 - weight) * jnp.square(delta))
        return normalized


def observe(policy: Policy, params: Params, obs: PyTree, valid: Array | None = None) -> Params:
    """The parameters with ``obs`` added to their statistics; the same ones where the policy keeps none.

    Args:
        valid: rows of ``obs`` that count, in the shape of its leading axes. None: all.
    """
    if "normalizer" not in params:
        return params
    _, observed = policy.apply(params, obs, observe=True if valid is None else valid, mutable=["normalizer"])
    return {**params, **observed}
