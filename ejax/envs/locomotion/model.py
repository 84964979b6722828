"""The MuJoCo model of a legged robot on the ground: its links, its drives, and a sensor for each contact that counts.

Contacts are the floor with every collision geom of the robot, and the robot's listed pairs with each other. Only the
feet have friction. Each geom of a foot, each guarded geom and each listed pair has a contact sensor:

    (number of contacts, force in the contact's frame [3], normal [3], tangent [3]) for each place, largest force first

Sensors lag one physics step behind the state; ``ejax.envs.locomotion.motion`` does not.
The ground is ``ejax.envs.locomotion.terrain``'s.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import mujoco
import numpy as np

from ejax.envs.locomotion.robots import FILE, LeggedRobot, robot_file
from ejax.envs.locomotion.terrain import Terrain, add_terrain
from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.models import check_model_files
from ejax.envs.task.mjcf import find_child
from ejax.schema.messages import shorten

_CONTACT_DATA = ("found", "force", "normal", "tangent")
PLACE_WIDTH = 10  # Numbers of a contact sensor for each of its places


@dataclass(frozen=True, kw_only=True)
class LeggedModel:
    xml: str
    joint_qpos: tuple[int, ...]  # The policy's joints, in its order, which is the actuators' order too
    joint_qvel: tuple[int, ...]  # likewise
    upright: int
    feet: tuple[int, ...]  # Bodies
    foot_sensors: tuple[tuple[int, ...], ...]  # For each foot, where the places of its sensors begin in ``sensordata``
    guarded_sensors: tuple[int, ...]
    self_sensors: tuple[int, ...]
    unwanted_sensors: tuple[tuple[int, ...], ...] = ()
    imu: int = 0  # Body; the world, where the base's velocity is observed

    @property
    def model(self) -> mujoco.MjModel:
        return load_model(self.xml)


@functools.lru_cache(maxsize=16)
def make_legged_model(robot: LeggedRobot, terrain: Terrain, timestep: float) -> LeggedModel:
    """Compose the model; ``timestep``, s, is of a physics step. Raises ModuleNotFoundError: the package that has the
    robot's links is not installed. ValueError: no package has them, or the file lacks something."""
    root = ET.parse(robot_file("scene.xml")).getroot()
    source = _read(robot)
    solver = {"integrator": "implicitfast", "iterations": "10", "ls_iterations": "20"}
    find_child(root, "option").attrib |= {"timestep": str(timestep), **solver}
    world = find_child(root, "worldbody")
    add_terrain(root, terrain)
    find_child(root, "compiler").attrib |= {"autolimits": "true"}
    root.extend(source.findall("default"))
    base = find_child(source, f"worldbody/body[@name='{robot.base}']")
    # the drawn model stands; an episode's qpos says where it starts
    base.set("pos", f"0 0 {robot.height}")
    geoms = _prepare_links(base, robot)
    away = max(1.0, robot.height / 0.4)  # so that a tall robot's feet are in the picture too
    place = f"{-0.9 * away} {-0.9 * away} {0.4 * away}"
    camera = {"name": "main", "mode": "track", "pos": place, "xyaxes": "0.707 -0.707 0 0.22 0.22 0.95"}
    world.remove(find_child(world, "camera[@name='ejax overview']"))
    ET.SubElement(base, "camera", camera)
    world.append(base)
    _add_drives(root, base, robot)
    sensors = _add_sensors(root, robot, geoms)
    xml = ET.tostring(root, encoding="unicode")
    model = load_model(xml)
    # of the compiled model: the file's order of joints need not be the policy's
    joints = [model.joint(name) for name in robot.joints]
    return LeggedModel(
        xml=xml,
        joint_qpos=tuple(int(joint.qposadr[0]) for joint in joints),
        joint_qvel=tuple(int(joint.dofadr[0]) for joint in joints),
        upright=model.body(robot.upright).id,
        feet=tuple(model.body(foot.body).id for foot in robot.feet),
        foot_sensors=tuple(_places(model, names) for names in sensors["feet"]),
        guarded_sensors=_places(model, sensors["guarded"][0]),
        self_sensors=_places(model, sensors["self"][0]),
        unwanted_sensors=tuple(_places(model, names) for names in sensors["unwanted"]),
        imu=model.body(robot.imu.body).id if robot.imu else 0,
    )


