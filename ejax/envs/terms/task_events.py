"""Event functors of ``trainer.events`` in a task: read from their entries, and each tried once."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from flax.core import FrozenDict

from ejax.envs.task.entities import ROBOT
from ejax.envs.task.terms import Term, fire
from ejax.envs.terms.events import EVENTS as OF_MODELS
from ejax.envs.terms.events import PhysicsEvent
from ejax.envs.terms.reading import read_specs
from ejax.envs.user_code import describe_error
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section

EVENTS = "functor_events"
"""The field of tasks that take them."""
MODES = ("interval", "startup", "reset")
"""The default first."""


@functools.lru_cache(maxsize=32)
def read_events(entries: Mapping[str, Any]) -> tuple[Term, ...]:
    """Read entries {func, mode, interval_step, params}. Raises ConfigError: all that is wrong, by key."""
    report = KeyReport()
    terms = read_specs(Section(entries, EVENTS, report), "events", ROBOT, MODES)
    report.raise_if_refused(EVENTS)
    return terms


def try_events(task: Any, events: tuple[Term, ...]) -> None:
    """Trace each event once, those of an episode's start first. Raises ConfigError: all that they refuse."""
    report, key = KeyReport(), jax.random.key(0)
    for event in events:
        name = getattr(event.func, "__name__", event.name)
        if isinstance(event.func, PhysicsEvent):
            report.refuse(
                event.key, f"{name} randomizes physics, which RandomizedEnv does; give it under trainer.events"
            )
        elif event.func in OF_MODELS and not task.has_model:
            text = f"{name} changes a MuJoCo model, and {type(task).__name__} has none"
            report.refuse(event.key, f"{text}; give a function of yours, f(world, key), with the task's world.state")
    report.raise_if_refused(EVENTS)
    state = jax.eval_shape(replace(task, **{EVENTS: FrozenDict()}).reset, key)[0]
    for event in sorted(events, key=lambda each: ("startup", "reset", "interval").index(each.mode)):
        after = functools.partial(lambda e, s, k: fire([e], task.world(s), e.mode, lambda *_: k).state, event)
        state = try_call(report, event.key, after, state, key) or state
    report.raise_if_refused(EVENTS)


def try_call(report: KeyReport, key: str, call: Callable[..., Any], *shapes: Any) -> Any:
    """Trace a functor, and refuse its key where it raises. Return the shapes of what it gives, or None."""
    try:
        return jax.eval_shape(call, *shapes)
    except Exception as error:  # any error here is the functor's own
        report.refuse(key, describe_error(error))
        return None
