"""Rewards and observations of velocity tasks: functions of a ``LeggedState`` of one robot after a control step.

Source of the formulas: mjlab 1.6 (``mjlab/tasks/velocity/mdp/rewards.py``, Apache-2.0) and Unitree's tasks on it, and
for ANYmal C's Isaac Lab, all as in EmbodiChain 0.3.2. Symbols: c command (v_x, v_y, ω_z), v and ω the base's velocities
in its own frame, g the unit vector down in it, q and q⁰ joint positions and their home, a the action, p and ṗ a foot's
point, |c| = ‖c_xy‖ + |c_z|. Terms with a ``command_threshold`` count only where |c| is above it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from ejax.envs.description import Feature
from ejax.envs.locomotion.contacts import Contacts
from ejax.envs.locomotion.motion import Motion
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.envs.task.entities import per_joint
from ejax.types import Array


@dataclass(frozen=True, kw_only=True)
class LeggedState:
    robot: LeggedRobot
    motion: Motion
    contacts: Contacts
    command: Array
    """[3]: that of the observation that was acted on, for rewards; the next one, for observations."""
    action: Array
    last_action: Array
    """[A]"""
    joint_acc: Array
    """[A], rad/s²"""
    joint_torque: Array
    """[A], N·m: what the drives pull with after the step."""
    foot_height: Array
    """[F], m above the ground."""
    swing_peak: Array
    """[F], m: the greatest height of a flight, up to and including its landing."""
    air_time: Array
    """[F], s"""
    encoder_bias: Array
    """[A], rad: measured minus true joint positions."""
    terminated: Array
    """bool"""
    time: Array
    """s since the episode's start."""
    phase_period: float
    """s, of the gait that is observed."""
    soft_limits: Array
    """[A, 2], rad"""
    link_masses: Array
    """[L], kg"""

    @property
    def offset(self) -> Array:
        """[A]: q − q⁰."""
        return self.motion.joint_pos - jnp.asarray(self.robot.home)


def track_linear_velocity(legged: LeggedState, std: float, vertical: float = 1.0) -> Array:
    """exp(−(‖c_xy − v_xy‖² + vertical·v_z²) / std²)"""
    velocity = legged.motion.lin_vel_b
    error = jnp.sum((legged.command[:2] - velocity[:2]) ** 2) + vertical * velocity[2] ** 2
    return jnp.exp(-error / std**2)


def track_angular_velocity(legged: LeggedState, std: float, tilting: float = 1.0) -> Array:
    """exp(−((c_z − ω_z)² + tilting·‖ω_xy‖²) / std²)"""
    velocity = legged.motion.ang_vel_b
    error = (legged.command[2] - velocity[2]) ** 2 + tilting * jnp.sum(velocity[:2] ** 2)
    return jnp.exp(-error / std**2)


def upright(legged: LeggedState, std: float) -> Array:
    """exp(−‖g_xy‖² / std²)"""
    return jnp.exp(-jnp.sum(legged.motion.gravity_b[:2] ** 2) / std**2)


def lin_vel_z_l2(legged: LeggedState) -> Array:
    """v_z²"""
    return legged.motion.lin_vel_b[2] ** 2


def ang_vel_xy_l2(legged: LeggedState) -> Array:
    """‖ω_xy‖²"""
    return jnp.sum(legged.motion.ang_vel_b[:2] ** 2)


def body_orientation_l2(legged: LeggedState) -> Array:
    """‖g_xy‖² in the frame of the body that shall stay upright."""
    return jnp.sum(legged.motion.upright_gravity[:2] ** 2)


def body_ang_vel(legged: LeggedState) -> Array:
    """‖ω_xy‖² of the body that shall stay upright, in the world's frame."""
    return jnp.sum(legged.motion.upright_ang_vel[:2] ** 2)


def angular_momentum(legged: LeggedState) -> Array:
    """‖Σ m_i·(x_i − x̄) × (ẋ_i − x̄̇)‖² over the origins of all links, their masses' mean x̄."""
    weight = (legged.link_masses / legged.link_masses.sum())[:, None]
    position = legged.motion.link_pos - jnp.sum(weight * legged.motion.link_pos, axis=0)[None]
    velocity = legged.motion.link_vel - jnp.sum(weight * legged.motion.link_vel, axis=0)[None]
    return jnp.sum(jnp.sum(jnp.cross(position, legged.link_masses[:, None] * velocity), axis=0) ** 2)


