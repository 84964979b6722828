"""Action functors: f(scene, active, **params) -> ActionTerm: its number of inputs, and their effect on the targets.

``active``: the indices of the observed joints. A target holds for one control step; joints that no term drives keep
theirs. EmbodiChain 0.2's terms (``…Term``) drive all active joints, 0.3's (``…Action``) a selection.

Differs from EmbodiChain: the numbers of an action count active joints, in every term. QposDenormalizedTerm and
QposNormalizedTerm index them by the robot's joint ids there, and DeltaQposTerm fails where ``control_parts`` names only
some joints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.manager.scene import Scene
from ejax.envs.manager.world import World, WorldState
from ejax.envs.mujoco.inverse_kinematics import solve_site_pose
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, matrix_from_quaternion
from ejax.types import Array

Scale: TypeAlias = float | Sequence[float]
Joints: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ActionTerm:
    """Part of an action."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    """Bounds of the action space; nothing is clipped to them."""
    apply: Callable[[World, Array], WorldState]
    """The state with new targets, from the world before the step and the term's numbers [width]."""

    @property
    def width(self) -> int:
        return len(self.low)


def delta_qpos(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q* = q + scale·a"""
    return _position_term(scene, active, scale, lambda q, a: q + jnp.asarray(scale) * a)


def qpos(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q* = scale·a"""
    return _position_term(scene, active, scale, lambda q, a: jnp.asarray(scale) * a)


def qpos_denormalized(
    scene: Scene,
    active: Joints,
    scale: Scale = 1.0,
    joint_ids: Sequence[int] | None = None,
    range: Sequence[float] = (-1.0, 1.0),
) -> ActionTerm:
    """q* = lo + (scale·a − r₀)/(r₁ − r₀)·(hi − lo) in the columns ``joint_ids`` (default: all), else scale·a."""
    low, high = scene.limits[list(active)].T
    chosen = _columns(active, joint_ids)

    def target(q: Array, a: Array) -> Array:
        scaled = jnp.asarray(scale) * a
        return jnp.where(chosen, low + (scaled - range[0]) / (range[1] - range[0]) * (high - low), scaled)

    return _position_term(scene, active, scale, target, bounds=(range[0], range[1]))


def qpos_normalized(
    scene: Scene,
    active: Joints,
    scale: Scale = 1.0,
    joint_ids: Sequence[int] | None = None,
    range: Sequence[float] = (0.0, 1.0),
) -> ActionTerm:
    """q* = (scale·a − lo)/(hi − lo)·(r₁ − r₀) + r₀ in the columns ``joint_ids`` (default: all), else scale·a."""
    low, high = scene.limits[list(active)].T
    chosen = _columns(active, joint_ids)

    def target(q: Array, a: Array) -> Array:
        scaled = jnp.asarray(scale) * a
        return jnp.where(chosen, (scaled - low) / (high - low) * (range[1] - range[0]) + range[0], scaled)

    return _position_term(scene, active, scale, target)


def eef_pose(
    scene: Scene,
    active: Joints,
    scale: Scale = 1.0,
    pose_dim: int = 7,
    part_name: str | None = None,
) -> ActionTerm:
    """The tool at a pose, by inverse kinematics; where it cannot be reached, the joints stay where they are.

    Args:
        pose_dim: 6: x y z (m) and Euler angles (rad, intrinsic x y z); 7: x y z and a quaternion (w x y z).

    Raises:
        ValueError: another ``pose_dim``, or a part without a tool.
    """
    if pose_dim not in (6, 7):
        raise ValueError(
            f"an end effector's pose has 6 numbers (Euler angles) or 7 (quaternion), got pose_dim {pose_dim}"
        )
    return _eef_term(scene, scale, part_name, pose_dim, lambda numbers: numbers)


def qvel(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q̇* = scale·a; the position target is the joint's position, so that the drive only follows the velocity."""
    return _velocity_term(active, scale)


def qf(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """τ = scale·a, in addition to the drive's damping; the position target is the joint's position."""
    return _effort_term(scene, active, scale)


def relative_joint_position(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
    clip: float | None = None,
) -> ActionTerm:
    """q* = q + scale·clip(a, ±clip)"""
    joints = _select(scene, part_name, joint_names, preserve_order)
    bound = np.inf if clip is None else clip
    return _position_term(
        scene, joints, scale, lambda q, a: q + jnp.asarray(scale) * jnp.clip(a, -bound, bound), bounds=(-bound, bound)
    )


def joint_position(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
    offset: Scale = 0.0,
) -> ActionTerm:
    """q* = scale·a + offset"""
    joints = _select(scene, part_name, joint_names, preserve_order)
    _check_scale(offset, len(joints), "offset")
    return _position_term(scene, joints, scale, lambda q, a: jnp.asarray(scale) * a + jnp.asarray(offset))


def joint_position_to_limits(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
) -> ActionTerm:
    """q* = lo + (clip(scale·a, ±1) + 1)/2·(hi − lo)"""
    joints = _select(scene, part_name, joint_names, preserve_order)
    low, high = scene.limits[list(joints)].T

    def target(q: Array, a: Array) -> Array:
        return low + (jnp.clip(jnp.asarray(scale) * a, -1.0, 1.0) + 1.0) * 0.5 * (high - low)

    return _position_term(scene, joints, scale, target, bounds=(-1.0, 1.0))


def default_joint_position(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
    offset: Scale | None = None,
    clip: float | None = 1.0,
) -> ActionTerm:
    """q* = offset + scale·clip(a, ±clip), the offset by default the robot's init_qpos."""
    joints = _select(scene, part_name, joint_names, preserve_order)
    middle = tuple(scene.home[i] for i in joints) if offset is None else offset
    _check_scale(middle, len(joints), "offset")
    bound = np.inf if clip is None else clip

    def target(q: Array, a: Array) -> Array:
        return jnp.asarray(middle) + jnp.asarray(scale) * jnp.clip(a, -bound, bound)

    return _position_term(scene, joints, scale, target, bounds=(-bound, bound))


def joint_velocity(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
) -> ActionTerm:
    """As ``qvel``, for selected joints."""
    return _velocity_term(_select(scene, part_name, joint_names, preserve_order), scale)


def joint_effort(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
) -> ActionTerm:
    """As ``qf``, for selected joints."""
    return _effort_term(scene, _select(scene, part_name, joint_names, preserve_order), scale)


def eef_pose_action(
    scene: Scene, active: Joints, part_name: str, pose_representation: str = "xyz_rpy", scale: Scale = 1.0
) -> ActionTerm:
    """As ``eef_pose``, with EmbodiChain 0.3's names: ``xyz_rpy`` or ``xyz_quat_xyzw``, whose w is last."""
    if pose_representation not in ("xyz_rpy", "xyz_quat_xyzw"):
        raise ValueError(f"got pose_representation '{pose_representation}'; allowed: xyz_rpy, xyz_quat_xyzw")
    if pose_representation == "xyz_rpy":
        return _eef_term(scene, scale, part_name, 6, lambda numbers: numbers)
    return _eef_term(scene, scale, part_name, 7, lambda numbers: numbers[jnp.array([0, 1, 2, 6, 3, 4, 5])])


def _position_term(
    scene: Scene,
    joints: Joints,
    scale: Scale,
    target: Callable[[Array, Array], Array],
    bounds: tuple[float, float] | None = None,
) -> ActionTerm:
    """Acts by ``target(q, a)`` on joints; bounds are their ranges unless given; ``scale`` is only checked."""
    _check_scale(scale, len(joints))

    def apply(world: World, action: Array) -> WorldState:
        ids = jnp.array(joints)
        wanted = target(world.state.physics.qpos[ids], action)
        return replace(world.state, target=world.state.target.at[ids].set(wanted))

    ranges = scene.limits[list(joints)] if bounds is None else np.broadcast_to(bounds, (len(joints), 2))
    return ActionTerm(tuple(ranges[:, 0].tolist()), tuple(ranges[:, 1].tolist()), apply)


def _check_scale(scale: Scale, width: int, name: str = "scale") -> None:
    """Raises ValueError: neither a number nor one for each number of the action."""
    values = scale if isinstance(scale, list | tuple) else [scale]
    wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or len(values) not in (1, width):
        raise ValueError(f"{name} must be a number, or a list of {width}, got {scale!r}")


def _velocity_term(joints: Joints, scale: Scale) -> ActionTerm:
    _check_scale(scale, len(joints))

    def apply(world: World, action: Array) -> WorldState:
        ids = jnp.array(joints)
        return replace(
            world.state,
            target=world.state.target.at[ids].set(world.state.physics.qpos[ids]),
            velocity_target=world.state.velocity_target.at[ids].set(jnp.asarray(scale) * action),
        )

    return ActionTerm((-np.inf,) * len(joints), (np.inf,) * len(joints), apply)


def _effort_term(scene: Scene, joints: Joints, scale: Scale) -> ActionTerm:
    _check_scale(scale, len(joints))

    def apply(world: World, action: Array) -> WorldState:
        ids = jnp.array(joints)
        return replace(
            world.state,
            target=world.state.target.at[ids].set(world.state.physics.qpos[ids]),
            effort=world.state.effort.at[ids].set(jnp.asarray(scale) * action),
        )

    high = tuple(scene.drives.max_effort[i] for i in joints)
    return ActionTerm(tuple(-each for each in high), high, apply)


def _eef_term(
    scene: Scene, scale: Scale, part_name: str | None, width: int, reorder: Callable[[Array], Array]
) -> ActionTerm:
    part = part_name or scene.tool_part
    if part is None or part != scene.tool_part:
        raise ValueError(f"control part '{part}' has no tool centre point to bring to a pose")
    joints = scene.part(part)
    _check_scale(scale, width)
    turn = matrix_from_euler if width == 6 else _matrix_of_any_quaternion

    def apply(world: World, action: Array) -> WorldState:
        ids = jnp.array(joints)
        numbers = reorder(jnp.asarray(scale) * action)
        target = make_pose(numbers[:3], turn(numbers[3:]))
        qpos = world.state.physics.qpos
        solved, reached = solve_site_pose(scene.model, "tcp", target, qpos, joints)
        wanted = jnp.where(reached, solved, qpos[ids])
        return replace(world.state, target=world.state.target.at[ids].set(wanted))

    return ActionTerm((-np.inf,) * width, (np.inf,) * width, apply)


def _matrix_of_any_quaternion(quaternion: Array) -> Array:
    return matrix_from_quaternion(quaternion / jnp.maximum(jnp.linalg.norm(quaternion), 1e-6))


def _columns(active: Joints, joint_ids: Sequence[int] | None) -> NDArray[np.bool_]:
    """[active joints]"""
    columns = range(len(active)) if joint_ids is None else joint_ids
    outside = [i for i in columns if not 0 <= i < len(active)]
    if outside:
        raise ValueError(f"joint_ids {outside} are not there: the action has {len(active)} numbers")
    chosen = np.zeros(len(active), bool)
    chosen[list(columns)] = True
    return chosen


def _select(scene: Scene, part_name: str | None, joint_names: Sequence[str] | None, preserve_order: bool) -> Joints:
    if (part_name is None) == (joint_names is None):
        raise ValueError("give either part_name or joint_names")
    if part_name is not None:
        return scene.part(part_name)
    unknown = [name for name in joint_names or () if name not in scene.joints]
    if unknown:
        raise ValueError(f"no joints {', '.join(unknown)}; there is {', '.join(scene.joints)}")
    joints = tuple(scene.joints.index(name) for name in joint_names or ())
    if not joints or len(set(joints)) != len(joints):
        raise ValueError(f"joint_names must name at least one joint, each once, got {joint_names}")
    return joints if preserve_order else tuple(sorted(joints))
