"""Places of wrappers and of the events of ``trainer.events``: functors go into the task whose world they change, the
others into a ``RandomizedEnv`` around it."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

from flax.core import FrozenDict

from ejax.envs.randomization.names import split_events
from ejax.schema.frozen import freeze
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import resolve
from ejax.types import HostEnv

FIELD = "functor_events"


@runtime_checkable
class SelfRandomizingEnv(Protocol):
    """An environment with its own events, in training and in evaluation."""

    @property
    def randomization(self) -> Mapping[str, Any]: ...


@runtime_checkable
class JudgedEnv(Protocol):
    """An environment that is another one where a policy is judged, as after the last stage of a curriculum."""

    def for_evaluation(self) -> Any: ...


def for_evaluation(env: Any) -> Any:
    """Return the environment that evaluations take place in; wrappers that are dataclasses stay around it."""
    if isinstance(env, JudgedEnv) or not is_dataclass(env):
        return env.for_evaluation() if isinstance(env, JudgedEnv) else env
    old = getattr(env, "env", None)
    return env if (new := for_evaluation(old)) is old else replace(env, env=new)  # type: ignore[type-var]


def wrap(
    env: Any,
    wrappers: Iterable[tuple[str, Mapping[str, Any]]] = (),
    events: Mapping[str, Any] = FrozenDict(),
    action_chunk: int = 1,
) -> Any:
    """Put wrappers, (name, arguments) each, around an environment in JAX, the outermost last.

    ``events``, none of them functors, and ``action_chunk`` go below the first wrapper that acts on what they make, such
    as ``RenderedEnv``: a decision gets one picture. Where there is none, they go around all.

    Raises ConfigError: events that the environment cannot have; ValueError: an environment outside JAX.
    """
    makes = [(resolve("wrapper", name), dict(cfg)) for name, cfg in wrappers]
    if isinstance(env, HostEnv) and (makes or events or action_chunk != 1):
        what = ["wrappers"] * bool(makes) + [f"events ({', '.join(events)})"] * bool(events)
        text = " or ".join(what or [f"action_chunk {action_chunk}"])
        raise ValueError(f"{type(env).__name__} is stepped outside JAX: it takes no {text}")
    below = next((i for i, (make, _) in enumerate(makes) if getattr(make, "above_events", False)), len(makes))
    if action_chunk != 1:
        makes.insert(below, (resolve("wrapper", "ActionChunk"), {"size": action_chunk}))
    for i, (make, cfg) in enumerate(makes):
        env = make(with_events(env, events if i == below else {}), **cfg)
    return env if below < len(makes) else with_events(env, events)


def with_events(env: Any, events: Mapping[str, Any]) -> Any:
    """Return ``env`` with these events over its own of the same name. Raises ConfigError: it cannot have them."""
    own = env.randomization if isinstance(env, SelfRandomizingEnv) else {}
    if not (together := {**own, **events}):
        return env
    from ejax.envs.wrappers.randomized import RandomizedEnv  # imports MuJoCo

    return RandomizedEnv(env, together)


def why_none(name: str) -> str:
    """Explain a refusal of event functors."""
    return (
        f"{name} takes no event functors: they change the world of one of ejax's tasks, and it has none. Tasks of ejax "
        f"do, wrappers around one, environments in manager form, and a class of yours with an argument {FIELD}"
    )


def with_functor_events(name: str, cfg: Mapping[str, Any], events: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add event functors to the arguments of an environment. None: it takes none."""
    return _added(cfg, events) if FIELD in inspect.signature(resolve("env", name)).parameters else None


def add_events(env: Any, events: Mapping[str, Any]) -> Any:
    """Return an environment in JAX, which is built already, with events of ``trainer.events`` besides its own.

    Raises ConfigError: events that it cannot have, by name.
    """
    randomizers, functors = split_events(freeze(events))
    if functors:
        made = _with_functors(env, functors)
        if made is None:
            raise ConfigError([Problem(name, why_none(type(env).__name__)) for name in functors], "events")
        env = made
    return with_events(env, randomizers)


def _with_functors(env: Any, events: Mapping[str, Any]) -> Any:
    """Return a copy with the events inside. None: it takes none."""
    if not is_dataclass(env):
        return None
    own = {each.name: getattr(env, each.name) for each in fields(env)}
    if FIELD in own:
        return replace(env, **{FIELD: _added(own, events)[FIELD]})  # type: ignore[type-var]
    inner = _with_functors(own.get("env"), events)
    return None if inner is None else replace(env, env=inner)  # type: ignore[type-var]


def _added(cfg: Mapping[str, Any], events: Mapping[str, Any]) -> dict[str, Any]:
    return {**cfg, FIELD: freeze({**(cfg.get(FIELD) or {}), **events})}
