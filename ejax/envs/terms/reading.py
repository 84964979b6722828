"""The terms of a gym config, and those that a config adds to a task: names become functions, parameters are checked
against their signatures, and each term that is added is tried once."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from ejax.envs.randomization.names import modes_of
from ejax.envs.task.entities import ROBOT
from ejax.envs.task.terms import Added, Term, TermKind, apply_events, total
from ejax.envs.terms.events import EVENTS as OF_MODELS
from ejax.envs.terms.events import PhysicsEvent
from ejax.envs.terms.registry import find_functor, find_reward
from ejax.envs.terms.vocabulary import CONTRACTS, IGNORED
from ejax.schema.frozen import freeze
from ejax.schema.messages import describe_error, did_you_mean
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section

TASK_EVENTS = "functor_events"  # The field of tasks that take events
EVENT_MODES = ("interval", "startup", "reset")  # Of those; the default first
_GIVEN: dict[TermKind, int] = {"events": 2, "observations": 2, "rewards": 1, "actions": 2, "terminations": 1}
"""Arguments that a functor gets before its parameters."""
_MODES: dict[TermKind, tuple[str, ...]] = {
    "events": ("reset", "startup", "interval"),
    "observations": ("modify", "add"),
    "rewards": ("add", "replace"),
}
"""The default first."""


def read_specs(section: Section, kind: TermKind, robot_uid: str, modes: tuple[str, ...] = ()) -> tuple[Term, ...]:
    """Read the functors of a section of ``env``, in the config's order. ``modes``: those allowed, by default all."""
    modes = modes or _MODES.get(kind, ())
    terms = [_read_term(name, each, kind, modes, robot_uid) for name, each in section.sections()]
    return tuple(term for term in terms if term is not None)


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


def _read_term(name: str, section: Section, kind: TermKind, modes: tuple[str, ...], robot_uid: str) -> Term | None:
    func_name = section.take("func")
    if kind == "actions":
        func_name = _read_contract(section, func_name)
        section.ignore("mode", "no effect: an action term acts before physics")
    params = section.open("params")
    fields: dict[str, Any] = {"mode": section.choice("mode", modes, modes[0])} if modes else {}
    if kind == "observations":
        fields |= {"path": tuple(str(section.take("name", name)).split("/")), **_read_shaping(section)}
    if kind == "rewards":
        fields["weight"] = section.number("weight", 1.0)
    if kind == "events":
        fields["interval_step"] = section.integer("interval_step", 10, at_least=1)
    section.ignore_all(IGNORED.get(f"env.{kind}", {}))
    # a wrong contract is reported alone: a missing func as well would mislead
    func = None if section.report.refuses(section.key("contract")) else _find(section, kind, func_name)
    if func is None:
        params.skip("its functor is missing")
        return None
    declared = modes_of(func.name) if isinstance(func, PhysicsEvent) else modes
    if kind == "observations":  # by the name of the second parameter
        _, second, *_ = *inspect.signature(func).parameters, "", ""
        declared = {"obs": ("add",), "data": ("modify",)}.get(second, modes)
    if fields.get("mode") in modes and fields["mode"] not in declared:
        text = f"got '{fields['mode']}', and '{modes[0]}' is the default; {func_name} takes {', '.join(declared)}"
        section.problem("mode", text)
    checked = _read_params(params, func, _GIVEN[kind], robot_uid)
    return Term(name=name, func=func, kind=kind, params=checked, key=section.path, **fields)


def _read_contract(section: Section, func_name: Any) -> Any:
    if section.take("contract") is None:
        return func_name
    if func_name is not None:
        section.problem("contract", "means a functor, and func is given too; keep one")
        return func_name
    contract = section.choice("contract", CONTRACTS)
    if contract in CONTRACTS:
        section.note("contract", CONTRACTS[contract])
    return CONTRACTS.get(contract)


def _read_shaping(section: Section) -> dict[str, Any]:
    clip = section.numbers("clip", (), 2) if "clip" in section else ()
    if clip and clip[0] > clip[1]:
        section.problem("clip", f"got {list(clip)}; must be [lowest, highest]")
    return {
        "clip": clip or None,
        "scale": section.number("scale", 1.0) if "scale" in section else None,
        "noise": section.number("noise", 0.0, at_least=0.0),
        "history_length": section.integer("history_length", 1, at_least=1),
    }


def _find(section: Section, kind: TermKind, name: Any) -> Callable[..., Any] | None:
    if not isinstance(name, str):
        section.problem("func", f"got {name!r}; must name a functor")
        return None
    try:
        if not callable(func := find_functor(kind, name)):
            raise ValueError(f"{name} is {func!r}, not a function")
        return find_reward(name) if kind == "rewards" else func
    except (ValueError, ImportError) as error:
        section.problem("func", str(error))
        return None


def _read_params(params: Section, func: Callable[..., Any], num_given: int, robot_uid: str) -> Mapping[str, Any]:
    given: dict[str, Any] = {}
    for each in list(inspect.signature(func).parameters.values())[num_given:]:
        # also what is missing, so that the message on an unknown key lists it as allowed
        name, value = each.name, freeze(params.take(each.name))
        if name not in params.data:
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                params.problem(name, f"is missing: {func.__name__} needs it")
            continue
        given[name] = value
        if name.endswith("_cfg"):
            if not isinstance(value, Mapping) or not isinstance(value.get("uid"), str):
                params.problem(name, f"got {value!r}; must be {{uid: name of a body}}")
                continue
            for other in (key for key in value if key != "uid"):
                params.problem(f"{name}.{other}", "ejax's functors take an entity as a whole: {uid: name}")
            # randomizers know the robot by one name, a config by its uid
            if isinstance(func, PhysicsEvent) and value == freeze({"uid": robot_uid}):
                given[name] = freeze({"uid": ROBOT})
        # there is one robot, so its name can only be right or a slip
        elif name == "robot_uid" and value != robot_uid:
            params.problem(name, f"no robot '{value}'; there is {robot_uid}")
        # any text would count as true
        elif each.annotation in (bool, "bool") and not isinstance(value, bool):
            params.problem(name, f"got {value!r}; must be true or false")
    params.close()
    return freeze(given)
