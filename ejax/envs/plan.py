"""From a gym config to what an environment is made of; every key is used, without effect, or refused."""

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejax.envs.functors.actions import ActionTerm
from ejax.envs.key_report import KeyNote, KeyReport, Section
from ejax.envs.robots import UR_FAMILY, Matrix, Robot, make_cart_pole, make_ur
from ejax.envs.scene import Scene, make_scene, read_drives, read_objects
from ejax.envs.specs import Spec, read_specs
from ejax.envs.tasks import TASKS, Task, generic
from ejax.frozen import freeze

_WITHOUT_EFFECT = {
    "max_episodes": "no effect: training counts env steps",
    "headless": "no effect: ejax opens no window",
    "device": "no effect: trainer.device decides",
    "gpu_id": "no effect: trainer.device decides",
    "arena_space": "no effect: environments share no space",
    "renderer": "no effect: there is one renderer",
    "render_cfg": "no effect: there is one renderer",
    "enable_rt": "no effect: there is one renderer",
    "visualization": "no effect: ejax opens no window",
    "physics": "no effect: env.cfg.physics chooses the engine",
    "scene_node_capacity": "no effect: scenes are as large as they need be",
    "light": "no effect: the picture has lights of its own",
}
_ROBOT_WITHOUT_EFFECT = {
    "attrs": "no effect: links have the masses and frictions of ejax's model",
    "link_attrs": "no effect: links have the masses and frictions of ejax's model",
    "root_props": "no effect: the base is fixed",
    "fix_base": "no effect: the base is fixed",
    "build_pk_chain": "no effect: kinematics come with the model",
    "asset_physics_mode": "no effect: there is no asset file",
    "disable_self_collision": "no effect: the robot does not collide with itself",
    "min_position_iters": "no effect: an option of PhysX",
    "min_velocity_iters": "no effect: an option of PhysX",
    "enable_sensor": "no effect: the robot has no sensors",
}
_SOLVER_WITHOUT_EFFECT = ("class_type", "ur_type", "end_link_name", "root_link_name", "joint_names", "num_samples")
_FIRST_ACTION_TYPES = {
    "delta_qpos": "DeltaQposTerm",
    "qpos": "QposTerm",
    "qpos_normalized": "QposDenormalizedTerm",
    "eef_pose": "EefPoseTerm",
    "qvel": "QvelTerm",
    "qf": "QfTerm",
}
"""``env.extensions.action_type`` of the releases before ``env.actions``."""
_ROBOTS = f"URRobot ({', '.join(UR_FAMILY)}), with or without DH_PGI_140_80; CartPole"
_IDENTITY: Matrix = tuple(tuple(row) for row in np.eye(4).tolist())


@dataclass(frozen=True)
class Plan:
    """Of one gym config."""

    scene: Scene
    active: tuple[int, ...]
    task: Task
    terms: tuple[ActionTerm, ...]
    events: tuple[Spec, ...]
    observations: tuple[Spec, ...]
    rewards: tuple[Spec, ...]
    extensions: Mapping[str, Any]
    max_episode_steps: int
    num_substeps: int
    timestep: float
    """s"""
    notes: tuple[KeyNote, ...]


@functools.lru_cache(maxsize=32)
def make_plan(gym_config: Mapping[str, Any]) -> Plan:
    """Read a gym config.

    Raises:
        GymConfigError: the keys that cannot be had, all of them.
    """
    report = KeyReport()
    with Section(gym_config, "", report) as root:
        name = str(root.take("id"))
        task = TASKS.get(name, Task(generic))
        for key, text in _WITHOUT_EFFECT.items():
            root.ignore(key, text)
        root.take("num_envs")
        root.refuse("sensor", "ejax has no camera observations")
        root.refuse("rigid_object_group", "ejax loads no groups of files; list the bodies under rigid_object")
        root.refuse("articulation", "ejax has no articulations besides the robot")
        limit = int(root.number("max_episode_steps", 300))
        objects = read_objects(root.take("rigid_object", ()), "rigid_object", report)
        objects += read_objects(root.take("background", ()), "background", report, static=True)
        with root.open("physics_config") as physics:
            gravity = physics.numbers("gravity", (0.0, 0.0, -9.81), 3)
            timestep = physics.number("physics_dt", 0.01, above=0.0)
            physics.ignore("cache_material", "no effect: an option of PhysX")
        with root.open("robot") as section:
            robot, robot_uid, placed = _read_robot(section)
        with root.open("env") as env:
            env.take("num_envs")
            num_substeps = _read_substeps(env, timestep)
            env.ignore("dataset", "no effect: training records no dataset")
            control_parts = env.take("control_parts")
            extensions, actions = _read_extensions(env, task)
            events = read_specs(env.open("events"), "events", robot_uid)
            observations = read_specs(env.open("observations"), "observations", robot_uid)
            rewards = read_specs(env.open("rewards"), "rewards", robot_uid)
            action_specs = read_specs(actions, "actions", robot_uid)
    if robot is None:
        report.raise_if_refused()
        raise ValueError("a robot is missing, and nothing told why")
    scene = make_scene(
        robot,
        objects=objects,
        gravity=gravity,
        timestep=timestep,
        markers=tuple(dict.fromkeys(key for spec in events for key in stored_keys(spec))),
        **placed,
    )
    active = _active(scene, control_parts, report)
    terms = tuple(term for spec in action_specs if (term := _make_term(spec, scene, active, report)) is not None)
    report.raise_if_refused()
    return Plan(
        scene=scene,
        active=active,
        task=task,
        terms=terms,
        events=events,
        observations=observations,
        rewards=rewards,
        extensions=extensions,
        max_episode_steps=limit,
        num_substeps=num_substeps,
        timestep=timestep,
        notes=tuple(report.notes),
    )


