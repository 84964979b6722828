"""The terms of a gym config: names become functions, parameters are checked against their signatures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ejax.envs.randomization.names import modes_of
from ejax.envs.task.entities import ROBOT
from ejax.envs.task.terms import Shaping, Term, TermKind
from ejax.envs.terms.events import PhysicsEvent
from ejax.envs.terms.registry import find_functor, find_reward
from ejax.envs.terms.vocabulary import CONTRACTS, IGNORED
from ejax.schema.frozen import freeze
from ejax.schema.sections import Section

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


def _read_term(name: str, section: Section, kind: TermKind, modes: tuple[str, ...], robot_uid: str) -> Term | None:
    func_name = section.take("func")
    if kind == "actions":
        func_name = _read_contract(section, func_name)
        section.ignore("mode", "no effect: an action term acts before physics")
    params = section.open("params")
    fields: dict[str, Any] = {"mode": section.choice("mode", modes, modes[0])} if modes else {}
    if kind == "observations":
        fields |= {"path": tuple(str(section.take("name", name)).split("/")), "shaping": _read_shaping(section)}
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


def _read_shaping(section: Section) -> Shaping:
    clip = section.numbers("clip", (), 2) if "clip" in section else ()
    if clip and clip[0] > clip[1]:
        section.problem("clip", f"got {list(clip)}; must be [lowest, highest]")
    return Shaping(
        clip=(clip[0], clip[1]) if clip else None,
        scale=section.number("scale", 1.0) if "scale" in section else None,
        noise=section.number("noise", 0.0, at_least=0.0),
        history_length=section.integer("history_length", 1, at_least=1),
    )


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
    accepted = list(inspect.signature(func).parameters.values())[num_given:]
    given: dict[str, Any] = {}
    for each in accepted:
        if each.name in params.data:
            given[each.name] = value = freeze(params.take(each.name))
            if each.name.endswith("_cfg"):
                _check_entity(params, each.name, value)
                # randomizers know the robot by one name, a config by its uid
                if isinstance(func, PhysicsEvent) and value == freeze({"uid": robot_uid}):
                    given[each.name] = freeze({"uid": ROBOT})
            # there is one robot, so its name can only be right or a slip
            elif each.name == "robot_uid" and value != robot_uid:
                params.problem(each.name, f"no robot '{value}'; there is {robot_uid}")
            # any text would count as true
            elif each.annotation in (bool, "bool") and not isinstance(value, bool):
                params.problem(each.name, f"got {value!r}; must be true or false")
        else:
            params.take(each.name)  # so that the message on an unknown key lists it as allowed
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                params.problem(each.name, f"is missing: {func.__name__} needs it")
    params.close()
    return freeze(given)


def _check_entity(params: Section, name: str, entity: Any) -> None:
    if not isinstance(entity, Mapping) or not isinstance(entity.get("uid"), str):
        params.problem(name, f"got {entity!r}; must be {{uid: name of a body}}")
        return
    for other in entity:
        if other != "uid":
            params.problem(f"{name}.{other}", "ejax's functors take an entity as a whole: {uid: name}")
