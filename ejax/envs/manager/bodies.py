"""Bodies of a gym config: ``rigid_object``, which move, ``background``, which never move, and ``robot``, with drives of
stiffness k and damping c, and limits F and v of each joint, scaled:

    s = min(1, F / (v·c)),    damping s·c,    stiffness s²·k

EmbodiChain limits the whole force of a drive; ours limits the spring, and damping acts in addition (``robots``). So
a joint turns at v at its force limit, and keeps its damping ratio c/(2·√(k·I)). v is at most the robot's own greatest
velocity. PushCube's 1e5, 1e3, 500, 2 become 6250 and 250.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ejax.envs.task.robots import (
    UR_FAMILY,
    Drives,
    Matrix,
    PlacedRobot,
    Robot,
    make_cart_pole,
    make_ur,
    matching_joints,
)
from ejax.envs.task.scene import DEFAULT_FRICTION, RigidObject
from ejax.envs.terms.vocabulary import IGNORED
from ejax.schema.messages import short_repr
from ejax.schema.sections import Section

_ROBOTS = f"URRobot ({', '.join(UR_FAMILY)}), with or without DH_PGI_140_80; CartPole"
_FAR = 1e6  # m: no tool is that far from its flange
_IDENTITY: Matrix = tuple(tuple(row) for row in np.eye(4).tolist())
_ATTRIBUTE_GROUPS = ("mass_props", "rigid_props", "collision_props", "material_props")


def read_objects(root: Section) -> Iterator[RigidObject]:
    """Read the entries of both lists."""
    for name in ("rigid_object", "background"):
        for section in root.listed(name):
            uid = section.take("uid")
            if not isinstance(uid, str):
                section.problem("uid", f"got {uid!r}; must be a name")
            with section.open("shape") as shape:
                kind, size = _read_shape(shape)
            body_type = section.take("body_type", "static" if name == "background" else "dynamic")
            if body_type not in ("dynamic", "static"):
                text = f"got {body_type!r}; ejax has dynamic and static bodies: its state holds no poses of other ones"
                section.problem("body_type", text)
            place = read_place(section)
            section.expect("body_scale", (1.0, 1.0, 1.0), "ejax scales no bodies: set the size in shape")
            section.ignore_all(IGNORED["rigid_object"])
            with section.open("attrs") as attrs:
                numbers = _read_attributes(attrs)
            if kind is not None:
                dynamic = body_type == "dynamic" and name != "background"
                yield RigidObject(uid=str(uid), shape=kind, size=size, dynamic=dynamic, **place, **numbers)


def read_place(section: Section) -> dict[str, Any]:
    """Read where a body stands: ``position``, m, and ``rotation``, intrinsic Euler angles, rad."""
    position = section.numbers("init_pos", (0.0, 0.0, 0.0), 3)
    angles = section.numbers("init_rot", (0.0, 0.0, 0.0), 3)
    section.refuse("init_local_pose", "use init_pos and init_rot instead")
    return {"position": position, "rotation": tuple(map(math.radians, angles))}


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
    shape.skip("its shape is missing")
    return None, ()


def _read_attributes(attrs: Section) -> dict[str, Any]:
    groups = [attrs.open(name) for name in _ATTRIBUTE_GROUPS if name in attrs]

    def holder(name: str) -> Section:
        return next((group for group in groups if name in group), attrs)

    friction = "dynamic_friction"
    # MuJoCo has one coefficient: that of sliding, if it is given
    if friction not in holder(friction) and "static_friction" in holder("static_friction"):
        friction = "static_friction"
    numbers: dict[str, Any] = {
        "collides": holder("enable_collision").flag("enable_collision", True),
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


def read_robot(section: Section) -> PlacedRobot | None:
    """Read the robot. None: the report has the reason."""
    uid = str(section.take("uid", "robot"))
    kind = str(section.take("robot_type", ""))
    arm, hand = _read_components(section)
    if kind.lower() in UR_FAMILY:
        arm = kind.lower()
    # the class of the whole family; its files say which
    elif kind == "URRobot":
        arm = arm or "ur10"
    elif kind:
        arm = None
    if arm is None:
        _refuse_robot(section, kind)
        section.skip("its robot is missing")
        return None
    tcp = _read_tcp(section)
    robot = make_cart_pole() if arm == "cart_pole" else make_ur(arm, tcp, gripper=hand)
    # before the drives, which may name parts
    robot = replace(robot, parts=_read_parts(section, robot))
    names = [name for name in ("drive_pros", "joint_drive_props") if name in section]
    if len(names) == 2:
        section.problem(names[0], f"means the same as {names[1]}, which is given too; keep one")
    with section.open(names[-1] if names else "drive_pros") as drives_section:
        drives = _read_drives(drives_section, robot)
    place = read_place(section)
    home = section.numbers("init_qpos", (0.0,) * len(robot.joints), len(robot.joints))
    section.ignore_all(IGNORED["robot"])
    section.refuse("qpos_limits", "joints have the limits of ejax's model")
    section.refuse("body_scale", "ejax scales no robots")
    section.refuse("sensors", "put a robot's cameras under sensor, with the link as extrinsics.parent")
    section.refuse("fpath", "ejax reads no robot files; leave it out for ejax's model of this robot")
    return PlacedRobot(robot=robot, drives=drives, home=home, uid=uid, **place)


def _refuse_robot(section: Section, kind: str) -> None:
    where = "fpath" if "fpath" in section else "robot_type"
    given = section.take(where, kind)
    if given:
        section.problem(where, f"ejax has no model of {given!r}; its robots: {_ROBOTS}")
    elif "urdf_cfg" in section:
        section.problem("urdf_cfg", f"names no arm of ejax's robots: {_ROBOTS}")
    elif section.data:
        section.problem(where, f"is missing; ejax's robots: {_ROBOTS}")
    else:
        section.report.refuse(section.path, f"is missing; set it to {{robot_type: …}}; ejax's robots: {_ROBOTS}")


def _read_components(section: Section) -> tuple[str | None, bool]:
    """Return the arm that the URDF files name (a UR model or ``cart_pole``), and whether there is a gripper."""
    arm, hand = None, False
    with section.open("urdf_cfg") as urdf:
        for component in urdf.listed("components"):
            kind, path = component.take("component_type"), str(component.take("urdf_path", ""))
            component.expect("transform", _IDENTITY, "ejax mounts the gripper on the flange; use the identity")
            model = re.search(r"\b(ur(?:3|5|10)e?)\b", path.lower())
            if kind == "arm" and "cart_pole" in path.lower():
                arm = "cart_pole"
            elif kind == "arm" and model:
                arm = model.group(1)
            elif kind == "hand" and "DH_PGI_140_80" in path:
                hand = True
            else:
                component.problem("urdf_path", f"ejax has no model of {kind} '{path}'; its robots: {_ROBOTS}")
        urdf.ignore_all(IGNORED["robot.urdf_cfg"])
    return arm, hand


def _read_tcp(section: Section) -> Matrix:
    tcp = _IDENTITY
    with section.open("solver_cfg") as solvers:
        for part, solver in solvers.sections():
            given = solver.take("tcp", _IDENTITY)
            solver.ignore_all(IGNORED["robot.solver_cfg.<part>"])
            if not _is_pose(given):
                solver.problem("tcp", f"got {short_repr(given)}; must be a pose, 4 rows of 4 numbers")
            elif part == "arm":
                tcp = tuple(tuple(map(float, row)) for row in given)
    return tcp


def _is_pose(given: Any) -> bool:
    rows = np.array(given, object)
    if rows.shape != (4, 4) or not all(isinstance(x, int | float) and abs(x) < _FAR for x in rows.flat):
        return False
    turn = rows[:3, :3].astype(float)
    return np.allclose(turn @ turn.T, np.eye(3), atol=1e-4)


def _read_parts(section: Section, robot: Robot) -> dict[str, tuple[str, ...]]:
    parts = dict(robot.parts)
    with section.open("control_parts") as given:
        for part, names in given.items():
            if not isinstance(names, list | tuple) or not names:
                given.problem(part, f"got {short_repr(names)}; must be a list of joints, by name or pattern")
                continue
            matched = {str(name): matching_joints(str(name), robot.joints) for name in names}
            if missing := [name for name, joints in matched.items() if not joints]:
                given.problem(part, f"no joints {', '.join(missing)}; there is {', '.join(robot.joints)}")
            given.note(part, "")
            parts[part] = tuple(joint for joint in robot.joints if any(joint in each for each in matched.values()))
    return parts


def _read_drives(section: Section, robot: Robot) -> Drives:
    stiffness = _per_joint(section, robot, "stiffness", dict.fromkeys(robot.joints, robot.stiffness))
    damping = _per_joint(section, robot, "damping", dict.fromkeys(robot.joints, robot.damping))
    effort = _per_joint(section, robot, "max_effort", robot.max_effort)
    velocity = _per_joint(section, robot, "max_velocity", dict.fromkeys(robot.joints, math.inf))
    section.expect("drive_type", "force", "ejax drives by force")
    section.ignore_all(IGNORED["robot.drive_pros"])
    # damping comes in addition to the limited spring: unscaled it would hold a joint below its velocity limit
    scale = [
        1.0 if robot.max_velocity is None or c == 0.0 else min(1.0, f / (min(v, robot.max_velocity) * c))
        for f, v, c in zip(effort, velocity, damping, strict=True)
    ]
    return Drives(
        stiffness=tuple(s * s * k for s, k in zip(scale, stiffness, strict=True)),
        damping=tuple(s * c for s, c in zip(scale, damping, strict=True)),
        max_effort=tuple(effort),
    )


def _per_joint(section: Section, robot: Robot, name: str, default: Mapping[str, float]) -> list[float]:
    value = section.take(name)
    given = value if isinstance(value, Mapping) else {} if value is None else {".*": value}
    chosen = dict(default)
    for pattern, number in given.items():
        key = f"{name}.{pattern}" if isinstance(value, Mapping) else name
        matched = robot.parts.get(pattern) or matching_joints(str(pattern), robot.joints)
        still = name == "max_velocity" and number == 0
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0 or still:
            section.problem(key, f"got {number!r}; must be a number {'>' if name == 'max_velocity' else '>='} 0")
            continue
        if not matched:
            section.problem(key, f"no such joint or control part; there is {', '.join([*robot.joints, *robot.parts])}")
        chosen |= dict.fromkeys(matched, float(number))
    return [chosen[joint] for joint in robot.joints]
