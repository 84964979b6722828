"""Action functors: f(scene, active, **params) -> ActionTerm: its number of inputs, and their effect on the targets.

``active``: the indices of the observed joints. A target holds for one control step; joints that no term drives keep
theirs. EmbodiChain 0.2's terms (``…Term``) drive all active joints, 0.3's (``…Action``) a selection.

Differs from EmbodiChain: the numbers of an action count active joints, in every term. QposDenormalizedTerm and
QposNormalizedTerm index them by the robot's joint ids there, and DeltaQposTerm fails where ``control_parts`` names only
some joints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.manager.drives import matching_joints
from ejax.envs.manager.scene import Scene
from ejax.envs.mujoco.inverse_kinematics import site_step, solve_site_pose
from ejax.envs.mujoco.rotations import (
    make_pose,
    matrix_from_euler,
    matrix_from_quaternion,
    matrix_from_rotation_vector,
)
from ejax.envs.task.states import SceneState
from ejax.envs.task.world import World
from ejax.types import Array

Scale: TypeAlias = float | Sequence[float]
Joints: TypeAlias = tuple[int, ...]
Command: TypeAlias = Literal["qpos", "qvel", "qf"]

_ROUNDING = 1e-6
"""rad or m, allowed above ``max_joint_delta``."""


@dataclass(frozen=True)
class ActionTerm:
    """Part of an action."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    """Bounds of the action space; nothing is clipped to them."""
    apply: Callable[[World, Array], SceneState]
    """The state with new targets, from the world before the step and the term's numbers [width]."""
    command: Command | None = None
    joints: Joints = ()
    """What it sets of which joints: two terms of one config may not set the same. None: not known."""

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


def unbounded_default_joint_position(
    scene: Scene,
    active: Joints,
    part_name: str | None = None,
    joint_names: Sequence[str] | None = None,
    preserve_order: bool = False,
    scale: Scale = 1.0,
    offset: Scale | None = None,
    clip: float | None = None,
) -> ActionTerm:
    """As ``default_joint_position``, with no clipping unless asked for: its form before it was an ``…Action``."""
    return default_joint_position(scene, active, part_name, joint_names, preserve_order, scale, offset, clip)


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


def relative_eef_pose(
    scene: Scene,
    active: Joints,
    part_name: str,
    translation_scale: float = 0.02,
    rotation_scale: float = 0.1,
    ik_method: str = "solver",
    dls_damping: float = 0.05,
    max_joint_delta: float = 0.1,
) -> ActionTerm:
    """p* = p + d,  R* = exp(w)·R  with (d, w) = (translation_scale·u₁₋₃, rotation_scale·u₄₋₆), u = clip(a, ±1)

    From where the tool is, not from the last target; axes are the arena's; m and rad. By inverse kinematics, or with
    ``ik_method: dls`` by one step of damped least squares, which need not arrive:

        δ = Jᵀ(J·Jᵀ + λ²I)⁻¹·(d, w),    q* = clip(q + δ·min(1, max_joint_delta/‖δ‖_∞), joint limits)

    Joints stay where they are without a solution, with one that is not finite, and, under ``dls``, where the limits
    would move one by more than ``max_joint_delta``.

    Args:
        dls_damping: λ.
        max_joint_delta: rad, each joint's in one control step; read under ``dls`` only, as is ``dls_damping``.

    Raises:
        ValueError: a part without a tool, another method, or a number that is not above 0.
    """
    joints = _tool_joints(scene, part_name)
    if ik_method not in ("solver", "dls"):
        raise ValueError(f"got ik_method {ik_method!r}; allowed: solver, dls")
    for name, number in (
        ("translation_scale", translation_scale),
        ("rotation_scale", rotation_scale),
        ("dls_damping", dls_damping),
        ("max_joint_delta", max_joint_delta),
    ):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0.0 < number < np.inf:
            raise ValueError(f"got {name} {number!r}; must be a number > 0")
    low, high = scene.limits[list(joints)].T

    def apply(world: World, action: Array) -> SceneState:
        asked = jnp.clip(action, -1.0, 1.0)
        shift, turn = translation_scale * asked[:3], rotation_scale * asked[3:]
        qpos = world.state.physics.qpos
        now = qpos[jnp.array(joints)]
        if ik_method == "solver":
            pose = world.eef_pose(part_name)
            target = make_pose(pose[:3, 3] + shift, matrix_from_rotation_vector(turn) @ pose[:3, :3])
            solved, reached = solve_site_pose(scene.model, "tcp", target, qpos, joints)
        else:
            error = jnp.concatenate([shift, turn])
            delta = site_step(scene.model, "tcp", error, qpos, joints, damping=dls_damping)
            delta = delta * (max_joint_delta / jnp.maximum(jnp.max(jnp.abs(delta)), max_joint_delta))
            solved = jnp.clip(now + delta, low, high)
            reached = jnp.max(jnp.abs(solved - now)) <= max_joint_delta + _ROUNDING
        return _with_targets(world.state, joints, jnp.where(reached, solved, now))

    return ActionTerm((-1.0,) * 6, (1.0,) * 6, apply, "qpos", joints)


