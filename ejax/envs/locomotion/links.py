"""A robot's links from any MJCF or URDF, in the form that ``model.py`` builds on: one tree of bodies, geoms with names.
Left out: meshes, and all that is no body, joint or geom; equalities and tendons, which hold joints, are refused.
Collision geoms are called ``{link}_{number}_collision``,
unless their names end in ``_collision``. The root gets the base's name and a free joint. Links on fixed joints
of a URDF become part of their parents."""

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

import mujoco
import numpy as np

from ejax.envs.locomotion.robots import LeggedRobot, Shape
from ejax.envs.mujoco.models import check_model_files
from ejax.schema.messages import shorten

COLLISION = re.compile(r".*_collision\d*")
_NOT_LINKS = (
    *("sensors", "actuators", "keys", "excludes", "pairs", "equalities", "tendons", "cameras", "lights", "sites"),
    *("hfields", "skins", "flexes", "textures", "texts", "tuples", "numerics"),
)
_SHAPES = {
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "capsule": mujoco.mjtGeom.mjGEOM_CAPSULE,
}
_MESHES = (mujoco.mjtGeom.mjGEOM_MESH, mujoco.mjtGeom.mjGEOM_SDF, mujoco.mjtGeom.mjGEOM_HFIELD)


def read_links(path: Path, robot: LeggedRobot) -> ET.Element:
    """Read the file as MJCF: defaults, and a world with nothing but the robot. Raises ValueError: the file cannot be
    read, lacks what the robot needs, or has joints that the robot has not."""
    check_model_files(path)
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ValueError(f"model: MuJoCo does not read {path} as MJCF or URDF: {error}") from error
    _check_names(spec, robot, path)
    base = _root_of(spec.joint(robot.joints[0]))
    base.name = robot.base
    # URDFs have inertias that no body can have, or none; an MJCF may leave them to its meshes
    if path.suffix.lower() == ".urdf":
        _mend_inertia(spec)
    else:
        _refuse_mass_of_meshes(spec, path)
    _drop_all_but_links(spec)
    for shape in robot.shapes:
        _add_shape(spec, shape)
    _name_collision_geoms(spec)
    # URDFs and MJCFs of arms alone are fixed to the world
    if not any(joint.type == mujoco.mjtJoint.mjJNT_FREE for joint in base.joints):
        base.add_freejoint(name=f"{robot.base}_free")
    try:
        spec.compile()
        root = ET.fromstring(spec.to_xml())
    except ValueError as error:
        raise ValueError(f"model: MuJoCo does not compile {path} without its meshes: {error}") from error
    # after compiling, which fuses a URDF's links on fixed joints with their parents
    there = [body.get("name", "") for body in root.iter("body")]
    _refuse(f"{path} has as a part of another link", _bodies(robot) - set(there), robot, there)
    return _set_apart(root, robot.base)


def _bodies(robot: LeggedRobot) -> set[str]:
    return {robot.upright, *(foot.body for foot in robot.feet), *([robot.imu.body] if robot.imu else [])}


def _check_names(spec: mujoco.MjSpec, robot: LeggedRobot, path: Path) -> None:
    joints = [joint.name for joint in spec.joints if joint.type != mujoco.mjtJoint.mjJNT_FREE]
    bodies = [body.name for body in spec.bodies if body.name != "world"]
    _refuse(f"{path} has no joint", set(robot.joints) - set(joints), robot, joints)
    _refuse(f"{path} has no body", _bodies(robot) - set(bodies) - {robot.base}, robot, bodies)
    more = [name for name in joints if name not in robot.joints]
    odd = [
        joint.name
        for joint in map(spec.joint, robot.joints)
        if joint.type != mujoco.mjtJoint.mjJNT_HINGE or joint.range[0] >= joint.range[1]
    ]
    if held := [*spec.equalities, *spec.tendons]:
        which = shorten(", ".join(each.name or type(each).__name__.removeprefix("Mjs").lower() for each in held))
        raise ValueError(f"model: {path} has {which}: robots have no equalities and tendons here; remove them")
    for names, what in ((more, f"no drive of {robot.name} moves"), (odd, "are no hinges with a range")):
        if names:
            text = f"{path} has joints that {what}: {', '.join(names)}"
            raise ValueError(f"model: {shorten(text)}")


