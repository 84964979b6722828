"""Rewards, ends and observations of legged robots: functions of ``world.legged`` of one robot after a control step.

Source of the formulas: mjlab 1.6 (``mjlab/tasks/velocity/mdp/rewards.py``, Apache-2.0) and Unitree's tasks on it, and
for ANYmal C's Isaac Lab, all as in EmbodiChain 0.3.2. Symbols: c command (v_x, v_y, ω_z), v and ω the base's velocities
in its own frame, g the unit vector down in it, q and q⁰ joint positions and their home, a the action, p and ṗ a foot's
point, |c| = ‖c_xy‖ + |c_z|. Terms with a ``command_threshold`` count only where |c| is above it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.description import Feature
from ejax.envs.task.entities import per_joint
from ejax.envs.task.terms import Outcome
from ejax.envs.task.world import World
from ejax.types import Array


@dataclass(frozen=True, kw_only=True)
class Contacts:
    found: Array  # [F] bool
    landed: Array  # [F] bool
    force: Array  # [F, 3], N: the strongest force of the ground on the foot, in the world's frame
    guarded_force: Array  # [], N: the strongest on a guarded geom; 0 without one
    self_contacts: Array  # []: physics steps in which the robot pushed against itself with more than 10 N
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
    link_rotation: Array  # [L, 3, 3]: from the link's frame to the world's
    link_ang_vel: Array  # [L, 3]
    imu_lin_vel: Array  # [3]: as the IMU has them, in its body's frame; the base's where the robot has none
    imu_ang_vel: Array  # likewise


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One moment of a motion to track. World frame; m, m/s, rad, rad/s."""

    joint_pos: Array  # [A]: in the policy's order
    joint_vel: Array  # likewise
    link_pos: Array  # [L, 3]; as those of ``Motion``
    link_vel: Array  # likewise
    link_rotation: Array  # [L, 3, 3]
    link_ang_vel: Array  # [L, 3]
    anchor: int  # The link that the others are placed by
    bodies: tuple[int, ...]  # The K links that count
    ends: tuple[tuple[int, tuple[float, float, float]], ...]  # Links, and points on them, m, that end an episode


@dataclass(frozen=True, kw_only=True)
class LeggedState:
    """All that the terms of a legged robot's task are computed from; without a command or a reference those are 0."""

    joints: tuple[str, ...]  # In the policy's order
    home: tuple[float, ...]  # rad: the positions that actions are added to
    motion: Motion
    contacts: Contacts
    command: Array  # [3]: that of the observation that was acted on, for rewards; the next one, for observations
    action: Array  # [A]
    last_action: Array  # likewise
    joint_acc: Array  # [A], rad/s²
    joint_torque: Array  # [A], N·m: what the drives pull with after the step
    base_height: Array  # m above the ground
    scan: Array  # [P], m: how far the ground is below the base at rest, at each point of the height scan, within ±1
    foot_height: Array  # [F], m above the ground
    swing_peak: Array  # [F], m: the greatest height of a flight, up to and including its landing
    air_time: Array  # [F], s
    encoder_bias: Array  # [A], rad: measured minus true joint positions
    time: Array  # s since the episode's start
    phase_period: float  # s, of the gait that is observed
    soft_limits: Array  # [A, 2], rad
    link_masses: Array  # [L], kg
    reference: Reference | None = None  # Of the moment itself, for rewards; the next one, for observations

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


Numbers: TypeAlias = tuple[str, str, str]
"""The name of some numbers of an observation, with {joint}, {foot} or {point} for each; their axes; their unit."""


def track_linear_velocity(world: LeggedWorld, std: float, vertical: float = 1.0) -> Array:
    """exp(−(‖c_xy − v_xy‖² + vertical·v_z²) / std²)"""
    velocity = world.legged.motion.lin_vel_b
    error = jnp.sum((world.legged.command[:2] - velocity[:2]) ** 2) + vertical * velocity[2] ** 2
    return jnp.exp(-error / std**2)


def track_angular_velocity(world: LeggedWorld, std: float, tilting: float = 1.0) -> Array:
    """exp(−((c_z − ω_z)² + tilting·‖ω_xy‖²) / std²)"""
    velocity = world.legged.motion.ang_vel_b
    error = (world.legged.command[2] - velocity[2]) ** 2 + tilting * jnp.sum(velocity[:2] ** 2)
    return jnp.exp(-error / std**2)


