"""Running statistics of observations, in collections of their own beside the trained parameters.

Collection ``normalizer``: of all observations so far. Collection ``batch_stats``: running averages, as in BatchNorm.
Both change after an update or before it, never within, so that collection and update see the same policy.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.numerics.finite import all_finite, finite_rows
from ejax.numerics.moments import add_rows
from ejax.types import Array, Params, Policy, PolicyWithMemory, PyTree

_ROWS = 1024  # most observations that move running averages by one step


class PolicyStateError(ValueError):
    """State of a policy's module that ejax would lose, or random numbers it would repeat."""


class ObsNormalizer(nn.Module):
    """Normalizer of observations: (x − mean) / (std + 1e-2), over all rows observed so far. Source: EmbodiChain 0.3.2.
    The statistics live in the collection ``normalizer`` and change only with ``observe``."""

    @nn.compact
    def __call__(self, x: Array, *, observe: bool | Array = False) -> Array:
        """Normalize ``x`` [..., O].

        With ``observe`` its rows (of an array [...] bool, the true ones) are added to the statistics, which needs
        ``mutable=["normalizer"]``. Broken rows are left out, as in ``ejax.numerics.moments``.
        """
        size = x.shape[-1:]
        mean = self.variable("normalizer", "mean", jnp.zeros, size)
        variance = self.variable("normalizer", "variance", jnp.ones, size)
        count = self.variable("normalizer", "count", jnp.zeros, ())
        y = normalized(x, mean.value, variance.value)  # by what was known before x
        if observe is False:
            return y
        old = (count.value, mean.value, variance.value)
        count.value, mean.value, variance.value = add_rows(old, x, None if observe is True else observe)
        return y


def normalized(x: Array, mean: Array, variance: Array) -> Array:
    """Compute (x − mean) / (std + 1e-2) of x [..., O]."""
    per_feature = (1,) * (x.ndim - 1) + x.shape[-1:]
    return (x - mean.reshape(per_feature)) / (jnp.sqrt(variance) + 1e-2).reshape(per_feature)


def update_normalizer(policy: Policy, params: Params, obs: PyTree, valid: Array | None = None) -> Params:
    """Add ``obs``, leaves [T, N, ...], to the statistics in ``params``, if any; of ``valid`` [T, N] the true rows
    alone.

    Raises PolicyStateError for running averages in a policy with memory.
    """
    mutable = [name for name in ("normalizer", "batch_stats") if name in params]
    if "normalizer" in mutable:
        _, observed = policy.apply(params, obs, observe=True if valid is None else valid, mutable=mutable)
        params = {**params, "normalizer": observed["normalizer"]}
    if "batch_stats" in mutable:
        if isinstance(policy, PolicyWithMemory):
            raise PolicyStateError("BatchNorm averages over single observations, and a memory is none; give LayerNorm")
        params = {**params, "batch_stats": _moved(policy, params, obs, valid, mutable)}
    return params


def _moved(policy: Policy, params: Params, obs: PyTree, valid: Array | None, mutable: list[str]) -> PyTree:
    """Move running averages by steps of equally many rows of ``obs``; finite rows replace those that do not count."""
    obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    counts = finite_rows(obs) if valid is None else finite_rows(obs) & valid.reshape(-1)
    first, num_counting = jnp.argsort(~counts, stable=True), counts.sum()
    num_rows = counts.shape[0]
    num_steps = -(-num_rows // _ROWS)
    # the last step is filled up with rows that count
    rows = first[jnp.arange(num_steps * -(-num_rows // num_steps)) % jnp.maximum(num_counting, 1)]

    def step(stats: PyTree, rows: Array) -> tuple[PyTree, None]:
        seen = jax.tree.map(lambda x: x[rows], obs)
        _, observed = policy.apply({**params, "batch_stats": stats}, seen, observe=True, mutable=mutable)
        return observed["batch_stats"], None

    before = params["batch_stats"]
    # transposed: each step has rows of the whole rollout
    after, _ = jax.lax.scan(step, before, rows.reshape(-1, num_steps).T)
    keep = (num_counting > 0) & all_finite(after)
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, before)
