"""Terms that a config adds to a task: events of ``trainer.events`` and rewards. They are read from their entries, and
each is tried once."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from ejax.envs.task.entities import ROBOT
from ejax.envs.task.terms import Added, Term, apply_events, total
from ejax.envs.terms.events import EVENTS as OF_MODELS
from ejax.envs.terms.events import PhysicsEvent
from ejax.envs.terms.reading import read_specs
from ejax.schema.messages import describe_error, did_you_mean
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section

TASK_EVENTS = "functor_events"  # The field of tasks that take them
EVENT_MODES = ("interval", "startup", "reset")  # The default first


@functools.lru_cache(maxsize=32)
def read_added(
    events: Mapping[str, Any], rewards: Mapping[str, Any], reward_field: str, reward_names: tuple[str, ...] | None
) -> Added:
    """Read what a config adds to a task.

    Args:
        events: name -> {func, mode, interval_step, params}.
        rewards: name of one of the task's terms -> its weight, or {weight}; a new name -> {func, weight, mode, params}.
        reward_names: the task's terms. None: they are not known yet.

    Raises:
        ConfigError: all that is wrong, by key.
    """
    report = KeyReport()
    added_events = read_specs(Section(events, TASK_EVENTS, report), "events", ROBOT, EVENT_MODES)
    report.raise_if_refused(TASK_EVENTS)
    weights: dict[str, float] = {}
    functors: dict[str, Any] = {}
    for name, entry in Section(rewards, reward_field, report).items():
        key, known = f"{reward_field}.{name}", reward_names is None or name in reward_names
        if isinstance(entry, Mapping) and "func" in entry:
            functors[name] = entry
            if reward_names is not None and known:
                report.refuse(key, "is already a term of the task; rename the new one")
        elif known:
            with Section(entry if isinstance(entry, Mapping) else {"weight": entry}, key, report) as section:
                weights[name] = section.number("weight", 1.0)
        else:
            there = f"there is {', '.join(reward_names or ()) or 'none'}{did_you_mean(name, reward_names or ())}"
            report.refuse(key, f"no such term of the reward, and no func that computes a new one; {there}")
    added_rewards = read_specs(Section(functors, reward_field, report), "rewards", ROBOT)
    report.raise_if_refused(reward_field)
    return Added(added_events, added_rewards, FrozenDict(weights))


def try_added(task: Any) -> None:
    """Trace each term that a config adds, the events of an episode's start first. Raises ConfigError: all that they
    refuse."""
    report, key = KeyReport(), jax.random.key(0)
    for event in task.added.events:
        name = getattr(event.func, "__name__", event.name)
        if isinstance(event.func, PhysicsEvent):
            report.refuse(
                event.key, f"{name} randomizes physics, which RandomizedEnv does; put it under trainer.events"
            )
        elif event.func in OF_MODELS and not task.has_model:
            text = f"{name} changes a MuJoCo model, and {type(task).__name__} has none"
            report.refuse(event.key, f"{text}; use a function of yours, f(world, key), with the task's world.state")
    report.raise_if_refused(TASK_EVENTS)
    state = jax.eval_shape(lambda: task.first_world(key).state)
    for event in sorted(task.added.events, key=lambda each: ("startup", "reset", "interval").index(each.mode)):
        after = functools.partial(lambda e, s, k: apply_events([e], task.world(s), e.mode, lambda *_: k).state, event)
        state = try_call(report, event.key, after, state, key) or state
    report.raise_if_refused(TASK_EVENTS)
    state, obs = jax.eval_shape(task.reset, key)
    action = jax.ShapeDtypeStruct(task.action_space.shape, jnp.float32)
    info = dict.fromkeys(("success", "fail"), jax.ShapeDtypeStruct((), bool))

    def reward(term: Term, state: Any, obs: Any, action: Any, info: Any) -> Any:
        before = task.world(state)
        return total([term], replace(before, before=before, obs=obs, executed=action, info=info))[0]

    for term in task.added.rewards:
        try_call(report, term.key, functools.partial(reward, term), state, obs, action, info)
    report.raise_if_refused(task.reward_field)


def try_call(report: KeyReport, key: str, call: Callable[..., Any], *shapes: Any) -> Any:
    """Trace a functor, and refuse its key where it raises. Return the shapes of what it gives, or None."""
    try:
        return jax.eval_shape(call, *shapes)
    except Exception as error:  # any error here is the functor's own
        report.refuse(key, describe_error(error))
        return None
