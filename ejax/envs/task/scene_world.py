"""The world of a gym config: a ``World`` whose robot has control parts and drives, among rigid objects and cameras."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.mujoco.engine import Engine, Physics
from ejax.envs.task.scene import Scene
from ejax.envs.task.world import World
from ejax.types import Array


@struct.dataclass(kw_only=True)
class SceneWorld(World):
    """A gym config's scene at one moment, in the arena's frame."""

    scene: Scene = struct.field(pytree_node=False)
    selected: tuple[int, ...] = struct.field(pytree_node=False)
    """The joints that are observed and acted on: those of ``env.control_parts``."""
    extensions: Mapping[str, Any] = struct.field(pytree_node=False, default=FrozenDict())
    """``env.extensions`` of the gym config."""
    max_episode_steps: int = struct.field(pytree_node=False, default=0)
    """0 or less: no limit."""
    engine: Engine = struct.field(pytree_node=False, default="auto")

    @property
    def qpos(self) -> Array:
        """[active joints], m or rad."""
        return self.physics.qpos[jnp.array(self.selected)]

    @property
    def qvel(self) -> Array:
        """[active joints], m/s or rad/s."""
        return self.physics.qvel[jnp.array(self.selected)]

    @property
    def qf(self) -> Array:
        """[active joints]: the efforts that an action commands, N or N·m; zeros under position and velocity drives. As
        in PhysX, the drives' own are not included."""
        return self.state.effort[jnp.array(self.selected)]

    @property
    def joints(self) -> tuple[int, ...]:
        """Numbers of the robot's joints."""
        return tuple(range(len(self.scene.joints)))

    @property
    def active(self) -> tuple[int, ...]:
        return self.selected

    @property
    def ctrl(self) -> Array:
        """[J]: k·q* + c·q̇* + f, see ``ejax.envs.task.robots``."""
        state, drives = self.state, self.scene.drives
        stiffness, damping = (jnp.array(each, state.target.dtype) for each in (drives.stiffness, drives.damping))
        return stiffness * state.target + damping * state.velocity_target + state.effort

    def part_qpos(self, name: str) -> Array:
        """[joints of the control part]."""
        return self.physics.qpos[jnp.array(self.scene.part(name))]

    def part_qvel(self, name: str) -> Array:
        """[joints of the control part]."""
        return self.physics.qvel[jnp.array(self.scene.part(name))]

    def eef_pose(self, part: str | None = None, qpos: Array | None = None) -> Array:
        self.scene.check_tool(part)
        return super().eef_pose(None, qpos)

    def camera_pose(self, uid: str, *, right: bool = False) -> Array:
        """[4, 4]: a camera in the arena, its line of sight along −z and y up; of a stereo camera, one of its lenses."""
        camera = self.scene.camera(uid)
        pose = jnp.asarray(camera.lens_pose(camera.lens(right=right)), jnp.float32)
        return pose if camera.parent is None else self.body_pose(camera.parent) @ pose

    def has_object(self, uid: str) -> bool:
        """Return whether the scene has this rigid object."""
        return uid in self.scene.uids

    def initial_pose(self, uid: str) -> Array:
        """[4, 4]: where the config puts an object."""
        return self.scene.initial_pose(uid)

    def object_pose(self, uid: str) -> Array:
        return self.initial_pose(uid) if self._slots(uid) is None else super().object_pose(uid)

    def with_qpos(self, joints: tuple[int, ...], qpos: Array) -> Self:
        """Move joints, by their numbers, to ``qpos`` [joints], rad or m, at rest; the drives hold them there."""
        state = super().with_qpos(joints, qpos).state
        # without new targets the drives would pull the joints back
        target = self.state.target.at[jnp.array(self.model.jnt_qposadr[list(joints)])].set(qpos)
        return replace(self, state=replace(state, target=target))

    def advance(self, num_substeps: int) -> Self:
        """Make physics steps under the drives' current targets."""
        physics = Physics(self.asset, self.engine, num_substeps).step(self.physics, self.ctrl)
        return replace(self, state=replace(self.state, physics=physics))

    def _slots(self, uid: str) -> tuple[int, int] | None:
        self.scene.find_object(uid)
        return super()._slots(uid)
