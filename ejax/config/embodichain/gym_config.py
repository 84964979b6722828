"""An EmbodiChain gym config: which of ejax's environments it stands for.

The manager form (events, observations, rewards, actions) is built as it is, by ``ejax.envs.manager.embodied``, which
says what becomes of each key. Velocity tasks are read by ``ejax.config.embodichain.velocity_tasks``. Of the first
releases, whose tasks are classes with all numbers in ``env.extensions``, the id, the number of environments, the time
limit, the control rate and the extensions are taken over.
"""

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import gymnasium

from ejax.config.annotations import argument_problems
from ejax.config.embodichain.draft import Draft
from ejax.config.embodichain.spellings import RECORDERS, read_numbers
from ejax.config.embodichain.velocity_tasks import VELOCITY_ENV, read_velocity_task, velocity_robot
from ejax.config.models import EnvConfig, EventsConfig
from ejax.config.run_config import RunConfig
from ejax.config.spaces import space_problems
from ejax.envs.manager.vocabulary import IGNORED
from ejax.envs.randomization.names import KINDS, split_events
from ejax.schema.frozen import freeze, thaw
from ejax.schema.messages import short_repr
from ejax.schema.problems import ConfigError, KeyNote, KeyReport, Problem
from ejax.schema.registry import ENVS, UnknownNameError, did_you_mean, did_you_mean_family, resolve
from ejax.schema.sections import Section
from ejax.schema.trust import UntrustedCodeError
from ejax.types import PHASES

MANAGER_ENV = "EmbodiedEnv"
"""The registered name of the environment that is built from a gym config."""
MANAGER_KEYS = ("events", "observations", "rewards", "actions")
SCENE_KEYS = (
    "robot",
    "sensor",
    "light",
    "background",
    "rigid_object",
    "rigid_object_group",
    "articulation",
    "physics_config",
)
FIRST_RELEASE_NAMES = {
    "reaching_reward_weight": "reaching_weight",
    "place_reward_weight": "place_weight",
    "success_bonus_weight": "success_weight",
}
"""``env.extensions`` of the first release -> what ejax's task classes call it."""
EXTENSIONS_OF_STEPS = ("joint_limits", "action_type")
"""Options of actions, in the first releases. A task class need not take them; PushCubeRL takes ``joint_limits``."""
FIRST_RELEASE_BODIES = {"cube": "cube_position", "goal_sphere": "goal_position"}
"""Bodies of the first release -> the argument that says where they start."""
_REFUSED = (TypeError, ValueError, ArithmeticError, ImportError)
"""Errors of a constructor about its arguments; the last: they name an environment whose library is not installed."""