def pose(
    legged: LeggedState,
    std_standing: Mapping[str, float],
    std_walking: Mapping[str, float],
    std_running: Mapping[str, float],
    walking_threshold: float,
    running_threshold: float,
) -> Array:
    """exp(−mean((q − q⁰)² / std²)), std of each joint by |c|: standing below the first threshold, running from the
    second on."""
    speed = _speed(legged.command)
    standing, walking, running = (
        jnp.asarray(per_joint(legged.robot.joints, std)) for std in (std_standing, std_walking, std_running)
    )
    std = jnp.where(speed < walking_threshold, standing, jnp.where(speed >= running_threshold, running, walking))
    return jnp.exp(-jnp.mean((legged.offset / std) ** 2))


def joint_pos_limits(legged: LeggedState) -> Array:
    """Σ how far joints are beyond their soft limits, rad."""
    low, high = legged.soft_limits.T
    position = legged.motion.joint_pos
    return jnp.sum(jnp.maximum(low - position, 0.0) + jnp.maximum(position - high, 0.0))


def joint_acc_l2(legged: LeggedState) -> Array:
    """‖q̈‖², from the joint velocities of two control steps."""
    return jnp.sum(legged.joint_acc**2)


def joint_torques_l2(legged: LeggedState) -> Array:
    """‖τ‖²"""
    return jnp.sum(legged.joint_torque**2)


def action_rate_l2(legged: LeggedState) -> Array:
    """‖a − a_before‖²"""
    return jnp.sum((legged.action - legged.last_action) ** 2)


def is_terminated(legged: LeggedState) -> Array:
    """1 in the step that ends in a failure."""
    return legged.terminated.astype(jnp.float32)


def feet_air_time(
    legged: LeggedState, threshold_min: float = 0.05, threshold_max: float = 0.5, command_threshold: float = 0.5
) -> Array:
    """The number of feet that have been in the air for more than the one time and less than the other, s."""
    in_range = (legged.air_time > threshold_min) & (legged.air_time < threshold_max)
    return jnp.sum(in_range) * _moves(legged, command_threshold)


def flight_time(legged: LeggedState, threshold: float, command_threshold: float) -> Array:
    """Σ (flight − threshold) over feet that land, flight its time in the air, where ‖c_xy‖ is above the other one."""
    moves = jnp.linalg.norm(legged.command[:2]) > command_threshold
    return jnp.sum((legged.contacts.flight - threshold) * legged.contacts.landed) * moves


def unwanted_contacts(legged: LeggedState, threshold: float) -> Array:
    """The number of parts that touch the ground with more than the threshold, N, and shall not."""
    return jnp.sum(legged.contacts.unwanted_force > threshold).astype(jnp.float32)


def foot_gait(
    legged: LeggedState, period: float, offset: tuple[float, ...], threshold: float, command_threshold: float
) -> Array:
    """The part of feet that touch the ground just when their phase, t/period + offset modulo 1, is below threshold."""
    expected = (legged.time / period + jnp.asarray(offset)) % 1.0 < threshold
    return jnp.mean(legged.contacts.found == expected) * _moves(legged, command_threshold)


def foot_clearance(legged: LeggedState, target_height: float, command_threshold: float) -> Array:
    """Σ |p_z − target|·‖ṗ_xy‖"""
    speed = jnp.linalg.norm(legged.motion.foot_vel[:, :2], axis=-1)
    return jnp.sum(jnp.abs(legged.foot_height - target_height) * speed) * _moves(legged, command_threshold)


def foot_swing_height(legged: LeggedState, target_height: float, command_threshold: float) -> Array:
    """Σ (peak/target − 1)² over feet that land, peak the greatest height of the flight."""
    cost = jnp.where(legged.contacts.landed, (legged.swing_peak / target_height - 1.0) ** 2, 0.0)
    return jnp.sum(cost) * _moves(legged, command_threshold)


def foot_slip(legged: LeggedState, command_threshold: float) -> Array:
    """Σ ‖ṗ_xy‖² over feet that touch the ground."""
    return jnp.sum(jnp.sum(legged.motion.foot_vel[:, :2] ** 2, axis=-1) * legged.contacts.found) * _moves(
        legged, command_threshold
    )


def soft_landing(legged: LeggedState, command_threshold: float) -> Array:
    """Σ ‖force‖ over feet that land, N."""
    return jnp.sum(jnp.linalg.norm(legged.contacts.force, axis=-1) * legged.contacts.landed) * _moves(
        legged, command_threshold
    )


