"""Names for environments, policies, algorithms and demonstrating tasks: what a config may call, where the code is.

An entry is an object or ``"package.module:Name"``, imported when it is resolved. Names are case-insensitive. Such a
place is a name too, once the gate (``ejax.schema.trust``) lets it through.
"""

import difflib
import importlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from ejax.schema.code_places import as_imported
from ejax.schema.episode_limits import with_limit
from ejax.schema.messages import did_you_mean
from ejax.schema.tables import tables_beside
from ejax.schema.trust import UntrustedCodeError, check_trusted, import_trusted

Kind = Literal["env", "wrapper", "policy", "algorithm", "task"]

# data next to the code: a built-in environment, policy or algorithm is its own file and a line there
_ENTRIES: dict[str, dict[str, str]] = tables_beside(__file__)

ENVS: dict[str, Any] = _ENTRIES["env"]  # called as Name(**cfg)
WRAPPERS: dict[str, Any] = _ENTRIES["wrapper"]  # called as Name(env, **cfg)
ENV_FAMILIES = _ENTRIES["env_family"]  # family:Name is called as make(Name, **cfg)
POLICIES: dict[str, Any] = _ENTRIES["policy"]
ALGORITHMS: dict[str, Any] = _ENTRIES["algorithm"]
DEMONSTRATORS = _ENTRIES["task"]
CHECKPOINT_READERS = _ENTRIES["checkpoint_reader"]
"""Checkpoints of other systems, by the ending of their files. Called as
``reader(file, config, parts, policy_only=…) -> (RunState, notes)``; raises ValueError or TypeError."""
EXPORT = "policy.json"  # the file by which an export's folder is known
POLICY_READERS = _ENTRIES["policy_reader"]
"""Policies of other forms. That of a file is called as ``reader(file, policy, params)``, with parameters of this form,
and gives the file's; that of ``EXPORT`` as ``reader(folder, env) -> (policy, params)``. Both raise ValueError,
TypeError or OSError."""
WEIGHT_READERS = _ENTRIES["weight_reader"]
"""Readers of weights alone, by the ending of the file. Called as ``reader(path) -> {name: array}``; raise ValueError,
RuntimeError or OSError."""

# not there, and the nearest name would mislead
_OFF_POLICY = ("td3", "ddpg", "dqn")
_TABLES: dict[Kind, dict[str, Any]] = {
    "env": ENVS,
    "wrapper": WRAPPERS,
    "policy": POLICIES,
    "algorithm": ALGORITHMS,
    "task": DEMONSTRATORS,
}

_CLASSES = "ejax.envs.adapters.to_gymnasium"
_NAMESPACE, _GYMNASIUMS = "ejax", re.compile(r"[\w:.-]+?(-v\d+)?")


class UnknownNameError(ValueError):
    """No entry of that name."""


def register_env(name: str, obj: Any = None, *, max_episode_steps: int | None = None, override: bool = False) -> Any:
    """Register an environment: ``register_env(name, obj)``, or ``@register_env(name)`` above a class. Gymnasium gets
    the id ``ejax/<name without RL>-v0`` too.

    ``obj``: a callable ``(**cfg) -> Env``, or its place as ``"package.module:Name"``. ``max_episode_steps``: the
    default of its argument ``episode_length`` or ``max_episode_steps``; a subclass is registered, and returned.

    ValueError: the name is taken, and not to be overridden; no such argument.
    """
    if obj is None:
        return partial(register_env, name, max_episode_steps=max_episode_steps, override=override)
    made = obj if max_episode_steps is None else with_limit(obj, max_episode_steps)
    register("env", name, made, override=override)
    register_id(name)
    return made


def register_ids() -> None:
    """Register an id for every environment's name, and every wrapper's. Again, it changes nothing."""
    for name in (*ENVS, *WRAPPERS):
        register_id(name)


def register_id(name: str) -> None:
    """Register ``ejax/<name without RL>-v0``, with RL where a task has the name without it, and without
    the version that the name has itself. A name that Gymnasium cannot write gets none."""
    from gymnasium.envs import registration

    parts = _GYMNASIUMS.fullmatch(name)
    if parts is None:
        return
    short = name if (stem := name.removesuffix("RL")) != name and stem in ENVS else stem
    key = f"{_NAMESPACE}/{name if parts[1] else short + '-v0'}"
    # Gymnasium warns where it would replace one; which environment the name means, ejax's own registry decides
    registration.registry.pop(key, None)
    registration.register(
        key,
        entry_point=f"{_CLASSES}:EjaxEnv",
        vector_entry_point=f"{_CLASSES}:EjaxVectorEnv",
        kwargs={"task": name},
    )


def register_policy(name: str, obj: Any = None, *, override: bool = False) -> Any:
    """Register a policy: a class, or an ``ejax.policies.record.PolicyKind``; as ``register_env``."""
    return register("policy", name, obj, override=override)


