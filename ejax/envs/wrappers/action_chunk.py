"""One decision of the policy is a sequence of actions, executed one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.description import EnvDescription, Feature, describe
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.types import Array, Env, Key, PyTree, Timestep


@dataclass(frozen=True)
class ActionChunk(EnvWrapper):
    """A pure environment whose action is ``size`` actions of ``env`` in a row: ``[size · A]``, the first one first.

    An episode's end ends the chunk too. The reward is the sum of the steps' rewards, ``info`` the last step's;
    ``gamma`` and ``max_episode_steps`` count decisions.

    Raises ValueError: an action space that is not a one-dimensional Box, or ``size`` < 1.
    """

    env: Env
    size: int

    def __post_init__(self) -> None:
        chunk_space(self.env.action_space, self.size)

    above_events = True
    actions_per_decision = property(attrgetter("size"))

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return chunk_space(self.env.action_space, self.size)

    @property
    def max_episode_steps(self) -> int:
        return -(-self.env.max_episode_steps // self.size)

    @property
    def description(self) -> EnvDescription:
        """Return the environment's; a decision's numbers are those of its actions, one after the other."""
        inner, count, names = describe(self.env), range(1, self.size + 1), None
        if inner.action is not None:
            names = tuple(Feature(f"{x}, action {i} of {self.size}", unit) for i in count for x, unit in inner.action)
        return replace(
            inner,
            action=names,
            control_period=None if inner.control_period is None else inner.control_period * self.size,
            actions_per_decision=inner.actions_per_decision * self.size,
        )

    @property
    def control_period(self) -> float:
        """Return the duration of one decision, s."""
        return super().control_period * self.size

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        return self._execute(state, action, key, lambda _: ())[0]

    def trajectory(self, state: PyTree, action: Array, key: Key) -> PyTree:
        """Return the states after each action of a decision [size, ...]: those past an episode's end repeat it."""
        return self._execute(state, action, key, lambda state: state)[1]

    def _execute(
        self, state: PyTree, action: Array, key: Key, keep: Callable[[PyTree], PyTree]
    ) -> tuple[tuple[PyTree, Timestep], PyTree]:
        actions = action.reshape(self.size, -1)
        # outside the loop, whose carry needs a timestep: its ``info`` may be anything
        first = self.env.step(state, actions[0], jax.random.fold_in(key, 0))

        def one_more(carry: tuple[PyTree, Timestep], i: Array) -> tuple[tuple[PyTree, Timestep], PyTree]:
            state, timestep = carry
            following, latest = self.env.step(state, actions[i], jax.random.fold_in(key, i))
            latest = replace(latest, reward=timestep.reward + latest.reward)
            # past the episode's end everything stays as it was
            done = timestep.terminated | timestep.truncated
            carry = jax.tree.map(lambda old, new: jnp.where(done, old, new), carry, (following, latest))
            return carry, keep(carry[0])

        last, later = jax.lax.scan(one_more, first, jnp.arange(1, self.size))
        return last, jax.tree.map(lambda one, rest: jnp.concatenate([one[None], rest]), keep(first[0]), later)


def chunk_space(space: gymnasium.Space[Any], size: int) -> gymnasium.spaces.Box:
    """Make the space of ``size`` actions in a row, [size · A]. Raises ValueError: an action space that is not a
    one-dimensional Box, or ``size`` < 1."""
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1 or size < 1:
        raise ValueError(f"action_chunk {size} needs a one-dimensional Box of actions and size >= 1, got {space}")
    dtype: Any = space.dtype  # Gymnasium's releases differ in what they call its type
    return gymnasium.spaces.Box(np.tile(space.low, size), np.tile(space.high, size), dtype=dtype)
