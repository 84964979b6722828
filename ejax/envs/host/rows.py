"""Rows of arrays, most of them outside JAX: observations as vectors, their forms, seeds, and rows put in place."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.schema.messages import short_repr
from ejax.schema.paths import leaves, nest
from ejax.types import Env, HostEnv, PyTree


def choose_rows(rows: Any, new: PyTree, old: PyTree, *, numpy: Any = np) -> PyTree:
    """Take ``new``, a leaf of which may be one number, in these rows [N] and ``old`` in the others, leaves [N, ...].
    ``numpy`` computes it; ``jnp`` inside JAX.
    """

    def choose(one: Any, other: Any) -> Any:
        return numpy.where(rows.reshape(-1, *[1] * (np.ndim(other) - 1)), one, other)

    return jax.tree.map(choose, new, old)


def put_rows(rows: Any, new: PyTree, into: PyTree) -> PyTree:
    """Return a copy of ``into`` with ``new``, leaves [len(rows), ...], in the rows of these numbers."""

    def put(part: Any, whole: NDArray[Any]) -> NDArray[Any]:
        out = whole.copy()
        out[rows] = part
        return out

    return jax.tree.map(put, new, into)


def as_rows(space: gymnasium.Space[Any], obs: Any) -> PyTree:
    """Turn batched observations of ``space`` into float32 vectors [N, F] by leaf.
    Boxes are flattened row by row; Discrete, MultiDiscrete and MultiBinary become ones and zeros. Raises ValueError:
    a choice that the space does not have; a Dict without one of its parts, a Tuple of another number.
    """
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Dict):
        if missing := space.spaces.keys() - obs.keys():
            raise ValueError(f"the observation has no {', '.join(map(repr, missing))}; must be a dict of {[*space]}")
        return {name: as_rows(part, obs[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if len(obs) != len(space):
            raise ValueError(f"the observation has {len(obs)} parts; must be a tuple of {len(space)}")
        return {str(i): as_rows(part, obs[i]) for i, part in enumerate(space.spaces)}
    array = np.asarray(obs)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        columns = (array - space.start).reshape(len(array), -1).T
        parts = [column[:, None] == np.arange(count) for column, count in zip(columns, counts, strict=True)]
        ones = np.concatenate(parts, axis=1)
        if (missing := ones.sum(axis=1) < len(counts)).any():
            row = int(np.argmax(missing))
            raise ValueError(f"the observation of row {row} is {short_repr(array[row].tolist())}; must be of {space}")
        return ones.astype(np.float32)
    return np.array(array.reshape(len(array), -1), np.float32)  # a copy: vector environments write into their own


def rows_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return the space of one row of ``as_rows``. Raises ValueError: it has no vectors (Text, Graph, Sequence)."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: rows_space(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Dict({str(i): rows_space(part) for i, part in enumerate(space.spaces)})
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        flat: Any = spaces.flatten_space(space)
        return spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32))
    allowed = "Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple"
    raise ValueError(f"observations of {space} are not vectors; allowed: {allowed}")


def obs_forms(env: Env | HostEnv, num_rows: int) -> PyTree:
    """Return the forms of ``num_rows`` observations as a program meets them, leaves [num_rows, ...]: pictures of 8 bits
    stay so."""
    if not isinstance(env, HostEnv):
        _, obs = jax.eval_shape(env.reset, jax.random.key(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape), x.dtype), obs)

    def form(space: Any) -> PyTree:
        return jax.ShapeDtypeStruct((num_rows, *space.shape), jnp.empty(0, space.dtype).dtype)  # of 64 bits: 32

    return nest((path, form(space)) for path, space in leaves(env.observation_space))


def next_seed(seed: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the seeds of the next episodes: a bijection of 32 bits, so that no two rows ever meet."""
    # a linear congruence and steps of Murmur's mixing, each of which can be undone
    x = seed * np.uint32(1664525) + np.uint32(1013904223)
    x ^= x >> np.uint32(16)
    return x * np.uint32(0x85EBCA6B)
