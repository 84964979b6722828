"""Robots with two legs, and their tasks.

The numbers are those of EmbodiChain 0.3.2's ``UnitreeG1FlatRL-v1``, ``UnitreeH1_2FlatRL-v1`` and
``MicroDuckFlatRL-v1``, at the first stage of their curriculum. No package has files of H1-2 and MicroDuck.
"""

import math
from dataclasses import replace

from flax.core import FrozenDict

from ejax.envs.locomotion.commands import CommandRanges
from ejax.envs.locomotion.gait_task import GAIT_ACTOR, GAIT_COMMAND, GAIT_CRITIC, GAIT_NOISE, gait_rewards
from ejax.envs.locomotion.motors import motor_drives
from ejax.envs.locomotion.robots import Foot, Imu, JointDrives, LeggedRobot, per_joint
from ejax.envs.locomotion.tasks import Push, VelocityTask
from ejax.schema.frozen import freeze

_G1_JOINTS = tuple(
    f"{name}_joint"
    for name in (
        *(
            f"{side}_{part}"
            for side in ("left", "right")
            for part in ("hip_pitch", "hip_roll", "hip_yaw", "knee", "ankle_pitch", "ankle_roll")
        ),
        *("waist_yaw", "waist_roll", "waist_pitch"),
        *(
            f"{side}_{part}"
            for side in ("left", "right")
            for part in (
                "shoulder_pitch",
                "shoulder_roll",
                "shoulder_yaw",
                "elbow",
                "wrist_roll",
                "wrist_pitch",
                "wrist_yaw",
            )
        ),
    )
)

G1 = LeggedRobot(
    name="g1",
    source="mjlab:asset_zoo/robots/unitree_g1/xmls/g1.xml",
    joints=_G1_JOINTS,
    home=per_joint(
        _G1_JOINTS,
        {
            ".*_hip_pitch_joint": -0.1,
            ".*_knee_joint": 0.3,
            ".*_ankle_pitch_joint": -0.2,
            ".*_shoulder_pitch_joint": 0.35,
            "left_shoulder_roll_joint": 0.18,
            "right_shoulder_roll_joint": -0.18,
            ".*_elbow_joint": 0.87,
        },
    ),
    base="pelvis",
    upright="torso_link",
    height=0.8,
    feet=tuple(
        Foot(
            body=f"{side}_ankle_roll_link", offset=(0.04, 0.0, -0.035), geoms=f"{side}_foot[1-7]_collision", contacts=2
        )
        for side in ("left", "right")
    ),
    friction=0.6,
    self_contacts=(
        ("left_foot1_collision", "right_foot7_collision"),
        ("left_foot2_collision", "right_foot6_collision"),
        ("left_shin_collision", "right_shin_collision"),
        ("left_thigh_collision", "right_thigh_collision"),
        ("left_hand_collision", "left_thigh_collision"),
        ("right_hand_collision", "right_thigh_collision"),
    ),
    soft_limit_factor=0.9,
    drives=motor_drives(
        _G1_JOINTS,
        {
            ".*": 0.003609725,
            ".*_hip_(pitch|yaw)_joint|waist_yaw_joint": 0.01017752004132231,
            ".*_(hip_roll|knee)_joint": 0.025101925,
            ".*_ankle_.*|waist_(roll|pitch)_joint": 2.0 * 0.003609725,
            ".*_wrist_(pitch|yaw)_joint": 0.00425,
        },
        {
            ".*": 25.0,
            ".*_hip_(pitch|yaw)_joint|waist_yaw_joint": 88.0,
            ".*_(hip_roll|knee)_joint": 139.0,
            ".*_ankle_.*|waist_(roll|pitch)_joint": 50.0,
            ".*_wrist_(pitch|yaw)_joint": 5.0,
        },
    ),
)

_H1_2_ARM = ("shoulder_pitch", "shoulder_roll", "shoulder_yaw", "elbow", "wrist_roll", "wrist_pitch", "wrist_yaw")
_H1_2_JOINTS = (
    *(
        f"{side}_{part}_joint"
        for side in ("left", "right")
        for part in ("hip_yaw", "hip_pitch", "hip_roll", "knee", "ankle_pitch", "ankle_roll")
    ),
    "torso_joint",
    *(f"{side}_{part}_joint" for side in ("left", "right") for part in _H1_2_ARM),
)


