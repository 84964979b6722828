"""The terms of a gym config: names become functions, parameters are checked against their signatures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ejax.envs.manager.functors.events import PhysicsEvent
from ejax.envs.manager.functors.registry import FunctorKind, find_functor
from ejax.envs.manager.functors.rewards import REWARDS
from ejax.envs.manager.vocabulary import CONTRACTS, IGNORED
from ejax.envs.task.entities import ROBOT
from ejax.envs.task.terms import Kind, Shaping, Term, as_term
from ejax.schema.frozen import freeze
from ejax.schema.sections import Section


class _Form(NamedTuple):
    kind: Kind
    given: int
    modes: tuple[str, ...] = ()
    default_mode: str = ""


_FORMS: dict[FunctorKind, _Form] = {
    "events": _Form("event", 2, ("startup", "reset", "interval"), "reset"),
    "observations": _Form("observation", 2, ("add", "modify"), "modify"),
    "rewards": _Form("reward", 1, ("add", "replace"), "add"),
    "actions": _Form("action", 2),
}


def read_specs(
    section: Section, kind: FunctorKind, robot_uid: str, modes: tuple[str, ...] | None = None
) -> tuple[Term, ...]:
    """Read the functors of a section of ``env``, in the config's order; ``modes``: those allowed, None: all."""
    form = _FORMS[kind]
    if modes is not None:
        form = form._replace(modes=modes, default_mode=modes[0])
    terms = [_read_term(name, each, kind, form, robot_uid) for name, each in section.sections()]
    return tuple(term for term in terms if term is not None)


def _read_term(name: str, section: Section, kind: FunctorKind, form: _Form, robot_uid: str) -> Term | None:
    func_name = section.take("func")
    if kind == "actions":
        func_name = _read_contract(section, func_name)
    params = section.open("params")
    mode = ""
    if form.modes:
        mode = section.choice("mode", form.modes, form.default_mode)
    else:
        section.ignore("mode", "no effect: an action term acts before physics")
    fields: dict[str, Any] = {}
    if kind == "observations":
        fields["path"] = tuple(str(section.take("name", name)).split("/"))
        fields["shaping"] = _read_shaping(section)
    if kind == "rewards":
        fields["weight"] = section.number("weight", 1.0)
    if kind == "events":
        fields["interval_step"] = section.integer("interval_step", 10, at_least=1)
    section.ignore_all(IGNORED.get(f"env.{kind}", {}))
    # a wrong contract is reported by itself: a missing func besides would mislead
    func = None if section.report.refuses(section.key("contract")) else _find(section, kind, func_name)
    if func is None:
        params.skip("its functor is not there")
        return None
    checked = _read_params(params, func, form.given, robot_uid)
    return Term(name=name, func=func, kind=form.kind, params=checked, mode=mode, key=section.path, **fields)


def _read_contract(section: Section, func_name: Any) -> Any:
    if "contract" not in section:
        section.take("contract")
        return func_name
    if func_name is not None:
        section.take("contract")
        section.problem("contract", "means a functor, and func is given too; keep one")
        return func_name
    contract = section.choice("contract", CONTRACTS)
    if contract in CONTRACTS:
        section.note("contract", CONTRACTS[contract])
    return CONTRACTS.get(contract)


def _read_shaping(section: Section) -> Shaping:
    clip = section.numbers("clip", (), 2) if "clip" in section else ()
    scale = section.number("scale", 1.0) if "scale" in section else None
    noise = section.number("noise", 0.0, at_least=0.0)
    try:
        return Shaping(clip=(clip[0], clip[1]) if clip else None, scale=scale, noise=noise)
    except ValueError as error:
        section.problem("clip", str(error))
        return Shaping()


def _find(section: Section, kind: FunctorKind, name: Any) -> Callable[..., Any] | None:
    if not isinstance(name, str):
        section.problem("func", f"got {name!r}; must name a functor")
        return None
    try:
        func = find_functor(kind, name)
    except (ValueError, ImportError) as error:
        section.problem("func", str(error))
        return None
    return as_term(func) if kind == "rewards" and func not in REWARDS else func


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
            elif each.name == "robot_uid" and value != robot_uid:
                params.problem(each.name, f"no robot '{value}'; there is {robot_uid}")
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
