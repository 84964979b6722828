"""A simulation at one moment, asked by the names of its MJCF: what a task's terms are computed from.

Positions of bodies and sites follow from qpos alone and are exact at every step, the first included; so are their
velocities. A sensor reads at the beginning of a physics step: ``World.sensor`` says what that means here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from numpy.typing import ArrayLike, NDArray

from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.mujoco.kinematics import body_pose, rate_of_qpos, times, transform
from ejax.schema.registry import did_you_mean
from ejax.types import Array

_FREE, _BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)
_OBJECTS = {
    "body": mujoco.mjtObj.mjOBJ_BODY,
    "joint": mujoco.mjtObj.mjOBJ_JOINT,
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "sensor": mujoco.mjtObj.mjOBJ_SENSOR,
}


@struct.dataclass(kw_only=True)
class TaskState:
    """One episode. Arrays only: what a run's state and its checkpoints hold."""

    physics: PhysicsState
    markers: dict[str, Array]
    """Mocap body -> its place [3], m."""
    kept: dict[str, Array]
    """What the task remembers, by its own names."""
    action: Array
    """[A]: the last, within ±1; zeros at the start."""
    readings: Array
    """[nsensordata]: see ``World.sensor``."""
    episode_step: Array
    """Control steps done, int32."""


@dataclass(frozen=True)
class Frame:
    """Where a body or a site is in the world, and how it moves."""

    position: Array
    """[3], m"""
    rotation: Array
    """[3, 3]: its columns are the frame's x, y and z axes in the world."""
    _rate: Callable[[], Array] = field(repr=False)

    @property
    def velocity(self) -> Array:
        """[3], m/s, in the world's axes."""
        return self._rate()[:3, 3]

    @property
    def angular_velocity(self) -> Array:
        """[3], rad/s, in the world's axes: the ω of Ṙ = [ω]ₓ R."""
        spin = jnp.matmul(self._rate()[:3, :3], self.rotation.T, precision="highest")
        return jnp.stack([spin[2, 1], spin[0, 2], spin[1, 0]])


@dataclass(frozen=True)
class JointState:
    """A joint's own numbers: of a hinge (rad, rad/s) and a slide (m, m/s) scalars; of a ball joint a quaternion [4] and
    [3] rad/s; of a free joint [7] m and quaternion, and [6] m/s in the world's axes and rad/s in the body's."""

    position: Array
    velocity: Array


