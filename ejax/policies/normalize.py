"""Running observation normalization: statistics that are carried alongside the trained parameters."""

import flax.linen as nn
import jax.numpy as jnp

from ejax.moments import add_rows
from ejax.types import Array, Params, Policy, PyTree


class ObsNormalizer(nn.Module):
    """(x − mean) / (std + 1e-2), with mean and variance over all rows observed so far.

    The statistics live in the collection ``normalizer`` and change only where ``observe`` is given, after an update,
    so that collection and update see the same policy. Source: the rule of EmbodiChain 0.3.2.
    """

    @nn.compact
    def __call__(self, x: Array, *, observe: bool | Array = False) -> Array:
        """
        Args:
            x: [..., O].
            observe: also add the rows of ``x`` to the statistics; needs ``mutable=["normalizer"]``. An array [...]
                bool: only the rows where it is true. Broken rows are left out, as ``ejax.moments`` has it.
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
        count.value, mean.value, variance.value = add_rows(old, x, None if observe is True else observe)
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