def _h1_2(leg: float, knee: float, ankle: float, arm: float) -> tuple[float, ...]:
    """A number for each joint, by its motor: of hips and torso, knees, ankles and upper shoulders, and lower arms."""
    motors = {".*": arm, ".*_hip_.*|torso_joint": leg, ".*_knee_joint": knee}
    return per_joint(_H1_2_JOINTS, {**motors, ".*_ankle_.*|.*_shoulder_(pitch|roll)_joint": ankle})


_H1_2_STIFFNESS = _h1_2(98.7, 157.7, 19.7, 7.9)
_H1_2_EFFORT = _h1_2(200.0, 300.0, 40.0, 18.0)

H1_2 = LeggedRobot(
    name="h1_2",
    source=None,
    joints=_H1_2_JOINTS,
    home=per_joint(
        _H1_2_JOINTS,
        {
            ".*_hip_pitch_joint": -0.2,
            ".*_knee_joint": 0.5,
            ".*_ankle_pitch_joint": -0.3,
            ".*_shoulder_pitch_joint": 0.28,
            ".*_elbow_joint": 0.52,
        },
    ),
    drives=JointDrives(
        action_scale=tuple(0.25 * f / k for f, k in zip(_H1_2_EFFORT, _H1_2_STIFFNESS, strict=True)),
        stiffness=_H1_2_STIFFNESS,
        damping=_h1_2(6.3, 10.1, 1.3, 0.5),
        armature=_h1_2(0.025, 0.04, 0.005, 0.002),
        max_effort=_H1_2_EFFORT,
    ),
    base="pelvis",
    upright="torso_link",
    height=1.02,
    feet=tuple(
        Foot(
            body=f"{side}_ankle_roll_link",
            offset=(0.04, 0.0, -0.04),
            geoms=rf"{side}_(foot\d+|ankle_roll_link_\d+)_collision",
            contacts=2,
        )
        for side in ("left", "right")
    ),
    friction=0.6,
    self_contacts=(
        (r"left_(foot1|ankle_roll_link_\d+)_collision", r"right_(foot7|ankle_roll_link_\d+)_collision"),
        (r"left_(shin|knee_link_\d+)_collision", r"right_(shin|knee_link_\d+)_collision"),
    ),
    soft_limit_factor=0.9,
    imu=Imu(body="torso_link", offset=(-0.04452, -0.01891, 0.27756)),
)

_DUCK_JOINTS = (
    *("left_hip_yaw", "left_hip_roll", "left_hip_pitch", "left_knee", "left_ankle"),
    *("neck_pitch", "head_pitch", "head_yaw", "head_roll"),
    *("right_hip_yaw", "right_hip_roll", "right_hip_pitch", "right_knee", "right_ankle"),
)

MICRODUCK = LeggedRobot(
    name="microduck",
    source=None,
    joints=_DUCK_JOINTS,
    home=(
        *(0.0, -0.0873, -0.4579, -0.0049, 0.453),
        *(0.3491, 0.3491, 0.0, 0.0),
        *(0.0, 0.0873, 0.4579, 0.0049, -0.453),
    ),
    drives=JointDrives(
        action_scale=(1.0,) * 14,
        stiffness=(0.55,) * 14,
        damping=(0.053,) * 14,
        armature=(0.0018,) * 14,
        max_effort=(0.96,) * 14,
    ),
    base="trunk_base",
    upright="trunk_base",
    height=0.12,
    feet=tuple(
        Foot(
            body=f"ankle_{side}",
            offset=(0.0, -0.0238146, -0.0140852),
            geoms=rf"({side}_foot|ankle_{side}_\d+)_collision",
            contacts=4,
        )
        for side in ("left", "right")
    ),
    friction=0.6,
    guarded=r"(?!((left|right)_foot|ankle_(left|right)_\d+)_collision).*",
    soft_limit_factor=0.9,
)

_G1_WALKING = {
    ".*_(shoulder_roll|shoulder_yaw|elbow|wrist_.*)_joint": 0.1,
    "waist_(roll|pitch)_joint|.*_ankle_roll_joint": 0.1,
    ".*_hip_(roll|yaw)_joint|.*_ankle_pitch_joint|waist_yaw_joint|.*_shoulder_pitch_joint": 0.15,
    ".*_(hip_pitch|knee)_joint": 0.5,
}

