"""An EmbodiChain gym config: which of ejax's environments it means.

``ejax.envs.manager.embodied`` builds the manager form as it is. Of the first releases, whose tasks are classes, the id,
the number of environments, the time limit, the control rate and ``env.extensions`` are taken over.
"""

import inspect
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ejax.config.embodichain.draft import Draft
from ejax.config.embodichain.spellings import TABLES
from ejax.envs.terms.vocabulary import IGNORED
from ejax.schema.frozen import freeze
from ejax.schema.messages import short_repr
from ejax.schema.problems import ConfigError, KeyNote
from ejax.schema.registry import ENVS, UnknownNameError, resolve
from ejax.schema.sections import Section
from ejax.schema.tables import tables_beside
from ejax.schema.trust import UntrustedCodeError

if TYPE_CHECKING:
    from ejax.envs.locomotion.robots import LeggedRobot

MANAGER_ENV = "EmbodiedEnv"
VELOCITY_ENV = "VelocityRL"
_FIRST: dict[str, Any] = TABLES["first_release"]  # what ejax reads of the first releases' gym configs
_TABLES = tables_beside(__file__)
_IGNORED: dict[str, dict[str, str]] = _TABLES["ignored"]
_AXES = ("x", "y", "z", "roll", "pitch", "yaw")
_PUSH = "push_articulation_by_setting_velocity"
_REWARD = "velocity_locomotion_total_reward"
_OBSERVATION = "velocity_locomotion_observation"


