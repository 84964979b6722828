"""An EmbodiChain gym config, read for one of ejax's task classes.

Taken over: the id, the number of environments, the time limit, the control rate, and ``env.extensions`` (in the first
releases: all of a task's numbers). The manager form (events, observations, rewards, actions, scene) is announced.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from ejax.config.errors import Notice, Problem
from ejax.config.models import EnvConfig, thaw
from ejax.registry import UnknownNameError, did_you_mean, registered_name, resolve

MANAGER_KEYS = ("events", "observations", "rewards", "actions", "dataset", "control_parts")
SCENE_KEYS = (
    "robot",
    "sensor",
    "light",
    "background",
    "rigid_object",
    "rigid_object_group",
    "articulation",
    "physics_config",
    "visualization",
)
WITHOUT_EFFECT_KEYS = (
    "max_episodes",
    "headless",
    "device",
    "gpu_id",
    "arena_space",
    "renderer",
    "render_cfg",
    "enable_rt",
    "physics",
    "scene_node_capacity",
)
EXTENSIONS_WITHOUT_EFFECT = ("joint_limits", "action_type")
"""Extensions of the first releases that ejax's tasks answer by themselves: from the robot model; joint-position steps."""


def read_gym_config(
    data: Mapping[str, Any], source: str
) -> tuple[dict[str, Any], int | None, list[Notice], list[Problem]]:
    """``({id, cfg}, num_envs or None, notices, problems)`` of a gym config.

    Args:
        data: the parsed file.
        source: its name in notices and problems: they read ``<source>:<dotted key>``.
    """
    notices: list[Notice] = []
    problems: list[Problem] = []
    env = data.get("env")
    env = env if isinstance(env, dict) else {}
    name = data.get("id")
    if not isinstance(name, str):
        return {}, None, [], [Problem(f"{source}:id", f"got {name!r}; must be the name of an environment")]

    for prefix, section, keys in (("env.", env, MANAGER_KEYS), ("", data, SCENE_KEYS)):
        used = [key for key in keys if section.get(key)]
        notices += [
            Notice(f"{source}:{prefix}{key}", f"not built yet: {name} of ejax has its own") for key in used
        ]
    notices += [
        Notice(f"{source}:{key}", "no effect in ejax") for key in WITHOUT_EFFECT_KEYS if data.get(key)
    ]
    if env.get("target_control_frequency") is not None:
        notices.append(
            Notice(f"{source}:env.target_control_frequency", "not built yet: give sim_steps_per_control")
        )

    allowed = {"id", "env", "max_episode_steps", "num_envs", *SCENE_KEYS, *WITHOUT_EFFECT_KEYS}
    problems += _unknown(f"{source}:", data, allowed)
    allowed = {"num_envs", "sim_steps_per_control", "target_control_frequency", "extensions", *MANAGER_KEYS}
    problems += _unknown(f"{source}:env.", env, allowed)

    cfg = dict(env.get("extensions") or {})
    for key in EXTENSIONS_WITHOUT_EFFECT:
        if cfg.pop(key, None) is not None:
            notices.append(Notice(f"{source}:env.extensions.{key}", f"no effect: {name} of ejax has its own"))
    if "sim_steps_per_control" in env:
        cfg["sim_steps_per_control"] = env["sim_steps_per_control"]
    limit = data.get("max_episode_steps")
    if limit is not None:
        key = time_limit_key(name)
        if cfg.setdefault(key, limit) != limit:
            problems.append(
                Problem(
                    f"{source}:max_episode_steps",
                    f"is {limit}, but env.extensions.{key} is {cfg[key]}; keep one",
                )
            )
    num_envs = data.get("num_envs", env.get("num_envs"))
    return {"id": name, "cfg": cfg}, num_envs, notices, problems


def time_limit_key(name: str) -> str:
    """What the environment calls its time limit: ``episode_length`` in EmbodiChain's first tasks."""
    return "episode_length" if "episode_length" in _parameters(name) else "max_episode_steps"


def env_problems(env: EnvConfig) -> list[Problem]:
    """Arguments in ``env.cfg`` that the environment does not take, or not of this type; or an environment that is missing."""
    try:
        parameters = _parameters(env.id, strict=True)
    except ImportError as error:
        return [Problem("env.id", f"'{env.id}' cannot be imported: {error}")]
    cfg = thaw(env.cfg)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    problems = [] if takes_any else _unknown("env.cfg.", cfg, parameters)
    for key, value in cfg.items():
        if key in parameters and (text := _mismatch(parameters[key].annotation, value)):
            problems.append(Problem(f"env.cfg.{key}", f"got {value!r}; {text}"))
    return problems


def _parameters(name: str, *, strict: bool = False) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(resolve("env", registered_name("env", name)), eval_str=True).parameters
    except (UnknownNameError, ImportError):
        if strict:
            raise
        return {}


def _mismatch(annotation: Any, value: Any) -> str | None:
    """Why a value read from JSON is not of the annotated type, or None where it is or where nobody can tell."""
    if annotation is inspect.Parameter.empty:
        return None
    try:
        adapter = TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return None
    try:
        adapter.validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        return " or ".join(
            dict.fromkeys(each["msg"].replace("Input should", "must") for each in error.errors())
        )
    return None


def _unknown(prefix: str, section: Mapping[str, Any], allowed: Any) -> list[Problem]:
    return [
        Problem(
            f"{prefix}{key}",
            f"unknown key; allowed: {', '.join(sorted(allowed))}{did_you_mean(str(key), allowed)}",
        )
        for key in section
        if key not in allowed
    ]
