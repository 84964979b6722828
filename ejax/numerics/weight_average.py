"""An average of a policy's weights over its training, kept in the state of the optimizer.

    ā ← d·ā + (1 − d)·w,    d = min(decay, t/(t + 9)) at step t from 0

So the first weights that are averaged are those after the first step, not those that the optimizer was made with.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ejax.types import Array, Params, PyTree, TrainState, with_networks


class WeightAverage(NamedTuple):
    """State of the last link of an optimizer with ``ema_decay``."""

    averaged_steps: Array
    average: PyTree


def average_weights(decay: float) -> optax.GradientTransformation:
    """Keep the average; the step is not changed."""

    def init(params: PyTree) -> WeightAverage:
        return WeightAverage(jnp.zeros((), jnp.int32), params)

    def update(updates: PyTree, state: WeightAverage, params: PyTree = None) -> tuple[PyTree, WeightAverage]:
        t = state.averaged_steps.astype(jnp.float32)
        share = 1.0 - jnp.minimum(decay, t / (t + 9.0))
        average = optax.incremental_update(optax.apply_updates(params, updates), state.average, share)
        return updates, WeightAverage(state.averaged_steps + 1, average)

    return optax.GradientTransformation(init, update)


def acting_params(train: TrainState) -> Params:
    """Return the parameters by which a policy acts outside its training: the average, where there is one."""
    links = jax.tree.leaves(train.opt_state, is_leaf=lambda x: isinstance(x, WeightAverage))
    link = next((each for each in links if isinstance(each, WeightAverage)), None)
    if link is None:
        return train.params
    begun = link.averaged_steps > 0  # of a population [M]

    def choose(average: Array, own: Array) -> Array:
        return jnp.where(begun.reshape(begun.shape + (1,) * (own.ndim - begun.ndim)), average, own)

    own = {name: train.params["params"][name] for name in link.average}  # not a critic with an optimizer apart
    return with_networks(train.params, jax.tree.map(choose, link.average, own))
