"""Wrappers of a user, which a config names as ``own_wrappers:Scaled``."""

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.envs.wrappers.wrapper import EnvWrapper, ObservationWrapper
from ejax.types import Array, Key, PyTree, Timestep


@dataclass(frozen=True)
class Scaled(ObservationWrapper):
    """The observation times a factor."""

    factor: float = 0.5

    def observe(self, state: PyTree, obs: Array) -> Array:
        return self.factor * obs


class WithCount(ObservationWrapper):
    """A dict of the observation and the number of zeros in it."""

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        count = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        return gymnasium.spaces.Dict({"all": self.env.observation_space, "zeros": count})

    def observe(self, state: PyTree, obs: Array) -> dict[str, Array]:
        return {"all": obs, "zeros": jnp.sum(obs == 0.0, dtype=jnp.float32)[None]}


@dataclass(frozen=True)
class Negated(EnvWrapper):
    """Another observation by ``reset`` and ``step``, without a thought of ``persist``."""

    env: Any

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.env.reset(key)
        return state, -obs

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = self.env.step(state, action, key)
        return state, replace(timestep, obs=-timestep.obs)


@struct.dataclass
class CountingState:
    episode: Array
    num_steps: Array


@dataclass(frozen=True)
class CountsEpisodes:
    """Episodes of two steps, counted: what outlasts them. Its observation is [episode, steps, 1]."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = gymnasium.spaces.Box(0.0, np.inf, (3,), np.float32)
    max_episode_steps = 2

    def reset(self, key: Key) -> tuple[CountingState, Array]:
        del key
        state = CountingState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        return state, self._obs(state)

    def persist(self, ended: CountingState, started: CountingState, obs: Array) -> tuple[CountingState, Array]:
        state = replace(started, episode=ended.episode + 1)
        return state, obs.at[0].set(state.episode)  # from the observation given: another's would show

    def step(self, state: CountingState, action: Array, key: Key) -> tuple[CountingState, Timestep]:
        del action, key
        state = replace(state, num_steps=state.num_steps + 1)
        over = state.num_steps == self.max_episode_steps
        return state, Timestep(
            obs=self._obs(state), reward=jnp.ones(()), terminated=jnp.zeros((), bool), truncated=over, info={}
        )

    def _obs(self, state: CountingState) -> Array:
        return jnp.stack([state.episode, state.num_steps, jnp.ones((), jnp.int32)]).astype(jnp.float32)


def counts_after(env: Any, num_steps: int) -> list[Any]:
    """Return the observations of one row after each of so many steps."""
    from ejax.rollout import reset, step

    carry, seen = reset(env, jax.random.key(0), 1), []
    for _ in range(num_steps):
        carry, _ = step(env, carry, jnp.zeros((1, 1)), jax.random.key(1))
        seen.append(jax.tree.map(lambda x: np.asarray(x)[0].tolist(), carry.obs))
    return seen