def read_gym_config(draft: Draft, data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``{id, cfg}`` of a gym config; what it says besides goes into the draft.

    Args:
        data: the parsed file.
        source: its name in notices and problems, which read ``<source>:<dotted key>``.
    """
    env = data.get("env") or {}
    name = data.get("id")
    if not isinstance(name, str) or not isinstance(env, dict) or not isinstance(env.get("extensions") or {}, dict):
        draft.problem("env", f"{source} must hold id: the name of an environment, and env: {{extensions: {{…}}}}")
        return {}
    draft.spelled["env.id"] = f"{source}:id"
    _read_num_envs(draft, data, env, source)
    if robot := velocity_robot(name):
        draft.spelled["env.cfg"] = f"{source}:robot.fpath"  # what the task's class can still lack are its links
        with Section(read_numbers(dict(data)), f"{source}:", draft.report) as root:
            return {"id": VELOCITY_ENV, "cfg": read_velocity_task(root, robot)}
    if is_manager_form(data):
        draft.spelled["env.cfg.gym_config"] = f"{source}:"
        return {"id": MANAGER_ENV, "cfg": {"gym_config": read_numbers(dict(data))}}
    draft.spelled["env.cfg"] = f"{source}:env.extensions"
    with Section(data, f"{source}:", draft.report) as root:
        return {"id": name, "cfg": _read_first_form(draft, root)}


def _read_first_form(draft: Draft, root: Section) -> dict[str, Any]:
    """The arguments of the task class that a first release's gym config names."""
    task = root.take("id")
    its_own = f"no effect: the task class {task} has its own"
    for key in SCENE_KEYS:
        root.ignore(key, its_own + (", but for init_pos" if key in ("rigid_object", "background") else ""))
    root.ignore_all(IGNORED[""])
    root.take("num_envs")
    with root.open("env") as env:
        env.ignore_all(dict.fromkeys(("dataset", "control_parts"), its_own))
        for key in ("num_envs", "extensions", *MANAGER_KEYS):
            env.take(key)
        env.refuse("target_control_frequency", f"the task class {task} takes sim_steps_per_control instead")
        cfg = _read_extensions(draft, env.open("extensions"), task)
        if (substeps := env.take("sim_steps_per_control")) is not None:
            cfg["sim_steps_per_control"] = substeps
            draft.spelled["env.cfg.sim_steps_per_control"] = env.key("sim_steps_per_control")
        cfg = {**_read_places(root.data), **_read_events(draft, env.open("events"), task), **cfg}
    if (limit := root.take("max_episode_steps")) is not None:
        key = "episode_length" if "episode_length" in _arguments(task) else "max_episode_steps"
        if cfg.setdefault(key, limit) != limit:
            root.problem("max_episode_steps", f"is {limit}, but env.extensions.{key} is {cfg[key]}; keep one")
        draft.spelled[f"env.cfg.{key}"] = root.key("max_episode_steps")
    return cfg


def is_manager_form(data: Mapping[str, Any]) -> bool:
    """True for what ``EmbodiedEnv`` builds: functors, or a robot for an id that no class of ejax has."""
    env = data.get("env") or {}
    if {"obs_mode", "episode_length"} & set(env.get("extensions") or {}) and not any(
        env.get(key) for key in ("observations", "rewards", "actions")
    ):
        return False  # the first release's tasks are classes, though they have a scene and events
    known = str(data.get("id")).casefold() in {name.casefold() for name in ENVS}
    return any(env.get(key) for key in MANAGER_KEYS) or bool(data.get("robot") and not known)


def manager_notes(gym_config: Mapping[str, Any]) -> tuple[KeyNote, ...]:
    """A note for each key of a gym config in manager form, buildable or not."""
    try:
        return _manager_spec().read_manager_spec(freeze(gym_config)).notes
    except ConfigError as error:
        return error.notes


def note_manager_form(draft: Draft) -> None:
    """Notices of a gym config that was read from a file. This imports the functors that may run."""
    if draft.get("env.id") == MANAGER_ENV and "env.cfg.gym_config" in draft.spelled:
        report = KeyReport({note.key: note for note in manager_notes(draft.get("env.cfg.gym_config"))})
        for note in report.notices:
            draft.note(f"env.cfg.gym_config.{note.key}", note.text, note.status)


def env_problems(env: EnvConfig) -> list[Problem]:
    """Arguments in ``env.cfg`` that the environment does not take; or an environment that is not there."""
    try:
        make = resolve("env", env.id)
    except (ImportError, TypeError, ValueError) as error:  # the last two: no name, or a relative one
        return [Problem("env.id", f"'{env.id}' cannot be imported: {error}{did_you_mean_family(env.id)}")]
    cfg = thaw(env.cfg)
    try:
        parameters = inspect.signature(make).parameters
        chunk = cfg.pop("action_chunk", 1) if "action_chunk" not in parameters else 1
        problems = argument_problems(make, cfg, "env.cfg")
    except (TypeError, ValueError) as error:
        return [Problem("env.id", f"'{env.id}' is neither a class nor a function that makes an environment: {error}")]
    if type(chunk) is not int or chunk < 1:
        problems.append(Problem("env.cfg.action_chunk", f"got {short_repr(chunk)}; must be an integer of at least 1"))
    if not problems and dataclasses.is_dataclass(make):  # checks its own values, and costs little
        try:
            make(**{name: env.cfg[name] for name in cfg})  # type: ignore[operator]  # a class, here
        except ConfigError as error:
            inside = "gym_config" if "gym_config" in parameters else "env_cfg.gym_config"  # of RenderedEnv
            return [Problem(f"env.cfg.{inside}.{key}", text) for key, text in error.problems]
        except _REFUSED as error:
            problems.append(Problem("env.cfg", str(error)))
    return problems


def action_problems(config: RunConfig) -> list[Problem]:
    """Problems between the policy's config and the environment's spaces, where these are known before it is built."""
    make, cfg = resolve("env", config.env.id), dict(config.env.cfg)
    chunk = cfg.pop("action_chunk", 1) if "action_chunk" not in inspect.signature(make).parameters else 1
    policy = config.policy
    gym_config = cfg.get("gym_config")
    sees = isinstance(gym_config, Mapping) and bool(gym_config.get("sensor"))
    observed = sees or policy.record.images or policy.obs_groups.actor or policy.obs_groups.critic
    if not dataclasses.is_dataclass(make) or not (observed or policy.squash_actions or policy.action_dim is not None):
        return []
    env: Any = make(**cfg)  # type: ignore[operator]  # a class, here
    observation_space = env.observation_space if observed else gymnasium.spaces.Dict()  # of some it takes long to know
    return space_problems(policy, env.action_space, observation_space, action_chunk=chunk)


def event_problems(env: EnvConfig, events: EventsConfig) -> list[Problem]:
    """Events of the trainer that the environment, which is right by itself, cannot have."""
    problems: list[Problem] = []
    make = resolve("env", env.id)
    for phase in PHASES:
        section = f"trainer.events.{phase}"
        randomizers, specs = split_events(events.of(phase))
        problems += _randomizer_problems(env, make, randomizers, section)
        unknown = [name for name, spec in specs.items() if not _is_event(spec["func"])]
        # MuJoCo, which has the functors, is imported for a mistake alone
        allowed = [*dict.fromkeys([*_event_functors(), *KINDS]), *RECORDERS[:1]] if unknown else []
        for name in unknown:
            func = specs[name]["func"]
            text = f"no events functor '{func}'; there is {', '.join(allowed)}, or package.module:function"
            problems.append(Problem(f"{section}.{name}.func", text + did_you_mean(func, allowed)))
        if unknown or not specs:
            continue
        if "interval_events" not in inspect.signature(make).parameters:
            text = (
                f"{env.id} takes no events from outside. Environments in manager form do (trainer.gym_config with "
                "env.observations, rewards and actions), and a class of your own with an argument interval_events"
            )
            problems += [Problem(f"{section}.{name}", text) for name in specs]
        elif dataclasses.is_dataclass(make):
            try:
                make(**{**env.cfg, "interval_events": specs})  # type: ignore[operator]  # a class, here
            except ConfigError as error:
                for key, text in error.problems:
                    problems.append(Problem(f"{section}{key.removeprefix(_manager_spec().INTERVAL_EVENTS)}", text))
            except _REFUSED as error:
                problems.append(Problem(section, str(error)))
    return problems


def _randomizer_problems(env: EnvConfig, make: Any, randomizers: Mapping[str, Any], section: str) -> list[Problem]:
    """Problems of the events (``ejax.envs.wrappers.randomized``) in this environment, if it can be made here."""
    if not randomizers or not dataclasses.is_dataclass(make) or not callable(make):
        return []  # whoever builds it says what is wrong
    from ejax.envs.wrappers.randomized import randomized  # imports MuJoCo

    cfg = {name: value for name, value in env.cfg.items() if name in inspect.signature(make).parameters}
    try:
        randomized(make, cfg, randomizers)
    except ConfigError as error:
        return [Problem(f"{section}.{key}", text) for key, text in error.problems]
    except _REFUSED as error:
        return [Problem(section, str(error))]
    return []


def _is_event(func: str) -> bool:
    return func in _event_functors() or ":" in func


def _read_num_envs(draft: Draft, data: Mapping[str, Any], env: Mapping[str, Any], source: str) -> None:
    key, num_envs = ("num_envs", data["num_envs"]) if "num_envs" in data else ("env.num_envs", env.get("num_envs"))
    if num_envs is None:
        return
    if draft.has("trainer.num_envs"):
        if num_envs == draft.get("trainer.num_envs"):
            return
        text = f"no effect: trainer.num_envs is {short_repr(draft.get('trainer.num_envs'))}"
        draft.note(f"{source}:{key}", text, "without effect")
    else:
        draft.put("trainer.num_envs", num_envs)
        draft.spelled["trainer.num_envs"] = f"{source}:{key}"


def _read_extensions(draft: Draft, extensions: Section, task: str) -> dict[str, Any]:
    cfg = dict(extensions.data)
    for key in EXTENSIONS_OF_STEPS:
        value = cfg.pop(key, None) if key not in _arguments(task) else None
        if key == "action_type" and value not in (None, "delta_qpos"):
            text = f"got {value!r}; the task class {task} acts by joint steps only: delta_qpos"
            extensions.problem(key, text)
        elif value is not None:
            extensions.note(key, f"no effect: the task class {task} has its own", "without effect")
    for old, new in FIRST_RELEASE_NAMES.items():
        if old in cfg and new not in cfg:
            cfg[new] = cfg.pop(old)
            draft.spelled[f"env.cfg.{new}"] = extensions.key(old)
            extensions.note(old, new, "renamed")
    return cfg


def _arguments(name: str) -> Collection[str]:
    """Parameters of an environment's constructor; none where there is none or it may not run, as env.id reports."""
    try:
        return inspect.signature(resolve("env", name)).parameters.keys()
    except (UnknownNameError, UntrustedCodeError, ImportError):
        return ()


def _read_places(data: Mapping[str, Any]) -> dict[str, Any]:
    """Start poses of the bodies of a first release's scene, as far as the task class takes them."""
    bodies = [*(data.get("rigid_object") or ()), *(data.get("background") or ())]
    places = {
        FIRST_RELEASE_BODIES.get(str(body.get("uid")), ""): body["init_pos"]
        for body in bodies
        if isinstance(body, Mapping) and "init_pos" in body
    }
    return {name: place for name, place in places.items() if name in _arguments(data["id"])}


def _read_events(draft: Draft, events: Section, task: str) -> dict[str, Any]:
    """The first release's events: positions of bodies, relative to where they start, drawn at reset."""
    ranges: dict[str, Any] = {}
    for name, spec in events.data.items():
        argument = _ranged(spec)
        if argument not in _arguments(task):
            text = (
                f"the task class {task} takes no such event, only randomize_rigid_object_pose of its cube at "
                "reset, with a relative position_range; or write the task in manager form, with env.observations, "
                "rewards and actions"
            )
            events.problem(name, text)
            continue
        ranges[argument] = spec["params"].get("position_range")
        draft.spelled[f"env.cfg.{argument}"] = f"{events.key(name)}.params.position_range"
        events.note(name, f"env.cfg.{argument}", "renamed")
    return ranges


def _ranged(spec: Any) -> str:
    """The argument of a task class that an event draws; "" if there is none for it."""
    params = spec.get("params") if isinstance(spec, Mapping) else None
    if not isinstance(params, Mapping) or not isinstance(body := params.get("entity_cfg"), Mapping):
        return ""
    if (
        (spec.get("func"), spec.get("mode")) != ("randomize_rigid_object_pose", "reset")
        or params.keys() - {"entity_cfg", "position_range", "relative_position"}
        or params.get("relative_position", True) is not True
    ):
        return ""
    return f"{body.get('uid')}_position_range"


def _manager_spec() -> ModuleType:
    # here, not above: MuJoCo would be imported at the start of every command
    from ejax.envs.manager import manager_spec

    return manager_spec


def _event_functors() -> Collection[str]:
    from ejax.envs.manager.functors.registry import FUNCTORS

    return FUNCTORS["events"]
