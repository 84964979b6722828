"""Reads a gym config into what an environment is made of; every key is used, without effect, or refused."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax.core import FrozenDict

from ejax.envs.manager.bodies import check_names, read_objects
from ejax.envs.manager.cameras import names_camera, read_cameras
from ejax.envs.manager.extensions import read_extensions
from ejax.envs.manager.functors.actions import ActionTerm
from ejax.envs.manager.functors.observations import OF_CAMERAS
from ejax.envs.manager.ignored import IGNORED
from ejax.envs.manager.robot_config import read_robot
from ejax.envs.manager.scene import Scene, make_scene
from ejax.envs.manager.specs import read_specs
from ejax.envs.manager.tasks import SCENE_ONLY, TASK_RULES, OutcomeFn, Task, missing_task
from ejax.envs.task.terms import Term
from ejax.schema.problems import ConfigError, KeyNote, KeyReport
from ejax.schema.registry import did_you_mean
from ejax.schema.sections import Section
from ejax.schema.values import number_problems

SOURCE = "gym config"
"""Where a problem's key is, in errors."""
_NO_SENSORS = "no effect: enable_sensor is false"
INTERVAL_EVENTS = "interval_events"
"""The path, in notes, of events that are not in the gym config."""


@dataclass(frozen=True)
class ManagerSpec:
    """The parsed contents of one gym config."""

    scene: Scene
    active: tuple[int, ...]
    outcome: OutcomeFn
    terms: tuple[ActionTerm, ...]
    events: tuple[Term, ...]
    observations: tuple[Term, ...]
    rewards: tuple[Term, ...]
    extensions: Mapping[str, Any]
    max_episode_steps: int
    ignore_terminations: bool
    """Episodes end by truncation only."""
    num_substeps: int
    timestep: float
    """s"""
    notes: tuple[KeyNote, ...]


@functools.lru_cache(maxsize=32)
def read_manager_spec(gym_config: Mapping[str, Any], interval_events: Mapping[str, Any] = FrozenDict()) -> ManagerSpec:
    """Read a gym config.

    Args:
        interval_events: more events, which come after those of ``env.events``.

    Raises:
        ConfigError: all the keys that are not supported.
    """
    report = KeyReport()
    for key, text in number_problems(gym_config, element="[{}]"):
        report.refuse(key, text)
    report.raise_if_refused(SOURCE)
    with Section(gym_config, "", report) as root:
        task = _read_task(root)
        root.ignore_all(IGNORED[""])
        root.take("num_envs")
        root.refuse("rigid_object_group", "ejax loads no groups of files; list the bodies under rigid_object")
        root.refuse("articulation", "ejax has no articulations other than the robot")
        objects = read_objects(root.take("rigid_object", ()), "rigid_object", report)
        objects += read_objects(root.take("background", ()), "background", report, static=True)
        with root.open("physics_config") as physics:
            gravity = physics.numbers("gravity", (0.0, 0.0, -9.81), 3)
            period = physics.number("physics_dt", 0.01, above=0.0)
            finer = physics.integer("num_substeps", 1, at_least=1)  # Newton's: steps of its solver in a physics step
            physics.ignore_all(IGNORED["physics_config"])
            physics.ignore_all(IGNORED["physics_config of Newton"])
        with root.open("robot") as section:
            placed = read_robot(section)
        robot_uid = placed.uid if placed else str(section.data.get("uid"))
        links = tuple(str(each.get("name")) for each in placed.robot.body.iter("body")) if placed else ()
        cameras = read_cameras(root.take("sensor", ()), report, links, robot_uid)
        sensing = _read_enable_sensor(root)
        with root.open("env") as env:
            env.take("num_envs")
            num_substeps = finer * _read_substeps(env, period)
            env.ignore_all(IGNORED["env"])
            control_parts = env.take("control_parts")
            extensions = read_extensions(root, env, task)
            events = read_specs(env.open("events"), "events", robot_uid)
            observations = read_specs(env.open("observations"), "observations", robot_uid)
            uids = tuple(each.uid for each in cameras)
            if not sensing:
                observations = _without_cameras(observations, uids, report)
            _check_uids(observations, [*(each.uid for each in objects), robot_uid], uids, report)
            rewards = read_specs(env.open("rewards"), "rewards", robot_uid)
            action_specs = read_specs(extensions.actions, "actions", robot_uid)
        events += read_specs(Section(interval_events, INTERVAL_EVENTS, report), "events", robot_uid, ("interval",))
    if placed is None or task is None:
        raise ConfigError(report.problems, SOURCE, report.notes)
    check_names(objects, {"floor"} | {str(each.get("name")) for each in placed.robot.body.iter()}, report)
    report.raise_if_refused(SOURCE)
    scene = make_scene(
        placed.robot,
        placed.drives,
        objects,
        position=placed.position,
        rotation=placed.rotation,
        home=placed.home,
        gravity=(gravity[0], gravity[1], gravity[2]),
        timestep=period / finer,
        markers=tuple(dict.fromkeys(key for spec in events for key in stored_keys(spec))),
        cameras=cameras if sensing else (),
    )
    active = _active(scene, control_parts, report)
    terms = _make_terms(action_specs, scene, active, report)
    report.raise_if_refused(SOURCE)
    return ManagerSpec(
        scene=scene,
        active=active,
        outcome=task.first_outcome if extensions.first_success and task.first_outcome else task.outcome,
        terms=terms,
        events=events,
        observations=observations,
        rewards=rewards,
        extensions=extensions.values,
        max_episode_steps=extensions.max_episode_steps,
        ignore_terminations=extensions.ignore_terminations,
        num_substeps=num_substeps,
        timestep=period / finer,
        notes=report.notes,
    )


