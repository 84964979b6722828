"""Describe the caller's objects, environment, policy and algorithm, by a config."""

import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeAlias

from gymnasium.envs import registration
from gymnasium.vector import VectorEnv
from pydantic import BaseModel

from ejax.algorithms.record import Algorithm
from ejax.collectors.stateful import BaseAlgorithm
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.policies.calls import DroppingPolicy
from ejax.policies.heads import injected
from ejax.policies.record import PolicyKind, find_policy
from ejax.schema import registry
from ejax.schema.code_places import as_imported
from ejax.schema.frozen import given_fields, thaw
from ejax.schema.messages import short_repr
from ejax.schema.registry import Kind
from ejax.schema.trust import trust
from ejax.schema.values import plain
from ejax.types import Policy

Events: TypeAlias = Mapping[str, Any]
"""Name -> ``{func, mode, interval_step, params}``; ``func`` is a registered name, or a function."""
_NAME: dict[Kind, str] = {"env": "id", "policy": "name"}


def config_of(
    env: Any,
    policy: Policy,
    algorithm: Algorithm | BaseAlgorithm | str,
    options: Any,
    trainer: Mapping[str, Any],
    batch_size: int | None = None,
) -> RunConfig:
    """Describe objects by a config, as far as a file can: what the run's folder holds, and what a resume compares.

    ``options`` are the algorithm's ``Config`` or a mapping; None: its own, else the defaults. ``batch_size`` is one of
    them. ConfigError if the config is refused.
    """
    if isinstance(algorithm, BaseAlgorithm):
        if algorithm.record is None:
            text = f"{type(algorithm).__name__} has only methods, which no compiled program calls; set its record = "
            raise ConfigError([Problem("algorithm", text + "Algorithm(Config=…, update=…), or write your own loop")])
        options = algorithm.cfg if options is None else options
        algorithm = algorithm.record
    if isinstance(algorithm, str):
        name = algorithm
    else:
        kind = algorithm.Config
        name = _name_of("algorithm", algorithm, kind.__module__, "ALGORITHM", kind.__name__.removesuffix("Config"))
    given = given_fields(options) if isinstance(options, BaseModel) else options or {}
    if batch_size is not None and given.get("batch_size", batch_size) != batch_size:
        text = f"got {batch_size}, and the algorithm's options have {given['batch_size']}; pass only one of them"
        raise ConfigError([Problem("batch_size", text)])
    cfg = options.model_dump(mode="json") if isinstance(options, BaseModel) else dict(given)
    sections = {
        "trainer": {"exp_name": type(env).__name__, **trainer},
        "env": _describe_env(env),
        "policy": _describe_policy(policy),
        "algorithm": {"name": name, "cfg": cfg if batch_size is None else {**cfg, "batch_size": batch_size}},
    }
    return parse_untrusted(plain(sections))


def section_of(
    trainer: Mapping[str, Any], *, num_steps: int | None, event_cfg: Events | None, eval_event_cfg: Events | None
) -> dict[str, Any]:
    """Make the section ``trainer`` from arguments of EmbodiChain's ``Trainer``; ConfigError: two that mean the same."""
    for name in trainer.keys() & {"rank", "world_size"}:
        text = "comes from what starts the processes (docs/scaling.md); leave it out"
        raise ConfigError([Problem(name, text)])
    phases = {"train": event_cfg, "eval": eval_event_cfg}
    events = {phase: _named(given) for phase, given in phases.items() if given is not None}
    section = dict(trainer)
    for name, key, value in (("num_steps", "buffer_size", num_steps), ("event_cfg", "events", events or None)):
        if value is not None and key in section:
            raise ConfigError([Problem(name, f"means the same as {key}, which is given too; keep one")])
        section |= {} if value is None else {key: value}
    return section


def _named(events: Events) -> Any:
    """Name the functions of events, as a file does; what is not an event is left to the config's reader."""
    if not isinstance(events, Mapping):
        return events
    named = dict(events)
    for event, spec in events.items():
        if isinstance(spec, Mapping) and callable(spec.get("func")):
            named[event] = {**spec, "func": _name_of_function(event, spec["func"])}
    return named


def _name_of_function(event: str, function: Any) -> str:
    from ejax.envs.terms.registry import TERMS  # imports MuJoCo

    for name, known in TERMS["events"].items():
        if known is function:
            return name
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not function:
        text = f"got {short_repr(function)}, which no file can name; register it by @register_functor('events', name)"
        raise ConfigError([Problem(f"{event}.func", text)])
    trust(place := as_imported(f"{module}:{name}"))  # the caller has run this code already
    return place


