"""Velocity tasks: commands, observations, rewards, disturbances, and the limits of a fall."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flax.core import FrozenDict

from ejax.envs.locomotion.commands import CommandRanges, Range
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.envs.locomotion.terms import REWARDS
from ejax.envs.task.entities import per_joint
from ejax.schema.frozen import freeze
from ejax.schema.registry import did_you_mean

_AXES = ("x", "y", "z", "roll", "pitch", "yaw")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Sudden changes of the base's velocity, all in the world's frame, each axis uniform."""

    interval: Range = (1.0, 3.0)
    """s, uniform."""
    x: Range = (-0.5, 0.5)
    y: Range = (-0.5, 0.5)
    z: Range = (-0.4, 0.4)
    """m/s"""
    roll: Range = (-0.52, 0.52)
    pitch: Range = (-0.52, 0.52)
    yaw: Range = (-0.78, 0.78)
    """rad/s"""

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high = getattr(self, field.name)
            if low > high or (field.name == "interval" and low <= 0.0):
                raise ValueError(f"push.{field.name} must be [lowest, highest], got {[low, high]}")

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(getattr(self, axis) for axis in _AXES)


@dataclass(frozen=True, kw_only=True)
class VelocityTask:
    """A task of one robot. ``rewards``: term -> its weight, per second, and its parameters."""

    robot: LeggedRobot
    command: CommandRanges
    actor: tuple[str, ...]
    critic: tuple[str, ...]
    """Terms of the observations ``policy`` and ``critic``."""
    noise: Mapping[str, float]
    """Term of the actor's observation -> half the width of the uniform noise on it."""
    encoder_bias: float
    """rad: half the width of the joint positions' error, drawn for an episode."""
    rewards: Mapping[str, Mapping[str, Any]]
    push: Push | None = None
    drop: Range = (0.0, 0.0)
    """m: how much higher than at rest an episode starts."""
    spread: float = 0.5
    """m: an episode starts at x and y within ± this."""
    turn: float = math.pi
    """rad: an episode starts looking within ± this of the world's x."""
    max_tilt: float | None = math.radians(70.0)
    """rad: an episode ends beyond it. None: never."""
    max_guarded_force: float | None = None
    """N: an episode ends when a guarded geom touches the ground with more. None: never."""
    min_height: float | None = None
    """m: an episode ends when the base is lower. None: never."""
    phase_period: float = 0.6
    """s, of the gait that is observed."""
    timestep: float = 0.005
    """s, of a physics step."""
    sim_steps_per_control: int = 4


def change_task(
    task: VelocityTask,
    *,
    command: Mapping[str, Any],
    rewards: Mapping[str, Any],
    noise: Mapping[str, Any],
    push: Mapping[str, Any] | None,
) -> VelocityTask:
    """Change numbers of the task; what is not named stays. ``rewards``: term -> {weight, parameter: …}; weight 0 takes
    the term out. ``push`` None: no pushes. Raises ValueError: an unknown name, or a value that cannot be."""
    _check_names("command", command, [field.name for field in fields(CommandRanges)])
    _check_names("noise", noise, task.actor)
    _check_names("rewards", rewards, REWARDS)
    _check_names("push", push or {}, [field.name for field in fields(Push)])
    merged = {name: {**task.rewards.get(name, {}), **_as_mapping(name, change)} for name, change in rewards.items()}
    kept = {name: spec for name, spec in {**task.rewards, **merged}.items() if spec.get("weight")}
    for name, spec in kept.items():
        _check_reward(task.robot, name, spec)
    return replace(
        task,
        command=replace(task.command, **_as_ranges("command", command)),
        rewards=freeze(kept),
        noise=FrozenDict({**task.noise, **noise}),
        push=None if push is None else replace(task.push or Push(), **_as_ranges("push", push)),
    )


def _check_names(where: str, given: Mapping[str, Any], allowed: Any) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{where} has no '{name}'; there is {', '.join(allowed)}{did_you_mean(name, allowed)}")


def _check_reward(robot: LeggedRobot, name: str, spec: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(REWARDS[name]).parameters.values())[1:]
    _check_names(f"rewards.{name}", spec, ["weight", *(each.name for each in parameters)])
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in spec]
    if missing:
        raise ValueError(f"rewards.{name} needs {', '.join(missing)}")
    for parameter, value in spec.items():
        if isinstance(value, Mapping) and 0.0 in per_joint(robot.joints, value):
            raise ValueError(f"rewards.{name}.{parameter} must give a number > 0 for each joint")


def _as_mapping(name: str, change: Any) -> Mapping[str, Any]:
    if not isinstance(change, Mapping):
        raise ValueError(f"rewards.{name} must be {{weight: …, parameter: …}}, got {change!r}")
    return change


def _as_ranges(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        pair = isinstance(value, list | tuple) and len(value) == 2
        single = name in ("standing", "heading", "forward", "heading_stiffness")
        if pair == single or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):
            wanted = "a number" if single else "two numbers, [lowest, highest]"
            raise ValueError(f"{where}.{name} must be {wanted}, got {value!r}")
    return {
        name: tuple(float(each) for each in value) if isinstance(value, list | tuple) else float(value)
        for name, value in given.items()
    }
