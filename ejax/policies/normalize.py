"""Running statistics of observations, in separate collections next to the trained parameters.

Collection ``normalizer``: of all observations so far. Collection ``batch_stats``: running averages, as in BatchNorm.
Both change after an update or before it, never within, so that collection and update see the same policy.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from numpy.typing import NDArray

from ejax.numerics.checks import check_width
from ejax.numerics.finite import all_finite, finite_rows
from ejax.numerics.moments import add_rows
from ejax.types import Array, Params, Policy, PolicyWithMemory, PyTree

_ROWS = 1024  # most observations that move running averages by one step


class PolicyStateError(ValueError):
    """State of a policy's module that ejax would lose, or random numbers it would repeat."""


class ObsNormalizer(nn.Module):
    """Normalizer of observations: (x − mean) / (std + 1e-2), over all rows observed so far. Source: EmbodiChain 0.3.2,
    which does not clip either; ``unlike_training`` says where that matters.
    The statistics live in the collection ``normalizer`` and change only with ``observe``."""

    @nn.compact
    def __call__(self, x: Array, *, observe: bool | Array = False, inverse: bool = False) -> Array:
        """Normalize ``x`` [..., O], or find what is ``x`` when normalized.

        With ``observe`` its rows (of an array [...] bool, the true ones) are added to the statistics, which needs
        ``mutable=["normalizer"]``. Broken rows are left out, as in ``ejax.numerics.moments``.
        """
        size = x.shape[-1:]
        check_width(self, "normalizer", "mean", *size)
        mean = self.variable("normalizer", "mean", jnp.zeros, size)
        variance = self.variable("normalizer", "variance", jnp.ones, size)
        count = self.variable("normalizer", "count", jnp.zeros, ())
        if inverse:
            return x * jnp.full(x.shape, jnp.sqrt(variance.value) + 1e-2) + jnp.full(x.shape, mean.value)
        y = normalized(x, mean.value, variance.value)  # by what was known before x
        if observe is not False:
            old = (count.value, mean.value, variance.value)
            count.value, mean.value, variance.value = add_rows(old, x, None if observe is True else observe)
        return y


def normalized(x: Array, mean: Array, variance: Array) -> Array:
    """Compute (x − mean) / (std + 1e-2) of x [..., O]."""
    per_feature = (1,) * (x.ndim - 1) + x.shape[-1:]
    return (x - mean.reshape(per_feature)) / (jnp.sqrt(variance) + 1e-2).reshape(per_feature)


Statistics: TypeAlias = tuple[str, NDArray[Any], NDArray[Any]]
"""Name of a normalizer, mean and std [O]."""


def acting_statistics(params: Params) -> Iterator[Statistics]:
    """Yield name, mean and std of each normalizer of the acting network's input that has seen something."""
    known = flatten_dict(params.get("normalizer", {}), sep=".")
    for name in [key.removesuffix(".count") for key in known if key.endswith(".count")]:
        if not name.startswith(("critic", "targets")) and known[f"{name}.count"] > 0:
            yield name, np.asarray(known[f"{name}.mean"]), np.sqrt(np.asarray(known[f"{name}.variance"]))


def unlike_training(policy: Policy, params: Params, obs: PyTree, known: Sequence[Statistics]) -> str:
    """Describe a number of ``obs``, leaves [N, ...], that the acting network sees as more than 10, in the root mean
    square over the rows; empty: there is none. ``known``: of ``acting_statistics``."""
    moments = jax.device_get(_moments_of(policy, tuple(name for name, *_ in known), params, obs))
    for (name, mean, std), (now, variance) in zip(known, moments, strict=True):
        size = np.sqrt((now - mean) ** 2 + variance) / (std + 1e-2)
        if size[i := int(size.argmax())] > 10.0:
            return f"{name}[{i}] is {now[i]:.4g}, in training {mean[i]:.4g} ± {std[i]:.2g}, and seen as {size[i]:.0f}"
    return ""


@partial(jax.jit, static_argnames=("policy", "names"))
def _moments_of(policy: Policy, names: tuple[str, ...], params: Params, obs: PyTree) -> list[Array]:
    empty = jax.tree.map(lambda x: x * 0.0 if x.ndim == 0 else x, params["normalizer"])  # the counts
    rows = jax.tree.map(lambda x: x[None], obs)
    state = policy.apply({**params, "normalizer": empty}, rows, observe=True, mutable=["normalizer"])[1]
    now = flatten_dict(state["normalizer"], sep=".")
    return [jnp.stack([now[f"{name}.mean"], now[f"{name}.variance"]]) for name in names]


def update_normalizer(policy: Policy, params: Params, obs: PyTree, valid: Array | None = None) -> Params:
    """Add ``obs``, leaves [T, N, ...], to the statistics in ``params``, if any; only rows where ``valid`` [T, N].

    Raises PolicyStateError for running averages in a policy with memory.
    """
    mutable = [name for name in ("normalizer", "batch_stats") if name in params]
    if "normalizer" in mutable:
        _, observed = policy.apply(params, obs, observe=True if valid is None else valid, mutable=mutable)
        params = {**params, "normalizer": observed["normalizer"]}
    if "batch_stats" in mutable:
        if isinstance(policy, PolicyWithMemory):
            raise PolicyStateError("BatchNorm averages single observations, and a memory is not one; use LayerNorm")
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
