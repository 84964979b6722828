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
    def __call__(self, x: Array, *, observe: bool = False) -> Array:
        """
        Args:
            x: [..., O].
            observe: also add the rows of ``x`` to the statistics; needs ``mutable=["normalizer"]``.
        """
        size = x.shape[-1:]
        mean = self.variable("normalizer", "mean", jnp.zeros, size)
        variance = self.variable("normalizer", "variance", jnp.ones, size)
        count = self.variable("normalizer", "count", jnp.zeros, ())
        per_feature = (1,) * (x.ndim - 1) + size
        normalized = (x - mean.value.reshape(per_feature)) / (jnp.sqrt(variance.value) + 1e-2).reshape(per_feature)
        if observe:
            rows = x.reshape(-1, *size)
            count.value += rows.shape[0]
            weight = rows.shape[0] / count.value
            delta = rows.mean(axis=0) - mean.value
            mean.value += weight * delta
            variance.value += weight * (rows.var(axis=0) - variance.value + (1.0 - weight) * jnp.square(delta))
        return normalized


def observe(policy: Policy, params: Params, obs: PyTree) -> Params:
    """The parameters with ``obs`` added to their statistics; the same ones where the policy keeps none."""
    if "normalizer" not in params:
        return params
    _, observed = policy.apply(params, obs, observe=True, mutable=["normalizer"])
    return {**params, **observed}
