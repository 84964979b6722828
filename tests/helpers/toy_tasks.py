"""Environments of one number, and policies by a formula, for tests of what plays, films and evaluates them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np

from ejax.distributions import Normal
from ejax.types import Array, Key, Params, Timestep


@dataclass(frozen=True)
class Line:
    """Spaces of one number; a subclass gives ``reset`` and ``step``."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 9
    control_period = 0.1


def told(obs: Any, reward: Any, ended: Any, **info: Any) -> Timestep:
    """Make a step whose end is the task's."""
    never = jnp.zeros((), bool)
    return Timestep(obs=obs, reward=jnp.asarray(reward, jnp.float32), terminated=ended, truncated=never, info=info)


@dataclass(frozen=True)
class Formula:
    """A Gaussian policy without parameters, around ``mean(obs)``; its value is the first feature."""

    mean: Callable[[Array], Array]
    log_std: float = 0.0

    def init(self, key: Key, obs: Array) -> Params:
        del key, obs
        return {"params": {}}

    def apply(self, params: Params, obs: Array) -> tuple[Normal, Array]:
        del params
        mean = self.mean(obs)
        return Normal(mean, jnp.full_like(mean, self.log_std)), obs[..., 0]
