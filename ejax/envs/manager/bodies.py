"""Rigid objects of a gym config as MuJoCo bodies, from primitives.

A dynamic object moves on three slide joints and a ball joint, seven numbers in qpos, so that its linear and angular
damping are two numbers, as EmbodiChain has them.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from xml.etree import ElementTree as ET

import numpy as np

from ejax.envs.manager.ignored import IGNORED
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section

Vector: TypeAlias = tuple[float, float, float]

DEFAULT_FRICTION = 0.5
"""Friction of the robot, the floor, and objects that give none."""
_CORNER = 0.1
"""Radius of the balls a box stands on, as a part of its shortest half edge. Against a plane, MJX keeps only those
vertices of a box that lie within 1 mm of the deepest one: a tilting box would move differently in the two engines."""
_ATTRIBUTE_GROUPS = ("mass_props", "rigid_props", "collision_props", "material_props")


@dataclass(frozen=True, kw_only=True)
class RigidObject:
    """A primitive body."""

    uid: str
    shape: Literal["box", "sphere", "cylinder", "capsule"]
    size: tuple[float, ...]
    """MuJoCo's sizes: half edges, or radius and half height, m."""
    dynamic: bool
    position: Vector
    rotation: Vector
    """Intrinsic Euler angles, rad."""
    mass: float
    friction: float
    linear_damping: float
    angular_damping: float
    """1/s"""
    collides: bool = True
    """False: it passes through everything."""


def read_objects(data: Any, path: str, report: KeyReport, *, static: bool = False) -> tuple[RigidObject, ...]:
    """The entries of ``rigid_object``, or of ``background``, which never move."""
    if not isinstance(data, list | tuple):
        report.refuse(path, f"got {data!r}; must be a list")
        return ()
    read = [_read_object(each, f"{path}[{i}]", report, static) for i, each in enumerate(data)]
    return tuple(each for each in read if each is not None)


def check_names(objects: tuple[RigidObject, ...], taken: Iterable[str], report: KeyReport) -> None:
    """Refuse bodies that share a name.

    Args:
        taken: names of the robot's bodies.
    """
    names = set(taken)
    for each in objects:
        if each.uid in names:
            report.refuse("rigid_object", f"the uid '{each.uid}' is taken; give every body, background too, its own")
        names.add(each.uid)


def add_body(world: ET.Element, each: RigidObject) -> list[str]:
    """Add an object to MJCF. Returns the geoms that rest on the floor."""
    geom = {"name": each.uid, "type": each.shape, "size": to_text(each.size), "material": "object"}
    body = ET.SubElement(world, "body", {"name": each.uid})
    if each.dynamic:  # the body is at the origin, so that its part of qpos is its pose in the world
        for axis, direction in (("x", "1 0 0"), ("y", "0 1 0"), ("z", "0 0 1")):
            slide = {"name": f"{each.uid}_{axis}", "type": "slide", "axis": direction}
            ET.SubElement(body, "joint", slide, damping=str(each.mass * each.linear_damping))
        damping = str(_mean_inertia(each) * each.angular_damping)
        ET.SubElement(body, "joint", {"name": f"{each.uid}_turn", "type": "ball"}, damping=damping)
    else:
        body.attrib |= {"pos": to_text(each.position), "euler": to_text(each.rotation)}
    ET.SubElement(body, "geom", geom, mass=str(each.mass), contype="0", conaffinity="0")
    if not each.dynamic:
        return []
    return _add_corners(body, each) if each.shape == "box" else [each.uid]


def to_text(numbers: Any) -> str:
    """Numbers as an attribute of MJCF."""
    return " ".join(repr(float(number)) for number in numbers)


def _add_corners(body: ET.Element, each: RigidObject) -> list[str]:
    radius = _CORNER * min(each.size)
    names = []
    for i, signs in enumerate(itertools.product((-1.0, 1.0), repeat=3)):
        names.append(f"{each.uid}_corner_{i}")
        place = to_text(np.array(signs) * (np.array(each.size) - radius))
        corner = {"name": names[-1], "type": "sphere", "size": str(radius), "pos": place, "group": "3"}
        ET.SubElement(body, "geom", corner, mass="0", contype="0", conaffinity="0")
    return names