G1_TASK = VelocityTask(
    robot=G1,
    command=GAIT_COMMAND,
    actor=GAIT_ACTOR,
    critic=GAIT_CRITIC,
    noise=GAIT_NOISE,
    encoder_bias=0.015,
    rewards=freeze(
        {
            **gait_rewards(
                offset=(0.0, 0.5),
                standing={".*": 0.05},
                walking=_G1_WALKING,
                running={
                    **_G1_WALKING,
                    ".*_hip_(roll|yaw)_joint|.*_ankle_pitch_joint|waist_yaw_joint|.*_shoulder_pitch_joint": 0.25,
                },
            ),
            "self_collisions": {"weight": -1.0},
        }
    ),
    push=Push(interval=(5.0, 6.0)),
)

_H1_2_TIGHT = {".*": 0.1, ".*_(hip_pitch|knee)_joint": 0.5}
_H1_2_WIDER = ".*_hip_(yaw|roll)_joint|.*_ankle_pitch_joint|torso_joint|.*_shoulder_pitch_joint"

H1_2_TASK = replace(
    G1_TASK,
    robot=H1_2,
    rewards=freeze(
        {
            **gait_rewards(
                offset=(0.0, 0.5),
                standing={".*": 0.05},
                walking={**_H1_2_TIGHT, _H1_2_WIDER: 0.15},
                running={**_H1_2_TIGHT, _H1_2_WIDER: 0.25},
            ),
            "self_collisions": {"weight": -1.0},
        }
    ),
)

_DUCK_WALKING = {
    ".*_hip_yaw|.*neck.*|.*head.*": 0.3,
    ".*_hip_roll": 0.05,
    ".*_(hip_pitch|knee)": 0.4,
    ".*_ankle": 0.25,
}
_DUCK_REWARDS = gait_rewards(
    offset=(0.0, 0.5),
    standing={".*": 0.15, ".*_(hip_yaw|ankle)": 0.1, ".*_hip_roll": 0.05},
    walking=_DUCK_WALKING,
    running=_DUCK_WALKING,
    moves=0.01,
)

MICRODUCK_TASK = VelocityTask(
    robot=MICRODUCK,
    command=CommandRanges(
        lin_vel_x=(-0.2, 0.2), lin_vel_y=(-0.15, 0.15), ang_vel_z=(-0.5, 0.5), standing=0.1, heading=0.0, forward=0.0
    ),
    actor=GAIT_ACTOR,
    critic=GAIT_CRITIC,
    noise=FrozenDict(base_ang_vel=0.03, projected_gravity=0.01, joint_pos=0.001, joint_vel=0.25),
    encoder_bias=0.015,
    rewards=freeze(  # EmbodiChain's self_collisions has no contacts to count there either, soft_landing no weight
        {
            **{name: spec for name, spec in _DUCK_REWARDS.items() if name != "soft_landing"},
            "track_linear_velocity": {"weight": 2.0, "std": math.sqrt(0.1), "vertical": 2.0},
            "track_angular_velocity": {"weight": 2.0, "std": math.sqrt(0.5), "tilting": 0.05},
            "body_orientation_l2": {"weight": -0.5},
            "pose": {**_DUCK_REWARDS["pose"], "running_threshold": 1.0},
            "angular_momentum": {"weight": -0.02},
            "action_rate_l2": {"weight": -0.1},
            "foot_gait": {**_DUCK_REWARDS["foot_gait"], "period": 0.5},
            "foot_clearance": {**_DUCK_REWARDS["foot_clearance"], "target_height": 0.02},
            "foot_slip": {**_DUCK_REWARDS["foot_slip"], "weight": -0.1},
        }
    ),
    push=Push(
        interval=(3.0, 6.0),
        x=(-0.3, 0.3),
        y=(-0.3, 0.3),
        z=(0.0, 0.0),
        roll=(0.0, 0.0),
        pitch=(0.0, 0.0),
        yaw=(0.0, 0.0),
    ),
    max_guarded_force=1.0,
    min_height=0.06,
    phase_period=0.5,
    timestep=0.002,
    sim_steps_per_control=10,
)
