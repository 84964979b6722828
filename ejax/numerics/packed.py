"""The small arrays of a step as the columns of one table: what a loop stores is then one kernel, not one for each."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ejax.types import Array, PyTree

_MAX_COLUMNS = 64
"""Numbers of one row of an array that is worth a copy into the table and out of it."""


@struct.dataclass(kw_only=True)
class Packed:
    """A tree of arrays [N, ...]; after a scan has stacked it, [T, N, ...]."""

    table: Array
    """[N, K] uint32: the bits of all small leaves, side by side."""
    others: tuple[Array, ...]
    leaves: tuple[jax.ShapeDtypeStruct | None, ...] = struct.field(pytree_node=False)
    """One row of each leaf; None where it is one of the others."""
    structure: Any = struct.field(pytree_node=False)

    @classmethod
    def of(cls, tree: PyTree) -> "Packed":
        """Pack leaves [N, ...]."""
        arrays, structure = jax.tree.flatten(tree)
        leaves = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if _is_small(x) else None for x in arrays)
        small = [_bits(x).reshape(len(x), -1) for x, leaf in zip(arrays, leaves, strict=True) if leaf is not None]
        others = tuple(x for x, leaf in zip(arrays, leaves, strict=True) if leaf is None)
        nothing = jnp.zeros((len(arrays[0]), 0), jnp.uint32)
        return cls(table=jnp.concatenate([nothing, *small], axis=1), others=others, leaves=leaves, structure=structure)

    def tree(self) -> PyTree:
        arrays, others, column = [], iter(self.others), 0
        for leaf in self.leaves:
            if leaf is None:
                arrays.append(next(others))
                continue
            width = math.prod(leaf.shape)
            bits = self.table[..., column : column + width].reshape(*self.table.shape[:-1], *leaf.shape)
            arrays.append(_from_bits(bits, leaf.dtype))
            column += width
        return jax.tree.unflatten(self.structure, arrays)


def _is_small(x: Array) -> bool:
    return math.prod(x.shape[1:]) <= _MAX_COLUMNS and (jnp.issubdtype(x.dtype, jnp.bool_) or _has_32_bits(x))


def _has_32_bits(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.number) and x.dtype.itemsize == 4


def _bits(x: Array) -> Array:
    return x.astype(jnp.uint32) if jnp.issubdtype(x.dtype, jnp.bool_) else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: Array, dtype: Any) -> Array:
    return bits != 0 if jnp.issubdtype(dtype, jnp.bool_) else jax.lax.bitcast_convert_type(bits, dtype)
