"""The robots and their tasks: a TOML file for each, ``envs/assets/robots/{robot}.toml``.

It has the fields of ``LeggedRobot`` and, under ``task``, those of ``VelocityTask``; ``false`` means None. Numbers
of joints are one for all, or by regular expression, of which the last that fits counts. ``task.like`` names the robot
whose task fills the gaps of this one; a reward of weight 0 is left out. In place of ``drives`` there may be ``motors``:

    k = I·ω²        c = 2ζ·I·ω        action scale = F / (4·k)

with I the rotors' ``inertia`` seen from the joint, F the greatest torque, ``effort``, ω = 20π rad/s, ζ = 2. Source:
mjlab 1.6, whose Go1 and G1 EmbodiChain 0.3.2 has.
"""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ejax.envs.locomotion.robots import Foot, Imu, JointDrives, LeggedRobot, Shape
from ejax.envs.locomotion.tasks import Push, Record, VelocityTask, check_names
from ejax.envs.task.entities import per_joint
from ejax.envs.terms.registry import find_functor
from ejax.schema.frozen import freeze
from ejax.schema.plain_files import read_text

_FOLDER = Path(__file__).parents[1] / "assets" / "robots"
_OMEGA = 2.0 * math.pi * 10.0
_ZETA = 2.0


@functools.cache
def robot_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob("[!.]*.toml")))


@functools.cache
def velocity_task(robot: str) -> VelocityTask:
    """Read a robot and its task. Raises ValueError: no such robot, or a key of its file that is unknown or missing."""
    if robot not in robot_names():
        raise ValueError(f"robot must be one of {', '.join(robot_names())}, got {robot!r}")
    return read_task(_FOLDER / f"{robot}.toml")


def read_task(path: Path) -> VelocityTask:
    """Read a robot's file. Raises OSError: as ``plain_files.read_text``. ValueError: no TOML, or a wrong key."""
    table, task = _tables(path)
    kinds: dict[str, Any] = {"command": find_functor("commands", "velocity"), "push": Push}
    for name, kind in kinds.items():
        if isinstance(task.get(name), dict):
            task[name] = _filled(kind, task[name], f"{path}: task.{name}")
    # after merging: a robot that is like another leaves its terms out by weight 0
    rewards = {name: spec for name, spec in task.get("rewards", {}).items() if spec.get("weight")}
    made = {**task, "robot": _robot(path, table), "rewards": rewards}
    return _filled(VelocityTask, made, f"{path}: task")


def _tables(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the tables of a robot and of its task, whose gaps the one that it is like has filled."""
    try:
        robot = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    own = robot.pop("task", {})
    like = own.pop("like", None)
    if like is None:
        return robot, own
    other = path.with_name(f"{like}.toml")
    if not other.is_file():
        raise ValueError(f"{path}: task.like must name a robot that has a file next to it, got {like!r}")
    return robot, _merged(_tables(other)[1], own, depth=2)


def _merged(old: dict[str, Any], new: dict[str, Any], depth: int) -> dict[str, Any]:
    """Merge the tables; ``new`` counts, but tables in both are merged themselves, down to ``depth``."""
    deeper = {
        name: _merged(old[name], value, depth - 1)
        for name, value in new.items()
        if depth and isinstance(value, dict) and isinstance(old.get(name), dict)
    }
    return {**old, **new, **deeper}


def _robot(path: Path, table: dict[str, Any]) -> LeggedRobot:
    joints = tuple(table.get("joints", ()))
    motors, drives = table.pop("motors", None), table.get("drives", {})
    by_joint = {name: _of_joints(joints, each) for name, each in drives.items()}
    made: dict[str, Any] = {
        "name": path.stem,
        "home": _of_joints(joints, table.get("home", 0.0)),
        "drives": _motor_drives(joints, **motors) if motors else _filled(JointDrives, by_joint, f"{path}: drives"),
        "feet": tuple(_filled(Foot, each, f"{path}: feet") for each in table.get("feet", ())),
        "shapes": tuple(_filled(Shape, each, f"{path}: shapes") for each in table.get("shapes", ())),
        "imu": _filled(Imu, table["imu"], f"{path}: imu") if "imu" in table else None,
    }
    return _filled(LeggedRobot, {**table, **made}, str(path))


def _motor_drives(joints: tuple[str, ...], inertia: Any, effort: Any) -> JointDrives:
    """Drives of motors. ``inertia``: kg·m², ``effort``: N·m."""
    armature, limit = _of_joints(joints, inertia), _of_joints(joints, effort)
    stiffness = tuple(each * _OMEGA**2 for each in armature)
    return JointDrives(
        armature=armature,
        max_effort=limit,
        stiffness=stiffness,
        damping=tuple(2.0 * _ZETA * each * _OMEGA for each in armature),
        action_scale=tuple(0.25 * f / k for f, k in zip(limit, stiffness, strict=True)),
    )


def _of_joints(joints: tuple[str, ...], given: Any) -> tuple[float, ...]:
    return per_joint(joints, given if isinstance(given, Mapping) else {".*": given})


def _filled(kind: type[Record], table: Mapping[str, Any], where: str) -> Record:
    check_names(where, table, [field.name for field in fields(kind)])
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in needed if name not in table]:
        raise ValueError(f"{where} gives no {', '.join(missing)}")
    return kind(**{name: None if value is False else freeze(value) for name, value in table.items()})
