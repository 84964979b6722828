"""Robots as MJCF, from published kinematics: the UR family, a two-finger gripper, cart and pole.

A robot is made once for a model and knows its joints, the parts they are grouped in, and where its tool is. Its drives
are affine actuators that take a force,

    τ = clip(ctrl − k·q, ±max_effort) − c·q̇        with ctrl = k·q* + c·q̇* + f

so that one control signal carries a position target q*, a velocity target q̇* and an effort f. The damping c is a joint
damping: MuJoCo's Euler integrator takes it implicitly, stable at 0.01 s for any link inertia, in both engines.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

Matrix = tuple[tuple[float, ...], ...]

UR_FAMILY = ("ur3", "ur3e", "ur5", "ur5e", "ur10", "ur10e")


@dataclass(frozen=True)
class DhTable:
    """A UR arm: T_i = Rz(q_i)·Tz(d_i)·Tx(a_i)·Rx(α_i) with α = 90, 0, 0, 90, −90, 0 degrees. Lengths m, masses kg.

    Source: Universal Robots, "DH parameters for calculations of kinematics and dynamics".
    """

    d: tuple[float, float, float, float]
    """d₁, d₄, d₅, d₆; d₂ and d₃ are 0."""
    a: tuple[float, float]
    """a₂, a₃; the others are 0."""
    masses: tuple[float, float, float, float, float, float]
    offset: float
    """Offset of the upper arm, and its mass, from the shoulder's axis."""
    radius: float
    """Radius of the links as cylinders: determines moments of inertia and drawing."""
    max_effort: float
    """Drive limit where a config gives none, N·m; EmbodiChain's."""


UR: dict[str, DhTable] = {
    "ur3": DhTable(
        (0.1519, 0.11235, 0.08535, 0.0819), (-0.24365, -0.21325), (2.0, 3.42, 1.26, 0.8, 0.8, 0.35), 0.12, 0.05, 56.0
    ),
    "ur3e": DhTable(
        (0.15185, 0.13105, 0.08535, 0.0921),
        (-0.24355, -0.2132),
        (1.98, 3.4445, 1.437, 0.871, 0.805, 0.261),
        0.12,
        0.05,
        56.0,
    ),
    "ur5": DhTable(
        (0.089159, 0.10915, 0.09465, 0.0823),
        (-0.425, -0.39225),
        (3.7, 8.393, 2.275, 1.219, 1.219, 0.1879),
        0.136,
        0.06,
        150.0,
    ),
    "ur5e": DhTable(
        (0.1625, 0.1333, 0.0997, 0.0996),
        (-0.425, -0.3922),
        (3.761, 8.058, 2.846, 1.37, 1.3, 0.365),
        0.138,
        0.06,
        150.0,
    ),
    "ur10": DhTable(
        (0.1273, 0.163941, 0.1157, 0.0922),
        (-0.612, -0.5723),
        (7.778, 12.93, 3.87, 1.96, 1.96, 0.202),
        0.175,
        0.075,
        330.0,
    ),
    "ur10e": DhTable(
        (0.1807, 0.17415, 0.11985, 0.11655),
        (-0.6127, -0.57155),
        (7.369, 13.051, 3.989, 2.1, 1.98, 0.615),
        0.176,
        0.075,
        330.0,
    ),
}

FINGER_TRAVEL = 0.04
"""m. The gripper opens 80 mm: each finger travels from 0 (open) to 0.04 (closed)."""


@dataclass(frozen=True)
class Robot:
    """A robot's MJCF and the names in it."""

    body: ET.Element
    joints: tuple[str, ...]
    """In the order of qpos, qvel and actions."""
    parts: dict[str, tuple[str, ...]]
    """Control part -> joints."""
    tool_part: str | None
    """The part that carries the tool centre point, site ``tcp``."""
    hull: tuple[str, ...]
    """Geoms that collide with objects."""
    feelers: tuple[str, ...]
    """Geoms that collide with the floor."""
    stiffness: float
    damping: float
    max_effort: dict[str, float]
    """Drives where a config gives none: N·m/rad, N·m·s/rad, N·m."""
    max_velocity: float | None
    """rad/s or m/s; None: drives are taken as they are configured."""
    followers: dict[str, str] = field(default_factory=dict)
    """Joint -> the joint whose command it takes where one number moves a gripper."""