def upright(world: LeggedWorld, std: float) -> Array:
    """exp(−‖g_xy‖² / std²)"""
    return jnp.exp(-jnp.sum(world.legged.motion.gravity_b[:2] ** 2) / std**2)


def lin_vel_z_l2(world: LeggedWorld) -> Array:
    """v_z²"""
    return world.legged.motion.lin_vel_b[2] ** 2


def ang_vel_xy_l2(world: LeggedWorld) -> Array:
    """‖ω_xy‖²"""
    return jnp.sum(world.legged.motion.ang_vel_b[:2] ** 2)


def body_orientation_l2(world: LeggedWorld) -> Array:
    """‖g_xy‖² in the frame of the body that shall stay upright."""
    return jnp.sum(world.legged.motion.upright_gravity[:2] ** 2)


def body_ang_vel(world: LeggedWorld) -> Array:
    """‖ω_xy‖² of the body that shall stay upright, in the world's frame."""
    return jnp.sum(world.legged.motion.upright_ang_vel[:2] ** 2)


def angular_momentum(world: LeggedWorld) -> Array:
    """‖Σ m_i·(x_i − x̄) × (ẋ_i − x̄̇)‖² over the origins of all links, their masses' mean x̄."""
    # about the centre of mass, and relative to its motion: going straight on costs nothing
    weight = (world.legged.link_masses / world.legged.link_masses.sum())[:, None]
    position = world.legged.motion.link_pos - jnp.sum(weight * world.legged.motion.link_pos, axis=0)[None]
    velocity = world.legged.motion.link_vel - jnp.sum(weight * world.legged.motion.link_vel, axis=0)[None]
    return jnp.sum(jnp.sum(jnp.cross(position, world.legged.link_masses[:, None] * velocity), axis=0) ** 2)


def pose(
    world: LeggedWorld,
    std_standing: Mapping[str, float],
    std_walking: Mapping[str, float],
    std_running: Mapping[str, float],
    walking_threshold: float,
    running_threshold: float,
) -> Array:
    """exp(−mean((q − q⁰)² / std²)), std by |c|: standing below the first threshold, running from the second on."""
    speed = _speed(world.legged.command)
    stds = std_standing, std_walking, std_running
    standing, walking, running = (jnp.asarray(per_joint(world.legged.joints, std)) for std in stds)
    std = jnp.where(speed < walking_threshold, standing, jnp.where(speed >= running_threshold, running, walking))
    return jnp.exp(-jnp.mean((world.legged.offset / std) ** 2))


def joint_pos_limits(world: LeggedWorld) -> Array:
    """Σ how far joints are beyond their soft limits, rad."""
    low, high = world.legged.soft_limits.T
    position = world.legged.motion.joint_pos
    return jnp.sum(jnp.maximum(low - position, 0.0) + jnp.maximum(position - high, 0.0))


def joint_acc_l2(world: LeggedWorld) -> Array:
    """‖q̈‖², from the joint velocities of two control steps."""
    return jnp.sum(world.legged.joint_acc**2)


def joint_torques_l2(world: LeggedWorld) -> Array:
    """‖τ‖²"""
    return jnp.sum(world.legged.joint_torque**2)


def action_rate_l2(world: LeggedWorld) -> Array:
    """Compute ‖a − a⁻‖², a⁻ the action before."""
    return jnp.sum((world.legged.action - world.legged.last_action) ** 2)


def is_terminated(world: LeggedWorld) -> Array:
    """1 in the step that ends in a failure."""
    return world.info["fail"].astype(jnp.float32)


def feet_air_time(
    world: LeggedWorld, threshold_min: float = 0.05, threshold_max: float = 0.5, command_threshold: float = 0.5
) -> Array:
    """Count the feet that have been in the air for more than the one time and less than the other, s."""
    in_range = (world.legged.air_time > threshold_min) & (world.legged.air_time < threshold_max)
    return jnp.sum(in_range) * _moves(world, command_threshold)