def parallel_gripper(
    scene: Scene,
    active: Joints,
    part_name: str,
    command_mode: str = "continuous",
    use_joint_limits: bool = False,
    lower_command: Mapping[str, float] | None = None,
    upper_command: Mapping[str, float] | None = None,
    open_command: Mapping[str, float] | None = None,
    close_command: Mapping[str, float] | None = None,
) -> ActionTerm:
    """One number for all joints of a gripper.

        continuous: q* = lower + (clip(a, ±1) + 1)/2·(upper − lower)        binary: q* = open if a ≥ 0 else close

    A command says of each joint, by name or pattern, where it goes, m or rad. A finger that follows another one takes
    its command, and needs none of its own, whether the part names it or not.

    Args:
        use_joint_limits: of ``continuous``: lower and upper are the joints' limits.

    Raises:
        ValueError: another mode, a command that this mode does not read or that is missing, or one that does not name
            each joint once.
    """
    read = {"continuous": ("lower_command", "upper_command"), "binary": ("close_command", "open_command")}
    if command_mode not in read:
        raise ValueError(f"got command_mode {command_mode!r}; allowed: {', '.join(read)}")
    given = {
        "lower_command": lower_command,
        "upper_command": upper_command,
        "close_command": close_command,
        "open_command": open_command,
    }
    limited = bool(use_joint_limits) and command_mode == "continuous"
    needed = () if limited else read[command_mode]
    for name, command in given.items():
        if command is not None and name not in needed:
            which = "use_joint_limits" if limited else f"command_mode {command_mode}"
            raise ValueError(f"{name} is not read with {which}; leave it out")
    leaders = dict(scene.followers)
    joints = tuple(joint for joint in scene.part(part_name) if joint not in leaders)
    if not joints:
        raise ValueError(f"control part '{part_name}' has no joints of its own: they follow others")
    ends = [_command(scene, joints, name, given[name]) for name in needed]
    first, second = scene.limits[list(joints)].T if limited else ends
    moved = joints + tuple(joint for joint, leader in leaders.items() if leader in joints)
    column = np.array([joints.index(leaders.get(joint, joint)) for joint in moved])

    def apply(world: World, action: Array) -> SceneState:
        if command_mode == "binary":
            wanted = jnp.where(action[0] >= 0.0, second, first)
        else:
            wanted = jnp.asarray(first) + (jnp.clip(action[0], -1.0, 1.0) + 1.0) * 0.5 * (second - first)
        return _with_targets(world.state, moved, wanted[column])

    return ActionTerm((-1.0,), (1.0,), apply, "qpos", moved)


def _position_term(
    scene: Scene,
    joints: Joints,
    scale: Scale,
    target: Callable[[Array, Array], Array],
    bounds: tuple[float, float] | None = None,
) -> ActionTerm:
    """Acts by ``target(q, a)`` on joints; bounds are their ranges unless given; ``scale`` is only checked."""
    _check_scale(scale, len(joints))

    def apply(world: World, action: Array) -> SceneState:
        return _with_targets(world.state, joints, target(world.state.physics.qpos[jnp.array(joints)], action))

    ranges = scene.limits[list(joints)] if bounds is None else np.broadcast_to(bounds, (len(joints), 2))
    return ActionTerm(tuple(ranges[:, 0].tolist()), tuple(ranges[:, 1].tolist()), apply, "qpos", joints)