def make_ur(model: str, tcp: Matrix, *, gripper: bool) -> Robot:
    """An arm of the UR family, with or without the two-finger gripper.

    Args:
        model: one of ``UR_FAMILY``.
        tcp: [4, 4], the tool centre point in the frame of the flange.
        gripper: two more joints, m.
    """
    dh = UR[model]
    prefix = "joint" if model == "ur5" else "Joint"  # as in EmbodiChain's URDF files
    joints = tuple(f"{prefix}{i}" for i in range(1, 7))
    base = ET.Element("body", name="base")
    _geom(base, "base", "cylinder", fromto=(0, 0, 0, 0, 0, 0.06), size=(1.25 * dh.radius,), material="steel")
    _geom(base, "base_hull", "sphere", pos=(0, 0, 0.05), size=(1.25 * dh.radius,))
    flange = _chain(base, dh, joints)
    hull, feelers = ["base_hull", "wrist_hull"], ["elbow_hull", "wrist_hull"]
    _geom(flange, "wrist_hull", "sphere", pos=(0, 0, -0.02), size=(0.6 * dh.radius,))
    site = ET.SubElement(flange, "site", name="tcp", size="0.006", rgba="0.9 0.2 0.2 1")
    site.set("pos", _text(row[3] for row in tcp[:3]))
    site.set("xyaxes", _text([*(row[0] for row in tcp[:3]), *(row[1] for row in tcp[:3])]))
    parts = {"arm": joints}
    if gripper:
        parts["hand"] = _gripper(flange)
        tips = [f"finger{side}_{place}" for side in (1, 2) for place in ("tip", "root")]
        hull, feelers = [*hull, "palm", *tips], [*feelers, "palm", *tips[::2]]
    hand = parts.get("hand", ())
    efforts = dict.fromkeys(joints, dh.max_effort) | dict.fromkeys(hand, 100.0)
    return Robot(
        body=base,
        joints=joints + hand,
        parts=parts,
        tool_part="arm",
        hull=tuple(hull),
        feelers=tuple(feelers),
        stiffness=1e4,
        damping=1e3,
        max_effort=efforts,
        max_velocity=math.pi,
        followers=dict(zip(hand[1:], hand[:1], strict=True)),
    )


def make_cart_pole() -> Robot:
    """A cart of 1 kg on a rail of ±15 m, a pole of 1 m and 0.1 kg. Geometry as in Bullet's cartpole.urdf.

    Differs from Bullet: its pole has 10 kg, which the drives of EmbodiChain's config cannot hold up.
    The ranges are not enforced, observations are normalised by them.
    """
    rail = ET.Element("body", name="rail")
    _geom(rail, "rail", "capsule", fromto=(0, -15, 0, 0, 15, 0), size=(0.015,), material="steel")
    cart = ET.SubElement(rail, "body", name="cart")
    ET.SubElement(cart, "joint", name="slider_to_cart", type="slide", axis="0 1 0", range="-15 15", limited="false")
    _geom(cart, "cart", "box", size=(0.1, 0.2, 0.075), mass=1.0, material="accent")
    pole = ET.SubElement(cart, "body", name="pole")
    half_turn = f"{-math.pi} {math.pi}"
    ET.SubElement(pole, "joint", name="cart_to_pole", type="hinge", axis="1 0 0", range=half_turn, limited="false")
    _geom(pole, "axle", "cylinder", fromto=(-0.112, 0, 0, 0.112, 0, 0), size=(0.03,), material="steel")
    _geom(pole, "pole", "capsule", fromto=(0.11, 0, 0, 0.11, 0, 1), size=(0.018,), material="object")
    _inertial(pole, (0, 0, 0.5), 0.1, (0.00835416666, 0.00835416666, 0.00004166666))  # a bar of 5 cm square
    joints = ("slider_to_cart", "cart_to_pole")
    return Robot(
        body=rail,
        joints=joints,
        parts={"arm": joints[:1], "hand": joints[1:]},
        tool_part=None,
        hull=(),
        feelers=(),
        stiffness=10.0,
        damping=1.0,
        max_effort=dict(zip(joints, (100.0, 0.1), strict=True)),
        max_velocity=None,
    )


