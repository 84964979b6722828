"""Forms of a program that cost a GPU fewer kernels: few arrays and long loop bodies; a CPU has other forms."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.runtime.sharding import shares_parameters
from ejax.types import Array, PyTree, TrainState, split_critic

_MAX_COLUMNS = 64  # numbers of one row of an array that is worth a copy into a table and out of it
_LARGE_OBS = 4096  # bytes of one environment's observation
_MAX_ELEMENTS = 2**20  # of parameters; above it kernels for each cost less than copies of all


def has_large_rows(obs: PyTree) -> bool:
    """Test that one environment's observation, of leaves [N, ...], is large, as pictures are."""
    return sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(obs)) >= _LARGE_OBS


def is_small(params: PyTree) -> bool:
    """Return whether parameters are worth a copy for fewer kernels; sharded ones would be sent between devices."""
    return not shares_parameters() and sum(x.size for x in jax.tree.leaves(params)) <= _MAX_ELEMENTS


@struct.dataclass(kw_only=True)
class PackedRows:
    """The small arrays of a tree as the columns of one table, for a scan to store; its stack is a tree [T, N, ...]."""

    table: Array
    """[N, K] uint32: the bits of all small leaves, side by side."""
    others: tuple[Array, ...]
    leaves: tuple[jax.ShapeDtypeStruct | None, ...] = struct.field(pytree_node=False)
    """One row of each leaf; None where it is one of the others."""
    structure: Any = struct.field(pytree_node=False)

    def tree(self) -> PyTree:
        arrays, others, column = [], iter(self.others), 0
        for leaf in self.leaves:
            if leaf is None:
                arrays.append(next(others))
                continue
            width = math.prod(leaf.shape)
            bits = self.table[..., column : column + width].reshape(*self.table.shape[:-1], *leaf.shape)
            arrays.append(bits != 0 if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, leaf.dtype))
            column += width
        return jax.tree.unflatten(self.structure, arrays)


def pack_rows(tree: PyTree) -> PackedRows:
    """Pack a tree of arrays [N, ...]."""
    arrays, structure = jax.tree.flatten(tree)
    leaves: list[jax.ShapeDtypeStruct | None] = []
    columns, others = [jnp.zeros((len(arrays[0]), 0), jnp.uint32)], []
    for x in arrays:
        is_flag = x.dtype == jnp.bool_
        has_32_bits = jnp.issubdtype(x.dtype, jnp.number) and x.dtype.itemsize == 4
        if math.prod(x.shape[1:]) <= _MAX_COLUMNS and (is_flag or has_32_bits):
            # as bits, since a cast of integers to floats and back would lose the large ones
            bits = x.astype(jnp.uint32) if is_flag else jax.lax.bitcast_convert_type(x, jnp.uint32)
            columns.append(bits.reshape(len(x), -1))
            leaves.append(jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        else:
            others.append(x)
            leaves.append(None)
    table = jnp.concatenate(columns, axis=1)
    return PackedRows(table=table, others=tuple(others), leaves=tuple(leaves), structure=structure)


@dataclass(frozen=True, eq=False)
class FlatParams:
    """The layout of trees of parameters' form as one vector, or two where the critic's stays apart: a dict, so that
    what maps over a tree, or takes the critic out of one, does so here."""

    shapes: PyTree
    critic_apart: bool = False

    def pack(self, tree: PyTree) -> dict[str, Array]:
        leaves = {name: jax.tree.leaves(part) for name, part in self._parts(tree).items()}
        return {name: jnp.concatenate([x.reshape(-1) for x in part]) for name, part in leaves.items()}

    def unpack(self, vectors: dict[str, Array]) -> PyTree:
        parts = {}
        for name, part in self._parts(self.shapes).items():
            shapes, structure = jax.tree.flatten(part)
            ends = np.cumsum([x.size for x in shapes])
            leaves = [vectors[name][end - x.size : end].reshape(x.shape) for x, end in zip(shapes, ends, strict=True)]
            parts[name] = jax.tree.unflatten(structure, leaves)
        return {**parts.pop("rest"), **parts} if self.critic_apart else parts["all"]

    def _parts(self, tree: PyTree) -> dict[str, PyTree]:
        if not self.critic_apart:
            return {"all": tree}
        rest, critic = split_critic(tree)
        return {"rest": rest, **critic}

    def pack_state(self, state: TrainState) -> TrainState:
        """Pack the parameters, and every part of the optimizer's state that has their form."""
        params = {**state.params, "params": self.pack(state.params["params"])}
        return replace(state, params=params, opt_state=map_parts(self.pack, self.shapes, state.opt_state))

    def unpack_state(self, state: TrainState, like: TrainState) -> TrainState:
        """Invert ``pack_state``; ``like`` is the state before it."""
        params = {**state.params, "params": self.unpack(state.params["params"])}
        moments = map_parts(lambda _, x: self.unpack(x), self.shapes, like.opt_state, state.opt_state)
        return replace(state, params=params, opt_state=moments)


def map_parts(change: Callable[..., PyTree], params: PyTree, *trees: PyTree) -> PyTree:
    """Apply ``change`` to all parts of trees that have the form of ``params`` in the first, such as an optimizer's
    moments; other leaves are those of the last."""
    form = jax.tree.structure(params)

    def fits(tree: PyTree) -> bool:
        return bool(jax.tree.structure(tree) == form)  # type: ignore[operator]  # no stubs

    return jax.tree.map(lambda *x: change(*x) if fits(x[0]) else x[-1], *trees, is_leaf=fits)


def flat_params(params: PyTree, *, critic_apart: bool = False) -> FlatParams | None:
    """Lay ``params`` out as vectors; None where that is not worth it, or their types differ."""
    leaves = jax.tree.leaves(params)
    # one vector has one type; a lone array is a vector already
    if len(leaves) < 2 or len({x.dtype for x in leaves}) > 1 or not is_small(params):
        return None
    if critic_apart and not all(split_critic(params)):  # nothing is apart from the other
        return None
    return FlatParams(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), critic_apart)