def _read(robot: LeggedRobot) -> ET.Element:
    if robot.source is None:
        remedy = f"set model to the path of an MJCF or URDF with the joints {', '.join(robot.joints)}"
        raise ValueError(f"no known package has a model of {robot.name}: {remedy}")
    path = robot_file(robot.source)
    if robot.source.startswith(FILE) or path.suffix == ".urdf":
        return read_links(path, robot)
    return ET.parse(path).getroot()


def _prepare_links(base: ET.Element, robot: LeggedRobot) -> list[str]:
    bare = all(_is_mesh(geom) or COLLISION.fullmatch(geom.get("name", "")) for geom in base.iter("geom"))
    for parent in list(base.iter("body")):
        for tag in ("light", "camera"):
            for each in parent.findall(tag):
                parent.remove(each)
        for geom in parent.findall("geom"):
            if _is_mesh(geom):
                parent.remove(geom)
    names = []
    for geom in base.iter("geom"):
        name = geom.get("name", "")
        if not COLLISION.fullmatch(name):
            continue
        names.append(name)
        is_foot = any(re.fullmatch(foot.geoms, name) for foot in robot.feet)
        # with the floor only: its contype meets their conaffinity, and theirs meet nothing
        geom.attrib |= {"contype": "0", "conaffinity": "1", "condim": "3" if is_foot else "1", "solref": "0.01 1"}
        if is_foot:
            geom.attrib |= {"friction": f"{robot.friction} 0.005 0.0001", "priority": "1"}
        if bare:
            geom.attrib |= {"group": "1", "material": "rubber" if is_foot else "shell"}
    return names


def _is_mesh(geom: ET.Element) -> bool:
    return bool(geom.get("mesh") or geom.get("class") == "visual")


def _add_drives(root: ET.Element, base: ET.Element, robot: LeggedRobot) -> None:
    drives = robot.drives
    actuators = ET.SubElement(root, "actuator")
    for i, name in enumerate(robot.joints):
        find_child(base, f".//joint[@name='{name}']").set("armature", repr(drives.armature[i]))
        limit = drives.max_effort[i]
        drive = {"kp": repr(drives.stiffness[i]), "kv": repr(drives.damping[i]), "forcerange": f"{-limit} {limit}"}
        ET.SubElement(actuators, "position", drive, name=name, joint=name)


def _add_sensors(root: ET.Element, robot: LeggedRobot, geoms: list[str]) -> dict[str, list[list[str]]]:
    """Contact sensors and the pairs that need one; their names, for each foot, and for all the others together."""
    sensors, pairs = ET.SubElement(root, "sensor"), ET.SubElement(root, "contact")

    def add(one: str, other: str, contacts: int) -> str:
        spec = {"num": str(contacts), "data": " ".join(_CONTACT_DATA), "reduce": "maxforce"}
        name = f"{one} on {other}"
        ET.SubElement(sensors, "contact", spec, name=name, geom1=other, geom2=one)
        return name

    feet = [[add(name, "floor", foot.contacts) for name in _like(foot.geoms, geoms)] for foot in robot.feet]
    # one sensor of a geom serves both: where it is guarded, and where it shall not touch
    guards = {name: add(name, "floor", 1) for name in _like(robot.guarded, geoms)} if robot.guarded else {}
    touching = []
    for left, right in robot.self_contacts:
        for one, other in itertools.product(_like(left, geoms), _like(right, geoms)):
            ET.SubElement(pairs, "pair", geom1=one, geom2=other, condim="1")
            touching.append(add(one, other, 1))
    unwanted = [[guards.get(name) or add(name, "floor", 1) for name in _like(part, geoms)] for part in robot.unwanted]
    return {"feet": feet, "guarded": [list(guards.values())], "self": [touching], "unwanted": unwanted}


def _like(pattern: str, geoms: list[str]) -> list[str]:
    if found := [name for name in geoms if re.fullmatch(pattern, name)]:
        return found
    has = f"it has {', '.join(geoms)}" if geoms else "it has none but meshes"
    raise ValueError(f"model: no collision geom matches '{pattern}'; {has}")