def _chain(base: ET.Element, dh: DhTable, joints: tuple[str, ...]) -> ET.Element:
    """Six links; the flange's body."""
    r = dh.radius
    (d1, d4, d5, d6), (a2, a3) = dh.d, dh.a
    place = ((0, 0, 0), (0, 0, d1), (a2, 0, 0), (a3, 0, 0), (0, 0, d4), (0, 0, d5))
    turn = (0.0, math.pi / 2, 0.0, 0.0, math.pi / 2, -math.pi / 2)
    fromto = (
        (0, 0, 0.06, 0, 0, d1),
        (0, 0, dh.offset, a2, 0, dh.offset),
        (0, 0, 0.3 * dh.offset, a3, 0, 0.3 * dh.offset),
        (0, 0, 0.3 * dh.offset, 0, 0, d4),
        (0, 0, 0, 0, 0, d5),
        (0, 0, 0, 0, 0, d6),
    )
    body = base
    for i, name in enumerate(("shoulder", "upper_arm", "forearm", "wrist_1", "wrist_2", "wrist_3")):
        attributes = {"pos": _text(place[i]), "euler": f"{turn[i]} 0 0", "gravcomp": "1"}
        body = ET.SubElement(body, "body", attributes, name=name)
        limits = {"range": f"{-2 * math.pi} {2 * math.pi}", "limited": "true", "armature": "0.1"}
        ET.SubElement(body, "joint", limits, name=joints[i], type="hinge", axis="0 0 1")
        thick = r * (0.72 if i in (1, 2) else 0.95 if i == 0 else 0.6)
        _geom(body, name, "capsule", fromto=fromto[i], size=(thick,), material="shell")
        _geom(
            body, f"{name}_joint", "cylinder", pos=(0, 0, fromto[i][2]), size=(1.05 * thick, thick), material="accent"
        )
        start, end = fromto[i][:3], fromto[i][3:]
        centre = (0.0, 0.0, (d1, 0.0, 0.0, d4, d5, d6)[i]) if i not in (1, 2) else _middle(start, end)
        _inertial(body, centre, dh.masses[i], _cylinder_inertia(dh, i))
        if name == "forearm":
            _geom(body, "elbow_hull", "sphere", pos=(0, 0, 0.3 * dh.offset), size=(r,))
    return ET.SubElement(body, "body", name="flange", pos=f"0 0 {d6}", gravcomp="1")


def _gripper(flange: ET.Element) -> tuple[str, str]:
    """The two-finger gripper, 0.16 m long; its joints. Fingers touch with two spheres each: engines agree on those."""
    _geom(flange, "mount", "cylinder", fromto=(0, 0, 0, 0, 0, 0.012), size=(0.04,), material="steel")
    _geom(flange, "housing", "box", pos=(0, 0, 0.051), size=(0.024, 0.047, 0.039), material="rubber")
    _geom(flange, "palm", "sphere", pos=(0, 0, 0.055), size=(0.045,))
    _inertial(flange, (0, 0, 0.05), 1.0, (0.002, 0.001, 0.001))
    names = []
    for side, sign in ((1, 1.0), (2, -1.0)):
        name = f"gripper_finger{side}_joint_1"
        open_at = FINGER_TRAVEL + 0.011
        finger = ET.SubElement(flange, "body", name=f"finger{side}", pos=f"0 {sign * open_at} 0", gravcomp="1")
        limits = {"range": f"0 {FINGER_TRAVEL}", "limited": "true"}
        ET.SubElement(finger, "joint", limits, name=name, type="slide", axis=f"0 {-sign} 0")
        _geom(finger, f"finger{side}", "box", pos=(0, 0, 0.125), size=(0.011, 0.0105, 0.034), material="rubber")
        _geom(finger, f"finger{side}_tip", "sphere", pos=(0, 0, 0.149), size=(0.011,))
        _geom(finger, f"finger{side}_root", "sphere", pos=(0, 0, 0.12), size=(0.011,))
        _inertial(finger, (0, 0, 0.12), 0.1, (1e-4, 1e-4, 1e-4))
        names.append(name)
    return names[0], names[1]


def _cylinder_inertia(dh: DhTable, link: int) -> tuple[float, float, float]:
    """Inertia of a solid cylinder along x (upper arm, forearm) or z, kg·m²."""
    mass = dh.masses[link]
    length = abs((0.178, *dh.a, 0.12, 0.12, 0.03)[link])
    along = 0.5 * mass * dh.radius**2
    across = mass * (3.0 * dh.radius**2 + length**2) / 12.0
    return (along, across, across) if link in (1, 2) else (across, across, along)


def _middle(start: tuple[float, ...], end: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((a + b) / 2.0 for a, b in zip(start, end, strict=True))


def _inertial(body: ET.Element, pos: tuple[float, ...], mass: float, inertia: tuple[float, ...]) -> None:
    ET.SubElement(body, "inertial", pos=_text(pos), mass=str(mass), diaginertia=_text(inertia))


def _geom(
    body: ET.Element, name: str, shape: str, *, material: str = "", mass: float = 0.0, **numbers: Iterable[float]
) -> None:
    """A geom that collides only as contact pairs say; not drawn without a material."""
    look = {"material": material} if material else {"group": "3"}
    geom = look | {key: _text(value) for key, value in numbers.items()}
    ET.SubElement(body, "geom", geom, name=name, type=shape, mass=str(mass), contype="0", conaffinity="0")


def _text(numbers: Iterable[float]) -> str:
    return " ".join(str(float(number)) for number in numbers)
