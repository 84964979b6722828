"""A UR10 pushes a cube to a goal on the floor: EmbodiChain's task, and its part in ``ejax.envs.tasks.push``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.description import Feature, features
from ejax.envs.mujoco.engine import Engine, PhysicsState
from ejax.envs.task.world import World
from ejax.envs.tasks.physics_task import PhysicsTask, Position, PositionRange, draw_position
from ejax.types import Array, Key

HOME = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")


@struct.dataclass(kw_only=True)
class PushCubeState:
    """One episode."""

    physics: PhysicsState  # qpos [13]: 6 joints, cube position, cube quaternion; qvel [12]
    goal: Array  # [3], m
    episode_step: Array  # Control steps done, int32


@dataclass(frozen=True)
class PushTask(PhysicsTask):
    """The common part: the scene, its start, and actions that are joint steps.

    Action [6]: Δq rad is added to the current joint angles, and the drives hold that target for one control step of
    0.04 s. Truncated: after episode_length control steps, or when the cube fell
    below −0.1 m. Cube and goal (m, in the frame of the robot's base) start at their ``_position`` plus a uniform draw
    from their ``_range``, (low, high).
    """

    asset = "push_cube.xml"
    obs_features = (
        *(Feature(f"{joint} angle", "rad") for joint in JOINTS),
        *features(("tool centre point", "xyz", "m"), ("cube", "xyz", "m"), ("goal", "xyz", "m")),
    )
    action_features = tuple(Feature(f"{joint} angle change / action_scale", "rad") for joint in JOINTS)
    positive: ClassVar[tuple[str, ...]] = ("episode_length", "success_threshold", "action_scale")
    positions = ("cube_position", "goal_position", "cube_position_range", "goal_position_range")
    marked = (("goal", "goal"),)

    episode_length: int = 100
    action_scale: float = 0.1
    success_threshold: float = 0.1
    obs_mode: Literal["state"] = "state"
    physics: Engine = "auto"
    sim_steps_per_control: int = 4
    cube_position: Position = (-0.6, -0.4, 0.05)
    goal_position: Position = (-0.9, -0.6, 0.05)
    cube_position_range: PositionRange = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    goal_position_range: PositionRange = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    rewards: Mapping[str, Any] = FrozenDict()
    functor_events: Mapping[str, Any] = FrozenDict()

    def start(self, key: Key) -> PushCubeState:
        key_cube, key_goal = jax.random.split(key)
        cube = draw_position(key_cube, self.cube_position, self.cube_position_range)
        goal = draw_position(key_goal, self.goal_position, self.goal_position_range)
        physics = self.resting(HOME, cube, (1.0, 0.0, 0.0, 0.0))
        return PushCubeState(physics=physics, goal=goal, episode_step=jnp.zeros((), jnp.int32))

    def observe(self, world: World) -> Array:
        return jnp.concatenate([world.qpos[:6], world.eef_pose()[:3, 3], world.qpos[6:9], world.state.goal])

    def control(self, world: World, action: Array) -> Array:
        return world.qpos[:6] + self.joint_step(action)

    def joint_step(self, action: Array) -> Array:
        """Compute Δq [6], rad."""
        return self.action_scale * action

    def succeeds(self, world: World) -> Array:
        return distance_to_goal(world) < self.success_threshold

    def truncates(self, world: World) -> Array:
        return world.qpos[8] < -0.1

    def metrics(self, world: World) -> dict[str, Array]:
        return {"distance_to_goal": distance_to_goal(world)}


@dataclass(frozen=True)
class PushCubeRL(PushTask):
    """EmbodiChain's task, by the first version of its PushCubeRL. Its success can be thrown; ``PushCube``'s cannot.

        r = w_reaching·(1 − tanh 5‖ee − push‖) + w·tanh 10(d_prev − d) − w_action·‖Δq‖ + w_success·[d < threshold]

    with ee the tool centre point, d the horizontal distance from cube to goal, w = place_weight or, where the cube went
    away, place_penalty_weight, û the direction from cube to goal, push = cube − 0.015·û + (0, 0, 0.015), all in m.

    Observation [15]: joint angles (6, rad), ee (3), cube (3), goal (3). Δq = clip(action_scale·a, ±joint_limits).
    Terminated: d < success_threshold, at any height and speed. The rest: see ``PushTask``.

    Differs from the source: d_prev is the distance before this very step, so it cannot leak across episodes. The cube
    weighs 2 kg with friction 0.6, not 10 kg with friction 2 to 3: that one tips over when pushed.
    """

    positive = (*PushTask.positive, "joint_limits")
    action_bound = "joint_limits"

    joint_limits: float = 0.5
    reaching_weight: float = 0.1
    place_weight: float = 2.0
    place_penalty_weight: float = 0.5
    action_penalty_weight: float = 0.01
    success_weight: float = 10.0

    def joint_step(self, action: Array) -> Array:
        return jnp.clip(super().joint_step(action), -self.joint_limits, self.joint_limits)

    def reward_terms(self, world: World, before: World) -> dict[str, Array]:
        """Compute EmbodiChain's terms. ``progress``: how much nearer the cube came to the goal, m."""
        tool, cube, goal = world.obs[6:9], world.obs[9:12], world.obs[12:15]
        direction = (goal - cube) / (jnp.linalg.norm(goal - cube) + 1e-6)  # at the goal itself it would be 0/0
        push = cube - 0.015 * direction + jnp.array([0.0, 0.0, 0.015])
        progress = distance_to_goal(before) - distance_to_goal(world)
        place_weight = jnp.where(progress >= 0.0, self.place_weight, self.place_penalty_weight)
        return {
            "reaching_reward": 1.0 - jnp.tanh(5.0 * jnp.linalg.norm(tool - push)),
            "place_reward": place_weight * jnp.tanh(10.0 * progress),
            "action_penalty": -jnp.linalg.norm(self.joint_step(world.executed)),
            "success_bonus": world.info["success"],
        }

    @property
    def own_weights(self) -> dict[str, float]:
        return {
            "reaching_reward": self.reaching_weight,
            "place_reward": 1.0,  # its two weights depend on the cube's way
            "action_penalty": self.action_penalty_weight,
            "success_bonus": self.success_weight,
        }


def distance_to_goal(world: World) -> Array:
    """Horizontal, from the cube to the goal, m."""
    return jnp.linalg.norm(world.qpos[6:8] - world.state.goal[:2])
