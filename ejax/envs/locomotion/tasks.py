"""The velocity tasks: for each robot what is commanded, observed, rewarded, disturbed, and when it has fallen.

Go1 and G1 have the numbers of EmbodiChain 0.3.2's ``UnitreeGo1FlatRL-v1`` and ``UnitreeG1FlatRL-v1``, at the first
stage of their curriculum. The quadruped is our own: Go1's task, with time in the air rewarded and the trunk guarded.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flax.core import FrozenDict

from ejax.envs.locomotion.commands import CommandRanges, Range
from ejax.envs.locomotion.robots import G1, GO1, QUADRUPED, LeggedRobot, per_joint
from ejax.envs.locomotion.terms import REWARDS
from ejax.frozen import freeze
from ejax.registry import did_you_mean

_AXES = ("x", "y", "z", "roll", "pitch", "yaw")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Sudden changes of the base's velocity, all in the world's frame, each axis uniform."""

    interval: Range = (1.0, 3.0)
    """s, uniform."""
    x: Range = (-0.5, 0.5)
    y: Range = (-0.5, 0.5)
    z: Range = (-0.4, 0.4)
    """m/s"""
    roll: Range = (-0.52, 0.52)
    pitch: Range = (-0.52, 0.52)
    yaw: Range = (-0.78, 0.78)
    """rad/s"""

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high = getattr(self, field.name)
            if low > high or (field.name == "interval" and low <= 0.0):
                raise ValueError(f"push.{field.name} must be [lowest, highest], got {[low, high]}")

    @property
    def ranges(self) -> tuple[Range, ...]:
        """x, y, z, roll, pitch, yaw."""
        return tuple(getattr(self, axis) for axis in _AXES)


@dataclass(frozen=True, kw_only=True)
class VelocityTask:
    """A task of one robot. ``rewards``: term -> its weight, per second, and its parameters."""

    robot: LeggedRobot
    command: CommandRanges
    actor: tuple[str, ...]
    critic: tuple[str, ...]
    """Terms of the observations ``policy`` and ``critic``."""
    noise: Mapping[str, float]
    """Term of the actor's observation -> half the width of the uniform noise on it."""
    encoder_bias: float
    """rad: half the width of the joint positions' error, drawn for an episode."""
    rewards: Mapping[str, Mapping[str, Any]]
    push: Push | None
    drop: Range = (0.0, 0.0)
    """m: how much higher than at rest an episode starts."""
    spread: float = 0.5
    """m: an episode starts at x and y within ± this, looking anywhere."""
    max_tilt: float = math.radians(70.0)
    """rad: an episode ends beyond it."""
    max_guarded_force: float | None = None
    """N: an episode ends when a guarded geom touches the ground with more. None: never."""


def change_task(
    task: VelocityTask,
    *,
    command: Mapping[str, Any],
    rewards: Mapping[str, Any],
    noise: Mapping[str, Any],
    push: Mapping[str, Any] | None,
) -> VelocityTask:
    """The task with other numbers; what is not named stays.

    Args:
        rewards: term -> {weight, parameter: …}; weight 0 takes the term out.
        push: None: no pushes.

    Raises:
        ValueError: an unknown name, or a value that cannot be.
    """
    _check_names("command", command, [field.name for field in fields(CommandRanges)])
    _check_names("noise", noise, task.actor)
    _check_names("rewards", rewards, REWARDS)
    _check_names("push", push or {}, [field.name for field in fields(Push)])
    merged = {name: {**task.rewards.get(name, {}), **_as_mapping(name, change)} for name, change in rewards.items()}
    kept = {name: spec for name, spec in {**task.rewards, **merged}.items() if spec.get("weight")}
    for name, spec in kept.items():
        _check_reward(task.robot, name, spec)
    return replace(
        task,
        command=replace(task.command, **_as_ranges("command", command)),
        rewards=freeze(kept),
        noise=FrozenDict({**task.noise, **noise}),
        push=None if push is None else replace(task.push or Push(), **_as_ranges("push", push)),
    )


def _check_names(where: str, given: Mapping[str, Any], allowed: Any) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{where} has no '{name}'; there is {', '.join(allowed)}{did_you_mean(name, allowed)}")


def _check_reward(robot: LeggedRobot, name: str, spec: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(REWARDS[name]).parameters.values())[1:]
    _check_names(f"rewards.{name}", spec, ["weight", *(each.name for each in parameters)])
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in spec]
    if missing:
        raise ValueError(f"rewards.{name} needs {', '.join(missing)}")
    for parameter, value in spec.items():
        if isinstance(value, Mapping) and 0.0 in per_joint(robot.joints, value):
            raise ValueError(f"rewards.{name}.{parameter} must give a number > 0 for each joint")


def _as_mapping(name: str, change: Any) -> Mapping[str, Any]:
    if not isinstance(change, Mapping):
        raise ValueError(f"rewards.{name} must be {{weight: …, parameter: …}}, got {change!r}")
    return change


