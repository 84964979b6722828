"""Velocity tasks of legged robots, and a TOML file for each robot and its task, ``envs/assets/robots/{robot}.toml``.

It has the fields of ``LeggedRobot`` and, under ``task``, those of ``VelocityTask``; ``false`` means None. Numbers
of joints are one for all, or by regular expression, of which the last that fits counts. ``task.like`` names the robot
whose task fills the gaps of this one; a reward of weight 0 is left out. In place of ``drives`` there may be ``motors``:

    k = I·ω²        c = 2ζ·I·ω        action scale = F / (4·k)

with I the rotors' ``inertia`` seen from the joint, F the greatest torque, ``effort``, ω = 20π rad/s, ζ = 2. Source:
mjlab 1.6, whose Go1 and G1 EmbodiChain 0.3.2 has.
"""

import functools
import inspect
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flax.core import FrozenDict

from ejax.envs.locomotion.robots import FILE, Foot, Imu, JointDrives, LeggedRobot, Shape
from ejax.envs.task.entities import per_joint
from ejax.envs.task.terms import Term
from ejax.envs.terms.commands import CommandRanges, NumberRange, check_kind, check_range
from ejax.envs.terms.curricula import Part, Stages
from ejax.envs.terms.registry import find_functor, find_reward
from ejax.schema.frozen import freeze
from ejax.schema.messages import did_you_mean
from ejax.schema.plain_files import expanded, read_text
from ejax.schema.values import is_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
_FOLDER = Path(__file__).parents[1] / "assets" / "robots"
_OMEGA = 2.0 * math.pi * 10.0
_ZETA = 2.0
AXES = ("x", "y", "z", "roll", "pitch", "yaw")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Sudden changes of the base's velocity, m/s and rad/s, all in the world's frame, each axis uniform."""

    interval: NumberRange = (1.0, 3.0)  # s, uniform
    x: NumberRange = (-0.5, 0.5)
    y: NumberRange = (-0.5, 0.5)
    z: NumberRange = (-0.4, 0.4)
    roll: NumberRange = (-0.52, 0.52)
    pitch: NumberRange = (-0.52, 0.52)
    yaw: NumberRange = (-0.78, 0.78)

    def __post_init__(self) -> None:
        for field in fields(self):
            check_range(f"push.{field.name}", getattr(self, field.name), positive=field.name == "interval")


@dataclass(frozen=True, kw_only=True)
class VelocityTask:
    """A task of one robot. ``rewards``: term -> its weight, per second, and its parameters."""

    robot: LeggedRobot
    command: CommandRanges
    actor: tuple[str, ...]  # Terms of the observation ``policy``
    critic: tuple[str, ...]  # likewise of ``critic``
    noise: Mapping[str, float]  # Term of the actor's observation -> half the width of the uniform noise on it
    encoder_bias: float  # rad: half the width of the joint positions' error, drawn for an episode
    rewards: Mapping[str, Mapping[str, Any]]
    push: Push | None = None
    curriculum: Mapping[str, Stages] = FrozenDict()
    """Name -> stages of the command's, the push's or the rewards' numbers."""
    drop: NumberRange = (0.0, 0.0)  # m: how much higher than at rest an episode starts
    spread: float = 0.5  # m: an episode starts at x and y within ± this
    turn: float = math.pi  # rad: an episode starts looking within ± this of the world's x
    terminations: Mapping[str, Mapping[str, Any]] = FrozenDict(bad_orientation=FrozenDict(limit=math.radians(70.0)))
    """Term -> its parameters: each ends an episode as a failure."""
    phase_period: float = 0.6  # s, of the gait that is observed
    timestep: float = 0.005  # s, of a physics step
    sim_steps_per_control: int = 4

    def numbers(self, part: Part) -> Mapping[str, Any]:
        """Numbers of a part, by name, as a curriculum finds them; weights of rewards are per second."""
        if part == "rewards":
            return {name: spec["weight"] for name, spec in self.rewards.items()}
        return vars(self.command if part == "command" else self.push or Push())

    def terms(self, control_period: float) -> tuple[Term, ...]:
        """List all terms: rewards weighted for a control step, s; observations, by their group as path; ends."""
        terms = list[Term]()
        for name, spec in self.rewards.items():
            params = {key: value for key, value in spec.items() if key != "weight"}
            weight = control_period * spec["weight"]
            terms.append(Term(name=name, func=find_reward(name), params=params, weight=weight))
        # the critic sees the same robot without noise
        for group, names, noise in (("policy", self.actor, self.noise), ("critic", self.critic, FrozenDict())):
            for name in names:
                func, width = find_functor("observations", name), noise.get(name, 0.0)
                terms.append(Term(name=name, func=func, kind="observations", noise=width, path=(group,)))
        for name, limits in self.terminations.items():
            func = find_functor("terminations", name)
            terms.append(Term(name=name, func=func, kind="terminations", params=limits))
        return tuple(terms)


