"""Drives of a gym config (stiffness k, damping c, limits F and v of each joint) as drives of a robot of ours.

    s = min(1, F / (v·c)),    damping s·c,    stiffness s²·k

EmbodiChain limits the whole force of a drive; ours limits the spring, and the damping acts in addition, see ``robots``.
Scaled like this a joint turns at v at its force limit, and its damping ratio c/(2·√(k·I)) stays as configured. v is at
most the robot's own greatest velocity. PushCube's 1e5, 1e3, 500, 2 become 6250 and 250.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ejax.envs.manager.ignored import IGNORED
from ejax.envs.manager.robots import Robot
from ejax.schema.sections import Section


@dataclass(frozen=True, kw_only=True)
class Drives:
    """Per joint, after the scaling. N·m/rad, N·m·s/rad, N·m; N/m, N·s/m, N for sliding joints."""

    stiffness: tuple[float, ...]
    damping: tuple[float, ...]
    max_effort: tuple[float, ...]


def read_drives(section: Section, robot: Robot) -> Drives:
    """``drive_pros`` or ``joint_drive_props``: numbers for all joints, or by joint name, pattern or control part."""
    stiffness = _per_joint(section, robot, "stiffness", dict.fromkeys(robot.joints, robot.stiffness))
    damping = _per_joint(section, robot, "damping", dict.fromkeys(robot.joints, robot.damping))
    effort = _per_joint(section, robot, "max_effort", robot.max_effort)
    velocity = _per_joint(section, robot, "max_velocity", dict.fromkeys(robot.joints, math.inf))
    if section.take("drive_type", "force") != "force":
        text = f"got {section.data['drive_type']!r}; ejax drives by force"
        section.problem("drive_type", text)
    section.ignore_all(IGNORED["robot.drive_pros"])
    scale = [_scale(robot, f, v, c) for f, v, c in zip(effort, velocity, damping, strict=True)]
    return Drives(
        stiffness=tuple(s * s * k for s, k in zip(scale, stiffness, strict=True)),
        damping=tuple(s * c for s, c in zip(scale, damping, strict=True)),
        max_effort=tuple(effort),
    )


def matching_joints(pattern: str, joints: Iterable[str]) -> list[str]:
    """Joints by name or regular expression, in any case: EmbodiChain's releases have JOINT1 and Joint1."""
    try:
        return [each for each in joints if re.fullmatch(pattern, each, re.IGNORECASE)]
    except re.error:
        return []


def _scale(robot: Robot, effort: float, velocity: float, damping: float) -> float:
    if robot.max_velocity is None or damping == 0.0:
        return 1.0
    return min(1.0, effort / (min(velocity, robot.max_velocity) * damping))


def _per_joint(section: Section, robot: Robot, name: str, default: Mapping[str, float]) -> list[float]:
    """One value for each joint; a later entry of a mapping wins."""
    value = section.take(name)
    given = value if isinstance(value, Mapping) else {} if value is None else {".*": value}
    chosen = dict(default)
    for pattern, number in given.items():
        key = section.key(f"{name}.{pattern}") if isinstance(value, Mapping) else section.key(name)
        matched = robot.parts.get(pattern) or matching_joints(str(pattern), robot.joints)
        still = name == "max_velocity" and number == 0
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0 or still:
            section.report.refuse(key, f"got {number!r}; must be a number {'>' if name == 'max_velocity' else '>='} 0")
            continue
        if not matched:
            there = ", ".join([*robot.joints, *robot.parts])
            section.report.refuse(key, f"no such joint or control part; there is {there}")
        chosen |= dict.fromkeys(matched, float(number))
    return [chosen[joint] for joint in robot.joints]
