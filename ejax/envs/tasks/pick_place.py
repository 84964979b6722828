"""A UR10 with a two-finger gripper picks up a cube and sets it down in a goal zone. EmbodiChain has no such task."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from ejax.envs.description import WHOLE, Feature, features
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.task.world import World
from ejax.envs.tasks.grasp_task import (
    GOAL_MARKER,
    HOME,
    ROBOT_NUMBERS,
    GraspTask,
    check_reachable,
    describe_numbers,
    draw_place,
    draw_turn,
    is_set_down,
    make_grasp_model,
)
from ejax.types import Array, Key

OBSERVATION = (
    *ROBOT_NUMBERS,
    *(f"{point} {axis}" for point in ("cube", "goal", "cube - tool", "goal - cube") for axis in "xyz"),
    "was lifted",
)
"""The name of each number of the observation; rad, m, and 0 or 1."""
VELOCITIES = (
    *(Feature(f"{name.split()[0]} velocity", "rad/s") for name in ROBOT_NUMBERS[:6]),
    *(Feature(f"finger {side} velocity", "m/s") for side in (1, 2)),
    *features(("cube velocity", "xyz", "m/s"), ("cube angular velocity", "xyz", "rad/s")),
)
"""The numbers that ``velocities`` adds."""


@struct.dataclass(kw_only=True)
class PickPlaceState:
    """One episode."""

    physics: PhysicsState  # qpos [15]: 6 joints, 2 fingers, cube position, cube quaternion; qvel [14]
    goal: Array  # [3], m: where the cube's centre should end up
    was_lifted: Array  # bool: the cube has been 0.05 m above the floor in this episode
    episode_step: Array  # Control steps done, int32

    @property
    def cubes(self) -> Array:
        """[3], m: the centre of the one cube."""
        return self.physics.qpos[8:11]


@dataclass(frozen=True)
class PickPlaceRL(GraspTask):
    """Task of a UR10 with a gripper that picks a cube up and sets it down at a goal.

    Reward and action: see ``GraspTask``. Observation [24]: see ``OBSERVATION``. Success: a cube that was lifted, now
    stands within success_threshold (m, horizontally) of the goal, is at rest, and is released.

    Args:
        cube_position, goal_position: m, (x, y) in the frame of the robot's base; at reset ± their ``_range``, uniform.
        cube_turn: ± rad about the vertical at reset, uniform.
        velocities: observations [38] end with ``VELOCITIES``: a learned model predicts better with them.
    """

    obs_features = describe_numbers(OBSERVATION)
    positions = ("cube_position", "goal_position", "cube_position_range", "goal_position_range")
    marked = ((GOAL_MARKER, "goal"),)

    reaching_weight: float = 1.0
    lifting_weight: float = 1.0
    placing_weight: float = 3.0
    action_penalty_weight: float = 0.05
    success_weight: float = 10.0
    cube_position: tuple[float, float] = (-0.65, 0.05)
    goal_position: tuple[float, float] = (-0.65, -0.3)
    cube_position_range: tuple[float, float] = (0.1, 0.08)
    goal_position_range: tuple[float, float] = (0.15, 0.12)
    velocities: bool = False

    def check_fields(self) -> None:
        super().check_fields()
        check_reachable("cube", self.cube_position, self.cube_position_range)
        check_reachable("goal", self.goal_position, self.goal_position_range)

    @property
    def asset(self) -> str:
        return make_grasp_model()

    @property
    def parts(self) -> Mapping[str, tuple[Feature, ...]]:
        return {WHOLE: self.obs_features + (VELOCITIES if self.velocities else ())}

    def start(self, key: Key) -> PickPlaceState:
        key_cube, key_turn, key_goal = jax.random.split(key, 3)
        cube = draw_place(key_cube, self.cube_position, self.cube_position_range)
        return PickPlaceState(
            physics=self.resting(HOME, cube, draw_turn(key_turn, self.cube_turn)),
            goal=draw_place(key_goal, self.goal_position, self.goal_position_range),
            was_lifted=jnp.zeros((), bool),
            episode_step=jnp.zeros((), jnp.int32),
        )

    def target(self, state: PickPlaceState) -> tuple[Array, Array, Array]:
        return state.cubes, state.goal, state.was_lifted

    def observe(self, world: World) -> Array:
        state, qpos = world.state, world.qpos
        tool, cube, goal = self.tool_position(state), state.cubes, state.goal
        lifted = state.was_lifted.astype(qpos.dtype)[None]
        known = [qpos[:8], tool, cube, goal, cube - tool, goal - cube, lifted]
        return jnp.concatenate([*known, world.qvel] if self.velocities else known)

    def succeeds(self, world: World) -> Array:
        state, velocity, fingers = world.state, world.qvel[8:11], world.qpos[6:8]
        near = self.distance(state) < self.success_threshold
        return state.was_lifted & near & is_set_down(state.cubes, velocity, fingers)
