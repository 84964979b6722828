"""Spaces made of others: chunks of actions, parts of observations."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np


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
