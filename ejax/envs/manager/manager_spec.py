"""A gym config read into what an environment is made of; every key is used, without effect, or refused."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax.core import FrozenDict

from ejax.envs.manager.bodies import read_objects, read_robot
from ejax.envs.manager.cameras import names_camera, read_cameras
from ejax.envs.manager.extensions import read_extensions
from ejax.envs.task.robots import Vector
from ejax.envs.task.scene import Scene, SensorCamera, make_scene
from ejax.envs.task.terms import Term
from ejax.envs.terms.actions import ActionTerm
from ejax.envs.terms.observations import OF_CAMERAS
from ejax.envs.terms.reading import EVENT_MODES, TASK_EVENTS, read_specs
from ejax.envs.terms.registry import TERMS
from ejax.envs.terms.terminations import FIRST_FORM, SCENE_ONLY
from ejax.envs.terms.vocabulary import IGNORED, OTHER_TASKS, TASKS_ELSEWHERE
from ejax.schema.frozen import freeze
from ejax.schema.messages import describe_error, did_you_mean
from ejax.schema.problems import ConfigError, KeyNote, KeyReport
from ejax.schema.sections import Section
from ejax.schema.values import number_problems

SOURCE = "gym config"
_NO_SENSORS = "no effect: enable_sensor is false"


@dataclass(frozen=True, kw_only=True)
class ManagerSpec:
    """The parsed contents of one gym config."""

    scene: Scene
    active: tuple[int, ...]
    actions: tuple[ActionTerm, ...]
    terms: tuple[Term, ...]  # Events, observations, rewards, and the ends of the ``id``
    extensions: Mapping[str, Any]
    max_episode_steps: int
    num_substeps: int
    timestep: float  # s
    notes: tuple[KeyNote, ...]


@functools.lru_cache(maxsize=32)
def read_manager_spec(
    gym_config: Mapping[str, Any],
    functor_events: Mapping[str, Any] = FrozenDict(),
    default_limit: int | None = None,
) -> ManagerSpec:
    """Read a gym config, with more events after those of ``env.events``, and another default of its time limit. Raises
    ConfigError: all unsupported keys."""
    report = KeyReport()
    # before anything is read: NaN or a huge number would fail somewhere else, without its key
    for key, text in number_problems(gym_config, element="[{}]"):
        report.refuse(key, text)
    report.raise_if_refused(SOURCE)
    with Section(gym_config, "", report) as root, root.open("env") as env:
        task = _read_task(root)
        root.ignore_all(IGNORED[""])
        root.take("num_envs")
        root.refuse("rigid_object_group", "ejax loads no groups of files; list the bodies under rigid_object")
        root.refuse("articulation", "ejax has no articulations other than the robot")
        objects = tuple(read_objects(root))
        gravity, timestep, num_substeps = _read_physics(root, env)
        with root.open("robot") as section:
            placed = read_robot(section)
        robot_uid = placed.uid if placed else str(section.data.get("uid"))
        cameras = read_cameras(root, placed.bodies if placed else (), robot_uid)
        sensing = root.flag("enable_sensor", True)
        env.take("num_envs")
        env.ignore_all(IGNORED["env"])
        control_parts = env.take("control_parts")
        # the entries of ``env.extensions`` that the task's ends read
        parameters = None if task is None else tuple(inspect.signature(TERMS["terminations"][task]).parameters)[1:]
        extensions, action_section, limit, first_success = read_extensions(root, env, parameters, default_limit)
        events = read_specs(env.open("events"), "events", robot_uid)
        events += read_specs(Section(functor_events, TASK_EVENTS, report), "events", robot_uid, EVENT_MODES)
        observations = read_specs(env.open("observations"), "observations", robot_uid)
        observations = _seen(root, observations, cameras, [*(each.uid for each in objects), robot_uid], sensing)
        rewards = read_specs(env.open("rewards"), "rewards", robot_uid)
        ends = read_specs(env.open("terminations"), "terminations", robot_uid)
        own_actions = read_specs(action_section, "actions", robot_uid)
    # what follows needs both; the report has the reason by now
    if placed is None or task is None or parameters is None:
        raise ConfigError(report.problems, SOURCE, report.notes)
    taken = {"floor", *(each.get("name") for each in placed.robot.body.iter())}
    for each in objects:
        if each.uid in taken:
            report.refuse("rigid_object", f"the uid '{each.uid}' is taken; every body, background too, needs its own")
        taken.add(each.uid)
    report.raise_if_refused(SOURCE)
    first = FIRST_FORM.format(task)
    func = TERMS["terminations"][first if first_success and first in TERMS["terminations"] else task]
    params = freeze({name: extensions[name] for name in parameters if name in extensions})
    own_ends = Term(name=task, func=func, kind="terminations", params=params, key="id")
    terms = (*events, *observations, *rewards, own_ends, *ends)
    markers = tuple(dict.fromkeys(key for term in terms for key in stored_keys(term)))
    for term in observations:  # a target that nobody stores is observed as zeros
        if (target := term.params.get("target_pose_key")) not in (None, *markers):
            text = f"no target pose '{target}' is stored; there is {', '.join(markers) or 'none'}"
            report.refuse(f"{term.key}.params.target_pose_key", text)
    # read all the same, so that a wrong one is refused though it is off
    seen = cameras if sensing else ()
    scene = make_scene(placed, objects, gravity, timestep, markers=markers, cameras=seen)
    active = _active(scene, control_parts, report)
    actions = _make_actions(own_actions, scene, active, report)
    report.raise_if_refused(SOURCE)
    return ManagerSpec(
        scene=scene,
        active=active,
        actions=actions,
        terms=terms,
        extensions=extensions,
        max_episode_steps=limit,
        num_substeps=num_substeps,
        timestep=timestep,
        notes=report.notes,
    )


def stored_keys(term: Term) -> tuple[str, ...]:
    """Return the poses that an event stores, by its parameter ``store_key``."""
    parameter = inspect.signature(term.func).parameters.get("store_key") if term.kind == "events" else None
    return () if parameter is None else (term.params.get("store_key", parameter.default),)


def _read_task(root: Section) -> str | None:
    name = root.take("id")
    if not isinstance(name, str):
        root.problem("id", f"got {name!r}; must name a task")
        return None
    if name == SCENE_ONLY:
        text = "has no success and no failure: an episode ends by its time limit only, and success is always 0"
        root.note("id", text)
    if name in TERMS["terminations"]:
        return name
    family, there = name.partition("-")[0], ", ".join(TERMS["terminations"])
    remedy = (
        f"use {SCENE_ONLY} for the scene without a task, which never succeeds and ends by its time limit only, or "
        "register a function of its ends: register_functor('terminations', name) (ejax.envs.terms.registry)"
    )
    if own := TASKS_ELSEWHERE.get(family):
        text = f"'{name}' is not a task of EmbodiedEnv, but of a class: {own}. trainer.gym_config finds it"
    elif family in OTHER_TASKS:
        text = (
            f"'{name}' is a class of EmbodiChain's, which ejax does not have: when an episode succeeds, fails or ends, "
            f"and everything else that the class computes, such as its actions, is not known here. ejax has {there}; "
            f"{remedy}"
        )
    else:
        text = f"no task '{name}'; there is {there}; else {remedy}{did_you_mean(name, TERMS['terminations'])}"
    root.problem("id", text)
    return None


def _read_physics(root: Section, env: Section) -> tuple[Vector, float, int]:
    """Read gravity, the length of a physics step, s, and how many make a control step."""
    with root.open("physics_config") as physics:
        x, y, z = physics.numbers("gravity", (0.0, 0.0, -9.81), 3)
        period = physics.number("physics_dt", 0.01, above=0.0)
        finer = physics.integer("num_substeps", 1, at_least=1)  # Newton's: steps of its solver in a physics step
        physics.ignore_all(IGNORED["physics_config"])
        physics.ignore_all(IGNORED["physics_config of Newton"])
    substeps = env.integer("sim_steps_per_control", 4, at_least=1)
    # another spelling of the number of physics steps; both may stand there if they agree
    if "target_control_frequency" in env:
        frequency = env.number("target_control_frequency", 1.0, above=0.0)
        given, exact = substeps, 1.0 / (frequency * period)
        substeps = max(1, round(exact))
        if abs(exact - round(exact)) > 1e-6 or round(exact) < 1:
            text = f"got {frequency:g} Hz; one period must be a whole number of physics steps of {period:g} s"
            env.problem("target_control_frequency", text)
        elif "sim_steps_per_control" in env and substeps != given:
            text = f"means {substeps} physics steps, but sim_steps_per_control is {given}; keep one"
            env.problem("target_control_frequency", text)
    env.take("target_control_frequency")
    return (x, y, z), period / finer, finer * substeps


def _seen(
    root: Section, terms: tuple[Term, ...], cameras: Sequence[SensorCamera], bodies: Sequence[str], sensing: bool
) -> tuple[Term, ...]:
    """Leave out observations of cameras that are off, and refuse unknown uids: functors observe zeros for a missing
    object, which must not hide a misspelled name."""
    names = tuple(each.uid for each in cameras)
    if not sensing:
        root.note("sensor", _NO_SENSORS, "without effect")
        blind = [each for each in terms if each.path[0] == "sensor" or names_camera(each.params, names)]
        for each in blind:
            root.report.add(each.key, "without effect", _NO_SENSORS)
        terms = tuple(each for each in terms if each not in blind)
    for term in terms:
        uids = names if term.func in OF_CAMERAS else bodies  # a camera is not a body
        for name, entity in term.params.items():
            if name.endswith("_cfg") and isinstance(entity, Mapping) and entity.get("uid") not in uids:
                uid = str(entity.get("uid"))
                text = f"no '{uid}' in the scene; there is {', '.join(uids) or 'none'}{did_you_mean(uid, uids)}"
                root.report.refuse(f"{term.key}.params.{name}", text)
    return terms


def _active(scene: Scene, control_parts: Any, report: KeyReport) -> tuple[int, ...]:
    everything = tuple(range(len(scene.joints)))
    if control_parts is None:
        return everything
    try:
        if not isinstance(control_parts, list | tuple) or not control_parts:
            raise ValueError(f"got {control_parts!r}; must be a list of the robot's parts, or null for all")
        return tuple(sorted({joint for part in control_parts for joint in scene.part(part)}))
    except (TypeError, ValueError) as error:
        report.refuse("env.control_parts", str(error))
        return everything


def _make_actions(
    specs: tuple[Term, ...], scene: Scene, active: tuple[int, ...], report: KeyReport
) -> tuple[ActionTerm, ...]:
    terms: list[ActionTerm] = []
    owner: dict[tuple[str, int], str] = {}
    for spec in specs:
        try:
            if not isinstance(term := spec(scene, active), ActionTerm):
                raise ValueError(f"gave {term!r}; must give an ActionTerm")
        except Exception as error:  # any error here is the functor's own
            report.refuse(spec.key, describe_error(error))
            continue
        terms.append(term)
        # a joint may have a term for each command: a velocity and an effort add up
        mine: dict[tuple[str, int], str] = {
            (term.command, joint): spec.name for joint in term.joints if term.command is not None
        }
        if taken := [key for key in mine if key in owner]:
            joints = ", ".join(scene.joints[joint] for _, joint in taken)
            text = f"sets {taken[0][0]} of {joints}, as {owner[taken[0]]} does; let one term do it"
            report.refuse(spec.key, text)
        owner |= mine
    return tuple(terms)
