"""Demonstrations of PointMassRL with its own rewards, for tests: every other episode is cut off, one has a NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.data.task import Episode, EpisodeSpec, Failure
from ejax.envs.tasks.point_mass import PointMassRL

LENGTH = 7


@jax.jit
def _play(key: Any, actions: Any) -> Any:
    env = PointMassRL(max_episode_steps=1000)

    def one_step(carry: Any, action: Any) -> Any:
        state, obs = carry
        state, timestep = env.step(state, action, key)
        return (state, timestep.obs), (obs, timestep.reward)

    return jax.lax.scan(one_step, env.reset(key), actions)[1]


class Points:
    """Episodes of ``LENGTH`` steps; the number ``broken_at`` has a reward that is not finite at step 2."""

    def __init__(self, broken_at: int | None = None, scale: float = 1.0, fails: bool = False) -> None:
        self.broken_at, self.scale, self.fails, self.number = broken_at, scale, fails, 0

    def spec(self) -> EpisodeSpec:
        return EpisodeSpec({"obs": ((14,), "float32"), "actions": ((2,), "float32"), "rewards": ((), "float32")})

    def generate(self, seed: int) -> Episode | Failure:
        number, self.number = self.number, self.number + 1
        if self.fails or number == 1:
            return Failure("it missed the goal")
        actions = np.random.default_rng(seed).uniform(-1.0, 1.0, (LENGTH, 2)).astype(np.float32)
        obs, reward = map(np.array, _play(jax.random.key(seed), jnp.asarray(actions)))
        if number == self.broken_at:
            reward[2] = np.nan
        frames = {"obs": obs, "actions": self.scale * actions, "rewards": reward}
        return Episode(frames, terminated=number % 2 == 0)
