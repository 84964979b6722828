"""Motion of a legged robot, from (qpos, qvel) alone: velocities of its base, of its feet, and of its links.

    p(q) = o + R·f(θ)        ṗ = v + R·(ω × f(θ) + ∂f/∂θ·θ̇)

with base position o, rotation R, velocity v in the world, angular velocity ω in the base's own frame, and f the forward
kinematics of the joints θ.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.locomotion.model import LeggedModel
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.kinematics import body_poses
from ejax.envs.mujoco.rotations import matrix_from_quaternion
from ejax.envs.terms.legged_world import Motion
from ejax.types import Array


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