def change_task(
    task: VelocityTask,
    *,
    command: Mapping[str, Any],
    rewards: Mapping[str, Any],
    noise: Mapping[str, Any],
    push: Mapping[str, Any] | None,
    curriculum: Mapping[str, Any] | None,
    encoder_bias: float | None = None,
    model: str | None = None,
) -> VelocityTask:
    """Change numbers of the task; what is not named stays. ``rewards``: term -> {weight, parameter: …}; weight 0 takes
    the term out. ``push`` None: no pushes; empty: the task's. ``curriculum``: name -> ``Stages``, None: not this one;
    of the task's own, those of numbers that are given here are left out. ``model``: the file of the robot's links.
    Raises ValueError: an unknown name, or a value that cannot be."""
    check_names("noise", noise, task.actor)
    widths = {f"noise.{name}": width for name, width in noise.items()}
    for name, width in (widths if encoder_bias is None else {**widths, "encoder_bias": encoder_bias}).items():
        check_kind(name, width, 0.0)
        if width < 0.0:
            raise ValueError(f"{name} must be half the width of the noise, 0 or more, got {width}")
    if wrong := [name for name, change in rewards.items() if not isinstance(change, Mapping)]:
        raise ValueError(f"rewards.{wrong[0]} must be {{weight: …, parameter: …}}, got {rewards[wrong[0]]!r}")
    merged = {name: {**task.rewards.get(name, {}), **change} for name, change in rewards.items()}
    kept = {name: spec for name, spec in {**task.rewards, **merged}.items() if spec.get("weight")}
    for name, spec in {**kept, **{name: rewards[name] for name in rewards.keys() - kept}}.items():
        _check_reward(task.robot, name, spec)
    robot = task.robot
    if model is not None:  # a user's file has its own collision shapes
        robot = replace(robot, source=f"{FILE}{Path(expanded(model)).absolute()}", shapes=())
    changed = replace(
        task,
        robot=robot,
        encoder_bias=task.encoder_bias if encoder_bias is None else encoder_bias,
        command=_changed("command", task.command, command),
        rewards=freeze(kept),
        noise=FrozenDict({**task.noise, **noise}),
        push=_changed("push", task.push or Push(), push) if push else None if push is None else task.push,
        curriculum=FrozenDict(),
    )
    if curriculum is None:
        return changed
    given = {"command": command, "rewards": rewards, "push": vars(Push()) if push is None else push}
    own = {name: each for name, each in task.curriculum.items() if each.names.isdisjoint(given[each.of])}
    return with_curriculum(changed, {**own, **curriculum}, "curriculum")


def with_curriculum(task: VelocityTask, curriculum: Mapping[str, Any], where: str) -> VelocityTask:
    """Add curricula by name: ``Stages``, their table, or None for none of this name. Raises ValueError: stages that
    cannot be, of numbers that the task has not, or of one number in two curricula."""
    made: dict[str, Stages] = {}
    changes: dict[tuple[str, str], str] = {}
    for name, table in curriculum.items():
        if table is None or table is False:
            continue
        try:
            stages = table if isinstance(table, Stages) else _filled(Stages, table, "it")
            made[name] = _checked(task, stages)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}.{name}: {error}") from error
        for number in sorted(stages.names):
            if (other := changes.setdefault((stages.of, number), name)) != name:
                raise ValueError(f"{where}.{name}: {number} already changes in {other}; keep one of them")
    return replace(task, curriculum=FrozenDict(made))


def _checked(task: VelocityTask, stages: Stages) -> Stages:
    if stages.of == "push" and task.push is None:
        raise ValueError("the task has no pushes; set push as well")
    for stage in stages.stages:
        change = {name: x for name, x in stage.items() if name != "step"}
        if stages.of != "rewards":
            _changed(stages.of, getattr(task, stages.of), change)
            continue
        check_names("rewards", change, task.rewards)
        if wrong := [f"{name}: {x!r}" for name, x in change.items() if not is_number(x)]:
            raise ValueError(f"stages of rewards are weights, which are numbers; got {wrong[0]}")
    return stages


def check_names(where: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raise ValueError at a name that is not allowed."""
    for name in given:
        if name not in allowed:
            raise ValueError(f"{where} has no '{name}'; there is {', '.join(allowed)}{did_you_mean(name, allowed)}")


def read_section(kind: type[Record], given: Mapping[str, Any], where: str) -> Record:
    """Make a record of the numbers that are given. Raises ValueError: an unknown name, or as the record."""
    check_names(where, given, [field.name for field in fields(kind)])
    return kind(**given)


def _check_reward(robot: LeggedRobot, name: str, spec: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(find_reward(name)).parameters.values())[1:]
    check_names(f"rewards.{name}", spec, ["weight", *(each.name for each in parameters)])
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in spec]
    if missing and spec.get("weight"):
        raise ValueError(f"rewards.{name} needs {', '.join(missing)}")
    numbers = ["weight", *(each.name for each in parameters if each.annotation is float)]
    for parameter, value in spec.items():
        if parameter in numbers:
            check_kind(f"rewards.{name}.{parameter}", value, 0.0)
        if isinstance(value, Mapping) and 0.0 in per_joint(robot.joints, value):
            raise ValueError(f"rewards.{name}.{parameter} must have a number > 0 for each joint")


def _changed(where: str, old: Record, given: Mapping[str, Any]) -> Record:
    """Change numbers and ranges of ``old``, each into one of its kind, as floats."""
    check_names(where, given, [field.name for field in fields(old)])
    new: dict[str, Any] = {}
    for name, value in given.items():
        check_kind(f"{where}.{name}", value, getattr(old, name))
        new[name] = tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)
    return replace(old, **new)


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
    curriculum = task.pop("curriculum", {})
    # after merging: a robot that is like another leaves its terms out by weight 0
    rewards = {name: spec for name, spec in task.get("rewards", {}).items() if spec.get("weight")}
    made = {**task, "robot": _robot(path, table), "rewards": rewards}
    return with_curriculum(_filled(VelocityTask, made, f"{path}: task"), curriculum, f"{path}: task.curriculum")


def _tables(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the tables of a robot and of its task, whose gaps the one that it is like has filled."""
    try:
        robot = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
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
        raise ValueError(f"{where} has no {', '.join(missing)}")
    return kind(**{name: None if value is False else freeze(value) for name, value in table.items()})