@struct.dataclass(kw_only=True)
class World:
    """A simulation at one moment; a pytree. Made by ``MuJoCoTask``; ``with_joint``, ``place`` and ``keep`` give changed
    copies.

    A name that the model lacks is refused with those that it has.
    """

    asset: str = struct.field(pytree_node=False)
    control_period: float = struct.field(pytree_node=False)
    state: TaskState

    @property
    def model(self) -> mujoco.MjModel:
        """For constants; not to be changed. What only shows, such as geoms that collide with nothing, is not in it."""
        return load_model(self.asset)

    @property
    def qpos(self) -> Array:
        """[nq], m, rad, unit quaternions (w x y z)"""
        return self.state.physics.qpos

    @property
    def qvel(self) -> Array:
        """[nv], m/s, rad/s"""
        return self.state.physics.qvel

    @property
    def action(self) -> Array:
        """[A]: the last one, within ±1; zeros at the start."""
        return self.state.action

    @property
    def time(self) -> Array:
        """s since the episode's start, at the end of the step."""
        return self.state.episode_step * self.control_period

    @property
    def kept(self) -> dict[str, Array]:
        """What ``keep`` stored."""
        return self.state.kept

    def body(self, name: str) -> Frame:
        """A body's frame; a marker's too."""
        return self._frame(find(self.model, "body", name), np.eye(4))

    def site(self, name: str) -> Frame:
        """A site's frame."""
        model = self.model
        site = find(model, "site", name)
        return self._frame(int(model.site_bodyid[site]), transform(model.site_pos[site], model.site_quat[site]))

    def joint(self, name: str) -> JointState:
        """A joint's position and velocity."""
        model = self.model
        joint = find(model, "joint", name)
        places, speeds = joint_slices(model, joint)
        if model.jnt_type[joint] in (_FREE, _BALL):
            return JointState(self.qpos[places], self.qvel[speeds])
        return JointState(self.qpos[places.start], self.qvel[speeds.start])

    def sensor(self, name: str) -> Array:
        """A sensor's numbers [its dim], as of the last physics step's beginning, so one physics step ago, with markers
        where they were during that step. At an episode's start: of the start itself, with all controls at 0.
        """
        model = self.model
        sensor = find(model, "sensor", name)
        start = int(model.sensor_adr[sensor])
        return self.state.readings[start : start + int(model.sensor_dim[sensor])]

    def joint_positions(self, *names: str) -> dict[str, Array]:
        """``{"hip angle [rad]": …}``: joints' positions with their names and units, for an observation.

        Args:
            names: of joints. None: all, in the model's order.
        """
        return self._named(names, lambda joint: _position_names(self.model, joint), self.qpos, 0)

    def joint_velocities(self, *names: str) -> dict[str, Array]:
        """``{"hip velocity [rad/s]": …}``, as ``joint_positions``."""
        return self._named(names, lambda joint: _velocity_names(self.model, joint), self.qvel, 1)

    def with_joint(self, name: str, position: ArrayLike | None = None, velocity: ArrayLike | None = None) -> "World":
        """The world with a joint elsewhere, or moving otherwise; shapes as of ``joint``."""
        model, physics = self.model, self.state.physics
        places, speeds = joint_slices(model, find(model, "joint", name))
        if position is not None:
            qpos = physics.qpos.at[places].set(_fitting(f"joint '{name}', position", position, places, physics.qpos))
            physics = replace(physics, qpos=qpos)
        if velocity is not None:
            qvel = physics.qvel.at[speeds].set(_fitting(f"joint '{name}', velocity", velocity, speeds, physics.qvel))
            physics = replace(physics, qvel=qvel)
        return self._with(physics=physics)

    def place(self, body: str, position: ArrayLike, quaternion: ArrayLike | None = None) -> "World":
        """The world with a body elsewhere: one that moves freely, or a marker, which is a mocap body.

        A marker stands there in the physics too, from the next step on: what collides with it is pushed aside.

        Args:
            position: [3], m.
            quaternion: [4] (w x y z), of a free body. None: as it is.

        Raises:
            ValueError: a body that hangs on others; a marker's quaternion.
        """
        model, physics = self.model, self.state.physics
        index = find(model, "body", body)
        if model.body_mocapid[index] >= 0:
            if quaternion is not None:
                raise ValueError(f"place: the marker '{body}' has a position only; leave out the quaternion")
            there = _fitting(f"marker '{body}'", position, slice(0, 3), physics.qpos)
            return self._with(markers={**self.state.markers, body: there})
        joint = int(model.body_jntadr[index])
        if joint < 0 or model.jnt_type[joint] != _FREE:
            free = [model.body(i).name for i in range(model.nbody) if is_placeable(model, i)]
            raise ValueError(
                f"place: '{body}' neither moves freely nor is a marker (<body mocap='true'>); "
                f"there is {', '.join(free) or 'none'}; with_joint moves what hangs on joints"
            )
        start = int(model.jnt_qposadr[joint])
        where, turn = slice(start, start + 3), slice(start + 3, start + 7)
        qpos = physics.qpos.at[where].set(_fitting(f"body '{body}', position", position, where, physics.qpos))
        if quaternion is not None:
            qpos = qpos.at[turn].set(_fitting(f"body '{body}', quaternion", quaternion, turn, physics.qpos))
        return self._with(physics=replace(physics, qpos=qpos))

    def keep(self, **values: ArrayLike) -> "World":
        """The world with these numbers remembered: ``kept`` has them until they are kept anew. An episode's start sets
        all that there will be, in the shapes that they will have."""
        return self._with(kept={**self.state.kept, **{name: jnp.asarray(x) for name, x in values.items()}})

    def _with(self, **changes: Any) -> "World":
        return replace(self, state=replace(self.state, **changes))

    def _frame(self, body: int, local: NDArray[np.float64]) -> Frame:
        model, markers = self.model, self.state.markers

        def pose_at(qpos: Array) -> Array:
            return jnp.asarray(times(body_pose(model, body, qpos, markers), local), qpos.dtype)

        def rate() -> Array:
            return jax.jvp(pose_at, (self.qpos,), (rate_of_qpos(model, self.qpos, self.qvel),))[1]

        pose = pose_at(self.qpos)
        return Frame(pose[:3, 3], pose[:3, :3], rate)

    def _named(
        self, names: Iterable[str], name_parts: Callable[[int], list[tuple[str, int]]], values: Array, side: int
    ) -> dict[str, Array]:
        model, named = self.model, {}
        joints = [find(model, "joint", name) for name in names] or range(model.njnt)
        for joint in joints:
            start = joint_slices(model, joint)[side].start
            for name, size in name_parts(joint):
                named[name] = values[start] if size == 1 else values[start : start + size]
                start += size
        return named


