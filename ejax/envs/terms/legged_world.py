"""The world of a legged robot: all that the terms of ``ejax.envs.terms.legged`` are computed from."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct

from ejax.envs.task.world import World
from ejax.types import Array


@dataclass(frozen=True, kw_only=True)
class Contacts:
    found: Array  # [F] bool
    landed: Array  # [F] bool
    force: Array  # [F, 3], N: the strongest force of the ground on the foot, in the world's frame
    guarded_force: Array  # [], N: the strongest on a guarded geom; 0 without one
    self_contacts: Array  # []: physics steps in which the robot pushed against itself with more than ``self_threshold``
    flight: Array
    """[F], s: how long those that landed had been in the air, the physics step of the landing included; else 0."""
    unwanted_force: Array  # [U], N: the strongest on each part that shall not touch the ground


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
    """All that the terms of a velocity task are computed from."""

    joints: tuple[str, ...]  # In the policy's order
    home: tuple[float, ...]  # rad: the positions that actions are added to
    motion: Motion
    contacts: Contacts
    command: Array
    """[3]: that of the observation that was acted on, for rewards; the next one, for observations."""
    action: Array  # [A]
    last_action: Array  # likewise
    joint_acc: Array  # [A], rad/s²
    joint_torque: Array  # [A], N·m: what the drives pull with after the step
    foot_height: Array  # [F], m above the ground
    swing_peak: Array  # [F], m: the greatest height of a flight, up to and including its landing
    air_time: Array  # [F], s
    encoder_bias: Array  # [A], rad: measured minus true joint positions
    time: Array  # s since the episode's start
    phase_period: float  # s, of the gait that is observed
    soft_limits: Array  # [A, 2], rad
    link_masses: Array  # [L], kg

    @property
    def offset(self) -> Array:
        """[A]: q − q⁰."""
        return self.motion.joint_pos - jnp.asarray(self.home)


@struct.dataclass(kw_only=True)
class LeggedWorld(World):
    """One moment of a task with a legged robot."""

    contacts: Contacts | None = struct.field(pytree_node=False, default=None)
    """Those of the last control step. None: at an episode's start."""
    target: Array | None = struct.field(pytree_node=False, default=None)
    """[A], rad: the positions that the drives pulled to, likewise."""
    legged: LeggedState = struct.field(pytree_node=False, default=None)
