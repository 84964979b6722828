"""Places of the events of ``trainer.events``: functors go into the task that they change, the others into a wrapper."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ejax.envs.randomization.names import split_events
from ejax.schema.frozen import freeze
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import resolve

FIELD = "functor_events"


def why_none(name: str) -> str:
    """Explain a refusal of event functors."""
    return (
        f"{name} takes no event functors: they change the world of one of ejax's tasks, and it has none. Tasks of ejax "
        f"do, wrappers around one, environments in manager form, and a class of your own with an argument {FIELD}"
    )


def with_functor_events(name: str, cfg: Mapping[str, Any], events: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add event functors to the arguments of an environment, or of the one that it wraps. None: it takes none."""
    return _added(inspect.signature(resolve("env", name)).parameters, cfg, events)


def add_events(env: Any, events: Mapping[str, Any]) -> Any:
    """Return an environment in JAX, which is built already, with events of ``trainer.events`` beside its own.

    Raises ConfigError: events that it cannot have, by name.
    """
    randomizers, functors = split_events(freeze(events))
    if functors:
        made = _with_functors(env, functors)
        if made is None:
            raise ConfigError([Problem(name, why_none(type(env).__name__)) for name in functors], "events")
        env = made
    if not (randomizers or getattr(env, "randomization", None)):
        return env
    from ejax.envs.wrappers.randomized import with_events  # imports MuJoCo

    return with_events(env, randomizers)


def _with_functors(env: Any, events: Mapping[str, Any]) -> Any:
    """Return a copy with the events inside. None: it takes none."""
    if not is_dataclass(env):
        return None
    own = {each.name: getattr(env, each.name) for each in fields(env)}
    if (cfg := _added(own, own, events)) is not None:
        return replace(env, **{name: cfg[name] for name in (FIELD, "env_cfg") if name in cfg})  # type: ignore[type-var]
    inner = _with_functors(own.get("env"), events)
    return None if inner is None else replace(env, env=inner)  # type: ignore[type-var]


def _added(takes: Mapping[str, Any], cfg: Mapping[str, Any], events: Mapping[str, Any]) -> dict[str, Any] | None:
    if FIELD in takes:
        return {**cfg, FIELD: freeze({**(cfg.get(FIELD) or {}), **events})}
    if "env_cfg" in takes and isinstance(cfg.get("env"), str):
        inner = with_functor_events(cfg["env"], cfg.get("env_cfg") or {}, events)
        return None if inner is None else {**cfg, "env_cfg": freeze(inner)}
    return None
