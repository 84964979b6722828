"""Motion of a legged robot, from (qpos, qvel) alone: velocities of its base, feet and links; and contacts of its feet.

    p(q) = o + R·f(θ)        ṗ = v + R·(ω × f(θ) + ∂f/∂θ·θ̇)

with base position o, rotation R, velocity v in the world, angular velocity ω in the base's own frame, and f the forward
kinematics of the joints θ.

Contacts are those of a control step, and time in the air, from contact sensors read in every physics step. Sensors lag
one physics step. Source: EmbodiChain 0.3.2's ``ContactHistory``, which samples after each physics step.

    found  = in any physics step        peak = the strongest force of any
    landed = touches, and did not in the physics step before
    air'   = 0 where it touches, else air + Δt
"""

import jax
import jax.numpy as jnp
from flax import struct

from ejax.envs.locomotion.model import LeggedModel
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.kinematics import body_poses
from ejax.envs.mujoco.rotations import matrix_from_quaternion
from ejax.envs.terms.legged import Contacts, Motion
from ejax.types import Array

_SELF_CONTACT = 10.0  # N: what the robot pushes against itself with at least where that counts


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
    link_rotation = jnp.einsum("ij,ljk->lik", rotation, poses[:, :3, :3])
    spins = jax.vmap(lambda turn, rate: _axis(rate @ turn.T))(poses[:, :3, :3], rates[:, :3, :3])
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
        link_rotation=link_rotation,
        link_ang_vel=(ang_vel_b[None] + spins) @ rotation.T,
        imu_lin_vel=imu_lin_vel,
        imu_ang_vel=imu_ang_vel,
    )


def drive_torque(robot: LeggedRobot, motion: Motion, target: Array) -> Array:
    """Compute [A], N·m: clip(k·(q* − q) − c·q̇, ±F), with ``target`` q*."""
    drives = robot.drives
    stiffness, damping, limit = (jnp.asarray(x) for x in (drives.stiffness, drives.damping, drives.max_effort))
    return jnp.clip(stiffness * (target - motion.joint_pos) - damping * motion.joint_vel, -limit, limit)


def heading(motion: Motion) -> Array:
    """rad: the direction that the base looks in, about the vertical."""
    return jnp.arctan2(motion.rotation[1, 0], motion.rotation[0, 0])


def _axis(skew: Array) -> Array:
    return jnp.stack([skew[2, 1], skew[0, 2], skew[1, 0]])


@struct.dataclass(kw_only=True)
class FootTimers:
    touching: Array  # [F] bool, in the last physics step that was sensed
    air_time: Array  # [F], s, of a flight that continues; 0 on the ground


def start_timers(num_feet: int) -> FootTimers:
    return FootTimers(touching=jnp.zeros(num_feet, bool), air_time=jnp.zeros(num_feet))


def no_contacts(robot: LeggedRobot) -> Contacts:
    """Make the contacts of a robot in the air, which an episode starts with."""
    num_feet = len(robot.feet)
    none, zero = jnp.zeros(num_feet, bool), jnp.zeros(())
    lengths = {"force": (num_feet, 3), "flight": num_feet, "unwanted_force": len(robot.unwanted)}
    zeros = {name: jnp.zeros(shape) for name, shape in lengths.items()}
    return Contacts(found=none, landed=none, guarded_force=zero, self_contacts=zero, **zeros)


def follow_contacts(
    timers: FootTimers, legged: LeggedModel, readings: Array, timestep: float
) -> tuple[FootTimers, Contacts]:
    """Compute the contacts of a control step, and the timers after it, from ``readings`` [num_substeps, nsensordata].
    ``timestep``: s, of a physics step."""
    force = jnp.stack([_force(readings, places) for places in legged.foot_sensors], axis=1)
    touching = jnp.stack([(readings[:, jnp.array(places)] > 0.0).any(axis=1) for places in legged.foot_sensors], axis=1)
    before, air_time, landed = timers.touching, timers.air_time, jnp.zeros_like(timers.touching)
    flight = jnp.zeros_like(air_time)
    # step by step: a foot may land and leave again within one control step
    for now in touching:
        flight = jnp.where(now & ~before, air_time + timestep, flight)
        landed |= now & ~before
        air_time = jnp.where(now, 0.0, air_time + timestep)
        before = now
    # by the whole vector: components of different steps would be no force that acted
    strongest = jnp.linalg.norm(force, axis=-1).argmax(axis=0)
    contacts = Contacts(
        found=touching.any(axis=0),
        landed=landed,
        force=jnp.take_along_axis(force, strongest[None, :, None], axis=0)[0],
        guarded_force=_strength(readings, legged.guarded_sensors).max(),
        self_contacts=(_strength(readings, legged.self_sensors).max(axis=1) > _SELF_CONTACT).sum().astype(jnp.float32),
        flight=flight,
        unwanted_force=jnp.array([_strength(readings, places).max() for places in legged.unwanted_sensors]),
    )
    return FootTimers(touching=before, air_time=air_time), contacts


def _force(readings: Array, places: tuple[int, ...]) -> Array:
    """[num_substeps, 3]: f₀·n + f₁·t + f₂·(n × t), added up over the places; 0 in those without a contact."""
    total = jnp.zeros((len(readings), 3), readings.dtype)
    for place in places:
        # a sensor reports in the contact's frame; frames differ from place to place
        force, normal, tangent = (readings[:, place + i : place + i + 3] for i in (1, 4, 7))
        total += force[:, :1] * normal + force[:, 1:2] * tangent + force[:, 2:] * jnp.cross(normal, tangent)
    return total


def _strength(readings: Array, places: tuple[int, ...]) -> Array:
    """[num_substeps, places], N; one column of zeros without places."""
    if not places:
        return jnp.zeros((len(readings), 1), readings.dtype)
    return jnp.stack([jnp.linalg.norm(readings[:, place + 1 : place + 4], axis=-1) for place in places], axis=1)