def _mean_inertia(each: RigidObject) -> float:
    """Mean of the three moments of inertia, kg·m²."""
    if each.shape == "box":
        return each.mass * 2.0 * sum(half**2 for half in each.size) / 9.0
    if each.shape == "sphere":
        return 0.4 * each.mass * each.size[0] ** 2
    radius, half = each.size
    return each.mass * (radius**2 + 2.0 * half**2 / 3.0) / 3.0


def _read_object(data: Any, path: str, report: KeyReport, static: bool) -> RigidObject | None:
    with Section(data, path, report) as section:
        uid = section.take("uid")
        if not isinstance(uid, str):
            section.problem("uid", f"got {uid!r}; must be a name")
        with section.open("shape") as shape:
            kind, size = _read_shape(shape)
        body_type = section.take("body_type", "static" if static else "dynamic")
        if body_type not in ("dynamic", "static"):
            text = f"got {body_type!r}; ejax has dynamic and static bodies: its state holds no poses of other ones"
            section.problem("body_type", text)
        position = section.numbers("init_pos", (0.0, 0.0, 0.0), 3)
        rotation = section.numbers("init_rot", (0.0, 0.0, 0.0), 3)
        if tuple(section.data.get("body_scale") or (1.0,)) == (1.0,) * len(section.data.get("body_scale") or (1.0,)):
            section.take("body_scale")
        section.refuse("body_scale", "ejax scales no bodies: give the size in shape")
        section.refuse("init_local_pose", "give init_pos and init_rot instead")
        section.ignore_all(IGNORED["rigid_object"])
        with section.open("attrs") as attrs:
            numbers = _read_attributes(attrs)
        if kind is None:
            return None
        return RigidObject(
            uid=str(uid),
            shape=kind,
            size=size,
            dynamic=body_type == "dynamic" and not static,
            position=_vector(position),
            rotation=_vector(np.radians(rotation)),
            **numbers,
        )


def _vector(numbers: Any) -> Vector:
    x, y, z = numbers
    return float(x), float(y), float(z)


def _read_shape(shape: Section) -> tuple[Any, tuple[float, ...]]:
    kind = shape.take("shape_type")
    shape.ignore_all(IGNORED["rigid_object.shape"])
    if kind in ("Cube", "Box"):
        size = shape.numbers("size", (1.0, 1.0, 1.0), 3)
        if min(size) <= 0.0:
            shape.problem("size", f"got {size}; edges must be > 0")
        return "box", tuple(edge / 2.0 for edge in size)
    if kind == "Sphere":
        return "sphere", (shape.number("radius", 1.0, above=0.0),)
    if kind in ("Cylinder", "Capsule"):
        return kind.lower(), (shape.number("radius", 0.5, above=0.0), shape.number("height", 1.0, above=0.0) / 2.0)
    text = "meshes are EmbodiChain's files, which ejax does not have; " if kind == "Mesh" else ""
    shape.problem("shape_type", f"got {kind!r}; {text}allowed: Cube, Sphere, Cylinder, Capsule")
    shape.skip("its shape is not there")
    return None, ()


def _read_attributes(attrs: Section) -> dict[str, Any]:
    """Mass, friction and damping, flat as in EmbodiChain 0.2 or in groups as in 0.3."""
    groups = [attrs.open(name) for name in _ATTRIBUTE_GROUPS if name in attrs]

    def holder(name: str) -> Section:
        return next((group for group in groups if name in group), attrs)

    friction = "dynamic_friction"
    if friction not in holder(friction) and "static_friction" in holder("static_friction"):
        friction = "static_friction"
    collides = holder("enable_collision").take("enable_collision", True)
    if not isinstance(collides, bool):
        key = holder("enable_collision").key("enable_collision")
        attrs.report.refuse(key, f"got {collides!r}; must be true or false")
    numbers: dict[str, Any] = {
        "collides": collides is not False,
        "mass": holder("mass").number("mass", 1.0, above=0.0),
        "friction": holder(friction).number(friction, DEFAULT_FRICTION, at_least=0.0),
        "linear_damping": holder("linear_damping").number("linear_damping", 0.0, at_least=0.0),
        "angular_damping": holder("angular_damping").number("angular_damping", 0.0, at_least=0.0),
    }
    ignored = {name: text for name, text in IGNORED["rigid_object.attrs"].items() if name != friction}
    for section in (*groups, attrs):
        section.ignore_all(ignored)
    for section in groups:
        section.close()
    return numbers
