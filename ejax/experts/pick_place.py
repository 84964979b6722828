"""An expert for PickPlaceRL: ``ejax.experts.pick_place:make_task``."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from ejax.envs.tasks.grasp_task import HALF_EDGE
from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.experts.task import EnvRows, Expert, ScriptedTask, limit_length, phrase, read_plan
from ejax.types import CameraView

PLAN = read_plan(__file__)
CAMERA, SEGMENTS, RANGES = CameraView(**PLAN["camera"]), tuple(PLAN["segments"]), PLAN["ranges"]
CARE = np.array(list(PLAN["segments"].values()))[:, None] * np.array([1.0, 1.0, 1.0, 0.0])
"""[segments, 4]; a noisy grip would drop the cube."""

_ABOVE = 0.015  # horizontal distance to the cube or goal, m, below which the tool goes down, and lets go
_AT_GRASP = 0.006  # m between the tool and the cube's centre
_HELD = 0.013  # m of travel of both fingers: they press on the cube
_LEFT, _LET_GO = 0.03, 0.02  # m from the way down to cube or goal, and from a held cube: a learner has left it
_SET_DOWN = 0.003  # m above the floor at which the fingers open


class PickPlaceExpert(Expert):
    make_env, segments, care, ranges = PickPlaceRL, SEGMENTS, CARE, RANGES

    def act(self, obs: EnvRows, segment: EnvRows, variation: Mapping[str, EnvRows]) -> tuple[EnvRows, EnvRows]:
        robot, cube, goal = obs[:, :11], obs[:, 11:14], obs[:, 14:17]
        return follow_plan(robot, cube, goal, segment, variation, self.env.action_scale)

    def return_to(self, obs: EnvRows, segment: EnvRows) -> EnvRows:
        return begin_again(obs[:, :11], obs[:, 11:14], obs[:, 14:17], segment)

    def instruct(self, rng: np.random.Generator, obs: EnvRows) -> list[str]:
        return phrase(rng, PLAN["wordings"], obs[:, 14:16] - np.array(self.env.goal_position))


def begin_again(robot: EnvRows, cube: EnvRows, goal: EnvRows, segment: EnvRows) -> EnvRows:
    """Return the plan's segments [N] where a learner acts: the first again where it has left the cube behind, and not
    down where it has left the place above the goal. Arguments as of ``follow_plan``."""
    way, rest = robot[:, 8:11] - cube, np.linalg.norm((cube - goal)[:, :2], axis=1)
    aside, away = np.linalg.norm(way[:, :2], axis=1), np.linalg.norm(way, axis=1)
    lost = np.where(segment == 1, aside > _LEFT, (segment > 1) & (away > _LET_GO))
    lost &= (segment < 6) | (rest > _LEFT)  # what was set down there is done
    return np.where(lost, 0, np.where((segment == 5) & (rest > _LEFT), 4, segment))


def follow_plan(
    robot: EnvRows,
    cube: EnvRows,
    goal: EnvRows,
    segment: EnvRows,
    variation: Mapping[str, EnvRows],
    action_scale: float,
) -> tuple[EnvRows, EnvRows]:
    """Act above the cube, down, close; up, across, down, open: each until the simulated state shows that it is done.

    From ``robot`` [N, 11] (``ejax.envs.tasks.grasp_task.ROBOT``), ``cube`` and ``goal`` [N, 3] m and ``segment`` [N] of
    the step before, return actions [N, 4] and segments [N], see ``Expert.act``.
    """
    fingers, tool, goal = robot[:, 6:8], robot[:, 8:11], goal.copy()
    goal[:, :2] += variation["place"]
    hover = cube + np.array([0.0, 0.0, 1.0]) * variation["hover"][:, None]
    lifted, above_goal = tool.copy(), goal.copy()
    lifted[:, 2] = above_goal[:, 2] = variation["carry_height"]
    held_at = goal + (tool - cube)  # the tool's position that puts the held cube at the goal
    above_goal[:, :2] = held_at[:, :2]
    aside, aside_of_goal = (np.linalg.norm((place - tool)[:, :2], axis=1) for place in (hover, above_goal))
    done = np.stack(
        [
            (aside < _ABOVE) & (tool[:, 2] > cube[:, 2] + HALF_EDGE),
            np.linalg.norm(cube - tool, axis=1) < _AT_GRASP,
            fingers.min(axis=1) > _HELD,
            tool[:, 2] > 0.8 * variation["carry_height"],
            aside_of_goal < _ABOVE,
            (cube[:, 2] < HALF_EDGE + _SET_DOWN) & (aside_of_goal < _ABOVE),
            np.zeros(len(robot), bool),
        ]
    )
    # one segment a step at most, and never back: a cube that slips away is a failed attempt, not another plan
    segment = segment + done[segment, np.arange(len(robot))]
    targets = np.stack([hover, cube, cube, lifted, above_goal, held_at, tool])
    way = targets[segment, np.arange(len(robot))] - tool
    move = limit_length(way, variation["speed"] * action_scale) / action_scale
    grip = np.where((segment >= 2) & (segment <= 5), 1.0, -1.0)
    return np.concatenate([move, grip[:, None]], axis=1), segment


make_task = partial(ScriptedTask, PickPlaceExpert, camera=CAMERA)
