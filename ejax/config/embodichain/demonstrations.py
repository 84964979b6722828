"""Demonstrations in the environment of an EmbodiChain gym config: what ``OnlineDataEngineCfg(gym_config=…)`` runs.

Who demonstrates is the task's own affair, as in EmbodiChain: ejax has experts for some ids, and a function of one's
own (``ejax.experts.planned``) is named in ``action_config``, or in ``env.extensions``, which EmbodiChain makes the
task's attributes.
``action_config`` are arguments of who demonstrates; EmbodiChain gives them to the task's class.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ejax.config.embodichain.draft import Draft
from ejax.config.embodichain.gym_config import MANAGER_ENV, read_gym_config
from ejax.config.environment import env_problems
from ejax.config.explain import argument_problems
from ejax.config.files import read_file
from ejax.config.models import EnvConfig
from ejax.data.engine_config import SIDE_BY_SIDE
from ejax.envs.manager.extensions import FIRST_EXTENSIONS, LIMIT
from ejax.experts.planned import KEYS, planned
from ejax.experts.task import ScriptedTask
from ejax.schema.frozen import thaw
from ejax.schema.messages import short_repr
from ejax.schema.paths import find
from ejax.schema.plain_files import expanded
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import import_entry, resolve
from ejax.schema.tables import tables_beside
from ejax.schema.trust import UntrustedCodeError, import_trusted

_TABLES: dict[str, dict[str, Any]] = tables_beside(__file__)
_ACTION_BANK = {key: text for text, keys in _TABLES["refused"].items() for key in keys}
_GIVEN = ("expert", "env", "num_envs", "instruction")  # arguments of ScriptedTask that the gym config decides


def make_task(**fields: Any) -> ScriptedTask:
    """Make the task that demonstrates; arguments as of ``read_demonstrations``. Raises ValueError: what cannot be
    honoured, key by key."""
    make, problems = read_demonstrations(**fields)
    if make is None:
        raise ValueError("\n".join(["the data engine cannot honour", *(f"  {key}: {text}" for key, text in problems)]))
    try:
        return make()
    except ConfigError as error:  # which does not travel from the worker to its owner
        raise ValueError(str(error)) from None


def read_demonstrations(
    gym_config: Mapping[str, Any] | str,
    action_config: Mapping[str, Any],
    max_episode_steps: int = LIMIT,
    num_envs: int = SIDE_BY_SIDE,
) -> tuple[Callable[[], ScriptedTask] | None, list[Problem]]:
    """Read what demonstrates from a gym config, None where something of it cannot be honoured, and those problems.

    Args:
        gym_config: as loaded, or its file.
        max_episode_steps, num_envs: where the gym config has none.
    """
    data = read_file(Path(expanded(gym_config))) if isinstance(gym_config, str) else thaw(dict(gym_config))
    data, draft = copy.deepcopy(data), Draft({})
    section: dict[str, Any] = data["env"] if isinstance(data.get("env"), dict) else {}
    extensions = section["extensions"] if isinstance(section.get("extensions"), dict) else {}
    if not extensions.keys() & {"max_episode_steps", "episode_length"}:
        data.setdefault("max_episode_steps", max_episode_steps)
    named = {key: extensions[key] for key in KEYS if key in extensions}
    if data.get("robot") and not section.get("actions") and not extensions.keys() & {"obs_mode", *FIRST_EXTENSIONS}:
        # in EmbodiChain an action without a term is target positions
        section["actions"] = {"qpos": {"func": "QposTerm"}}
    env = read_gym_config(draft, data, "gym_config")
    problems = list(draft.report.problems)
    if not problems:
        found = env_problems(EnvConfig.model_validate(env))
        problems = [Problem(draft.key(key) if draft.spelled else key, text) for key, text in found]
    if problems:
        return None, problems
    expert, options, problems = _find_demonstrator(data, env, {**named, **thaw(dict(action_config))})
    if expert is None or problems:
        return None, problems
    options |= {"env": env["cfg"], "num_envs": draft.get("trainer.num_envs") or num_envs}
    if text := _instruction(data):
        options["instruction"] = text
    return partial(expert, **options), []


def _find_demonstrator(
    data: Mapping[str, Any], env: Mapping[str, Any], arguments: dict[str, Any]
) -> tuple[Callable[..., ScriptedTask] | None, dict[str, Any], list[Problem]]:
    """Return what makes the task, its options, and problems of ``action_config``."""
    given = [key for key in KEYS if key in arguments]
    if len(given) > 1:
        return None, {}, [Problem(f"action_config.{given[1]}", f"{given[0]} is given too; keep one")]
    if given:
        place = arguments.pop(given[0])
        if not isinstance(place, str) or not all(place.partition(":")):
            text = f"got {short_repr(place)}; name a function as package.module:name"
            return None, {}, [Problem(f"action_config.{given[0]}", text)]
        try:
            plan = getattr(import_trusted(place), place.partition(":")[2])
        except (ImportError, AttributeError, UntrustedCodeError) as error:
            return None, {}, [Problem(f"action_config.{given[0]}", str(error))]
        taken = list(inspect.signature(plan).parameters)[:4]
        own = resolve("env", env["id"])
        takes_physics = "physics" in inspect.signature(own).parameters  # which an expert gives the environment
        make = own if takes_physics else lambda physics=None, **cfg: own(**cfg)
        expert = planned(make, plan, arguments, given[0])
        # a plan is carried out as it is
        return partial(ScriptedTask, expert), {"noise": 0.0}, argument_problems(plan, arguments, "action_config", taken)
    table = _TABLES["of_scenes" if env["id"] == MANAGER_ENV else "of_classes"]
    if data["id"] not in table:
        text = f"ejax has no expert for {data['id']!r} in this form; it has some for {', '.join(table)}"
        remedy = f"name a function of yours: action_config: {{{KEYS[0]}: package.module:name}} (docs/data.md)"
        return None, {}, [Problem("gym_config.id", f"{text}; {remedy}")]
    make = import_entry(table, data["id"])
    problems = [
        Problem(each.key, _ACTION_BANK.get(each.key.rpartition(".")[2], each.text))
        for each in argument_problems(make, arguments, "action_config", _GIVEN)
    ]
    return make, arguments, problems


def _instruction(data: Mapping[str, Any]) -> str | None:
    """Return EmbodiChain's instruction of a data set: that of the first of ``env.dataset`` which has one."""
    dataset = find(data, "env.dataset", ".", None)
    for entry in dataset.values() if isinstance(dataset, Mapping) else ():
        instruction = find(entry, "params.instruction", ".", None)
        text = instruction.get("lang") if isinstance(instruction, Mapping) else instruction
        if isinstance(text, str) and text:
            return text
    return None
