"""Action functors (``actions.py``) of a tool, by inverse kinematics, or of a gripper, one number for all fingers."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.kinematics import site_step, solve_site_pose
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, matrix_from_quaternion, matrix_from_rotation_vector
from ejax.envs.task.robots import matching_joints
from ejax.envs.task.scene import Scene, SceneWorld
from ejax.envs.task.world import SceneState
from ejax.envs.terms.actions import ActionTerm, Joints, Scale, between, check_scale, with_targets
from ejax.schema.values import is_number, is_positive
from ejax.types import Array

_ROUNDING = 1e-6  # rad or m, allowed above ``max_joint_delta``
_ENDS = {"continuous": ("lower_command", "upper_command"), "binary": ("close_command", "open_command")}
"""Mode of a gripper -> the commands at −1 and at 1."""


def eef_pose(
    scene: Scene, active: Joints, scale: Scale = 1.0, pose_dim: int = 7, part_name: str | None = None
) -> ActionTerm:
    """Bring the tool to a pose by inverse kinematics; joints stay where they are if it cannot be reached.

    ``pose_dim``: 6: x y z (m) and Euler angles (rad, intrinsic x y z); 7: x y z and a quaternion (w x y z).
    Raises ValueError: another ``pose_dim``, or a part without a tool.
    """
    if pose_dim not in (6, 7):
        raise ValueError(f"a tool's pose has 6 numbers (Euler angles) or 7 (quaternion), got pose_dim {pose_dim}")
    return _pose_term(scene, scale, part_name, pose_dim)


def eef_pose_action(
    scene: Scene, active: Joints, part_name: str, pose_representation: str = "xyz_rpy", scale: Scale = 1.0
) -> ActionTerm:
    """As ``eef_pose``, with EmbodiChain 0.3's names: ``xyz_rpy`` or ``xyz_quat_xyzw``, whose w is last."""
    if pose_representation == "xyz_rpy":
        return _pose_term(scene, scale, part_name, 6)
    if pose_representation == "xyz_quat_xyzw":
        return _pose_term(scene, scale, part_name, 7, order=(0, 1, 2, 6, 3, 4, 5))
    raise ValueError(f"got pose_representation '{pose_representation}'; allowed: xyz_rpy, xyz_quat_xyzw")


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

    Moves from where the tool is, along the arena's axes, m and rad. By inverse kinematics, or under ``dls`` by one step
    of damped least squares, which need not arrive, λ = ``dls_damping``, ``max_joint_delta`` in rad:

        δ = Jᵀ(J·Jᵀ + λ²I)⁻¹·(d, w),    q* = clip(q + δ·min(1, max_joint_delta/‖δ‖_∞), joint limits)

    Joints stay where they are without a finite solution, and, under ``dls``, where the limits would move one by more
    than ``max_joint_delta``. Raises ValueError: a part without a tool, another method, or a number that is not above 0.
    """
    joints = scene.tool_joints(part_name or None)
    if ik_method not in ("solver", "dls"):
        raise ValueError(f"got ik_method {ik_method!r}; allowed: solver, dls")
    numbers = {"translation_scale": translation_scale, "rotation_scale": rotation_scale}
    for name, number in {**numbers, "dls_damping": dls_damping, "max_joint_delta": max_joint_delta}.items():
        if not is_positive(number):
            raise ValueError(f"got {name} {number!r}; must be a number > 0")
    low, high = scene.limits[list(joints)].T

    def apply(world: SceneWorld, action: Array) -> SceneState:
        clipped = jnp.clip(action, -1.0, 1.0)
        shift, turn = translation_scale * clipped[:3], rotation_scale * clipped[3:]
        qpos = world.state.physics.qpos
        now = qpos[jnp.array(joints)]
        if ik_method == "solver":
            pose = world.eef_pose(part_name)
            target = make_pose(pose[:3, 3] + shift, matrix_from_rotation_vector(turn) @ pose[:3, :3])
            solved, reached = solve_site_pose(scene.model, "tcp", target, qpos, joints)
        else:
            error = jnp.concatenate([shift, turn])
            delta = site_step(scene.model, "tcp", error, qpos, joints, damping=dls_damping)
            # shortened as a whole, so that the tool keeps its direction
            delta = delta * (max_joint_delta / jnp.maximum(jnp.max(jnp.abs(delta)), max_joint_delta))
            solved = jnp.clip(now + delta, low, high)
            reached = jnp.max(jnp.abs(solved - now)) <= max_joint_delta + _ROUNDING
        return with_targets(world.state, joints, jnp.where(reached, solved, now))

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
    """Move all joints of a gripper by one number.

    continuous: q* = lower + (clip(a, ±1) + 1)/2·(upper − lower)        binary: q* = open if a ≥ 0 else close

    A command gives each joint, by name or pattern, its position, m or rad. A finger that follows another one takes its
    command, whether the part names it or not. ``use_joint_limits``, of ``continuous``: lower and upper are the limits.

    Raises ValueError: another mode, or commands that it does not read, that are missing, or not one for each joint.
    """
    if command_mode not in _ENDS:
        raise ValueError(f"got command_mode {command_mode!r}; allowed: {', '.join(_ENDS)}")
    names = ("lower_command", "upper_command", "open_command", "close_command")
    commands = dict(zip(names, (lower_command, upper_command, open_command, close_command), strict=True))
    limited = bool(use_joint_limits) and command_mode == "continuous"
    needed = () if limited else _ENDS[command_mode]
    for name, command in commands.items():
        if command is not None and name not in needed:
            which = "use_joint_limits" if limited else f"command_mode {command_mode}"
            raise ValueError(f"{name} is not read with {which}; leave it out")
    # EmbodiChain's second finger mimics the first; here it is a separate joint that gets the same command
    leaders = dict(scene.followers)
    joints = tuple(joint for joint in scene.part(part_name) if joint not in leaders)
    if not joints:
        raise ValueError(f"control part '{part_name}' has no joints but followers of others")
    ends = [_command(scene, joints, name, commands[name]) for name in needed]
    low, high = scene.limits[list(joints)].T if limited else ends
    moved = joints + tuple(joint for joint, leader in leaders.items() if leader in joints)
    # a follower takes its leader's number
    column = np.array([joints.index(leaders.get(joint, joint)) for joint in moved])

    def apply(world: SceneWorld, action: Array) -> SceneState:
        binary = command_mode == "binary"
        wanted = jnp.where(action[0] >= 0.0, high, low) if binary else between(low, high, action[0])
        return with_targets(world.state, moved, wanted[column])

    return ActionTerm((-1.0,), (1.0,), apply, "qpos", moved)


def _pose_term(
    scene: Scene, scale: Scale, part_name: str | None, width: int, order: tuple[int, ...] | None = None
) -> ActionTerm:
    joints = scene.tool_joints(part_name or None)
    check_scale(scale, width)

    def turn(numbers: Array) -> Array:
        if width == 6:
            return matrix_from_euler(numbers)
        # a policy's four numbers have no unit length
        return matrix_from_quaternion(numbers / jnp.maximum(jnp.linalg.norm(numbers), 1e-6))

    def apply(world: SceneWorld, action: Array) -> SceneState:
        numbers = jnp.asarray(scale) * action
        if order is not None:  # a gather alone, though it changed no order, would change the bits of what follows
            numbers = numbers[jnp.array(order)]
        qpos = world.state.physics.qpos
        target = make_pose(numbers[:3], turn(numbers[3:]))
        solved, reached = solve_site_pose(scene.model, "tcp", target, qpos, joints)
        return with_targets(world.state, joints, jnp.where(reached, solved, qpos[jnp.array(joints)]))

    return ActionTerm((-np.inf,) * width, (np.inf,) * width, apply, "qpos", joints)


def _command(scene: Scene, joints: Joints, name: str, given: Mapping[str, float] | None) -> NDArray[np.float32]:
    names = [scene.joints[joint] for joint in joints]
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must have a position for each of {', '.join(names)}, got {given!r}")
    found: dict[str, float] = {}
    for pattern, number in given.items():
        matched = matching_joints(str(pattern), names)
        if not matched:
            raise ValueError(f"{name} names '{pattern}'; the joints to command are {', '.join(names)}")
        if not is_number(number):
            raise ValueError(f"{name}.{pattern} must be a number, got {number!r}")
        # two patterns that both fit would leave it to their order
        if twice := [joint for joint in matched if joint in found]:
            raise ValueError(f"{name} gives {', '.join(twice)} twice")
        found |= dict.fromkeys(matched, float(number))
    if missing := [joint for joint in names if joint not in found]:
        raise ValueError(f"{name} gives no position for {', '.join(missing)}")
    return np.array([found[joint] for joint in names], np.float32)