def flight_time(world: LeggedWorld, threshold: float, command_threshold: float) -> Array:
    """Σ (flight − threshold) over feet that land, flight its time in the air, where ‖c_xy‖ is above the other one."""
    moves = jnp.linalg.norm(world.legged.command[:2]) > command_threshold
    return jnp.sum((world.legged.contacts.flight - threshold) * world.legged.contacts.landed) * moves


def unwanted_contacts(world: LeggedWorld, threshold: float) -> Array:
    """Count the parts that touch the ground with more than the threshold, N, and shall not."""
    return jnp.sum(world.legged.contacts.unwanted_force > threshold).astype(jnp.float32)


def foot_gait(
    world: LeggedWorld, period: float, offset: tuple[float, ...], threshold: float, command_threshold: float
) -> Array:
    """Compute the share of feet that touch the ground just when their phase, t/period + offset mod 1, is below it."""
    expected = (world.legged.time / period + jnp.asarray(offset)) % 1.0 < threshold
    return jnp.mean(world.legged.contacts.found == expected) * _moves(world, command_threshold)


def foot_clearance(world: LeggedWorld, target_height: float, command_threshold: float) -> Array:
    """Σ |p_z − target|·‖ṗ_xy‖"""
    speed = jnp.linalg.norm(world.legged.motion.foot_vel[:, :2], axis=-1)
    return jnp.sum(jnp.abs(world.legged.foot_height - target_height) * speed) * _moves(world, command_threshold)


def foot_swing_height(world: LeggedWorld, target_height: float, command_threshold: float) -> Array:
    """Σ (peak/target − 1)² over feet that land, peak the greatest height of the flight."""
    cost = jnp.where(world.legged.contacts.landed, (world.legged.swing_peak / target_height - 1.0) ** 2, 0.0)
    return jnp.sum(cost) * _moves(world, command_threshold)


def foot_slip(world: LeggedWorld, command_threshold: float) -> Array:
    """Σ ‖ṗ_xy‖² over feet that touch the ground."""
    squares = jnp.sum(world.legged.motion.foot_vel[:, :2] ** 2, axis=-1)
    return jnp.sum(squares * world.legged.contacts.found) * _moves(world, command_threshold)


def soft_landing(world: LeggedWorld, command_threshold: float) -> Array:
    """Σ ‖force‖ over feet that land, N."""
    strength = jnp.linalg.norm(world.legged.contacts.force, axis=-1)
    return jnp.sum(strength * world.legged.contacts.landed) * _moves(world, command_threshold)


def stand_still(world: LeggedWorld, command_threshold: float) -> Array:
    """‖q − q⁰‖² where |c| is not above the threshold."""
    return jnp.sum(world.legged.offset**2) * (1.0 - _moves(world, command_threshold))


def feet_contact_without_cmd(world: LeggedWorld, command_threshold: float) -> Array:
    """Count the feet that touch the ground where |c| is not above the threshold, as unitree_rl_lab does."""
    return jnp.sum(world.legged.contacts.found) * (1.0 - _moves(world, command_threshold))


def self_collisions(world: LeggedWorld) -> Array:
    """Physics steps in which the robot pushes against itself with more than 10 N."""
    return world.legged.contacts.self_contacts


def bad_orientation(world: LeggedWorld, limit: float) -> Outcome:
    """Fail where the base tilts by more than ``limit``, rad."""
    return Outcome(fail=-world.legged.motion.gravity_b[2] < jnp.cos(limit))


def illegal_contact(world: LeggedWorld, limit: float) -> Outcome:
    """Fail where a guarded geom touches the ground with more than ``limit``, N."""
    return Outcome(fail=world.legged.contacts.guarded_force > limit)


def root_height_below_minimum(world: LeggedWorld, limit: float) -> Outcome:
    """Fail where the base is lower than ``limit``, m above the ground."""
    return Outcome(fail=world.legged.base_height < limit)


LEGGED_REWARDS = (
    *(track_linear_velocity, track_angular_velocity, upright, body_orientation_l2, body_ang_vel, angular_momentum),
    *(lin_vel_z_l2, ang_vel_xy_l2, joint_torques_l2, flight_time, unwanted_contacts),
    *(pose, joint_pos_limits, joint_acc_l2, action_rate_l2, is_terminated, feet_air_time, foot_gait),
    *(foot_clearance, foot_swing_height, foot_slip, soft_landing, stand_still, self_collisions),
    feet_contact_without_cmd,
)
TERMINATIONS = (bad_orientation, illegal_contact, root_height_below_minimum)


