"""Spaces made of others: chunks of actions, parts of observations."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.schema.paths import leaves, nest
from ejax.types import Env, HostEnv, PyTree


def obs_forms(env: Env | HostEnv, num_rows: int) -> PyTree:
    """Return the forms of ``num_rows`` observations as a program meets them, leaves [num_rows, ...]: pictures of 8 bits
    stay so."""
    if not isinstance(env, HostEnv):
        _, obs = jax.eval_shape(env.reset, jax.random.key(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape), x.dtype), obs)

    def form(space: Any) -> PyTree:
        return jax.ShapeDtypeStruct((num_rows, *space.shape), jnp.empty(0, space.dtype).dtype)  # of 64 bits: 32

    return nest((path, form(space)) for path, space in leaves(env.observation_space))


def chunk_space(space: gymnasium.Space[Any], size: int) -> gymnasium.spaces.Box:
    """Make the space of ``size`` actions in a row, [size · A]. Raises ValueError: an action space that is not a
    one-dimensional Box, or ``size`` < 1."""
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1 or size < 1:
        raise ValueError(f"action_chunk {size} needs a one-dimensional Box of actions and size >= 1, got {space}")
    dtype: Any = space.dtype  # Gymnasium's releases differ in what they call its type
    return gymnasium.spaces.Box(np.tile(space.low, size), np.tile(space.high, size), dtype=dtype)


def part_space(space: gymnasium.Space[Any], indices: Sequence[int]) -> gymnasium.spaces.Box:
    """Make the space of some numbers of an observation, in this order. Raises ValueError: an observation that is not
    one vector, or indices that it does not have."""
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"observation_indices needs observations that are one vector, got {space}; leave it out")
    last = space.shape[0] - 1
    known = [isinstance(i, int | np.integer) and not isinstance(i, bool) and 0 <= i <= last for i in indices]
    if not known or not all(known):
        raise ValueError(f"observation_indices must be of 0 to {last}, at least one; got {list(indices)}")
    dtype: Any = space.dtype
    return gymnasium.spaces.Box(space.low[list(indices)], space.high[list(indices)], dtype=dtype)
