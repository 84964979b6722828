"""Robots as MJCF, from published kinematics: the UR family, a two-finger gripper, cart and pole.

Drives are affine actuators that take a force: one signal carries a position target q*, a velocity target q̇* and an
effort f. MuJoCo's Euler integrator takes the joint damping c implicitly, stable at 0.01 s for any link inertia:

    τ = clip(ctrl − k·q, ±max_effort) − c·q̇        with ctrl = k·q* + c·q̇* + f
"""

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from xml.etree import ElementTree as ET

from ejax.envs.mujoco.models import ASSETS
from ejax.envs.task.mjcf import find_child, to_text

Vector: TypeAlias = tuple[float, float, float]
Matrix: TypeAlias = tuple[tuple[float, ...], ...]

UR_FAMILY = ("ur3", "ur3e", "ur5", "ur5e", "ur10", "ur10e")
FINGER_TRAVEL = 0.04  # m. The gripper opens 80 mm: each finger travels from 0 (open) to 0.04 (closed).


@dataclass(frozen=True, kw_only=True)
class Drives:
    """Per joint. N·m/rad, N·m·s/rad, N·m; N/m, N·s/m, N for sliding joints."""

    stiffness: tuple[float, ...]
    damping: tuple[float, ...]
    max_effort: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A robot's MJCF and the names in it."""

    body: ET.Element
    joints: tuple[str, ...]  # In the order of qpos, qvel and actions
    parts: dict[str, tuple[str, ...]]  # Control part -> joints
    tool_part: str | None = None  # The part that carries the tool centre point, site ``tcp``
    hull: tuple[str, ...] = ()  # Geoms that collide with objects
    feelers: tuple[str, ...] = ()  # Geoms that collide with the floor
    stiffness: float
    damping: float
    max_effort: dict[str, float]  # Drives where a config gives none: N·m/rad, N·m·s/rad, N·m
    max_velocity: float | None = None  # rad/s or m/s; None: drives are taken as they are configured
    followers: dict[str, str] = field(default_factory=dict)
    """Joint -> the joint whose command it takes where one number moves a gripper."""


@dataclass(frozen=True, kw_only=True)
class PlacedRobot:
    """A robot with its drives, place and first posture."""

    robot: Robot
    drives: Drives
    position: Vector = (0.0, 0.0, 0.0)  # m
    rotation: Vector = (0.0, 0.0, 0.0)  # Intrinsic Euler angles, rad
    home: tuple[float, ...]  # [J]: joint positions of a new episode, m or rad
    uid: str = "robot"

    @property
    def bodies(self) -> tuple[str, ...]:
        return tuple(str(each.get("name")) for each in self.robot.body.iter("body"))


def make_ur(model: str, tcp: Matrix, *, gripper: bool) -> Robot:
    """Make an arm of ``UR_FAMILY``; a gripper adds two joints, m. ``tcp``: [4, 4], in the frame of the flange."""
    dh = tomllib.loads((ASSETS / "ur.toml").read_text())[model]
    prefix = "joint" if model == "ur5" else "Joint"  # as in EmbodiChain's URDF files
    arm = tuple(f"{prefix}{i}" for i in range(1, 7))
    axes = [row[column] for column in (0, 1) for row in tcp[:3]]
    numbers = {"tcp": to_text(row[3] for row in tcp[:3]), "tcp_axes": to_text(axes), "joint": prefix}
    # one template for six arms: they differ in numbers only
    body = _read_body("ur.xml", **numbers, **_arm_numbers(dh))
    hand: tuple[str, ...] = ()
    tips: list[str] = []
    if gripper:
        hand = ("gripper_finger1_joint_1", "gripper_finger2_joint_1")
        tips = [f"finger{side}_{place}" for side in (1, 2) for place in ("tip", "root")]
        find_child(body, ".//body[@name='flange']").extend(_read_body("gripper.xml", opened=FINGER_TRAVEL + 0.011))
    palm = ["palm"] if gripper else []
    return Robot(
        body=body,
        joints=arm + hand,
        parts={"arm": arm, "hand": hand} if gripper else {"arm": arm},
        tool_part="arm",
        hull=("base_hull", "wrist_hull", *palm, *tips),
        feelers=("elbow_hull", "wrist_hull", *palm, *tips[::2]),
        stiffness=1e4,
        damping=1e3,
        max_effort=dict.fromkeys(arm, dh["max_effort"]) | dict.fromkeys(hand, 100.0),
        max_velocity=math.pi,
        followers=dict(zip(hand[1:], hand[:1], strict=True)),
    )


def make_cart_pole() -> Robot:
    """Make a cart on a rail, with a pole on it."""
    joints = ("slider_to_cart", "cart_to_pole")
    return Robot(
        body=_read_body("rail.xml"),
        joints=joints,
        parts={"arm": joints[:1], "hand": joints[1:]},
        stiffness=10.0,
        damping=1.0,
        max_effort=dict(zip(joints, (100.0, 0.1), strict=True)),
    )


def matching_joints(pattern: str, joints: Iterable[str]) -> list[str]:
    """Match joints by name or regular expression, in any case: EmbodiChain's releases have JOINT1 and Joint1."""
    try:
        return [each for each in joints if re.fullmatch(pattern, each, re.IGNORECASE)]
    except re.error:
        return []


def _read_body(file: str, **numbers: Any) -> ET.Element:
    return ET.fromstring((ASSETS / file).read_text().format(**numbers))


def _arm_numbers(dh: dict[str, Any]) -> dict[str, Any]:
    r, a = dh["radius"], dh["a"]
    sizes = {"thick": 0.95 * r, "middling": 0.72 * r, "thin": 0.6 * r}
    # the links' as the template has them, base first, m
    lengths = (0.178, *a, 0.12, 0.12, 0.03)
    inertia = []
    for i, (mass, length) in enumerate(zip(dh["masses"], lengths, strict=True)):
        # of solid cylinders along x or z, kg·m²
        along, across = 0.5 * mass * r**2, mass * (3.0 * r**2 + length**2) / 12.0
        inertia.append(to_text((along, across, across) if i in (1, 2) else (across, across, along)))
    joints = {f"{name}_joint": 1.05 * size for name, size in sizes.items()}
    middle, inner = [length / 2.0 for length in a], 0.3 * dh["offset"]
    return dh | sizes | joints | {"foot": 1.25 * r, "inner": inner, "middle": middle, "inertia": inertia}
