"""Demonstrations of PointMassRL for tests. It imports no test module: those import jax."""

import os

import numpy as np

from ejax.data import Episode, EpisodeSpec


class Reach:
    """Accelerates towards the goal, and brakes.

    Args:
        broken_at, ended_at: the attempt that raises, or ends the worker.
        scale: of the actions that are kept.
    """

    def __init__(
        self,
        broken_at: int | None = None,
        num_steps: int = 40,
        misshapen: bool = False,
        ended_at: int | None = None,
        scale: float = 1.0,
    ) -> None:
        self.ended_at, self.scale = ended_at, scale
        self.broken_at, self.num_steps, self.misshapen, self.attempts = broken_at, num_steps, misshapen, 0

    def spec(self) -> EpisodeSpec:
        return EpisodeSpec({"obs": ((13 if self.misshapen else 14,), "float32"), "actions": ((2,), "float32")})

    def generate(self, seed: int) -> Episode:
        number, self.attempts = self.attempts, self.attempts + 1
        if number == self.broken_at:
            raise ArithmeticError("the point left the plane")
        if number == self.ended_at:
            os._exit(0)
        rng = np.random.default_rng(seed)
        position, goal = rng.uniform(-0.6, 0.6, 2), rng.uniform(-0.7, 0.7, 2)
        velocity, action = np.zeros(2), np.zeros(2)
        obstacles = np.concatenate([rng.uniform(-0.8, 0.8, 4), rng.uniform(0.08, 0.15, 2)])
        observations, actions = [], []
        for _ in range(self.num_steps):
            observations.append(np.concatenate([position, velocity, goal, action, obstacles]))
            action = np.clip(8.0 * (goal - position) - 2.0 * velocity, -1.0, 1.0)
            actions.append(action)
            velocity = velocity * (1.0 - 5.0 / 60.0) + action * 5.0 / 60.0
            position = position + velocity / 60.0
        obs, kept = np.array(observations, np.float32), np.float32(actions) * np.float32(self.scale)
        return Episode({"obs": obs[:, :13] if self.misshapen else obs, "actions": kept})
