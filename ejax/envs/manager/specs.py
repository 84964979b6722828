"""The terms of a gym config: names become functions, parameters are checked against their signatures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ejax.envs.manager.functors.events import PhysicsEvent
from ejax.envs.manager.functors.registry import CONTRACTS, FunctorKind, find_functor
from ejax.envs.manager.ignored import IGNORED
from ejax.envs.task.entities import ROBOT
from ejax.envs.task.terms import Kind, Shaping, Term, as_term
from ejax.schema.frozen import freeze
from ejax.schema.problems import KeyReport
from ejax.schema.registry import did_you_mean
from ejax.schema.sections import Section

MODES: dict[FunctorKind, tuple[str, ...]] = {
    "events": ("startup", "reset", "interval"),
    "observations": ("add", "modify"),
    "rewards": ("add", "replace"),
    "actions": (),
}
_GIVEN: dict[FunctorKind, int] = {"events": 2, "observations": 2, "rewards": 4, "actions": 2}
"""Number of arguments that ejax passes before the parameters."""


_KINDS: dict[FunctorKind, Kind] = {
    "events": "event",
    "observations": "observation",
    "rewards": "reward",
    "actions": "action",
}


def read_specs(
    section: Section, kind: FunctorKind, robot_uid: str, modes: tuple[str, ...] | None = None
) -> tuple[Term, ...]:
    """The functors of ``env.events``, ``observations``, ``rewards`` or ``actions``, in the config's order.

    Args:
        modes: those allowed. None: all of this kind.
    """
    specs = [
        _read_spec(name, data, section.key(str(name)), kind, section.report, robot_uid, modes or MODES[kind])
        for name, data in section.items()
    ]
    return tuple(spec for spec in specs if spec is not None)


def _read_spec(
    name: str,
    data: Any,
    key: str,
    kind: FunctorKind,
    report: KeyReport,
    robot_uid: str,
    modes: tuple[str, ...],
) -> Term | None:
    with Section(data, key, report) as section:
        func_name = section.take("func")
        if kind == "actions":
            func_name = _read_contract(section, func_name)
        params = section.open("params")
        mode = _read_mode(section, kind, modes)
        path: tuple[str, ...] = ()
        weight, interval_step, shaping = 1.0, 1, Shaping()
        if kind == "observations":
            path = tuple(str(section.take("name", name)).split("/"))
            section.ignore_all(IGNORED["env.observations"])
            shaping = _read_shaping(section)
        if kind == "rewards":
            weight = section.number("weight", 1.0)
        if kind == "events":
            interval_step = section.integer("interval_step", 10, at_least=1)
            section.ignore_all(IGNORED["env.events"])
        func = None if report.refuses(section.key("contract")) else _find(section, kind, func_name)
        if func is None:
            params.skip("its functor is not there")
            return None
        checked = _read_params(params, func, kind, robot_uid)
        return Term(
            name=name,
            func=as_term(func) if kind == "rewards" else func,
            kind=_KINDS[kind],
            params=checked,
            weight=weight,
            mode=mode,
            interval_step=interval_step,
            shaping=shaping,
            path=path,
            key=key,
        )


def _read_contract(section: Section, func_name: Any) -> Any:
    """The functor's name: ``func``, or what ``contract`` stands for."""
    contract = section.take("contract")
    if contract is None:
        return func_name
    if func_name is not None:
        section.problem("contract", "means a functor, and func is given too; keep one")
    elif contract in CONTRACTS:
        func_name = CONTRACTS[contract]
        section.note("contract", func_name)
    else:
        text = f"got {contract!r}; allowed: {', '.join(CONTRACTS)}{did_you_mean(str(contract), CONTRACTS)}"
        section.problem("contract", text)
    return func_name


def _read_shaping(section: Section) -> Shaping:
    """Changes of an observation's numbers, which EmbodiChain's configs do not have: ``clip``, ``scale``, ``noise``."""
    clip = section.numbers("clip", (), 2) if "clip" in section else ()
    scale = section.number("scale", 1.0) if "scale" in section else None
    noise = section.number("noise", 0.0, at_least=0.0)
    try:
        return Shaping(clip=(clip[0], clip[1]) if clip else None, scale=scale, noise=noise)
    except ValueError as error:
        section.problem("clip", str(error))
        return Shaping()


def _read_mode(section: Section, kind: FunctorKind, modes: tuple[str, ...]) -> str:
    if not modes:
        section.ignore("mode", "no effect: an action term acts before physics")
        return ""
    default = {"events": "reset", "observations": "modify"}.get(kind, "add")
    mode = section.take("mode", default if default in modes else modes[0])
    if mode not in modes:
        section.problem("mode", f"got {mode!r}; allowed: {', '.join(modes)}{did_you_mean(str(mode), modes)}")
        return modes[0]
    return mode


def _find(section: Section, kind: FunctorKind, name: Any) -> Callable[..., Any] | None:
    if not isinstance(name, str):
        section.problem("func", f"got {name!r}; must name a functor")
        return None
    try:
        return find_functor(kind, name)
    except (ValueError, ImportError) as error:
        section.problem("func", str(error))
        return None


def _read_params(params: Section, func: Callable[..., Any], kind: FunctorKind, robot_uid: str) -> Mapping[str, Any]:
    """The functor's parameters. Raises nothing: misfits go into the report."""
    accepted = list(inspect.signature(func).parameters.values())[_GIVEN[kind] :]
    given = {name: freeze(params.take(name)) for name in params.data if name in {each.name for each in accepted}}
    for each in accepted:
        key = params.key(each.name)
        if each.name not in given:
            params.take(each.name)  # so that the message on an unknown key lists it as allowed
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                params.report.refuse(key, f"is missing: {func.__name__} needs it")
        elif each.name.endswith("_cfg"):
            _check_entity(params, each.name, given[each.name])
            if isinstance(func, PhysicsEvent) and given[each.name] == freeze({"uid": robot_uid}):
                given[each.name] = freeze({"uid": ROBOT})
        elif each.name == "robot_uid" and given[each.name] != robot_uid:
            params.report.refuse(key, f"no robot '{given[each.name]}'; there is {robot_uid}")
    params.close()
    return freeze(given)


def _check_entity(params: Section, name: str, entity: Any) -> None:
    """An entity is ``{uid: name}``; the name is looked up when the functor is tried."""
    key = params.key(name)
    if not isinstance(entity, Mapping) or not isinstance(entity.get("uid"), str):
        params.report.refuse(key, f"got {entity!r}; must be {{uid: name of a body}}")
        return
    for other in entity:
        if other != "uid":
            params.report.refuse(f"{key}.{other}", "ejax's functors take an entity as a whole: {uid: name}")