def _gait_phase(world: LeggedWorld, obs: Any) -> Array:
    """(sin, cos) of 2π·t/period; zeros where ‖c‖ < 0.1."""
    angle = 2.0 * jnp.pi * (world.legged.time / world.legged.phase_period % 1.0)
    signal = jnp.stack([jnp.sin(angle), jnp.cos(angle)])
    return jnp.where(jnp.linalg.norm(world.legged.command) < 0.1, 0.0, signal)


_OBSERVED: dict[str, tuple[Callable[[LeggedWorld, Any], Array], tuple[Numbers, ...]]] = {
    "base_lin_vel": (lambda world, obs: world.legged.motion.imu_lin_vel, (("base velocity", "xyz", "m/s"),)),
    "base_ang_vel": (lambda world, obs: world.legged.motion.imu_ang_vel, (("base angular velocity", "xyz", "rad/s"),)),
    "projected_gravity": (lambda world, obs: world.legged.motion.gravity_b, (("unit vector down", "xyz", "1"),)),
    "joint_pos": (lambda world, obs: world.legged.offset, (("{joint} position − home", "", "rad"),)),
    "measured_joint_pos": (
        lambda world, obs: world.legged.offset + world.legged.encoder_bias,
        (("{joint} measured position − home", "", "rad"),),
    ),
    "joint_vel": (lambda world, obs: world.legged.motion.joint_vel, (("{joint} velocity", "", "rad/s"),)),
    "action": (lambda world, obs: world.legged.action, (("{joint} last action", "", "1"),)),
    "command": (
        lambda world, obs: world.legged.command,
        (("commanded velocity", "xy", "m/s"), ("commanded yaw rate", "", "rad/s")),
    ),
    "phase": (_gait_phase, (("sine of the gait's phase", "", "1"), ("cosine of the gait's phase", "", "1"))),
    "height_scan": (lambda world, obs: world.legged.scan, (("depth of the ground at {point}", "", "m"),)),
    "foot_height": (lambda world, obs: world.legged.foot_height, (("{foot} height", "", "m"),)),
    "foot_air_time": (lambda world, obs: world.legged.air_time, (("{foot} time in the air", "", "s"),)),
    "foot_contact": (lambda world, obs: world.legged.contacts.found, (("{foot} contact", "", "1"),)),
    "foot_force": (
        lambda world, obs: jnp.sign(world.legged.contacts.force) * jnp.log1p(jnp.abs(world.legged.contacts.force)),
        (("{foot} sign·ln(1 + |force/N|)", "xyz", "1"),),
    ),
}


OBSERVATIONS = {name: read for name, (read, _) in _OBSERVED.items()}


def describe_terms(
    joints: Sequence[str],
    num_feet: int,
    terms: tuple[str, ...],
    points: Sequence[Sequence[float]] = (),
    others: Mapping[str, tuple[Numbers, ...]] = FrozenDict(),
) -> tuple[Feature, ...]:
    """Name the numbers of observations, with their units. ``points``: [P, 2], m, of the height scan; ``others``: terms
    that are not of this module."""
    parts = {"{joint}": list(joints), "{foot}": [f"foot {i}" for i in range(num_feet)]}
    parts["{point}"] = [f"({x:.2g}, {y:.2g})" for x, y in points]

    def names(text: str) -> list[str]:
        mark = next((each for each in parts if each in text), "")
        return [text.replace(mark, part) for part in parts[mark]] if mark else [text]

    return tuple(
        Feature(f"{name} {axis}".rstrip(), unit)
        for term in terms
        for text, axes, unit in (others[term] if term in others else _OBSERVED[term][1])
        for name in names(text)
        for axis in axes or ("",)
    )


def _speed(command: Array) -> Array:
    return jnp.linalg.norm(command[:2]) + jnp.abs(command[2])


def _moves(world: LeggedWorld, threshold: float) -> Array:
    return (_speed(world.legged.command) > threshold).astype(jnp.float32)
