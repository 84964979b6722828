"""An environment whose observation has two parts: one for a deployed policy, and all of it."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import jax.numpy as jnp
from flax.core import FrozenDict

from ejax.envs.description import WHOLE, EnvDescription, describe
from ejax.envs.spaces import part_space
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.schema.frozen import freeze_fields, thaw
from ejax.schema.registry import resolve
from ejax.types import Array, HostEnv, Key, PyTree, Timestep, persist


@dataclass(frozen=True)
class AsymmetricEnv(EnvWrapper):
    """Observations in two parts, as VelocityRL's: ``policy`` has some of the numbers, ``critic`` all of them.

    ``trainer.events`` whose ``part`` is ``policy`` make noise and delay that the other part does not show.
    ``observation_indices``: the numbers that ``policy`` has, in this order. None: all.
    Raises ValueError: an environment outside JAX, an observation that is no vector, or an index that is not in it.
    """

    env: str
    env_cfg: Any = field(default_factory=FrozenDict)
    observation_indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        freeze_fields(self, "env_cfg")
        if isinstance(self.inner, HostEnv | gymnasium.Env):
            raise ValueError(f"AsymmetricEnv: {self.env} is stepped outside JAX; give an environment in JAX")
        space = self.inner.observation_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"AsymmetricEnv: the observation of {self.env} is no vector, but {space}")
        indices = tuple(range(space.shape[0]) if self.observation_indices is None else self.observation_indices)
        part_space(space, indices)  # checks them
        object.__setattr__(self, "observation_indices", indices)

    @functools.cached_property
    def inner(self) -> Any:
        """Return the environment inside, with its own events if it has any."""
        env = resolve("env", self.env)(**thaw(self.env_cfg))
        if not getattr(env, "randomization", None):
            return env
        from ejax.envs.wrappers.randomized import with_events  # imports MuJoCo

        return with_events(env, {})

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        whole = self.inner.observation_space
        return gymnasium.spaces.Dict({"policy": part_space(whole, self.observation_indices or ()), "critic": whole})

    @property
    def description(self) -> EnvDescription:
        inner = describe(self.inner)
        named = inner.observation.get(WHOLE)
        if named is None:
            return inner
        policy = tuple(named[i] for i in self.observation_indices or ())
        return replace(inner, observation={"policy": policy, "critic": named})

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.inner.reset(key)
        return state, self._parts(obs)

    def persist(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        state, inner = persist(self.inner, ended, started, obs["critic"])
        return state, self._parts(inner)

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = self.inner.step(state, action, key)
        return state, replace(timestep, obs=self._parts(timestep.obs))

    def _parts(self, obs: Array) -> dict[str, Array]:
        return {"policy": obs[jnp.array(self.observation_indices)], "critic": obs}
