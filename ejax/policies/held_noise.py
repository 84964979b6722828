"""The steps at which exploration draws new noise, which is held in between: a renewal process without a state, so that
a run that goes on at any step draws as if it had never stopped.

Source: Dabney et al. 2021, Temporally-Extended ε-Greedy Exploration, whose holds of length n come with a probability
∝ n to minus an exponent.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ejax.types import Array, Key

BLOCK = 1024
"""Steps after which a hold ends in any case: the process starts again, from the block's number."""


def hold_start(key: Key, step: Array, *, exponent: float, longest: int) -> Array:
    """Find the step at which the hold began that step number ``step``, int32, is part of."""
    if longest == 1:
        return step
    block = step // BLOCK
    drawn = jax.random.uniform(jax.random.fold_in(key, block), (BLOCK,))
    ends = jnp.cumsum(_lengths(drawn, exponent, longest))  # at least BLOCK at the last
    begin = jnp.max(jnp.where(ends <= step - block * BLOCK, ends, 0))
    return block * BLOCK + begin


def _lengths(uniform: Array, exponent: float, longest: int) -> Array:
    """Map numbers in [0, 1) to lengths of holds, 1 to ``longest``."""
    weight = np.arange(1, longest + 1) ** -exponent
    cumulative = np.cumsum(weight / weight.sum())[:-1].astype(np.float32)
    return 1 + jnp.sum(uniform[:, None] >= jnp.asarray(cumulative)[None, :], axis=-1, dtype=jnp.int32)