def _describe_policy(policy: Policy) -> dict[str, Any]:
    kind: Any = type(policy)
    name = _registered_name("policy", kind, kind.__module__)
    if name is not None and (section_of := find_policy(name).section_of) is not None:
        if networks := injected(policy):  # described by their text, so that a resume with others is refused
            texts = {
                network: re.sub(" at 0x[0-9a-f]+|# attributes ", "", " ".join(repr(x).split()))
                for network, x in networks.items()
            }
            return {**section_of(policy), **_describe_itself("policy", policy, texts)}
        return {"name": name, **section_of(policy)}
    if kind.__module__.startswith("ejax.") and not isinstance(policy, DroppingPolicy):
        text = f"got a {kind.__name__}, which a config describes; name it there, and call ejax.run.train"
        raise ConfigError([Problem("policy", text)])
    return _describe("policy", policy)


def _describe_env(env: Any) -> dict[str, Any]:
    wrappers: list[dict[str, Any]] = []
    while isinstance(env, EnvWrapper) and (cfg := _arguments_of(env, around=True)) is not None:
        kind = type(env)
        wrappers.insert(0, {_name_of("wrapper", kind, kind.__module__, kind.__qualname__, kind.__name__): cfg})
        env = env.inner
    return {**(_registered_in_gymnasium(env) or _describe("env", env)), "wrappers": wrappers}


def _registered_in_gymnasium(env: Any) -> dict[str, Any] | None:
    """Name what ``gymnasium.make_vec`` made, so that other processes can make it too. None: it has wrappers or
    arguments that no file can name, or was made otherwise."""
    spec = env.spec if isinstance(env, VectorEnv) and env.unwrapped is env else None
    if spec is None or spec.id not in registration.registry or spec.additional_wrappers or "wrappers" in spec.kwargs:
        return None
    cfg = {
        name: x for name, x in spec.kwargs.items() if name not in ("num_envs", "vectorization_mode", "vector_kwargs")
    }
    if spec.max_episode_steps != registration.registry[spec.id].max_episode_steps:
        cfg["max_episode_steps"] = spec.max_episode_steps
    try:
        return {"id": f"gymnasium:{spec.id}", "cfg": json.loads(json.dumps(cfg, allow_nan=False))}
    except (TypeError, ValueError):
        return None


def _describe(kind: Kind, made: Any) -> dict[str, Any]:
    """Find a name and arguments by which a config makes the like; or a name of ``made`` itself."""
    arguments = _arguments_of(made)
    if arguments is not None:
        make = type(made)
        name = _name_of(kind, make, make.__module__, make.__qualname__, make.__name__)
        return {_NAME[kind]: name, "cfg": arguments}
    return _describe_itself(kind, made, {})


def _describe_itself(kind: Kind, made: Any, about: dict[str, Any]) -> dict[str, Any]:
    """Register a name of ``made`` itself, in this process; ``about`` stands in the config only to be read."""

    def same(**cfg: Any) -> Any:
        del cfg
        return made

    # the name in files is that of its class
    same.__module__, same.__qualname__ = type(made).__module__, type(made).__qualname__
    return {_NAME[kind]: _register(kind, type(made).__name__, same), "cfg": about}


def _arguments_of(made: Any, *, around: bool = False) -> dict[str, Any] | None:
    """List the arguments of a dataclass that are not the defaults; ``around`` another: without that one. None: JSON
    has no words for one."""
    if not is_dataclass(made):
        required = [x for x in inspect.signature(type(made)).parameters.values() if x.default is x.empty]
        return None if any(x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in required) else {}
    found: dict[str, Any] = {}
    for each in fields(made)[around:]:
        if not each.init or each.name in ("parent", "name"):  # the latter are Flax's
            continue
        value = getattr(made, each.name)
        try:
            if each.default is MISSING or value != each.default:
                # as a file would hold it: tuples become lists
                found[each.name] = json.loads(json.dumps(thaw(value), allow_nan=False))
        except (TypeError, ValueError):
            return None
    return found


def _name_of(kind: Kind, made: Any, module: str, attribute: str, short: str) -> str:
    """Name an object for a config: as registered, or by its place; else it is registered as ``short``."""
    if (name := _registered_name(kind, made, module)) is not None:
        return name
    if getattr(sys.modules.get(module), attribute, None) is made:
        trust(place := as_imported(f"{module}:{attribute}"))  # the caller has run this code already
        return place
    return _register(kind, short, made)


def _registered_name(kind: Kind, made: Any, module: str) -> str | None:
    """Look an object of ``module`` up, or a policy's record whose ``make`` it is."""
    for name, entry in registry.entries(kind).items():
        if not isinstance(entry, str) or entry.startswith(f"{module}:"):  # other entries need not be imported
            found = registry.resolve(kind, name)
            found = getattr(found, "record", found) if kind == "algorithm" else found
            if found is made or (isinstance(found, PolicyKind) and found.make is made):
                return name
    return None


def _register(kind: Kind, name: str, made: Any) -> str:
    former = registry.entries(kind).get(name)
    same = former is not None and getattr(former, "__qualname__", name) == getattr(made, "__qualname__", name)
    registry.register(kind, name, made, override=same)  # a second Trainer of the same class takes the name over
    return name