def _as_ranges(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a config file as floats, its lists as (hashable) tuples."""
    for name, value in given.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        pair = isinstance(value, list | tuple) and len(value) == 2
        single = name in ("standing", "heading", "forward", "heading_stiffness")
        if pair == single or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):
            wanted = "a number" if single else "two numbers, [lowest, highest]"
            raise ValueError(f"{where}.{name} must be {wanted}, got {value!r}")
    return {
        name: tuple(float(each) for each in value) if isinstance(value, list | tuple) else float(value)
        for name, value in given.items()
    }


_ACTIVE = {"command_threshold": 0.05}
_LEG_STD = {".*_(hip|thigh)_joint": 0.3, ".*_calf_joint": 0.6}
_GO1_REWARDS: dict[str, dict[str, Any]] = {
    "track_linear_velocity": {"weight": 2.0, "std": 0.5},
    "track_angular_velocity": {"weight": 2.0, "std": math.sqrt(0.5)},
    "upright": {"weight": 1.0, "std": math.sqrt(0.2)},
    "pose": {
        "weight": 1.0,
        "walking_threshold": 0.05,
        "running_threshold": 1.5,
        "std_standing": {".*_(hip|thigh)_joint": 0.05, ".*_calf_joint": 0.1},
        "std_walking": _LEG_STD,
        "std_running": _LEG_STD,
    },
    "joint_pos_limits": {"weight": -1.0},
    "action_rate_l2": {"weight": -0.1},
    "foot_clearance": {"weight": -2.0, "target_height": 0.1, **_ACTIVE},
    "foot_swing_height": {"weight": -0.25, "target_height": 0.1, **_ACTIVE},
    "foot_slip": {"weight": -0.1, **_ACTIVE},
    "soft_landing": {"weight": -1e-5, **_ACTIVE},
}
_G1_WALKING = {
    ".*_(shoulder_roll|shoulder_yaw|elbow|wrist_.*)_joint": 0.1,
    "waist_(roll|pitch)_joint|.*_ankle_roll_joint": 0.1,
    ".*_hip_(roll|yaw)_joint|.*_ankle_pitch_joint|waist_yaw_joint|.*_shoulder_pitch_joint": 0.15,
    ".*_(hip_pitch|knee)_joint": 0.5,
}
_G1_ACTIVE = {"command_threshold": 0.1}
_PRIVILEGED = ("foot_height", "foot_air_time", "foot_contact", "foot_force")

GO1_TASK = VelocityTask(
    robot=GO1,
    command=CommandRanges(),
    actor=("base_lin_vel", "base_ang_vel", "projected_gravity", "measured_joint_pos", "joint_vel", "action", "command"),
    critic=(
        *("base_lin_vel", "base_ang_vel", "projected_gravity", "joint_pos", "joint_vel", "action", "command"),
        *_PRIVILEGED,
    ),
    noise=FrozenDict(
        base_lin_vel=0.5, base_ang_vel=0.2, projected_gravity=0.05, measured_joint_pos=0.01, joint_vel=1.5
    ),
    encoder_bias=0.015,
    rewards=freeze(_GO1_REWARDS),
    push=Push(),
    drop=(0.01, 0.05),
)

_G1_ACTOR = ("base_ang_vel", "projected_gravity", "command", "phase", "joint_pos", "joint_vel", "action")

G1_TASK = VelocityTask(
    robot=G1,
    command=CommandRanges(
        lin_vel_x=(-0.5, 1.0), lin_vel_y=(-0.5, 0.5), ang_vel_z=(-1.0, 1.0), standing=0.05, heading=1.0, forward=0.0
    ),
    actor=_G1_ACTOR,
    critic=(*_G1_ACTOR, "base_lin_vel", *_PRIVILEGED),
    noise=FrozenDict(base_ang_vel=0.2, projected_gravity=0.05, joint_pos=0.01, joint_vel=1.5),
    encoder_bias=0.015,
    rewards=freeze(
        {
            "track_linear_velocity": {"weight": 1.0, "std": 0.5, "vertical": 2.0},
            "track_angular_velocity": {"weight": 1.0, "std": math.sqrt(0.5), "tilting": 0.05},
            "body_orientation_l2": {"weight": -1.0},
            "pose": {
                "weight": 1.0,
                "walking_threshold": 0.1,
                "running_threshold": 1.5,
                "std_standing": {".*": 0.05},
                "std_walking": _G1_WALKING,
                "std_running": {
                    **_G1_WALKING,
                    ".*_hip_(roll|yaw)_joint|.*_ankle_pitch_joint|waist_yaw_joint|.*_shoulder_pitch_joint": 0.25,
                },
            },
            "body_ang_vel": {"weight": -0.05},
            "angular_momentum": {"weight": -0.025},
            "is_terminated": {"weight": -200.0},
            "joint_acc_l2": {"weight": -2.5e-7},
            "joint_pos_limits": {"weight": -10.0},
            "action_rate_l2": {"weight": -0.05},
            "foot_gait": {"weight": 0.5, "period": 0.6, "offset": (0.0, 0.5), "threshold": 0.56, **_G1_ACTIVE},
            "foot_clearance": {"weight": -1.0, "target_height": 0.1, **_G1_ACTIVE},
            "foot_slip": {"weight": -0.25, **_G1_ACTIVE},
            "soft_landing": {"weight": -1e-3, **_G1_ACTIVE},
            "stand_still": {"weight": -1.0, **_G1_ACTIVE},
            "self_collisions": {"weight": -1.0},
        }
    ),
    push=Push(interval=(5.0, 6.0)),
)

QUADRUPED_TASK = replace(
    GO1_TASK,
    robot=QUADRUPED,
    rewards=freeze(
        {
            **_GO1_REWARDS,
            "pose": {**_GO1_REWARDS["pose"], "weight": 0.5},
            "action_rate_l2": {"weight": -0.01},
            "foot_clearance": {"weight": -1.0, "target_height": 0.06, **_ACTIVE},
            "foot_swing_height": {"weight": -0.05, "target_height": 0.06, **_ACTIVE},
            "feet_air_time": {"weight": 0.5, "threshold_min": 0.05, "threshold_max": 0.4, "command_threshold": 0.1},
        }
    ),
    push=None,
    max_guarded_force=1.0,
)

TASKS: dict[str, VelocityTask] = {task.robot.name: task for task in (QUADRUPED_TASK, GO1_TASK, G1_TASK)}
