"""Robots with four legs, and their tasks.

The quadruped is our own: Go1's task, with time in the air rewarded and the trunk guarded. Go1, Go2 and ANYmal C have
the numbers of EmbodiChain 0.3.2's ``UnitreeGo1FlatRL-v1``, ``UnitreeGo2FlatRL-v1`` and ``ANYmalCFlatRL-v1``, at the
first stage of their curriculum; ANYmal C's are Isaac Lab's.
"""

import math
from dataclasses import replace
from typing import Any

from flax.core import FrozenDict

from ejax.envs.locomotion.commands import CommandRanges
from ejax.envs.locomotion.gait_task import (
    GAIT_ACTOR,
    GAIT_COMMAND,
    GAIT_CRITIC,
    GAIT_NOISE,
    PRIVILEGED,
    gait_rewards,
)
from ejax.envs.locomotion.motors import motor_drives
from ejax.envs.locomotion.robots import Foot, JointDrives, LeggedRobot, Shape, per_joint
from ejax.envs.locomotion.tasks import Push, VelocityTask
from ejax.schema.frozen import freeze


def _legs(*names: str) -> tuple[str, ...]:
    return tuple(f"{leg}_{part}_joint" for leg in names for part in ("hip", "thigh", "calf"))


def _foot_of_leg(leg: str, length: float) -> Foot:
    return Foot(body=f"{leg}_calf", offset=(0.0, 0.0, -length), geoms=f"{leg}_foot_collision", contacts=1)


_LEGS = ("FR", "FL", "RR", "RL")
_QUADRUPED_HOME = {".R_hip_joint": 0.1, ".L_hip_joint": -0.1, ".*_thigh_joint": 0.9, ".*_calf_joint": -1.8}

QUADRUPED = LeggedRobot(
    name="quadruped",
    source="quadruped.xml",
    joints=_legs(*_LEGS),
    home=per_joint(_legs(*_LEGS), _QUADRUPED_HOME),
    drives=JointDrives(
        action_scale=(0.3,) * 12,
        stiffness=(25.0,) * 12,
        damping=(1.0,) * 12,
        armature=(0.005,) * 12,
        max_effort=(24.0, 24.0, 36.0) * 4,
    ),
    base="trunk",
    upright="trunk",
    height=0.285,
    feet=tuple(_foot_of_leg(leg, 0.21) for leg in _LEGS),
    friction=0.8,
    guarded="trunk_.*_collision",
)

GO1 = LeggedRobot(
    name="go1",
    source="mjlab:asset_zoo/robots/unitree_go1/xmls/go1.xml",
    joints=_legs(*_LEGS),
    home=per_joint(_legs(*_LEGS), _QUADRUPED_HOME),
    base="trunk",
    upright="trunk",
    height=0.278,
    feet=tuple(_foot_of_leg(leg, 0.213) for leg in _LEGS),
    friction=1.0,
    guarded="trunk_collision|head_collision",
    drives=motor_drives(
        _legs(*_LEGS),
        {".*": 0.000111842 * 6.0**2, ".*_calf_joint": 0.000111842 * 9.0**2},
        {".*": 23.7, ".*_calf_joint": 35.55},
    ),
)

_GO2_LEGS = ("FL", "FR", "RL", "RR")


def _go2_shapes() -> tuple[Shape, ...]:
    """As large as the bounds of the package's convex meshes; a leg's are capsules along its middle."""
    trunk = Shape(body="base", name="base", kind="box", size=(0.237, 0.097, 0.098), place=(0.109, 0.0, -0.009))
    shapes = [trunk]
    for leg in _GO2_LEGS:
        side = 1.0 if leg.endswith("L") else -1.0
        thigh, calf = (0.0, -0.02 * side, 0.0, 0.0, 0.0, -0.2), (0.006, 0.0, 0.0, 0.0, 0.0, -0.2)
        shapes += [
            Shape(body=f"{leg}_hip", name=f"{leg}_hip", kind="sphere", size=(0.046,), place=(0.0, 0.0, 0.0)),
            Shape(body=f"{leg}_thigh", name=f"{leg}_thigh", kind="capsule", size=(0.027,), place=thigh),
            Shape(body=f"{leg}_calf", name=f"{leg}_calf", kind="capsule", size=(0.016,), place=calf),
            Shape(body=f"{leg}_calf", name=f"{leg}_foot", kind="sphere", size=(0.0225,), place=(-0.003, 0.0, -0.2135)),
        ]
    return tuple(shapes)


GO2 = LeggedRobot(
    name="go2",
    source="example-robot-data:cmeel.prefix/share/example-robot-data/robots/go2_description/urdf/go2.urdf",
    joints=_legs(*_GO2_LEGS),
    home=per_joint(_legs(*_GO2_LEGS), _QUADRUPED_HOME),
    drives=JointDrives(
        action_scale=(0.25,) * 12,
        stiffness=(20.0, 20.0, 40.0) * 4,
        damping=(1.0, 1.0, 2.0) * 4,
        armature=(0.01, 0.01, 0.02) * 4,
        max_effort=(23.5, 23.5, 45.0) * 4,
    ),
    base="base",
    upright="base",
    height=0.32,
    feet=tuple(  # of EmbodiChain's contacts the whole calf is the foot
        Foot(body=f"{leg}_calf", offset=(0.0, 0.0, -0.213), geoms=f"{leg}_(foot|calf).*_collision", contacts=2)
        for leg in _LEGS
    ),
    friction=0.6,
    guarded="(?!.._(foot|calf)).*",
    soft_limit_factor=0.9,
    shapes=_go2_shapes(),
)

