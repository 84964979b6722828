"""One decision of the policy is a sequence of actions, executed one after the other."""

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp

from ejax.envs.description import EnvDescription, Feature, describe
from ejax.envs.spaces import chunk_space
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.types import Array, Env, Key, PyTree, Timestep


@dataclass(frozen=True)
class ActionChunk(EnvWrapper):
    """A pure environment whose action is ``size`` actions of ``env`` in a row: ``[size · A]``, the first one first.

    An episode's end ends the chunk too. The reward of a decision is the sum of its steps' rewards, so ``gamma`` counts
    decisions; ``info`` is that of the last step executed, ``max_episode_steps`` are decisions.

    Raises:
        ValueError: an action space that is not a one-dimensional Box, or ``size`` < 1.
    """

    env: Env
    size: int

    def __post_init__(self) -> None:
        chunk_space(self.env.action_space, self.size)

    @property
    def inner(self) -> Env:
        return self.env

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return chunk_space(self.env.action_space, self.size)

    @property
    def actions_per_decision(self) -> int:
        return self.size

    @property
    def max_episode_steps(self) -> int:
        return -(-self.env.max_episode_steps // self.size)

    @property
    def description(self) -> EnvDescription:
        """The environment's; the numbers of a decision are those of its actions, one after the other."""
        inner = describe(self.env)
        named = None
        if inner.action is not None:
            named = tuple(
                Feature(f"{name}, action {i + 1} of {self.size}", unit)
                for i in range(self.size)
                for name, unit in inner.action
            )
        return replace(
            inner,
            action=named,
            control_period=None if inner.control_period is None else inner.control_period * self.size,
            actions_per_decision=inner.actions_per_decision * self.size,
        )

    @property
    def control_period(self) -> float:
        """Duration of one decision, s."""
        return super().control_period * self.size

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        actions = action.reshape(self.size, -1)
        state, timestep = self.env.step(state, actions[0], jax.random.fold_in(key, 0))

        def one_more(i: Array, carry: tuple[PyTree, Timestep]) -> tuple[PyTree, Timestep]:
            state, timestep = carry
            done = timestep.terminated | timestep.truncated
            following, latest = self.env.step(state, actions[i], jax.random.fold_in(key, i))
            latest = replace(latest, reward=timestep.reward + latest.reward)
            return jax.tree.map(lambda old, new: jnp.where(done, old, new), carry, (following, latest))

        carry: tuple[PyTree, Timestep] = jax.lax.fori_loop(1, self.size, one_more, (state, timestep))
        return carry

    def trajectory(self, state: PyTree, action: Array, key: Key) -> PyTree:
        """The states after each action of a decision [size, ...], for videos: those past an episode's end repeat it."""
        state, timestep = self.env.step(state, action.reshape(self.size, -1)[0], jax.random.fold_in(key, 0))

        def one_more(carry: tuple[PyTree, Array], i: Array) -> tuple[tuple[PyTree, Array], PyTree]:
            state, done = carry
            each = action.reshape(self.size, -1)[i]
            following, latest = self.env.step(state, each, jax.random.fold_in(key, i))
            state = jax.tree.map(lambda old, new: jnp.where(done, old, new), state, following)
            return (state, done | latest.terminated | latest.truncated), state

        done = timestep.terminated | timestep.truncated
        _, later = jax.lax.scan(one_more, (state, done), jnp.arange(1, self.size))
        return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state, later)
