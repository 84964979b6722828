"""An environment whose numbers stop being finite."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from tiny import NUM_STEPS

from ejax.envs.tasks.point_mass import PointMassRL, PointMassState
from ejax.types import Array, Key, Timestep


@dataclass(frozen=True)
class Failing(PointMassRL):
    """A task of successful episodes whose reward is NaN from step ``sound`` on, its observation infinite from ``seen``.

    Two rollouts make an episode.
    """

    sound: int = 1000
    seen: int = 1000
    max_episode_steps: int = 2 * NUM_STEPS

    def step(self, state: PointMassState, action: Array, key: Key) -> tuple[PointMassState, Timestep]:
        state, timestep = super().step(state, action, key)
        broken = state.episode_step >= self.sound
        blind = state.episode_step >= self.seen
        return state, replace(
            timestep,
            obs=jnp.where(blind, jnp.inf, timestep.obs),
            reward=jnp.where(broken, jnp.nan, timestep.reward),
            info={"success": jnp.ones((), bool)},
        )