def read_gym_config(draft: Draft, data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return ``{id, cfg}`` of a gym config; everything else in it goes into the draft, under the name ``source``."""
    env = data.get("env") or {}
    name = data.get("id")
    if not isinstance(name, str) or not isinstance(env, dict) or not isinstance(env.get("extensions") or {}, dict):
        draft.problem("env", f"{source} must hold id: the name of an environment, and env: {{extensions: {{…}}}}")
        return {}
    draft.spelled["env.id"] = f"{source}:id"
    key, num_envs = ("num_envs", data["num_envs"]) if "num_envs" in data else ("env.num_envs", env.get("num_envs"))
    decides = draft.get("trainer.num_envs")
    if num_envs is not None and not draft.has("trainer.num_envs"):
        draft.put("trainer.num_envs", num_envs)
        draft.spelled["trainer.num_envs"] = f"{source}:{key}"
    elif num_envs not in (None, decides):
        draft.note(f"{source}:{key}", f"no effect: trainer.num_envs is {short_repr(decides)}", "without effect")
    if robot := _TABLES["robots"].get(name.partition("-")[0]):
        draft.spelled["env.cfg"] = f"{source}:robot.fpath"  # what the task's class can still lack are its links
        with Section(dict(data), f"{source}:", draft.report) as root:
            return {"id": VELOCITY_ENV, "cfg": read_velocity_task(root, robot)}
    if is_manager_form(data):
        draft.spelled["env.cfg.gym_config"] = f"{source}:"
        return {"id": MANAGER_ENV, "cfg": {"gym_config": dict(data)}}
    draft.spelled["env.cfg"] = f"{source}:env.extensions"
    with Section(data, f"{source}:", draft.report) as root:
        return {"id": name, "cfg": _read_first_form(draft, root)}


def _read_first_form(draft: Draft, root: Section) -> dict[str, Any]:
    task, arguments = root.take("id"), set[str]()  # of the class; none if it may not run, as env.id reports
    with suppress(UnknownNameError, UntrustedCodeError, ImportError):
        arguments |= inspect.signature(resolve("env", task)).parameters.keys()
    cfg: dict[str, Any] = {}
    for body in (*(root.data.get("rigid_object") or ()), *(root.data.get("background") or ())):
        name = _FIRST["bodies"].get(str(body.get("uid")), "") if isinstance(body, Mapping) else ""
        if name in arguments and "init_pos" in body:
            cfg[name] = body["init_pos"]
    its_own = f"no effect: the task class {task} has its own"
    for key in _FIRST["scene_keys"]:
        root.ignore(key, its_own + (", but for init_pos" if key in ("rigid_object", "background") else ""))
    root.ignore_all(IGNORED[""])
    root.take("num_envs")
    with root.open("env") as env:
        env.ignore("dataset", its_own)
        env.ignore("control_parts", its_own)
        for key in ("num_envs", "extensions", *_FIRST["manager_keys"]):
            env.take(key)
        env.refuse("target_control_frequency", f"the task class {task} takes sim_steps_per_control instead")
        own = _read_extensions(draft, env.open("extensions"), task, arguments)
        if (substeps := env.take("sim_steps_per_control")) is not None:
            own["sim_steps_per_control"] = substeps
            draft.spelled["env.cfg.sim_steps_per_control"] = env.key("sim_steps_per_control")
        cfg |= _read_events(draft, env.open("events"), task, arguments) | own
    if (limit := root.take("max_episode_steps")) is not None:
        key = "episode_length" if "episode_length" in arguments else "max_episode_steps"
        if cfg.setdefault(key, limit) != limit:
            root.problem("max_episode_steps", f"is {limit}, but env.extensions.{key} is {cfg[key]}; keep one")
        draft.spelled[f"env.cfg.{key}"] = root.key("max_episode_steps")
    return cfg


def _read_extensions(draft: Draft, extensions: Section, task: str, arguments: Collection[str]) -> dict[str, Any]:
    cfg = dict(extensions.data)
    for key in _FIRST["options_of_steps"]:
        value = cfg.pop(key, None) if key not in arguments else None
        if key == "action_type" and value not in (None, "delta_qpos"):
            extensions.problem(key, f"got {value!r}; the task class {task} acts by joint steps only: delta_qpos")
        elif value is not None:
            extensions.note(key, f"no effect: the task class {task} has its own", "without effect")
    # both spellings are allowed: a file may be ejax's own by now
    for old, new in _FIRST["extensions"].items():
        if old in cfg and new not in cfg:
            cfg[new] = cfg.pop(old)
            draft.spelled[f"env.cfg.{new}"] = extensions.key(old)
            extensions.note(old, new, "renamed")
    return cfg


def _read_events(draft: Draft, events: Section, task: str, arguments: Collection[str]) -> dict[str, Any]:
    """Read positions of bodies, relative to where they start, drawn at reset."""
    ranges: dict[str, Any] = {}
    for name, spec in events.data.items():
        argument, params = "", spec.get("params") if isinstance(spec, Mapping) else None
        if isinstance(params, Mapping) and isinstance(body := params.get("entity_cfg"), Mapping):
            fits = (spec.get("func"), spec.get("mode")) == ("randomize_rigid_object_pose", "reset")
            fits &= not params.keys() - {"entity_cfg", "position_range", "relative_position"}
            fits &= params.get("relative_position", True) is True
            argument = f"{body.get('uid')}_position_range" if fits else ""
        if argument not in arguments:
            text = f"the task class {task} takes only randomize_rigid_object_pose of its cube at reset, with a relative"
            manager_form = "or write the task in manager form, with env.observations, rewards and actions"
            events.problem(name, f"{text} position_range; {manager_form}")
            continue
        ranges[argument] = spec["params"].get("position_range")
        draft.spelled[f"env.cfg.{argument}"] = f"{events.key(name)}.params.position_range"
        events.note(name, f"env.cfg.{argument}", "renamed")
    return ranges


def is_manager_form(data: Mapping[str, Any]) -> bool:
    """Return True for functors, or a robot for an id that no class of ejax has."""
    env = data.get("env") or {}
    if any(env.get(key) for key in ("observations", "rewards", "actions")):
        return True
    if {"obs_mode", "episode_length"} & set(env.get("extensions") or {}):
        return False  # the first release's tasks are classes, though they have a scene and events
    known = str(data.get("id")).casefold() in {name.casefold() for name in ENVS}
    return bool(env.get("events") or (data.get("robot") and not known))


def manager_notes(gym_config: Mapping[str, Any]) -> tuple[KeyNote, ...]:
    """Note each key of a gym config in manager form, buildable or not."""
    from ejax.envs.manager.manager_spec import read_manager_spec  # imports MuJoCo, which not every command needs

    try:
        return read_manager_spec(freeze(gym_config)).notes
    except ConfigError as error:
        return error.notes


def read_velocity_task(root: Section, robot: str) -> dict[str, Any]:
    """Read ``env.cfg``; what cannot be done goes into the section's report."""
    from ejax.envs.locomotion.catalog import velocity_task  # imports MuJoCo

    task = velocity_task(robot)
    root.take("id")
    root.ignore_all(IGNORED[""])
    root.take("num_envs")
    for name in ("background", "rigid_object", "rigid_object_group", "articulation"):
        root.refuse(name, "a velocity task has a floor and a robot, nothing else")
    with root.open("physics_config") as physics:
        for name, wanted in (("gravity", (0.0, 0.0, -9.81)), ("physics_dt", task.timestep), ("num_substeps", 1)):
            physics.expect(name, wanted, f"the velocity task of {task.robot.name} has {wanted}")
        physics.ignore_all(IGNORED["physics_config"] | _IGNORED["physics_config"])
    with root.open("robot") as section:
        _read_robot(section, task.robot)
    for sensor in root.listed("sensor"):
        if sensor.take("sensor_type") != "ContactSensor":
            sensor.problem("sensor_type", "velocity tasks have a ContactSensor, nothing else")
        sensor.ignore_all(_IGNORED["sensor"])
    with root.open("env") as env:
        env.take("num_envs")
        env.ignore_all(IGNORED["env"])
        cfg: dict[str, Any] = {"robot": robot, "max_episode_steps": root.integer("max_episode_steps", 1000, at_least=1)}
        cfg["sim_steps_per_control"] = env.integer("sim_steps_per_control", task.sim_steps_per_control, at_least=1)
        env.refuse("extensions", "the task's class reads none")
        env.refuse("target_control_frequency", "use sim_steps_per_control instead")
        env.expect("control_parts", ["locomotion"], "the policy acts on all joints: ['locomotion']")
        cfg["push"] = _read_push(env.open("events"))
        _read_actions(env.open("actions"))
        for _, term in env.open("rewards").sections():
            _expect_func(term, _REWARD)
            term.expect("weight", 1.0, "must be 1; change the weights of terms by env.cfg.rewards")
            term.refuse("params", f"{_REWARD} has none; change terms by env.cfg.rewards")
        if not _read_observations(env.open("observations")):
            cfg["noise"] = dict.fromkeys(task.noise, 0.0)
    return cfg


def _read_robot(section: Section, robot: "LeggedRobot") -> None:
    """Judge keys that EmbodiChain's classes replace by the task's own numbers."""
    section.take("uid")
    links = "env.cfg.model, which you set" if robot.source is None else robot.source.replace(":", "/")
    section.ignore("fpath", f"no effect: links and collision shapes are {links}")
    text = f"episodes start at height {robot.height}, around [0, 0]"
    section.expect("init_pos", [0.0, 0.0, robot.height], text)
    with section.open("control_parts") as parts:
        parts.expect("locomotion", list(robot.joints), f"must be {', '.join(robot.joints)}, in this order")
    with section.open("root_props") as root_props:
        root_props.expect("fixed_base", False, "the robot walks; set it to false")
        touches = bool(robot.self_contacts)
        root_props.expect("self_collision_enabled", touches, f"must be {str(touches).lower()} for {robot.name}")
        if touches:
            pairs = "; ".join(" and ".join(pair) for pair in robot.self_contacts)
            root_props.note("self_collision_enabled", f"of the pairs {pairs.replace('_collision', '')}")
        for name in ("min_position_iters", "min_velocity_iters"):
            root_props.ignore(name, IGNORED["robot"][name])
    with section.open("joint_drive_props") as drives:
        drives.expect("drive_type", "force", "velocity tasks have drives of forces: force")
        drives.ignore_all(_IGNORED["joint_drive_props"])
        for name in ("stiffness", "damping", "max_effort"):
            # a number for all joints can be right only where all of the robot's have the same
            first, *others = getattr(robot.drives, name)
            given = drives.take(name, first)
            if given not in (first, {".*": first}) or (name in drives and set(others) > {first}):
                drives.problem(name, f"got {short_repr(given)}; the drives of {robot.name} have {first}")
    section.ignore_all(_IGNORED["robot"])
    # of manipulators, whose base is fixed; a walking robot's is not, as refused above
    section.ignore_all(
        {name: text for name, text in IGNORED["robot"].items() if name not in ("root_props", "fix_base")}
    )


def _read_push(events: Section) -> dict[str, Any] | None:
    push: dict[str, Any] | None = None
    for _, event in events.sections():
        func = event.take("func")
        event.ignore_all(IGNORED["env.events"])
        if func != _PUSH or push is not None:
            event.problem("func", f"got {func!r}; ejax's velocity tasks have one {_PUSH}")
            event.skip("its functor is missing")
            continue
        if event.take("mode") != "interval" or event.integer("interval_step", 1) != 1:
            event.problem("mode", "a push has mode interval and interval_step 1: its own timer says when it is due")
        with event.open("params") as params:
            with params.open("entity_cfg") as entity:
                entity.take("uid")
            push = {"interval": list(params.numbers("interval_range_s", (math.inf, math.inf), 2))}
            with params.open("velocity_range") as ranges:
                push |= {axis: list(ranges.numbers(axis, (0.0, 0.0), 2)) for axis in _AXES}
    return push


def _read_actions(actions: Section) -> None:
    for _, term in actions.sections():
        contract, func = term.take("contract"), term.take("func")
        if (what := contract or func) not in ("joint_position.default_offset@1", "DefaultJointPositionAction"):
            term.problem("contract", f"got {what!r}; velocity tasks act by joint_position.default_offset@1")
        term.ignore_all(_IGNORED["action"])
        with term.open("params") as params:
            params.expect("clip", 1.0, "actions are clipped to ±1")


def _read_observations(observations: Section) -> bool:
    noisy = True
    for name, term in observations.sections():
        path = term.take("name", name)
        _expect_func(term, _OBSERVATION)
        term.ignore_all(IGNORED["env.observations"])
        with term.open("params") as params:
            wanted = "critic" if params.take("privileged", False) else "policy"
            corrupted = bool(params.take("enable_corruption", False))
        if path != wanted:
            term.problem("name", f"got {path!r}; this observation is called {wanted} here")
        noisy = corrupted if wanted == "policy" else noisy
    return noisy


def _expect_func(term: Section, func: str) -> None:
    if (given := term.take("func")) != func:
        term.problem("func", f"got {given!r}; must be {func}")
    term.expect("mode", "add", "must be add")