def stand_still(legged: LeggedState, command_threshold: float) -> Array:
    """‖q − q⁰‖² where |c| is not above the threshold."""
    return jnp.sum(legged.offset**2) * (1.0 - _moves(legged, command_threshold))


def self_collisions(legged: LeggedState) -> Array:
    """Physics steps in which the robot pushes against itself with more than 10 N."""
    return legged.contacts.self_contacts


def gait_phase(legged: LeggedState) -> Array:
    """(sin, cos) of 2π·t/period; zeros where ‖c‖ < 0.1."""
    angle = 2.0 * jnp.pi * (legged.time / legged.phase_period % 1.0)
    signal = jnp.stack([jnp.sin(angle), jnp.cos(angle)])
    return jnp.where(jnp.linalg.norm(legged.command) < 0.1, 0.0, signal)


REWARDS: dict[str, Callable[..., Array]] = {
    each.__name__: each
    for each in (
        *(track_linear_velocity, track_angular_velocity, upright, body_orientation_l2, body_ang_vel, angular_momentum),
        *(lin_vel_z_l2, ang_vel_xy_l2, joint_torques_l2, flight_time, unwanted_contacts),
        *(pose, joint_pos_limits, joint_acc_l2, action_rate_l2, is_terminated, feet_air_time, foot_gait),
        *(foot_clearance, foot_swing_height, foot_slip, soft_landing, stand_still, self_collisions),
    )
}
"""``LeggedState, **params -> []``"""

OBSERVATIONS: dict[str, Callable[[LeggedState], Array]] = {
    "base_lin_vel": lambda legged: legged.motion.imu_lin_vel,
    "base_ang_vel": lambda legged: legged.motion.imu_ang_vel,
    "projected_gravity": lambda legged: legged.motion.gravity_b,
    "joint_pos": lambda legged: legged.offset,
    "measured_joint_pos": lambda legged: legged.offset + legged.encoder_bias,
    "joint_vel": lambda legged: legged.motion.joint_vel,
    "action": lambda legged: legged.action,
    "command": lambda legged: legged.command,
    "phase": gait_phase,
    "foot_height": lambda legged: legged.foot_height,
    "foot_air_time": lambda legged: legged.air_time,
    "foot_contact": lambda legged: legged.contacts.found,
    "foot_force": lambda legged: jnp.sign(legged.contacts.force) * jnp.log1p(jnp.abs(legged.contacts.force)),
}
"""``LeggedState -> values``: q − q⁰ as it is and as the encoders have it; forces as sign·ln(1 + |f|), foot by foot."""


_NAMES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "base_lin_vel": (("base velocity", "xyz", "m/s"),),
    "base_ang_vel": (("base angular velocity", "xyz", "rad/s"),),
    "projected_gravity": (("unit vector down", "xyz", "1"),),
    "command": (("commanded velocity", "xy", "m/s"), ("commanded yaw rate", "", "rad/s")),
    "phase": (("sine of the gait's phase", "", "1"), ("cosine of the gait's phase", "", "1")),
    "joint_pos": (("{joint} position − home", "", "rad"),),
    "measured_joint_pos": (("{joint} measured position − home", "", "rad"),),
    "joint_vel": (("{joint} velocity", "", "rad/s"),),
    "action": (("{joint} last action", "", "1"),),
    "foot_height": (("{foot} height", "", "m"),),
    "foot_air_time": (("{foot} time in the air", "", "s"),),
    "foot_contact": (("{foot} contact", "", "1"),),
    "foot_force": (("{foot} sign·ln(1 + |force/N|)", "xyz", "1"),),
}
"""Observation -> the name, the axes and the unit of its numbers."""


def describe_terms(robot: LeggedRobot, terms: tuple[str, ...]) -> tuple[Feature, ...]:
    parts = {"{joint}": robot.joints, "{foot}": [f"foot {i}" for i in range(len(robot.feet))]}

    def names(text: str) -> list[str]:
        mark = next((each for each in parts if each in text), "")
        return [text.replace(mark, part) for part in parts[mark]] if mark else [text]

    return tuple(
        Feature(f"{name} {axis}".rstrip(), unit)
        for term in terms
        for text, axes, unit in _NAMES[term]
        for name in names(text)
        for axis in axes or ("",)
    )


def _speed(command: Array) -> Array:
    return jnp.linalg.norm(command[:2]) + jnp.abs(command[2])


def _moves(legged: LeggedState, threshold: float) -> Array:
    return (_speed(legged.command) > threshold).astype(jnp.float32)
