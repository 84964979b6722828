"""An expert for PushCubeRL: ``ejax.experts.push_cube:make_task``."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.experts.task import Expert, Rows, ScriptedTask, limit_length, phrase, read_plan
from ejax.types import Array, CameraView

_PLAN = read_plan(__file__)
CAMERA, ENV = CameraView(**_PLAN["camera"]), _PLAN["env"]
_CARE = np.array(list(_PLAN["segments"].values()))[:, None] * np.ones(6)

_THERE = 0.03  # distance of the tool from a waypoint, m, at which the next segment begins
_OFF_LINE = 0.04  # distance from the line between cube and goal, m, at which the tool only returns to it
_BACK_ON_LINE = 0.015  # m per step
_PUSH_HEIGHT = 0.04  # m
_DAMPING = 0.01


class PushCubeExpert(Expert):
    """Behind the cube, down, and forward, steering it by the place of contact."""

    make_env, env_fields = PushCubeRL, ENV
    segments, care, ranges = tuple(_PLAN["segments"]), _CARE, _PLAN["ranges"]

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
        there = [np.linalg.norm(place - tool, axis=1) < _THERE for place in (above, low)]
        done = np.stack([*there, np.zeros(len(obs), bool)])
        segment = segment + done[segment, np.arange(len(obs))]
        way = np.stack([above, low, push])[segment, np.arange(len(obs))] - tool
        way = limit_length(way, variation["speed"])
        return np.asarray(_joint_step(obs[:, :6], way)) / self.env.action_scale, segment

    def instruct(self, rng: np.random.Generator, obs: Rows) -> list[str]:
        return phrase(rng, _PLAN["wordings"], obs[:, 12:14] - np.array(self.env.goal_position[:2]))


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
