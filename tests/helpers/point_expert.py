"""An expert for PointMassRL, for tests: it accelerates towards the goal, and brakes."""

from functools import partial
from typing import Any

import numpy as np

from ejax.envs.tasks.point_mass import PointMassRL
from ejax.experts.task import Expert, ScriptedTask

EPISODE = 11


def towards(obs: Any) -> Any:
    """Return the expert's actions [N, 2] at observations [N, 14]."""
    return np.clip(8.0 * (obs[:, 4:6] - obs[:, :2]) - 2.0 * obs[:, 2:4], -1.0, 1.0).astype(np.float32)


class Paced(PointMassRL):
    control_period = 0.02


class PointExpert(Expert):
    segments, ranges, care = ("go",), {}, np.ones((1, 1))

    @staticmethod
    def make_env(physics: str = "", **fields: Any) -> Any:
        del physics
        return Paced(**{"max_episode_steps": EPISODE, **fields})

    def act(self, obs: Any, segment: Any, variation: Any) -> tuple[Any, Any]:
        del variation
        return towards(obs), segment

    def instruct(self, rng: np.random.Generator, obs: Any) -> list[str]:
        del rng
        return ["reach the goal"] * len(obs)


make_task = partial(ScriptedTask, PointExpert)