_ANYMAL_LEGS = ("LF", "LH", "RF", "RH")
_ANYMAL_JOINTS = tuple(f"{leg}_{part}" for leg in _ANYMAL_LEGS for part in ("HAA", "HFE", "KFE"))

ANYMAL_C = LeggedRobot(
    name="anymal_c",
    source=(
        "example-robot-data:cmeel.prefix/share/example-robot-data/robots/anymal_c_simple_description/urdf/anymal.urdf"
    ),
    joints=_ANYMAL_JOINTS,
    home=per_joint(_ANYMAL_JOINTS, {".F_HFE": 0.4, ".H_HFE": -0.4, ".F_KFE": -0.8, ".H_KFE": 0.8}),
    drives=JointDrives(
        action_scale=(0.5,) * 12,
        stiffness=(40.0,) * 12,
        damping=(5.0,) * 12,
        armature=(0.0,) * 12,
        max_effort=(80.0,) * 12,
    ),
    base="base",
    upright="base",
    height=0.6,
    feet=tuple(  # the origin of the link {leg}_FOOT, which is part of the shank here
        Foot(
            body=f"{leg}_SHANK",
            offset=(0.01305, -0.08795 if leg in ("LF", "RH") else 0.08795, -0.33797),
            geoms=rf"{leg}_FOOT_\d+_collision",
            contacts=2,
        )
        for leg in _ANYMAL_LEGS
    ),
    friction=1.0,
    guarded="(?![LR][FH]_).*",
    unwanted=tuple(rf"{leg}_(THIGH|thigh_fixed|KFE)_\d+_collision" for leg in _ANYMAL_LEGS),
    self_contacts=tuple(
        (rf"{one}_FOOT_1_collision", rf"{other}_FOOT_1_collision")
        for one, other in (("LF", "LH"), ("RF", "RH"), ("LF", "RF"), ("LH", "RH"))
    ),
)

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
GO1_TASK = VelocityTask(
    robot=GO1,
    command=CommandRanges(),
    actor=("base_lin_vel", "base_ang_vel", "projected_gravity", "measured_joint_pos", "joint_vel", "action", "command"),
    critic=(
        *("base_lin_vel", "base_ang_vel", "projected_gravity", "joint_pos", "joint_vel", "action", "command"),
        *PRIVILEGED,
    ),
    noise=FrozenDict(
        base_lin_vel=0.5, base_ang_vel=0.2, projected_gravity=0.05, measured_joint_pos=0.01, joint_vel=1.5
    ),
    encoder_bias=0.015,
    rewards=freeze(_GO1_REWARDS),
    push=Push(),
    drop=(0.01, 0.05),
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

_GO2_WALKING = {".*_hip_joint": 0.15, ".*_thigh_joint": 0.35, ".*_calf_joint": 0.5}

GO2_TASK = VelocityTask(
    robot=GO2,
    command=GAIT_COMMAND,
    actor=GAIT_ACTOR,
    critic=GAIT_CRITIC,
    noise=GAIT_NOISE,
    encoder_bias=0.015,
    rewards=freeze(
        gait_rewards(
            offset=(0.0, 0.5, 0.5, 0.0),
            standing={".*_hip_joint": 0.05, ".*_thigh_joint": 0.1, ".*_calf_joint": 0.15},
            walking=_GO2_WALKING,
            running=_GO2_WALKING,
        )
    ),
    push=Push(interval=(5.0, 6.0)),
    max_guarded_force=10.0,
)

_ANYMAL_OBSERVATION = (
    *("base_lin_vel", "base_ang_vel", "projected_gravity", "command"),
    *("joint_pos", "joint_vel", "action"),
)

ANYMAL_C_TASK = VelocityTask(
    robot=ANYMAL_C,
    command=CommandRanges(ang_vel_z=(-1.0, 1.0), resampling_time=(20.0, 20.0), standing=0.0, heading=0.0, forward=0.0),
    actor=_ANYMAL_OBSERVATION,
    critic=_ANYMAL_OBSERVATION,
    noise=FrozenDict(),
    encoder_bias=0.0,
    rewards=freeze(
        {
            "track_linear_velocity": {"weight": 1.0, "std": 0.5, "vertical": 0.0},
            "track_angular_velocity": {"weight": 0.5, "std": 0.5, "tilting": 0.0},
            "lin_vel_z_l2": {"weight": -2.0},
            "ang_vel_xy_l2": {"weight": -0.05},
            "joint_torques_l2": {"weight": -2.5e-5},
            "joint_acc_l2": {"weight": -2.5e-7},
            "action_rate_l2": {"weight": -0.01},
            "flight_time": {"weight": 0.5, "threshold": 0.5, "command_threshold": 0.1},
            "unwanted_contacts": {"weight": -1.0, "threshold": 1.0},
            "body_orientation_l2": {"weight": -5.0},
        }
    ),
    push=None,
    spread=0.0,
    turn=0.0,
    max_tilt=None,
    max_guarded_force=1.0,
)
