"""Problems of an environment's config that show before a run builds it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from ejax.config.annotations import argument_problems
from ejax.config.embodichain.spellings import RECORDERS
from ejax.config.models import EnvConfig, EventsConfig
from ejax.config.run_config import RunConfig
from ejax.config.spaces import space_problems
from ejax.envs.randomization.names import KINDS, split_events
from ejax.schema.frozen import thaw
from ejax.schema.messages import short_repr
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import did_you_mean, did_you_mean_family, resolve
from ejax.types import PHASES

_REFUSED = (TypeError, ValueError, ArithmeticError, ImportError)


def env_problems(env: EnvConfig) -> list[Problem]:
    """Find arguments that the environment does not take, or that it is not there."""
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
    if problems:
        return problems
    inside = "gym_config" if "gym_config" in parameters else "env_cfg.gym_config"  # of RenderedEnv
    given = {name: env.cfg[name] for name in cfg}
    return _refusals(make, lambda: make(**given), "env.cfg", f"env.cfg.{inside}.")


def action_problems(config: RunConfig) -> list[Problem]:
    """Find problems between the policy and the environment's spaces, where these are known before it is built."""
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
    """Find events of the trainer that the environment cannot have."""
    problems: list[Problem] = []
    make = resolve("env", env.id)
    for phase in PHASES:
        section = f"trainer.events.{phase}"
        randomizers, specs = split_events(events.of(phase))
        if randomizers:
            problems += _randomizer_problems(env, make, randomizers, section)
        unknown = _unknown_functors(specs, section) if specs else []
        problems += unknown
        if unknown or not specs:
            continue
        if "interval_events" in inspect.signature(make).parameters:
            build = functools.partial(make, **{**env.cfg, "interval_events": specs})
            problems += _refusals(make, build, section, section, "interval_events")
            continue
        text = (
            f"{env.id} takes no events from outside. Tasks on MuJoCo models and environments in manager form do, and a "
            "class of your own with an argument interval_events"
        )
        problems += [Problem(f"{section}.{name}", text) for name in specs]
    return problems


def _unknown_functors(specs: Mapping[str, Any], section: str) -> list[Problem]:
    from ejax.envs.terms.registry import TERMS  # imports MuJoCo

    problems = []
    allowed = [*dict.fromkeys([*TERMS["events"], *KINDS]), *RECORDERS[:1]]
    for name, spec in specs.items():
        if (func := spec["func"]) not in TERMS["events"] and ":" not in func:
            text = f"no events functor '{func}'; there is {', '.join(allowed)}, or package.module:function"
            problems.append(Problem(f"{section}.{name}.func", text + did_you_mean(func, allowed)))
    return problems


def _randomizer_problems(env: EnvConfig, make: Any, randomizers: Mapping[str, Any], section: str) -> list[Problem]:
    cfg = {name: value for name, value in env.cfg.items() if name in inspect.signature(make).parameters}

    def build() -> Any:
        from ejax.envs.wrappers.randomized import randomized  # imports MuJoCo

        return randomized(make, cfg, randomizers)

    return _refusals(make, build, section, f"{section}.")


def _refusals(make: Any, build: Callable[[], Any], section: str, above: str, own: str = "") -> list[Problem]:
    """Find problems of a class that checks its own values; others refuse when they are built.

    Args:
        section: the key of what has none.
        above: comes before a key of the class's, in place of ``own``.
    """
    if not dataclasses.is_dataclass(make):
        return []
    try:
        build()
    except ConfigError as error:
        return [Problem(above + key.removeprefix(own), text) for key, text in error.problems]
    except _REFUSED as error:
        return [Problem(section, str(error))]
    return []