def register_algorithm(name: str, obj: Any = None, *, override: bool = False) -> Any:
    """Register an algorithm's record, ``ejax.algorithms.record.Algorithm``, or a class that has one, as
    ``register_env`` does."""
    return register("algorithm", name, obj, override=override)


def register(kind: Kind, name: str, obj: Any, *, override: bool = False) -> Any:
    if obj is None:  # a decorator, which gets the object next
        return partial(register, kind, name, override=override)
    table = _TABLES[kind]
    taken = next((known for known in table if known.casefold() == name.casefold()), None)
    if taken is not None and not override:
        raise ValueError(f"{kind} '{taken}' is registered already; pass override=True to replace it")
    table.pop(taken or name, None)
    table[name] = obj
    return obj


def entries(kind: Kind) -> Mapping[str, Any]:
    return _TABLES[kind]


def resolve(kind: Kind, name: str) -> Any:
    """Look ``name`` up; import its module if need be.

    UnknownNameError: no such name; the message lists the names and the nearest. UntrustedCodeError: a place that nobody
    named but a file (``ejax.schema.trust``). ImportError: the entry's module, or the name in it, is not there.
    """
    if family := _family(kind, name):
        return partial(import_entry(ENV_FAMILIES, family), name.partition(":")[2])
    known = registered_name(kind, name)
    if known not in _TABLES[kind]:
        return _attribute(import_trusted(known), known)
    entry = _TABLES[kind][known]
    return import_entry(_TABLES[kind], known) if isinstance(entry, str) else entry


def is_foreign_checkpoint(file: str) -> bool:
    """Return whether a checkpoint is another system's: EmbodiChain's ``.pt``."""
    return file.endswith(tuple(CHECKPOINT_READERS))


def import_entry(table: Mapping[Any, str], key: Any) -> Any:
    """Import an entry of a table of places. ImportError: what it needs is not installed."""
    return _attribute(importlib.import_module(table[key].partition(":")[0]), table[key])


def place_of_task(name: str) -> str:
    """Return the place of a task's class without importing it. UntrustedCodeError: nobody named it but a file."""
    if name not in DEMONSTRATORS:
        check_trusted(name)
    return DEMONSTRATORS.get(name, name)


def trusted_name(kind: Kind, name: str) -> str:
    """Return ``registered_name``, where the place of other code must have passed the gate. Imports nothing. Raises
    UnknownNameError: no such name. UntrustedCodeError: a place that nobody named but a file."""
    known = registered_name(kind, name)
    if is_import_path(kind, known):
        try:
            check_trusted(known.partition(":")[2] if _family(kind, known) else known)
        except UntrustedCodeError as error:
            raise UntrustedCodeError(f"{error}{did_you_mean_family(known) if kind == 'env' else ''}") from None
    return known


def registered_name(kind: Kind, name: str) -> str:
    """Spell a name as registered; a family's stays, and a place of code too, but for ``__main__`` (``as_imported``).
    UnknownNameError: no such name."""
    name = as_imported(name)
    for known in _TABLES[kind]:
        if known.casefold() == name.casefold():
            return known
    if is_import_path(kind, name) or _family(kind, name):
        return name
    known_names = names(kind)
    hint = did_you_mean(name, known_names)
    if kind == "algorithm" and name.casefold() in _OFF_POLICY:
        hint = ". Of the off-policy algorithms ejax has sac, with td3's options; see docs/reference/algorithms.md"
    raise UnknownNameError(f"no {kind} '{name}'; there is {', '.join(known_names)}, or 'package.module:Name'{hint}")


def names(kind: Kind) -> list[str]:
    """List the registered names of a kind, families as ``family:<name>``."""
    families = [f"{family}:<name>" for family in ENV_FAMILIES] if kind == "env" else []
    return sorted(_TABLES[kind], key=str.casefold) + families


def get_registered_policy_names() -> list[str]:
    """List the names of policies, as EmbodiChain's function does."""
    return names("policy")


def get_registered_algo_names() -> list[str]:
    """List the names of algorithms, as EmbodiChain's function does."""
    return names("algorithm")


def is_import_path(kind: Kind, name: str) -> bool:
    """Return whether a name is a place of code, also in a family's name: ``torch:package.module:Name``."""
    return ":" in name and name not in _TABLES[kind] and (not _family(kind, name) or name.count(":") > 1)


def did_you_mean_family(name: str) -> str:
    """Suggest a family for ``playgound:Name``, which reads as a module's place."""
    family, _, rest = name.partition(":")
    near = difflib.get_close_matches(family.casefold(), ENV_FAMILIES, n=1, cutoff=0.75)
    return f". Did you mean '{near[0]}:{rest}'?" if near and near[0] != family else ""


def _family(kind: Kind, name: str) -> str | None:
    family = name.partition(":")[0].casefold()
    return family if kind == "env" and ":" in name and family in ENV_FAMILIES else None


def _attribute(module: Any, place: str) -> Any:
    module_name, _, attribute = place.partition(":")
    if not attribute:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ImportError(f"module '{module_name}' has no '{attribute}'{did_you_mean(attribute, public)}") from None