def find(model: mujoco.MjModel, kind: str, name: str) -> int:
    """The number of what has this name.

    Raises:
        ValueError: there is none; the message has those that there are.
    """
    index = mujoco.mj_name2id(model, _OBJECTS[kind], name)
    if index >= 0:
        return int(index)
    count = {"body": model.nbody, "joint": model.njnt, "site": model.nsite, "sensor": model.nsensor}[kind]
    known = [n for i in range(count) if (n := mujoco.mj_id2name(model, _OBJECTS[kind], i))]
    there = f"there is {', '.join(known)}" if known else f"the model names no {kind}"
    raise ValueError(f"no {kind} '{name}'; {there}{did_you_mean(name, known)}")


def joint_slices(model: mujoco.MjModel, joint: int) -> tuple[slice, slice]:
    """Where a joint's numbers are in qpos and in qvel."""
    sizes = {_FREE: (7, 6), _BALL: (4, 3)}.get(int(model.jnt_type[joint]), (1, 1))
    at, start = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
    return slice(at, at + sizes[0]), slice(start, start + sizes[1])


def is_placeable(model: mujoco.MjModel, body: int) -> bool:
    """A body that moves freely, or a marker."""
    joint = int(model.body_jntadr[body])
    return model.body_mocapid[body] >= 0 or (joint >= 0 and model.jnt_type[joint] == _FREE)


def joint_name(model: mujoco.MjModel, joint: int) -> str:
    """A joint's name; where it has none, and of free joints, its body's."""
    name = model.joint(joint).name
    body = model.body(int(model.jnt_bodyid[joint])).name
    return (body or name if model.jnt_type[joint] == _FREE else name or body) or f"joint {joint}"


def _position_names(model: mujoco.MjModel, joint: int) -> list[tuple[str, int]]:
    name, kind = joint_name(model, joint), int(model.jnt_type[joint])
    if kind == _FREE:
        return [(f"{name} position [m]", 3), (f"{name} quaternion [1]", 4)]
    if kind == _BALL:
        return [(f"{name} quaternion [1]", 4)]
    return [(f"{name} position [m]" if kind == _SLIDE else f"{name} angle [rad]", 1)]


def _velocity_names(model: mujoco.MjModel, joint: int) -> list[tuple[str, int]]:
    name, kind = joint_name(model, joint), int(model.jnt_type[joint])
    if kind == _FREE:
        return [(f"{name} velocity [m/s]", 3), (f"{name} angular velocity in its own frame [rad/s]", 3)]
    if kind == _BALL:
        return [(f"{name} angular velocity in its own frame [rad/s]", 3)]
    return [(f"{name} velocity [{'m/s' if kind == _SLIDE else 'rad/s'}]", 1)]


def _fitting(what: str, value: ArrayLike, where: slice, like: Array) -> Array:
    """The value in the shape [its numbers]; a scalar for one."""
    given, size = jnp.asarray(value, like.dtype), where.stop - where.start
    if given.shape not in ((size,), *([()] if size == 1 else [])):
        wanted = "one number" if size == 1 else f"shape ({size},)"
        raise ValueError(f"{what}: got shape {given.shape}; must be {wanted}")
    return given.reshape(size)
