"""Frames of bodies and sites: where they are, and how they move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.kinematics import body_pose, rate_of_qpos, times
from ejax.types import Array


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


def frame_of(
    model: mujoco.MjModel,
    body: int,
    local: NDArray[np.float64],
    physics: PhysicsState,
    markers: Mapping[str, Array],
) -> Frame:
    """The frame that is ``local`` [4, 4] in a body's. Its velocity is computed where it is read."""

    def pose_at(qpos: Array) -> Array:
        return jnp.asarray(times(body_pose(model, body, qpos, markers), local), qpos.dtype)

    def rate() -> Array:
        return jax.jvp(pose_at, (physics.qpos,), (rate_of_qpos(model, physics.qpos, physics.qvel),))[1]

    pose = pose_at(physics.qpos)
    return Frame(pose[:3, 3], pose[:3, :3], rate)