def stored_keys(event: Spec) -> tuple[str, ...]:
    """The poses that an event stores, as far as its parameter ``store_key`` says."""
    parameter = inspect.signature(event.func).parameters.get("store_key")
    return () if parameter is None else (event.params.get("store_key", parameter.default),)


def _read_robot(section: Section) -> tuple[Robot | None, str, dict[str, Any]]:
    """The robot, its uid, and what ``make_scene`` needs to know of it."""
    report = section.report
    uid = str(section.take("uid", "robot"))
    kind = str(section.take("robot_type", ""))
    arm, hand = _read_components(section)
    if kind.lower() in UR_FAMILY:
        arm = kind.lower()
    if kind == "URRobot" and arm is None:
        arm = "ur10"
    if arm is None or (kind and kind != "URRobot" and kind.lower() not in UR_FAMILY):
        where = "fpath" if "fpath" in section else "robot_type"
        given = section.data.get("fpath") or kind or "none"
        report.refuse(section.key(where), f"ejax has no model of {given!r}; its robots: {_ROBOTS}")
        for name in section.data:
            section.ignore(name, "not read: the robot is not there")
        return None, uid, {}
    tcp = _read_tcp(section)
    robot = make_cart_pole() if arm == "cart_pole" else make_ur(arm, tcp, gripper=hand)
    parts = _read_parts(section, robot)
    robot = Robot(**{**vars(robot), "parts": parts})
    drive_keys = [key for key in ("drive_pros", "joint_drive_props") if key in section]
    if len(drive_keys) == 2:
        report.refuse(section.key(drive_keys[0]), f"means the same as {drive_keys[1]}, which is given too; keep one")
    with section.open(drive_keys[-1] if drive_keys else "drive_pros") as drives_section:
        drives = read_drives(drives_section, robot)
    home = section.numbers("init_qpos", (0.0,) * len(robot.joints), len(robot.joints))
    placed = {
        "drives": drives,
        "parts": parts,
        "position": section.numbers("init_pos", (0.0, 0.0, 0.0), 3),
        "rotation": section.numbers("init_rot", (0.0, 0.0, 0.0), 3),
        "home": home,
    }
    for name, text in _ROBOT_WITHOUT_EFFECT.items():
        section.ignore(name, text)
    return robot, uid, placed


def _read_components(section: Section) -> tuple[str | None, bool]:
    """The arm (a UR model or ``cart_pole``) that the URDF files name, and whether there is a gripper."""
    arm, hand = None, False
    with section.open("urdf_cfg") as urdf:
        for i, data in enumerate(urdf.take("components", ())):
            with Section(data, urdf.key(f"components[{i}]"), section.report) as component:
                kind, path = component.take("component_type"), str(component.take("urdf_path", ""))
                if tuple(component.data.get("transform") or _IDENTITY) == _IDENTITY:
                    component.take("transform")
                model = re.search(r"\b(ur(?:3|5|10)e?)\b", path.lower())
                if kind == "arm" and "cart_pole" in path.lower():
                    arm = "cart_pole"
                elif kind == "arm" and model:
                    arm = model.group(1)
                elif kind == "hand" and "DH_PGI_140_80" in path:
                    hand = True
                else:
                    text = f"ejax has no model of {kind} '{path}'; its robots: {_ROBOTS}"
                    section.report.refuse(component.key("urdf_path"), text)
        urdf.ignore("name_prefix", "no effect: joints have EmbodiChain's names")
    return arm, hand


