"""Tests for finite numbers: no other is a success or a best, enters a normalizer's statistics, or is an update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.types import Array, PyTree

NONFINITE_EPISODES = "eval/nonfinite_episodes"
"""Tag of the episodes of an evaluation in which something was not finite; 0 where all is well."""


def all_finite(*trees: PyTree) -> Array:
    """Test that every number in every leaf is finite, by Σ 0·x, three times as fast on a CPU as ``isfinite(x).all()``;
    a bool scalar. Integers, booleans and keys are finite."""
    zeros: dict[Any, Array] = {}
    for x in map(jnp.asarray, jax.tree.leaves(trees)):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            kind = (x.shape, x.dtype)
            zeros[kind] = zeros[kind] + 0 * x if kind in zeros else 0 * x  # arrays of one shape share a sum
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x.sum()) for x in zeros.values()], jnp.asarray(True))


def finite_rows(*trees: PyTree, numpy: Any = jnp) -> Any:
    """Find the rows that hold finite numbers only, in all leaves [N, ...], at least one; [N] bool. ``numpy``: the
    module that computes it; ``np`` for arrays on the host."""
    leaves = jax.tree.leaves(trees)
    return functools.reduce(numpy.logical_and, [numpy.isfinite(x).reshape(len(x), -1).all(axis=1) for x in leaves])


def name_nonfinite(tree: PyTree, most: int = 4) -> str:
    """Name the numbers in arrays on the host that are not finite, by path and index, with their values."""
    found = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}{list(map(int, at)) or ''} {leaf[tuple(at)]}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.asarray, tree))
        for at in np.argwhere(~np.isfinite(leaf))
    ]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
