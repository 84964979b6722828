"""A MuJoCo model from the robot and the rigid objects of a gym config, and where each thing is in its state.

Physics at 0.01 s, as EmbodiChain's; contacts are listed pairs only: objects with the floor, with the robot's hull and with each
other, the robot's feelers with the floor. A dynamic object moves on three slide joints and a ball joint, seven numbers in
qpos, so that its linear and angular damping are two numbers, as EmbodiChain has them.

Mapped from a drive (stiffness k, damping c, limits F and v): s = min(1, F / (v·c)), damping s·c, stiffness s²·k. At the
force limit the joint then turns at v, since the damping acts beside the limit here; the damping ratio stays as configured.
v is at most the robot's own greatest velocity.
Mapped from a material: the friction of a contact is the mean of both dynamic frictions (PhysX's rule), 0.5 for robot and floor.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree as ET

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.key_report import KeyReport, Section
from ejax.envs.mujoco import Physics
from ejax.envs.robots import Robot
from ejax.registry import did_you_mean

_FRICTION = 0.5
_CORNER = 0.1
"""Radius of the balls a box stands on, as a part of its shortest half edge. Against a plane, MJX keeps only those vertices of a
box that lie within 1 mm of the deepest one, and a box that tilts would move differently in the two engines."""

_NO_COUNTERPART = {
    "static_friction": "no effect: MuJoCo has one coefficient, dynamic_friction gives it",
    "restitution": "no effect: contacts are critically damped",
    "contact_offset": "no effect: MuJoCo has no contact shell",
    "rest_offset": "no effect: MuJoCo has no contact shell",
    "max_depenetration_velocity": "no effect: MuJoCo's contacts are springs",
    "max_linear_velocity": "no effect: MuJoCo limits no velocity",
    "max_angular_velocity": "no effect: MuJoCo limits no velocity",
    "density": "no effect: mass gives it",
    "inertia": "no effect: the shape gives it",
    "recompute_inertia": "no effect: the shape gives it",
    "enable_ccd": "no effect: an option of PhysX",
    "min_position_iters": "no effect: an option of PhysX",
    "min_velocity_iters": "no effect: an option of PhysX",
    "sleep_threshold": "no effect: nothing sleeps",
    "retain_acceleration": "no effect: an option of PhysX",
}
_ATTRIBUTE_GROUPS = ("mass_props", "rigid_props", "collision_props", "material_props")


@dataclass(frozen=True)
class RigidObject:
    """A primitive body."""

    uid: str
    shape: Literal["box", "sphere", "cylinder", "capsule"]
    size: tuple[float, ...]
    """As MuJoCo has them: half edges, or radius and half height, m."""
    dynamic: bool
    position: tuple[float, float, float]
    rotation: tuple[float, float, float]
    """Intrinsic Euler angles, rad."""
    mass: float
    friction: float
    linear_damping: float
    angular_damping: float
    """1/s"""


@dataclass(frozen=True)
class Drives:
    """Per joint, after the mapping above."""

    stiffness: tuple[float, ...]
    damping: tuple[float, ...]
    max_effort: tuple[float, ...]


@dataclass(frozen=True)
class Scene:
    """The model as text, and where things are in qpos and qvel: joints first, then 7 and 6 numbers an object."""

    xml: str
    joints: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Control part -> joint indices."""
    tool_part: str | None
    drives: Drives
    home: tuple[float, ...]
    """Joint positions of a new episode, m or rad."""
    objects: tuple[RigidObject, ...]

    @property
    def model(self) -> mujoco.MjModel:
        return Physics(self.xml).model

    @property
    def limits(self) -> NDArray[np.float64]:
        """[joints, 2]: the joints' ranges."""
        return self.model.jnt_range[: len(self.joints)]

    def part(self, name: str) -> tuple[int, ...]:
        """Joint indices of a control part.

        Raises:
            ValueError: no such part.
        """
        parts = dict(self.parts)
        if name not in parts:
            raise ValueError(
                f"the robot has no control part '{name}'; it has {', '.join(parts)}{did_you_mean(name, parts)}"
            )
        return parts[name]

    def find_object(self, uid: str) -> RigidObject | None:
        return next((each for each in self.objects if each.uid == uid), None)

    def slot(self, uid: str) -> tuple[int, int]:
        """Where a dynamic object begins in qpos and in qvel."""
        before = [each.uid for each in self.objects if each.dynamic].index(uid)
        return len(self.joints) + 7 * before, len(self.joints) + 6 * before


def read_objects(data: Any, path: str, report: KeyReport, *, static: bool = False) -> tuple[RigidObject, ...]:
    """The entries of ``rigid_object``, or of ``background``, which never move."""
    if not isinstance(data, list | tuple):
        report.refuse(path, f"got {data!r}; must be a list")
        return ()
    objects = [_read_object(each, f"{path}[{i}]", report, static) for i, each in enumerate(data)]
    return tuple(each for each in objects if each is not None)