def _read_tcp(section: Section) -> Matrix:
    """[4, 4] of ``solver_cfg.<part>.tcp``."""
    tcp = _IDENTITY
    with section.open("solver_cfg") as solvers:
        for part, data in solvers.items():
            with Section(data, solvers.key(str(part)), section.report) as solver:
                given = solver.take("tcp", _IDENTITY)
                for name in _SOLVER_WITHOUT_EFFECT:
                    solver.ignore(name, "no effect: ejax solves inverse kinematics in its own way")
                matrix = np.asarray(given, dtype=float) if np.size(given) == 16 else np.zeros(0)
                if matrix.shape != (4, 4) or not np.allclose(matrix[:3, :3] @ matrix[:3, :3].T, np.eye(3), atol=1e-4):
                    section.report.refuse(solver.key("tcp"), f"got {given!r}; must be a pose, 4 rows of 4 numbers")
                elif part == "arm":
                    tcp = tuple(tuple(row) for row in matrix.tolist())
    return tcp


def _read_parts(section: Section, robot: Robot) -> dict[str, tuple[str, ...]]:
    """The robot's own parts, and those of ``control_parts`` over them: joint names or patterns."""
    parts = dict(robot.parts)
    with section.open("control_parts") as given:
        for part, names in given.items():
            joints = [joint for joint in robot.joints if any(re.fullmatch(str(name), joint) for name in names)]
            missing = [name for name in names if not any(re.fullmatch(str(name), joint) for joint in robot.joints)]
            if missing:
                text = f"no joints {', '.join(map(str, missing))}; there is {', '.join(robot.joints)}"
                section.report.refuse(given.key(str(part)), text)
            section.report.add(given.key(str(part)), "used")
            parts[str(part)] = tuple(joints)
    return parts


def _read_substeps(env: Section, timestep: float) -> int:
    given = int(env.number("sim_steps_per_control", 4, above=0))
    if "target_control_frequency" not in env:
        env.take("target_control_frequency")
        return given
    frequency = env.number("target_control_frequency", 1.0, above=0.0)
    substeps = 1.0 / (frequency * timestep)
    if abs(substeps - round(substeps)) > 1e-6 or round(substeps) < 1:
        text = f"got {frequency:g} Hz; one period must be a whole number of physics steps of {timestep:g} s"
        env.report.refuse(env.key("target_control_frequency"), text)
    elif "sim_steps_per_control" in env and round(substeps) != given:
        text = f"means {round(substeps)} physics steps, but sim_steps_per_control is {given}; keep one"
        env.report.refuse(env.key("target_control_frequency"), text)
    return max(1, round(substeps))


def _read_extensions(env: Section, task: Task) -> tuple[Mapping[str, Any], Section]:
    """``env.extensions``, and the section of actions: the first releases named the action there."""
    actions = env.open("actions")
    kept: dict[str, Any] = {}
    with env.open("extensions") as extensions:
        old_spelling = not actions.data and "action_type" in extensions
        for name, value in extensions.items():
            key = extensions.key(str(name))
            if name in ("action_type", "action_scale") and old_spelling:
                env.report.add(key, "renamed", f"env.actions: {extensions.data.get('action_type')}")
                continue
            if name in task.extensions:
                env.report.add(key, "used")
            else:
                text = "no effect, unless a functor of yours reads it from world.extensions"
                env.report.add(key, "without effect", text)
            kept[str(name)] = value
        if old_spelling:
            kind = extensions.data["action_type"]
            if kind not in _FIRST_ACTION_TYPES:
                text = f"got {kind!r}; allowed: {', '.join(_FIRST_ACTION_TYPES)}"
                env.report.refuse(extensions.key("action_type"), text)
            else:
                params = {"scale": extensions.data["action_scale"]} if "action_scale" in extensions else {}
                data = {kind: {"func": _FIRST_ACTION_TYPES[kind], "params": params}}
                actions = Section(data, actions.path, KeyReport())
        elif not actions.data:
            env.report.refuse(
                actions.path, "is missing; give an action term, such as {delta_qpos: {func: DeltaQposTerm}}"
            )
    return freeze(kept), actions


def _active(scene: Scene, control_parts: Any, report: KeyReport) -> tuple[int, ...]:
    """Joints of ``env.control_parts``, in the robot's order; all without it."""
    if control_parts is None:
        return tuple(range(len(scene.joints)))
    try:
        return tuple(sorted({joint for part in control_parts for joint in scene.part(part)}))
    except (TypeError, ValueError) as error:
        report.refuse("env.control_parts", str(error))
        return tuple(range(len(scene.joints)))


def _make_term(spec: Spec, scene: Scene, active: tuple[int, ...], report: KeyReport) -> ActionTerm | None:
    try:
        return spec(scene, active)
    except (TypeError, ValueError) as error:
        report.refuse(spec.key, str(error))
        return None
