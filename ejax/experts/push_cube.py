"""An expert for PushCubeRL: ``ejax.experts.push_cube:make_task``."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.experts.task import Expert, Rows, ScriptedTask, limit_length, phrase
from ejax.types import Array, CameraView

CAMERA = CameraView(eye=(-1.9, -1.1, 1.0), target=(-0.68, -0.42, 0.05), fovy=42.0, effects=False)
"""View without shadows, which are slow in software rendering."""
ENV: Mapping[str, Any] = {
    "cube_position_range": ((-0.05, -0.05, 0.0), (0.05, 0.05, 0.0)),
    "goal_position_range": ((-0.1, -0.1, 0.0), (0.1, 0.1, 0.0)),
}
"""Fields of the environment: under a fixed goal, instructions would not differ."""
SEGMENTS = ("approach", "descend", "push")
WORDINGS = (
    "push the cube to the {place}",
    "slide the orange cube onto the green disc on the {place}",
    "move the block to the {place} goal",
    "shove the cube until it reaches the {place}",
)
_CARE = np.array([1.0, 0.6, 0.4])[:, None] * np.ones(6)
_RANGES = {
    "speed": (0.022, 0.034, 1),  # m per step, on the way
    "push_speed": (0.014, 0.022, 1),
    "height": (0.22, 0.34, 1),  # m, of the approach
    "behind": (0.14, 0.19, 1),  # m from the cube's centre
    "aside": (-0.02, 0.02, 1),
}

_THERE = 0.03  # distance of the tool from a waypoint, m, at which the next segment begins
_OFF_LINE = 0.04
"""Distance from the line between cube and goal, m, at which the tool stops pushing and returns to it."""
_BACK_ON_LINE = 0.015  # m per step
_PUSH_HEIGHT = 0.04  # m
_DAMPING = 0.01


class PushCubeExpert(Expert):
    """Behind the cube, down, and forward, steering it by the place of contact."""

    make_env, env_fields, segments, care, ranges = PushCubeRL, ENV, SEGMENTS, _CARE, _RANGES

    def act(self, obs: Rows, segment: Rows, variation: Mapping[str, Rows]) -> tuple[Rows, Rows]:
        tool, cube, goal = obs[:, 6:9], obs[:, 9:12], obs[:, 12:15]
        forward = (goal - cube)[:, :2]
        forward = forward / np.maximum(np.linalg.norm(forward, axis=1), 1e-6)[:, None]
        left = np.stack([-forward[:, 1], forward[:, 0]], axis=1)
        behind = cube[:, :2] - variation["behind"][:, None] * forward + variation["aside"][:, None] * left
        above = np.column_stack([behind, variation["height"]])
        low = np.column_stack([behind, np.full(len(obs), _PUSH_HEIGHT)])
        off = np.sum((tool - cube)[:, :2] * left, axis=1)
        eager = variation["push_speed"] * np.clip(1.0 - np.abs(off) / _OFF_LINE, 0.0, 1.0)
        beside = eager[:, None] * forward - np.clip(off, -_BACK_ON_LINE, _BACK_ON_LINE)[:, None] * left
        push = np.column_stack([tool[:, :2] + beside, np.full(len(obs), _PUSH_HEIGHT)])
        done = np.stack([_near(above, tool), _near(low, tool), np.zeros(len(obs), bool)])
        segment = segment + done[segment, np.arange(len(obs))]
        way = np.stack([above, low, push])[segment, np.arange(len(obs))] - tool
        way = limit_length(way, variation["speed"])
        return np.asarray(_joint_step(obs[:, :6], way)) / self.env.action_scale, segment

    def instruct(self, rng: np.random.Generator, obs: Rows) -> list[str]:
        return phrase(rng, WORDINGS, obs[:, 12:14] - np.array(self.env.goal_position[:2]))


def _near(point: Rows, tool: Rows) -> Rows:
    return np.linalg.norm(point - tool, axis=1) < _THERE


@jax.jit
@jax.vmap
def _joint_step(angles: Array, way: Array) -> Array:
    """Compute changes of the joint angles [6] that move the tool by ``way`` [3] m and turn it to point down. One
    iteration of ``ejax.envs.mujoco.kinematics``' damped least squares, free about the tool's axis."""

    def tool(angles: Array) -> Array:
        pose = site_pose(load_model("push_cube.xml"), "tcp", jnp.concatenate([angles, jnp.zeros(7)]))
        return jnp.concatenate([pose[:3, 3], pose[:3, 2]])

    axis, jacobian = tool(angles)[3:], jax.jacfwd(tool)(angles)
    error = jnp.concatenate([way, jnp.array([0.0, 0.0, -1.0]) - axis])
    return jacobian.T @ jnp.linalg.solve(jacobian @ jacobian.T + _DAMPING**2 * jnp.eye(6), error)


make_task = functools.partial(ScriptedTask, PushCubeExpert, camera=CAMERA)
