"""An environment whose observation has two parts: one for a deployed policy, and all of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np

from ejax.envs.description import WHOLE, EnvDescription, describe
from ejax.envs.wrappers.wrapper import ObservationWrapper
from ejax.types import Array, HostEnv, PyTree


@dataclass(frozen=True)
class AsymmetricEnv(ObservationWrapper):
    """Observations in two parts, as VelocityRL's: ``policy`` has some of the numbers, ``critic`` all of them.

    ``trainer.events`` whose ``part`` is ``policy`` make noise and delay that the other part does not show.
    ``observation_indices``: the numbers that ``policy`` has, in this order. None: all.
    Raises ValueError: an environment outside JAX, an observation that is not a vector, or an index that is not in it.
    """

    observation_indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        name = type(self.env).__name__
        if isinstance(self.env, HostEnv | gymnasium.Env):
            raise ValueError(f"AsymmetricEnv: {name} is stepped outside JAX; use an environment in JAX")
        space = self.env.observation_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"AsymmetricEnv: the observation of {name} is not a vector, but {space}")
        indices = tuple(range(space.shape[0]) if self.observation_indices is None else self.observation_indices)
        part_space(space, indices)  # checks them
        object.__setattr__(self, "observation_indices", indices)

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        whole = self.env.observation_space
        return gymnasium.spaces.Dict({"policy": part_space(whole, self.observation_indices or ()), "critic": whole})

    @property
    def description(self) -> EnvDescription:
        inner = describe(self.env)
        named = inner.observation.get(WHOLE)
        if named is None:
            return inner
        policy = tuple(named[i] for i in self.observation_indices or ())
        return replace(inner, observation={"policy": policy, "critic": named})

    original = staticmethod(itemgetter("critic"))

    def observe(self, state: PyTree, obs: Array) -> dict[str, Array]:
        return {"policy": obs[jnp.array(self.observation_indices)], "critic": obs}


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