def stored_keys(event: Term) -> tuple[str, ...]:
    """The poses that an event stores, according to its parameter ``store_key``."""
    parameter = inspect.signature(event.func).parameters.get("store_key")
    return () if parameter is None else (event.params.get("store_key", parameter.default),)


def _read_enable_sensor(root: Section) -> bool:
    sensing = root.take("enable_sensor", True)
    if not isinstance(sensing, bool):
        root.problem("enable_sensor", f"got {sensing!r}; must be true or false")
    elif not sensing:
        root.note("sensor", _NO_SENSORS, "without effect")
    return sensing is not False


def _without_cameras(observations: tuple[Term, ...], uids: tuple[str, ...], report: KeyReport) -> tuple[Term, ...]:
    """The functors that read no camera, nor change what one saw."""
    without = [spec for spec in observations if spec.path[0] != "sensor" and not names_camera(spec.params, uids)]
    for spec in observations:
        if spec not in without:
            report.add(spec.key, "without effect", _NO_SENSORS)
    return tuple(without)


def _check_uids(observations: tuple[Term, ...], bodies: list[str], cameras: tuple[str, ...], report: KeyReport) -> None:
    """Refuse unknown uids: functors observe zeros for a missing object, which must not hide a misspelled name."""
    for spec in observations:
        uids = cameras if spec.func in OF_CAMERAS else bodies
        for name, entity in spec.params.items():
            if name.endswith("_cfg") and isinstance(entity, Mapping) and entity.get("uid") not in uids:
                uid = str(entity.get("uid"))
                text = f"no '{uid}' in the scene; there is {', '.join(uids) or 'none'}{did_you_mean(uid, uids)}"
                report.refuse(f"{spec.key}.params.{name}", text)


def _read_substeps(env: Section, timestep: float) -> int:
    given = env.integer("sim_steps_per_control", 4, at_least=1)
    if "target_control_frequency" not in env:
        env.take("target_control_frequency")
        return given
    frequency = env.number("target_control_frequency", 1.0, above=0.0)
    substeps = 1.0 / (frequency * timestep)
    if abs(substeps - round(substeps)) > 1e-6 or round(substeps) < 1:
        text = f"got {frequency:g} Hz; one period must be a whole number of physics steps of {timestep:g} s"
        env.problem("target_control_frequency", text)
    elif "sim_steps_per_control" in env and round(substeps) != given:
        text = f"means {round(substeps)} physics steps, but sim_steps_per_control is {given}; keep one"
        env.problem("target_control_frequency", text)
    return max(1, round(substeps))


def _read_task(root: Section) -> Task | None:
    """The task that ``id`` names. None: there is no such task, which the report says."""
    name = root.take("id")
    task = TASK_RULES.get(name) if isinstance(name, str) else None
    if task is None:
        root.report.refuse("id", f"got {name!r}; must name a task" if not isinstance(name, str) else missing_task(name))
    elif name == SCENE_ONLY:
        text = "has no success and no failure: an episode ends by its time limit only, and success is always 0"
        root.report.add("id", "used", text)
    return task


def _active(scene: Scene, control_parts: Any, report: KeyReport) -> tuple[int, ...]:
    """Joints of ``env.control_parts``, in the robot's order; all without it."""
    if control_parts is None:
        return tuple(range(len(scene.joints)))
    if not isinstance(control_parts, list | tuple) or not control_parts:
        report.refuse(
            "env.control_parts", f"got {control_parts!r}; must be a list of the robot's parts, or null for all"
        )
        return tuple(range(len(scene.joints)))
    try:
        return tuple(sorted({joint for part in control_parts for joint in scene.part(part)}))
    except (TypeError, ValueError) as error:
        report.refuse("env.control_parts", str(error))
        return tuple(range(len(scene.joints)))


def _make_terms(
    specs: tuple[Term, ...], scene: Scene, active: tuple[int, ...], report: KeyReport
) -> tuple[ActionTerm, ...]:
    """The action terms, each the only one that sets what it sets."""
    terms: list[ActionTerm] = []
    owner: dict[tuple[str, int], str] = {}
    for spec in specs:
        term = _make_term(spec, scene, active, report)
        if term is None:
            continue
        terms.append(term)
        mine: dict[tuple[str, int], str] = {
            (term.command, joint): spec.name for joint in term.joints if term.command is not None
        }
        if taken := [key for key in mine if key in owner]:
            joints = ", ".join(scene.joints[joint] for _, joint in taken)
            text = f"sets {term.command} of {joints}, as {owner[taken[0]]} does; let one term do it"
            report.refuse(spec.key, text)
        owner |= mine
    return tuple(terms)


def _make_term(spec: Term, scene: Scene, active: tuple[int, ...], report: KeyReport) -> ActionTerm | None:
    try:
        return spec(scene, active)
    except (TypeError, ValueError, OverflowError) as error:
        report.refuse(spec.key, str(error))
        return None
