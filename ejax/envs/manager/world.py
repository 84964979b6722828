"""The world that functors see: one environment between two steps, a pure function of a scene and its state.

Frames: the arena's, whose origin EmbodiChain puts the robot's base at. Poses are [4, 4], m.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import struct

from ejax.envs.manager.bodies import RigidObject
from ejax.envs.manager.scene import Scene
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState
from ejax.envs.mujoco.kinematics import body_poses, site_pose
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, matrix_from_quaternion, quaternion_from_matrix
from ejax.types import Array


@struct.dataclass(kw_only=True)
class WorldState:
    """One episode."""

    physics: PhysicsState
    """qpos: joints, then position and quaternion (w x y z) of each dynamic object; qvel likewise, 6 an object."""
    target: Array
    """[J]: target positions of the drives, m or rad."""
    velocity_target: Array
    """[J], m/s or rad/s"""
    effort: Array
    """[J]: efforts added to the drives' forces, N or N·m."""
    poses: dict[str, Array]
    """Virtual targets by their key, [4, 4]."""
    action: Array
    """[A]: the policy's last action, as it gave it; zeros before the first step."""
    episode_step: Array
    """Control steps done, int32."""


@dataclass(frozen=True)
class World:
    """A scene in one state, and in the state before the last control step."""

    scene: Scene
    state: WorldState
    active: tuple[int, ...]
    """The joints that are observed and acted on: those of ``env.control_parts``, in the robot's order."""
    extensions: Mapping[str, Any]
    """``env.extensions`` of the gym config."""
    max_episode_steps: int
    """0 or less: no limit."""
    engine: Engine = "auto"
    before: "World | None" = None

    @property
    def qpos(self) -> Array:
        """[active joints], m or rad."""
        return self.state.physics.qpos[jnp.array(self.active)]

    @property
    def qvel(self) -> Array:
        """[active joints], m/s or rad/s."""
        return self.state.physics.qvel[jnp.array(self.active)]

    @property
    def qf(self) -> Array:
        """[active joints]: the efforts that an action commands, N or N·m; zeros under position and velocity drives.

        Like PhysX's joint forces, these are applied from outside: the drives' own are not included. (Raw forces of up
        to 500 N·m next to angles drown a network's other inputs.)
        """
        return self.state.effort[jnp.array(self.active)]

    @property
    def ctrl(self) -> Array:
        """[J]: k·q* + c·q̇* + f, see ``ejax.envs.manager.robots``."""
        state, drives = self.state, self.scene.drives
        stiffness, damping = (jnp.array(each, state.target.dtype) for each in (drives.stiffness, drives.damping))
        return stiffness * state.target + damping * state.velocity_target + state.effort

    @property
    def limits(self) -> Array:
        """[active joints, 2]: lowest and highest position."""
        return jnp.asarray(self.scene.limits[list(self.active)])

    def part_qpos(self, name: str) -> Array:
        """[joints of the part]. Raises ValueError: no such part."""
        return self.state.physics.qpos[jnp.array(self.scene.part(name))]

    def part_qvel(self, name: str) -> Array:
        """[joints of the part]. Raises ValueError: no such part."""
        return self.state.physics.qvel[jnp.array(self.scene.part(name))]

    def eef_pose(self, part: str | None = None, qpos: Array | None = None) -> Array:
        """[4, 4]: the tool centre point, by forward kinematics.

        Args:
            qpos: [J], other joint positions than the current ones.

        Raises:
            ValueError: the part has no tool.
        """
        if part is not None:
            self.scene.part(part)
        if self.scene.tool_part is None or part not in (None, self.scene.tool_part):
            where = f"; it is on '{self.scene.tool_part}'" if self.scene.tool_part else ": this robot has none"
            raise ValueError(f"control part '{part}' has no tool centre point{where}")
        return site_pose(self.scene.model, "tcp", self.state.physics.qpos if qpos is None else qpos)

    def camera_pose(self, uid: str, *, right: bool = False) -> Array:
        """[4, 4]: a camera in the arena, its line of sight along −z and y up; of a stereo camera, one of its lenses.

        Raises:
            ValueError: no such camera.
        """
        camera = self.scene.camera(uid)
        pose = jnp.asarray(camera.lens_pose(camera.lens(right=right)), jnp.float32)
        return pose if camera.parent is None else self.body_pose(camera.parent) @ pose

    def body_pose(self, name: str) -> Array:
        """[4, 4]: a body of the model, such as a link of the robot."""
        model = self.scene.model
        return jnp.asarray(body_poses(model, self.state.physics.qpos)[model.body(name).id], jnp.float32)

    def find_object(self, uid: str) -> RigidObject:
        """Raises ValueError: no such object; the message lists the uids."""
        for each in self.scene.objects:
            if each.uid == uid:
                return each
        there = ", ".join(each.uid for each in self.scene.objects) or "none"
        raise ValueError(f"no rigid object '{uid}'; there is {there}")

    def has_object(self, uid: str) -> bool:
        return any(each.uid == uid for each in self.scene.objects)

    def object_pose(self, uid: str) -> Array:
        """The pose [4, 4] of a rigid object.

        Raises:
            ValueError: no such object.
        """
        each = self.find_object(uid)
        if not each.dynamic:
            return initial_pose(each)
        start, _ = self.scene.slot(uid)
        pose = self.state.physics.qpos[start : start + 7]
        return make_pose(pose[:3], matrix_from_quaternion(pose[3:]))

    def object_velocity(self, uid: str) -> Array:
        """The velocity [6] of a rigid object: linear (m/s) and angular (rad/s), both in the arena's frame.

        Raises:
            ValueError: no such object.
        """
        if not self.find_object(uid).dynamic:
            return jnp.zeros(6)
        _, start = self.scene.slot(uid)
        linear, angular = jnp.split(self.state.physics.qvel[start : start + 6], 2)
        return jnp.concatenate([linear, self.object_pose(uid)[:3, :3] @ angular])  # a ball joint turns in its own frame

    def pose(self, key: str) -> Array:
        """[4, 4]: a virtual target.

        Raises:
            ValueError: none is stored under the key.
        """
        if key not in self.state.poses:
            raise ValueError(
                f"no target pose '{key}' is stored; there is {', '.join(sorted(self.state.poses)) or 'none'}. "
                f"Add an event randomize_target_pose with store_key '{key}'"
            )
        return self.state.poses[key]

    def with_object_pose(self, uid: str, pose: Array) -> WorldState:
        """The state with a dynamic object moved, at rest.

        Raises:
            ValueError: no such object, or a static one.
        """
        if not self.find_object(uid).dynamic:
            raise ValueError(f"rigid object '{uid}' is static: it cannot be moved; give body_type 'dynamic'")
        position, velocity = self.scene.slot(uid)
        physics = self.state.physics
        placed = jnp.concatenate([pose[:3, 3], quaternion_from_matrix(pose[:3, :3])])
        return replace(
            self.state,
            physics=replace(
                physics,
                qpos=physics.qpos.at[position : position + 7].set(placed),
                qvel=physics.qvel.at[velocity : velocity + 6].set(0.0),
            ),
        )

    def with_qpos(self, joints: tuple[int, ...], qpos: Array) -> WorldState:
        """The state with joints moved, at rest, their drives holding them there."""
        ids, physics = jnp.array(joints), self.state.physics
        return replace(
            self.state,
            physics=replace(physics, qpos=physics.qpos.at[ids].set(qpos), qvel=physics.qvel.at[ids].set(0.0)),
            target=self.state.target.at[ids].set(qpos),
        )

    def with_pose(self, key: str, pose: Array) -> WorldState:
        """The state with a virtual target [4, 4] stored."""
        return replace(self.state, poses={**self.state.poses, key: pose})

    def advance(self, num_substeps: int) -> WorldState:
        """The state after physics steps under the current targets."""
        return replace(
            self.state, physics=Physics(self.scene.xml, self.engine, num_substeps).step(self.state.physics, self.ctrl)
        )


def initial_state(scene: Scene) -> WorldState:
    """Everything where the config puts it, before any event; the action has no width yet."""
    home = jnp.array(scene.home, jnp.float32)
    qpos = [home]
    for each in scene.objects:
        if each.dynamic:
            pose = initial_pose(each)
            qpos += [pose[:3, 3], quaternion_from_matrix(pose[:3, :3])]
    return WorldState(
        physics=PhysicsState(qpos=jnp.concatenate(qpos), qvel=jnp.zeros(scene.model.nv)),
        target=home,
        velocity_target=jnp.zeros_like(home),
        effort=jnp.zeros_like(home),
        poses={},
        action=jnp.zeros(0),
        episode_step=jnp.zeros((), jnp.int32),
    )


def initial_pose(each: RigidObject) -> Array:
    """[4, 4]: the initial pose of an object, from the config."""
    return make_pose(jnp.array(each.position, jnp.float32), matrix_from_euler(jnp.array(each.rotation, jnp.float32)))