def _places(model: mujoco.MjModel, names: list[str]) -> tuple[int, ...]:
    starts = [(int(model.sensor(name).adr[0]), int(model.sensor(name).dim[0])) for name in names]
    return tuple(place for start, size in starts for place in range(start, start + size, PLACE_WIDTH))


COLLISION = re.compile(r".*_collision\d*")
_NOT_LINKS = (
    *("sensors", "actuators", "keys", "excludes", "pairs", "equalities", "tendons", "cameras", "lights", "sites"),
    *("hfields", "skins", "flexes", "textures", "texts", "tuples", "numerics"),
)
_MESHES = (mujoco.mjtGeom.mjGEOM_MESH, mujoco.mjtGeom.mjGEOM_SDF, mujoco.mjtGeom.mjGEOM_HFIELD)


def read_links(path: Path, robot: LeggedRobot) -> ET.Element:
    """Read the file as MJCF: defaults, and a world with nothing but the robot. Raises ValueError: the file cannot be
    read, lacks what the robot needs, or has joints that the robot has not."""
    check_model_files(path)
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ValueError(f"model: MuJoCo cannot read {path} as MJCF or URDF: {error}") from error
    _check_names(spec, robot, path)
    base = spec.joint(robot.joints[0]).parent
    while base.parent.name != "world":
        base = base.parent
    base.name = robot.base
    # URDFs have inertias that no body can have, or none; an MJCF may leave them to its meshes
    if path.suffix.lower() == ".urdf":
        _mend_inertia(spec)
    else:
        _refuse_mass_of_meshes(spec, path)
    _drop_all_but_links(spec)
    for shape in robot.shapes:
        kind = getattr(mujoco.mjtGeom, f"mjGEOM_{shape.kind.upper()}")
        size = [*shape.size, *[0.0] * (3 - len(shape.size))]
        place = {"fromto": list(shape.place)} if len(shape.place) == 6 else {"pos": list(shape.place)}
        spec.body(shape.body).add_geom(name=f"{shape.name}_0_collision", type=kind, size=size, **place)
    _name_collision_geoms(spec)
    # URDFs and MJCFs of arms alone are fixed to the world
    if not any(joint.type == mujoco.mjtJoint.mjJNT_FREE for joint in base.joints):
        base.add_freejoint(name=f"{robot.base}_free")
    try:
        spec.compile()
        root = ET.fromstring(spec.to_xml())
    except ValueError as error:
        raise ValueError(f"model: MuJoCo cannot compile {path} without its meshes: {error}") from error
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
    hinge, needed = mujoco.mjtJoint.mjJNT_HINGE, map(spec.joint, robot.joints)
    odd = [joint.name for joint in needed if joint.type != hinge or joint.range[0] >= joint.range[1]]
    if held := [*spec.equalities, *spec.tendons]:
        which = shorten(", ".join(each.name or type(each).__name__.removeprefix("Mjs").lower() for each in held))
        raise ValueError(f"model: {path} has {which}: equalities and tendons are not supported here; remove them")
    for names, what in ((more, f"no drive of {robot.name} moves"), (odd, "are not hinges with a range")):
        if names:
            text = f"{path} has joints that {what}: {', '.join(names)}"
            raise ValueError(f"model: {shorten(text)}")


def _refuse(what: str, names: Iterable[str], robot: LeggedRobot, there: Iterable[str]) -> None:
    if names := sorted(names):
        text = f"{what} {', '.join(names)}, which {robot.name} needs; it has {', '.join(there)}"
        raise ValueError(f"model: {shorten(text)}")


def _refuse_mass_of_meshes(spec: mujoco.MjSpec, path: Path) -> None:
    massless = [
        body.name
        for body in spec.bodies
        if not body.explicitinertial
        and any(geom.type in _MESHES and geom.mass != 0.0 and geom.density != 0.0 for geom in body.geoms)
    ]
    if massless:
        text = f"{path} has bodies whose mass comes from meshes, which are left out: {', '.join(massless)}"
        raise ValueError(f"model: {shorten(text)}; add an inertial to each")


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
        # the drives set their own limits, and the scene sets colours
        for name in ("material", "actuatorfrcrange", "actuatorfrclimited"):
            element.attrib.pop(name, None)
    return root