def _with_targets(state: SceneState, joints: Joints, wanted: Array) -> SceneState:
    return replace(state, target=state.target.at[jnp.array(joints)].set(wanted))


def _check_scale(scale: Scale, width: int, name: str = "scale") -> None:
    """Raises ValueError: neither a number nor one for each number of the action."""
    values = scale if isinstance(scale, list | tuple) else [scale]
    wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or len(values) not in (1, width):
        raise ValueError(f"{name} must be a number, or a list of {width}, got {scale!r}")


def _velocity_term(joints: Joints, scale: Scale) -> ActionTerm:
    _check_scale(scale, len(joints))

    def apply(world: World, action: Array) -> SceneState:
        ids = jnp.array(joints)
        return replace(
            world.state,
            target=world.state.target.at[ids].set(world.state.physics.qpos[ids]),
            velocity_target=world.state.velocity_target.at[ids].set(jnp.asarray(scale) * action),
        )

    return ActionTerm((-np.inf,) * len(joints), (np.inf,) * len(joints), apply, "qvel", joints)


def _effort_term(scene: Scene, joints: Joints, scale: Scale) -> ActionTerm:
    _check_scale(scale, len(joints))

    def apply(world: World, action: Array) -> SceneState:
        ids = jnp.array(joints)
        return replace(
            world.state,
            target=world.state.target.at[ids].set(world.state.physics.qpos[ids]),
            effort=world.state.effort.at[ids].set(jnp.asarray(scale) * action),
        )

    high = tuple(scene.drives.max_effort[i] for i in joints)
    return ActionTerm(tuple(-each for each in high), high, apply, "qf", joints)


def _eef_term(
    scene: Scene, scale: Scale, part_name: str | None, width: int, reorder: Callable[[Array], Array]
) -> ActionTerm:
    joints = _tool_joints(scene, part_name)
    _check_scale(scale, width)
    turn = matrix_from_euler if width == 6 else _matrix_of_any_quaternion

    def apply(world: World, action: Array) -> SceneState:
        numbers = reorder(jnp.asarray(scale) * action)
        target = make_pose(numbers[:3], turn(numbers[3:]))
        qpos = world.state.physics.qpos
        solved, reached = solve_site_pose(scene.model, "tcp", target, qpos, joints)
        return _with_targets(world.state, joints, jnp.where(reached, solved, qpos[jnp.array(joints)]))

    return ActionTerm((-np.inf,) * width, (np.inf,) * width, apply, "qpos", joints)


def _tool_joints(scene: Scene, part_name: str | None) -> Joints:
    """Joints of the part that carries the tool. Raises ValueError: another part."""
    part = part_name or scene.tool_part
    if part is None or part != scene.tool_part:
        raise ValueError(f"control part '{part}' has no tool centre point to bring to a pose")
    return scene.part(part)


def _command(scene: Scene, joints: Joints, name: str, given: Mapping[str, float] | None) -> NDArray[np.float32]:
    """[joints]: positions that a mapping of joint names or patterns gives.

    Raises:
        ValueError: not one number for each joint, or a name of none.
    """
    names = [scene.joints[joint] for joint in joints]
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must give a position for each of {', '.join(names)}, got {given!r}")
    found: dict[str, float] = {}
    for pattern, number in given.items():
        matched = matching_joints(str(pattern), names)
        if not matched:
            raise ValueError(f"{name} names '{pattern}'; the joints to command are {', '.join(names)}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name}.{pattern} must be a number, got {number!r}")
        if twice := [joint for joint in matched if joint in found]:
            raise ValueError(f"{name} gives {', '.join(twice)} twice")
        found |= dict.fromkeys(matched, float(number))
    if missing := [joint for joint in names if joint not in found]:
        raise ValueError(f"{name} gives no position for {', '.join(missing)}")
    return np.array([found[joint] for joint in names], np.float32)


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
