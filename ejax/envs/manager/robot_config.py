"""``robot`` of a gym config: which of ejax's robots, how it is driven, where it stands."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ejax.envs.manager.bodies import Vector
from ejax.envs.manager.drives import Drives, matching_joints, read_drives
from ejax.envs.manager.ignored import IGNORED
from ejax.envs.manager.robots import UR_FAMILY, Matrix, Robot, make_cart_pole, make_ur
from ejax.schema.messages import short_repr
from ejax.schema.sections import Section

_ROBOT_REFUSED = {
    "qpos_limits": "joints have the limits of ejax's model",
    "body_scale": "ejax scales no robots",
    "sensors": "give a robot's cameras under sensor, with the link as extrinsics.parent",
    "init_local_pose": "give init_pos and init_rot instead",
    "fpath": "ejax reads no robot files; leave it out for ejax's model of this robot",
}
_ROBOTS = f"URRobot ({', '.join(UR_FAMILY)}), with or without DH_PGI_140_80; CartPole"
_FAR = 1e6
"""m: no tool is that far from its flange."""
_IDENTITY: Matrix = tuple(tuple(row) for row in np.eye(4).tolist())


@dataclass(frozen=True, kw_only=True)
class PlacedRobot:
    """A robot as the config sets it up."""

    robot: Robot
    uid: str
    drives: Drives
    position: Vector
    rotation: Vector
    """m; intrinsic Euler angles, rad."""
    home: tuple[float, ...]
    """[J]: ``init_qpos``."""


def read_robot(section: Section) -> PlacedRobot | None:
    """Read the robot. None: the report says why there is none."""
    uid = str(section.take("uid", "robot"))
    kind = str(section.take("robot_type", ""))
    arm, hand = _read_components(section)
    if kind.lower() in UR_FAMILY:
        arm = kind.lower()
    if kind == "URRobot" and arm is None:
        arm = "ur10"
    if arm is None or (kind and kind != "URRobot" and kind.lower() not in UR_FAMILY):
        _refuse_robot(section, kind)
        section.skip("its robot is not there")
        return None
    tcp = _read_tcp(section)
    robot = make_cart_pole() if arm == "cart_pole" else make_ur(arm, tcp, gripper=hand)
    robot = replace(robot, parts=_read_parts(section, robot))
    names = [name for name in ("drive_pros", "joint_drive_props") if name in section]
    if len(names) == 2:
        section.problem(names[0], f"means the same as {names[1]}, which is given too; keep one")
    with section.open(names[-1] if names else "drive_pros") as drives_section:
        drives = read_drives(drives_section, robot)
    position = section.numbers("init_pos", (0.0, 0.0, 0.0), 3)
    rotation = section.numbers("init_rot", (0.0, 0.0, 0.0), 3)
    home = section.numbers("init_qpos", (0.0,) * len(robot.joints), len(robot.joints))
    section.ignore_all(IGNORED["robot"])
    for name, text in _ROBOT_REFUSED.items():
        section.refuse(name, text)
    return PlacedRobot(
        robot=robot,
        uid=uid,
        drives=drives,
        position=(position[0], position[1], position[2]),
        rotation=(math.radians(rotation[0]), math.radians(rotation[1]), math.radians(rotation[2])),
        home=home,
    )


def _refuse_robot(section: Section, kind: str) -> None:
    """Report what is missing, or which robot has no model."""
    where = "fpath" if "fpath" in section else "robot_type"
    given = section.take(where, kind)
    if given:
        section.problem(where, f"ejax has no model of {given!r}; its robots: {_ROBOTS}")
    elif "urdf_cfg" in section:
        section.problem("urdf_cfg", f"names no arm of ejax's robots: {_ROBOTS}")
    elif section.data:
        section.problem(where, f"is missing; ejax's robots: {_ROBOTS}")
    else:
        section.report.refuse(section.path, f"is missing; give {{robot_type: …}}; ejax's robots: {_ROBOTS}")


def _read_components(section: Section) -> tuple[str | None, bool]:
    """The arm (a UR model or ``cart_pole``) that the URDF files name, and whether there is a gripper."""
    arm, hand = None, False
    with section.open("urdf_cfg") as urdf:
        components = urdf.take("components", ())
        if not isinstance(components, list | tuple):
            urdf.problem("components", f"got {short_repr(components)}; must be a list")
            components = ()
        for i, data in enumerate(components):
            with Section(data, urdf.key(f"components[{i}]"), section.report) as component:
                kind, path = component.take("component_type"), str(component.take("urdf_path", ""))
                if np.array_equal(component.data.get("transform") or _IDENTITY, _IDENTITY):
                    component.take("transform")
                component.refuse("transform", "ejax mounts the gripper on the flange as it is; give the identity")
                model = re.search(r"\b(ur(?:3|5|10)e?)\b", path.lower())
                if kind == "arm" and "cart_pole" in path.lower():
                    arm = "cart_pole"
                elif kind == "arm" and model:
                    arm = model.group(1)
                elif kind == "hand" and "DH_PGI_140_80" in path:
                    hand = True
                else:
                    text = f"ejax has no model of {kind} '{path}'; its robots: {_ROBOTS}"
                    component.problem("urdf_path", text)
        urdf.ignore_all(IGNORED["robot.urdf_cfg"])
    return arm, hand


def _read_tcp(section: Section) -> Matrix:
    """[4, 4] of ``solver_cfg.<part>.tcp``."""
    tcp = _IDENTITY
    with section.open("solver_cfg") as solvers:
        for part, data in solvers.items():
            with Section(data, solvers.key(str(part)), section.report) as solver:
                given = solver.take("tcp", _IDENTITY)
                solver.ignore_all(IGNORED["robot.solver_cfg.<part>"])
                pose = _as_pose(given)
                if pose is None:
                    solver.problem("tcp", f"got {short_repr(given)}; must be a pose, 4 rows of 4 numbers")
                elif part == "arm":
                    tcp = pose
    return tcp


def _as_pose(given: Any) -> Matrix | None:
    """4 rows of 4 numbers, a rotation without scaling in the first three; None: it is something else."""
    rows = given if isinstance(given, list | tuple) else ()
    if [len(row) for row in rows if isinstance(row, list | tuple)] != [4, 4, 4, 4] or len(rows) != 4:
        return None
    if not all(isinstance(x, int | float) and abs(x) < _FAR for row in rows for x in row):
        return None
    matrix = np.asarray(rows, dtype=float)
    turns = np.allclose(matrix[:3, :3] @ matrix[:3, :3].T, np.eye(3), atol=1e-4)
    return tuple(tuple(row) for row in matrix.tolist()) if turns else None


def _read_parts(section: Section, robot: Robot) -> dict[str, tuple[str, ...]]:
    """The robot's own parts, and those of ``control_parts`` over them: joint names or patterns."""
    parts = dict(robot.parts)
    with section.open("control_parts") as given:
        for part, names in given.items():
            key = given.key(str(part))
            if not isinstance(names, list | tuple) or not names:
                section.report.refuse(key, f"got {short_repr(names)}; must be a list of joints, by name or pattern")
                continue
            matched = {str(name): matching_joints(str(name), robot.joints) for name in names}
            missing = [name for name, joints in matched.items() if not joints]
            if missing:
                text = f"no joints {', '.join(missing)}; there is {', '.join(robot.joints)}"
                section.report.refuse(key, text)
            section.report.add(key, "used")
            parts[str(part)] = tuple(joint for joint in robot.joints if any(joint in each for each in matched.values()))
    return parts
