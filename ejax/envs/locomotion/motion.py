"""Motion of a legged robot, from (qpos, qvel) alone: velocities of its base, of its feet, and of its links.

    p(q) = o + R·f(θ)        ṗ = v + R·(ω × f(θ) + ∂f/∂θ·θ̇)

with base position o, rotation R, velocity v in the world, angular velocity ω in the base's own frame, and f the forward
kinematics of the joints θ.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.locomotion.contacts import Contacts
from ejax.envs.locomotion.model import LeggedModel
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.kinematics import body_poses
from ejax.envs.mujoco.rotations import matrix_from_quaternion
from ejax.types import Array

_LATER: Any = None


@dataclass(frozen=True, kw_only=True)
class Motion:
    """One robot at one moment. World frame unless noted; m, m/s, rad, rad/s."""

    position: Array  # [3]: the base
    rotation: Array  # [3, 3]: from the base's frame to the world's
    lin_vel_b: Array  # [3]: of the base, in its frame
    ang_vel_b: Array  # likewise
    gravity_b: Array  # [3]: the unit vector down, in the base's frame
    joint_pos: Array  # [A]: in the policy's order
    joint_vel: Array  # likewise
    foot_pos: Array  # [F, 3]
    foot_vel: Array  # likewise
    upright_gravity: Array  # [3]: the unit vector down, in the frame of the body that shall stay upright
    upright_ang_vel: Array  # [3]: that body's angular velocity
    link_pos: Array  # [L, 3]: all bodies of the robot; their masses are ``link_masses``
    link_vel: Array  # likewise
    imu_lin_vel: Array  # [3]: as the IMU has them, in its body's frame; the base's where the robot has none
    imu_ang_vel: Array  # likewise


@dataclass(frozen=True, kw_only=True)
class LeggedState:
    """All that the terms of a velocity task are computed from. The ends come first: while they are found, there are
    motion and contacts only."""

    robot: LeggedRobot
    motion: Motion
    contacts: Contacts
    command: Array = _LATER
    """[3]: that of the observation that was acted on, for rewards; the next one, for observations."""
    action: Array = _LATER  # [A]
    last_action: Array = _LATER  # likewise
    joint_acc: Array = _LATER  # [A], rad/s²
    joint_torque: Array = _LATER  # [A], N·m: what the drives pull with after the step
    foot_height: Array = _LATER  # [F], m above the ground
    swing_peak: Array = _LATER  # [F], m: the greatest height of a flight, up to and including its landing
    air_time: Array = _LATER  # [F], s
    encoder_bias: Array = _LATER  # [A], rad: measured minus true joint positions
    terminated: Array = _LATER  # bool
    time: Array = _LATER  # s since the episode's start
    phase_period: float = _LATER  # s, of the gait that is observed
    soft_limits: Array = _LATER  # [A, 2], rad
    link_masses: Array = _LATER  # [L], kg

    @property
    def offset(self) -> Array:
        """[A]: q − q⁰."""
        return self.motion.joint_pos - jnp.asarray(self.robot.home)


def observe_motion(robot: LeggedRobot, legged: LeggedModel, state: PhysicsState) -> Motion:
    """Compute places and velocities. ``state``: of one robot, not batched."""
    qpos, qvel = state.qpos, state.qvel
    rotation = matrix_from_quaternion(qpos[3:7] / jnp.linalg.norm(qpos[3:7]))
    lin_vel, ang_vel_b = qvel[:3], qvel[3:6]

    def links(joints: Array) -> Array:
        """[L, 4, 4]: the robot's bodies in the base's frame."""
        # the base's own motion is added in closed form, below
        at_origin = jnp.concatenate([jnp.zeros(3, qpos.dtype), jnp.eye(4, dtype=qpos.dtype)[0], joints])
        return jnp.stack([jnp.asarray(pose, qpos.dtype) for pose in body_poses(legged.model, at_origin)[1:]])

    # one derivative along q̇ gives every link's velocity, at about the price of the poses
    poses, rates = jax.jvp(links, (qpos[7:],), (qvel[6:],))
    feet = jnp.array(legged.feet) - 1
    offsets = jnp.asarray([(*foot.offset, 1.0) for foot in robot.feet], qpos.dtype)
    foot_b, foot_rate_b = (jnp.einsum("fij,fj->fi", each[feet, :3], offsets) for each in (poses, rates))

    def in_world(point: Array, rate: Array) -> tuple[Array, Array]:
        turned = jnp.cross(jnp.broadcast_to(ang_vel_b, point.shape), point) + rate
        return qpos[None, :3] + point @ rotation.T, lin_vel[None] + turned @ rotation.T

    turn, turning = poses[legged.upright - 1, :3, :3], rates[legged.upright - 1, :3, :3]
    foot_pos, foot_vel = in_world(foot_b, foot_rate_b)
    link_pos, link_vel = in_world(poses[:, :3, 3], rates[:, :3, 3])
    gravity_b = -rotation[2]
    imu_lin_vel, imu_ang_vel = lin_vel @ rotation, ang_vel_b
    if robot.imu is not None:
        pose, rate = poses[legged.imu - 1, :3], rates[legged.imu - 1, :3]
        offset = jnp.asarray([*robot.imu.offset, 1.0], qpos.dtype)
        imu_lin_vel = (imu_lin_vel + jnp.cross(ang_vel_b, pose @ offset) + rate @ offset) @ pose[:, :3]
        imu_ang_vel = (ang_vel_b + _axis(rate[:, :3] @ pose[:, :3].T)) @ pose[:, :3]
    return Motion(
        position=qpos[:3],
        rotation=rotation,
        lin_vel_b=lin_vel @ rotation,
        ang_vel_b=ang_vel_b,
        gravity_b=gravity_b,
        joint_pos=qpos[jnp.array(legged.joint_qpos)],
        joint_vel=qvel[jnp.array(legged.joint_qvel)],
        foot_pos=foot_pos,
        foot_vel=foot_vel,
        upright_gravity=gravity_b @ turn,
        upright_ang_vel=rotation @ (ang_vel_b + _axis(turning @ turn.T)),
        link_pos=link_pos,
        link_vel=link_vel,
        imu_lin_vel=imu_lin_vel,
        imu_ang_vel=imu_ang_vel,
    )


def drive_torque(robot: LeggedRobot, motion: Motion, target: Array) -> Array:
    """Compute [A], N·m: clip(k·(q* − q) − c·q̇, ±F), with ``target`` q*."""
    drives = robot.drives
    stiffness, damping, limit = (jnp.asarray(x) for x in (drives.stiffness, drives.damping, drives.max_effort))
    return jnp.clip(stiffness * (target - motion.joint_pos) - damping * motion.joint_vel, -limit, limit)


def link_masses(legged: LeggedModel) -> tuple[float, ...]:
    """[L], kg."""
    return tuple(np.asarray(legged.model.body_mass[1:]).tolist())


def heading(motion: Motion) -> Array:
    """rad: the direction that the base looks in, about the vertical."""
    return jnp.arctan2(motion.rotation[1, 0], motion.rotation[0, 0])


def _axis(skew: Array) -> Array:
    return jnp.stack([skew[2, 1], skew[0, 2], skew[1, 0]])