def read_drives(section: Section, robot: Robot) -> Drives:
    """``drive_pros`` or ``joint_drive_props``: numbers for all joints, or by joint name, pattern or control part."""
    report = section.report

    def per_joint(name: str, default: Mapping[str, float]) -> list[float]:
        value = section.take(name)
        chosen = dict(default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            chosen = dict.fromkeys(robot.joints, float(value))
        elif isinstance(value, Mapping):
            for pattern, number in value.items():
                matched = robot.parts.get(pattern) or [each for each in robot.joints if re.fullmatch(pattern, each)]
                if not matched:
                    there = ", ".join([*robot.joints, *robot.parts])
                    report.refuse(section.key(f"{name}.{pattern}"), f"no such joint or control part; there is {there}")
                chosen |= dict.fromkeys(matched, float(number))
        elif value is not None:
            report.refuse(section.key(name), f"got {value!r}; must be a number, or numbers by joint")
        return [chosen[joint] for joint in robot.joints]

    all_joints = dict.fromkeys
    stiffness = per_joint("stiffness", all_joints(robot.joints, robot.stiffness))
    damping = per_joint("damping", all_joints(robot.joints, robot.damping))
    effort = per_joint("max_effort", robot.max_effort)
    velocity = per_joint("max_velocity", all_joints(robot.joints, np.inf))
    if section.take("drive_type", "force") != "force":
        report.refuse(section.key("drive_type"), f"got {section.data['drive_type']!r}; ejax drives by force")
    section.ignore("friction", "no effect: ejax's joints have no dry friction")
    section.ignore("armature", "no effect: ejax's robots have their own")
    limit = robot.max_velocity
    scale = [
        min(1.0, f / (min(v, limit) * c)) if limit and c > 0.0 else 1.0
        for f, v, c in zip(effort, velocity, damping, strict=True)
    ]
    return Drives(
        stiffness=tuple(s * s * k for s, k in zip(scale, stiffness, strict=True)),
        damping=tuple(s * c for s, c in zip(scale, damping, strict=True)),
        max_effort=tuple(effort),
    )


def make_scene(
    robot: Robot,
    drives: Drives,
    parts: Mapping[str, tuple[str, ...]],
    objects: tuple[RigidObject, ...],
    *,
    position: tuple[float, ...],
    rotation: tuple[float, ...],
    home: tuple[float, ...],
    gravity: tuple[float, ...],
    timestep: float,
    markers: tuple[str, ...] = (),
) -> Scene:
    """Compose the model.

    Args:
        position, rotation: the robot's base, m and degrees (intrinsic x y z).
        home: [joints].
        markers: names of discs that are drawn where a virtual target is.
    """
    root = ET.fromstring(_FRAME)
    _child(root, "option", gravity=_text(gravity), timestep=str(timestep))
    world = root.find("worldbody")
    if world is None:
        raise ValueError("the frame of a scene needs a worldbody")
    robot.body.set("pos", _text(position))
    robot.body.set("euler", _text(np.radians(rotation)))
    world.append(robot.body)
    actuators, pairs = ET.SubElement(root, "actuator"), ET.SubElement(root, "contact")
    for i, name in enumerate(robot.joints):
        joint = robot.body.find(f".//joint[@name='{name}']")
        if joint is None:
            raise ValueError(f"the robot's MJCF has no joint {name!r}")
        joint.set("damping", str(drives.damping[i]))
        bias, limit = f"0 {-drives.stiffness[i]} 0", f"{-drives.max_effort[i]} {drives.max_effort[i]}"
        drive = {"gainprm": "1", "biastype": "affine", "biasprm": bias, "forcelimited": "true", "forcerange": limit}
        ET.SubElement(actuators, "general", name=name, joint=name, **drive)
    for each in objects:
        for geom in _add_object(world, each):
            _add_pair(pairs, "floor", geom, each.friction)
        for geom in robot.hull:
            _add_pair(pairs, geom, each.uid, each.friction)
    for one, other in itertools.combinations(objects, 2):
        if one.dynamic or other.dynamic:
            _add_pair(pairs, one.uid, other.uid, (one.friction + other.friction) / 2.0)
    for name in markers:
        disc = ET.SubElement(world, "body", name=marker_name(name), mocap="true")
        visual = {"contype": "0", "conaffinity": "0", "material": "marker"}
        ET.SubElement(disc, "geom", type="cylinder", size="0.1 0.001", pos="0 0 -0.049", **visual)
    for geom in robot.feelers:
        _add_pair(pairs, "floor", geom, _FRICTION)
    return Scene(
        xml=ET.tostring(root, encoding="unicode"),
        joints=robot.joints,
        parts=tuple((name, tuple(robot.joints.index(joint) for joint in joints)) for name, joints in parts.items()),
        tool_part=robot.tool_part,
        drives=drives,
        home=home,
        objects=objects,
    )


def marker_name(key: str) -> str:
    """The body that is drawn where the target ``key`` is."""
    return f"target {key}"


def _read_object(data: Any, path: str, report: KeyReport, static: bool) -> RigidObject | None:
    with Section(data, path, report) as section:
        uid = section.take("uid")
        if not isinstance(uid, str):
            report.refuse(section.key("uid"), f"got {uid!r}; must be a name")
            return None
        with section.open("shape") as shape:
            kind, size = _read_shape(shape)
        body_type = section.take("body_type", "static" if static else "dynamic")
        if body_type not in ("dynamic", "static"):
            report.refuse(section.key("body_type"), f"got {body_type!r}; ejax has dynamic and static bodies")
        position = section.numbers("init_pos", (0.0, 0.0, 0.0), 3)
        rotation = section.numbers("init_rot", (0.0, 0.0, 0.0), 3)
        section.ignore("body_scale", "no effect: the shape's size says it") if _is_one(section) else section.refuse(
            "body_scale", "ejax scales no bodies: give the size in shape"
        )
        with section.open("attrs") as attrs:
            numbers = _read_attributes(attrs)
        if kind is None:
            return None
        return RigidObject(
            uid=uid,
            shape=kind,
            size=size,
            dynamic=body_type == "dynamic" and not static,
            position=position[:3],  # type: ignore[arg-type]  # three, by count
            rotation=tuple(np.radians(rotation).tolist()),  # type: ignore[arg-type]  # three, by count
            **numbers,
        )


def _is_one(section: Section) -> bool:
    return tuple(section.data.get("body_scale") or (1.0, 1.0, 1.0)) == (1.0, 1.0, 1.0)


def _read_shape(shape: Section) -> tuple[Any, tuple[float, ...]]:
    kind = shape.take("shape_type")
    shape.ignore("resolution", "no effect: shapes are exact")
    shape.ignore("visual_material", "no effect: ejax has its own colours")
    if kind in ("Cube", "Box"):
        return "box", tuple(edge / 2.0 for edge in shape.numbers("size", (1.0, 1.0, 1.0), 3))
    if kind == "Sphere":
        return "sphere", (shape.number("radius", 1.0, above=0.0),)
    if kind in ("Cylinder", "Capsule"):
        return kind.lower(), (shape.number("radius", 0.5, above=0.0), shape.number("height", 1.0, above=0.0) / 2.0)
    for name in shape.data:
        shape.ignore(name, "not read")
    text = "meshes are EmbodiChain's files, which ejax does not have; " if kind == "Mesh" else ""
    shape.report.refuse(shape.key("shape_type"), f"got {kind!r}; {text}allowed: Cube, Sphere, Cylinder, Capsule")
    return None, ()


def _read_attributes(attrs: Section) -> dict[str, float]:
    """Mass, friction and damping, flat as in EmbodiChain 0.2 or in groups as in 0.3."""
    groups = [attrs.open(name) for name in _ATTRIBUTE_GROUPS if name in attrs]

    def number(name: str, default: float, above: float) -> float:
        holder = next((group for group in groups if name in group), attrs)
        return holder.number(name, default, above=above)

    numbers = {
        "mass": number("mass", 1.0, 0.0),
        "linear_damping": number("linear_damping", 0.0, -1.0),
        "angular_damping": number("angular_damping", 0.05, -1.0),
    }
    material = next((group for group in groups if "dynamic_friction" in group or "static_friction" in group), attrs)
    if "dynamic_friction" not in material and "static_friction" in material:
        friction = material.number("static_friction", _FRICTION, above=-1.0)
    else:
        friction = material.number("dynamic_friction", _FRICTION, above=-1.0)
    numbers["friction"] = (friction + _FRICTION) / 2.0
    for section in (*groups, attrs):
        for name, text in _NO_COUNTERPART.items():
            if name != "static_friction" or "dynamic_friction" in section:
                section.ignore(name, text)
    for section in groups:
        section.close()
    return numbers


def _add_object(world: ET.Element, each: RigidObject) -> list[str]:
    """Adds the body; the geoms that meet the floor."""
    place = {"pos": _text(each.position), "euler": _text(each.rotation)}
    geom = {
        "name": each.uid,
        "type": each.shape,
        "size": _text(each.size),
        "mass": str(each.mass),
        "material": "object",
    }
    if not each.dynamic:
        body = ET.SubElement(world, "body", name=each.uid, **place)
        ET.SubElement(body, "geom", contype="0", conaffinity="0", **geom)
        return []
    body = ET.SubElement(world, "body", name=each.uid)  # at the origin: qpos then is the pose in the world
    for axis, name in enumerate("xyz"):
        direction = _text(np.eye(3)[axis])
        joint = {"type": "slide", "axis": direction, "damping": str(each.mass * each.linear_damping)}
        ET.SubElement(body, "joint", name=f"{each.uid}_{name}", **joint)
    turning = {"type": "ball", "damping": str(_mean_inertia(each) * each.angular_damping)}
    ET.SubElement(body, "joint", name=f"{each.uid}_turn", **turning)
    ET.SubElement(body, "geom", contype="0", conaffinity="0", **geom)
    if each.shape != "box":
        return [each.uid]
    radius = _CORNER * min(each.size)
    corners = []
    for i, signs in enumerate(itertools.product((-1.0, 1.0), repeat=3)):
        corner = {"type": "sphere", "size": str(radius), "mass": "0", "group": "3", "contype": "0", "conaffinity": "0"}
        corners.append(f"{each.uid}_corner_{i}")
        pos = _text(np.array(signs) * (np.array(each.size) - radius))
        ET.SubElement(body, "geom", name=corners[-1], pos=pos, **corner)
    return corners


def _mean_inertia(each: RigidObject) -> float:
    """Mean of the three moments of inertia, kg·m²."""
    if each.shape == "box":
        return each.mass * 2.0 * sum(half**2 for half in each.size) / 9.0
    if each.shape == "sphere":
        return 0.4 * each.mass * each.size[0] ** 2
    radius, half = each.size
    return each.mass * (0.5 * radius**2 + 2.0 * (radius**2 / 4.0 + half**2 / 3.0)) / 3.0


def _add_pair(pairs: ET.Element, one: str, other: str, friction: float) -> None:
    ET.SubElement(pairs, "pair", geom1=one, geom2=other, condim="3", friction=_text((friction, friction)))


def _child(root: ET.Element, tag: str, **attributes: str) -> None:
    child = root.find(tag)
    if child is None:
        raise ValueError(f"the frame of a scene needs <{tag}>")
    child.attrib.update(attributes)


def _text(numbers: Any) -> str:
    return " ".join(repr(float(number)) for number in numbers)


_FRAME = """
<mujoco model="scene">
  <compiler angle="radian" eulerseq="xyz"/>
  <option integrator="Euler" cone="pyramidal" solver="Newton" iterations="6" ls_iterations="10">
    <flag warmstart="disable"/>
  </option>
  <visual>
    <global offwidth="1920" offheight="1440"/>
    <quality shadowsize="4096" offsamples="8"/>
    <headlight ambient="0.22 0.22 0.24" diffuse="0.22 0.22 0.22" specular="0 0 0"/>
    <map znear="0.02"/>
  </visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.86 0.91 0.97" rgb2="0.45 0.55 0.68" width="256" height="1536"/>
    <texture name="floor" type="2d" builtin="checker" rgb1="0.74 0.77 0.80" rgb2="0.65 0.68 0.72" width="512" height="512"/>
    <material name="floor" texture="floor" texrepeat="2.5 2.5" texuniform="true" reflectance="0.06" specular="0.1"/>
    <material name="shell" rgba="0.78 0.80 0.83 1" specular="0.6" shininess="0.7" reflectance="0.05"/>
    <material name="steel" rgba="0.36 0.38 0.42 1" specular="0.7" shininess="0.8"/>
    <material name="accent" rgba="0.20 0.52 0.78 1" specular="0.5" shininess="0.6"/>
    <material name="rubber" rgba="0.09 0.09 0.10 1" specular="0.2" shininess="0.2"/>
    <material name="marker" rgba="0.15 0.75 0.38 0.6" specular="0.1" emission="0.3"/>
    <material name="object" rgba="0.93 0.49 0.13 1" specular="0.4" shininess="0.4"/>
  </asset>
  <worldbody>
    <light name="key" pos="-1.6 -2.2 2.8" dir="0.4 0.7 -1" directional="true" diffuse="0.6 0.58 0.55" specular="0.3 0.3 0.3"/>
    <light name="fill" pos="1.5 -1 2.5" dir="-0.6 0.3 -1" directional="true" castshadow="false" diffuse="0.14 0.15 0.18"/>
    <camera name="main" pos="-1.75 -1.5 1.05" xyaxes="0.669 -0.743 0 0.281 0.253 0.926"/>
    <geom name="floor" type="plane" size="0 0 0.05" material="floor" contype="0" conaffinity="0"/>
  </worldbody>
</mujoco>
"""