def _refuse(what: str, names: Iterable[str], robot: LeggedRobot, there: Iterable[str]) -> None:
    if names := sorted(names):
        text = f"{what} {', '.join(names)}, which {robot.name} needs; it has {', '.join(there)}"
        raise ValueError(f"model: {shorten(text)}")


def _root_of(joint: mujoco.MjsJoint) -> mujoco.MjsBody:
    body = joint.parent
    while body.parent.name != "world":
        body = body.parent
    return body


def _refuse_mass_of_meshes(spec: mujoco.MjSpec, path: Path) -> None:
    massless = [
        body.name
        for body in spec.bodies
        if not body.explicitinertial
        and any(geom.type in _MESHES and geom.mass != 0.0 and geom.density != 0.0 for geom in body.geoms)
    ]
    if massless:
        text = f"{path} has bodies whose mass comes from meshes, which are left out: {', '.join(massless)}"
        raise ValueError(f"model: {shorten(text)}; give each an inertial")


def _drop_all_but_links(spec: mujoco.MjSpec) -> None:
    for kind in _NOT_LINKS:
        for each in list(getattr(spec, kind)):
            spec.delete(each)
    for material in spec.materials:
        material.textures = [""] * len(material.textures)
    for geom in list(spec.geoms):
        if geom.type in _MESHES:
            spec.delete(geom)
    for mesh in list(spec.meshes):
        spec.delete(mesh)


def _add_shape(spec: mujoco.MjSpec, shape: Shape) -> None:
    size = [*shape.size, *[0.0] * (3 - len(shape.size))]
    place = {"fromto": list(shape.place)} if len(shape.place) == 6 else {"pos": list(shape.place)}
    spec.body(shape.body).add_geom(name=f"{shape.name}_0_collision", type=_SHAPES[shape.kind], size=size, **place)


def _name_collision_geoms(spec: mujoco.MjSpec) -> None:
    for body in spec.bodies:
        collide = [geom for geom in body.geoms if geom.contype or geom.conaffinity]
        for i, geom in enumerate(collide):
            if not COLLISION.fullmatch(geom.name):
                geom.name = f"{body.name}_{i}_collision"


def _mend_inertia(spec: mujoco.MjSpec) -> None:
    """Make inertias that no body can have those of a ball, as ``balanceinertia`` does."""
    for body in spec.bodies:
        xx, yy, zz, xy, xz, yz = body.fullinertia
        if not body.explicitinertial:
            for geom in body.geoms:  # MuJoCo would fill it with water
                geom.mass = 0.0
        if np.isnan(xx):
            continue
        small, middle, large = np.linalg.eigvalsh([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
        if small <= 0.0 or small + middle < large:
            body.fullinertia = [(xx + yy + zz) / 3.0] * 3 + [0.0] * 3


def _set_apart(root: ET.Element, base: str) -> ET.Element:
    """Name the file's own defaults, so that they are its links' alone; drop its limits of forces and its materials."""
    for defaults in root.findall("default"):
        defaults.attrib = {"class": "links"}
        root.remove(defaults)
        ET.SubElement(root, "default").append(defaults)
    for body in root.findall(f"worldbody/body[@name='{base}']"):
        if root.find("default") is not None and not body.get("childclass"):
            body.set("childclass", "links")
    for element in root.iter():
        # the drives have limits of their own, and colours are the scene's
        for name in ("material", "actuatorfrcrange", "actuatorfrclimited"):
            element.attrib.pop(name, None)
    return root
