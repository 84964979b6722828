"""Names for environments, policies, algorithms and demonstrating tasks: what a config may call, where the code is.

An entry is an object or ``"package.module:Name"``, imported when it is resolved. Names are case-insensitive. Such a
place is a name too, once the gate (``ejax.schema.trust``) lets it through.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from ejax.schema.trust import UntrustedCodeError, check_trusted, import_trusted

Kind = Literal["env", "policy", "algorithm", "task"]

ENVS: dict[str, Any] = {
    "PointMassRL": "ejax.envs.tasks.point_mass:PointMassRL",
    "CartPoleRL": "ejax.envs.tasks.cart_pole:CartPoleRL",
    "PushCubeRL": "ejax.envs.tasks.push_cube:PushCubeRL",
    "PickPlaceRL": "ejax.envs.tasks.pick_place:PickPlaceRL",
    "InstructedPlaceRL": "ejax.envs.tasks.instructed_place:InstructedPlaceRL",
    "PlanarReachRL": "ejax.envs.tasks.planar_reach:PlanarReachRL",
    "VelocityRL": "ejax.envs.locomotion.velocity:VelocityRL",
    "EmbodiedEnv": "ejax.envs.manager.embodied:EmbodiedEnv",
    "RenderedEnv": "ejax.envs.wrappers.rendered:RenderedEnv",
    "AsymmetricEnv": "ejax.envs.wrappers.asymmetric:AsymmetricEnv",
}
"""Called as ``Name(**cfg)``."""

ENV_FAMILIES: dict[str, str] = {
    "gymnax": "ejax.envs.adapters.gymnax:make",
    "brax": "ejax.envs.adapters.brax:make",
    "playground": "ejax.envs.adapters.playground:make",
    "gymnasium": "ejax.envs.adapters.gymnasium:make",
    "envpool": "ejax.envs.adapters.envpool:make",
    "torch": "interop.envs:make",
}
"""``family:Name`` is called as ``make(Name, **cfg)``. The last three are host environments."""

POLICIES: dict[str, Any] = {
    "actor_critic": "ejax.policies.actor_critic:POLICY",
    "actor_only": "ejax.policies.actor_only:POLICY",
    "vision": "ejax.policies.vision:POLICY",
    "vla": "ejax.policies.vla.policy:POLICY",
}
ALGORITHMS: dict[str, Any] = {
    "ppo": "ejax.algorithms.ppo:ALGORITHM",
    "grpo": "ejax.algorithms.grpo:ALGORITHM",
    "apg": "ejax.algorithms.apg:ALGORITHM",
    "shac": "ejax.algorithms.shac:ALGORITHM",
    "bc": "ejax.algorithms.bc:ALGORITHM",
    "distill": "ejax.algorithms.distill:ALGORITHM",
}
DEMONSTRATORS: dict[str, str] = {
    "PushCubeExpert": "ejax.experts.push_cube:make_task",
    "PickPlaceExpert": "ejax.experts.pick_place:make_task",
    "InstructedPlaceExpert": "ejax.experts.instructed_place:make_task",
}

CHECKPOINT_READERS: dict[str, str] = {".pt": "interop.checkpoints.state:read_state"}
"""Checkpoints of other systems, by the ending of their files. Called as
``reader(file, config, parts, policy_only=…) -> (RunState, notes)``; raises ValueError or TypeError."""

EXPORT = "policy.json"
"""The file by which an export's folder is known."""

POLICY_READERS: dict[str, str] = {
    ".pt": "interop.checkpoints.state:read_policy",
    EXPORT: "interop.checkpoints.exported:read_export",
}
"""Policies of other forms. The first is called as ``reader(file, policy, params)``, with parameters of this form, and
gives the file's; the other as ``reader(folder, env) -> (policy, params)``. Both raise ValueError, TypeError or OSError.
"""

WEIGHT_READERS: dict[str, str] = {
    **dict.fromkeys((".pt", ".pth", ".bin"), "interop.checkpoints.plain_pt:load_tensors"),
    "": "ejax.store.checkpoint:load_policy_arrays",
}
"""Readers of weights alone, by the ending of the file; ``""``: a checkpoint's folder. Called as
``reader(path) -> {name: array}``; raises ValueError, RuntimeError or OSError.
"""

_MAX_NAME_CHARS = 100

_OFF_POLICY = ("sac", "td3", "ddpg", "dqn")
"""Not there; the nearest name, shac for sac, would mislead."""
_TABLES: dict[Kind, dict[str, Any]] = {"env": ENVS, "policy": POLICIES, "algorithm": ALGORITHMS, "task": DEMONSTRATORS}


class UnknownNameError(ValueError):
    """No entry of that name."""


def register_env(name: str, obj: Any = None, *, override: bool = False) -> Any:
    """Register an environment: ``register_env(name, obj)``, or ``@register_env(name)`` above a class.

    Args:
        obj: a callable ``(**cfg) -> Env``, or its place as ``"package.module:Name"``.

    Raises:
        ValueError: the name is taken, and not to be overridden.
    """
    return register("env", name, obj, override=override)


def register_policy(name: str, obj: Any = None, *, override: bool = False) -> Any:
    """Register a policy: a class, or an ``ejax.policies.record.PolicyKind``; as ``register_env``."""
    return register("policy", name, obj, override=override)


def register_algorithm(name: str, obj: Any = None, *, override: bool = False) -> Any:
    """Register an algorithm's record, ``ejax.algorithms.record.Algorithm``, as ``register_env`` does."""
    return register("algorithm", name, obj, override=override)


def register(kind: Kind, name: str, obj: Any, *, override: bool = False) -> Any:
    if obj is None:
        return partial(register, kind, name, override=override)
    table = _TABLES[kind]
    taken = next((known for known in table if known.casefold() == name.casefold()), None)
    if taken is not None and not override:
        raise ValueError(f"{kind} '{taken}' is registered already; pass override=True to replace it")
    table.pop(taken or name, None)
    table[name] = obj
    return obj


def entries(kind: Kind) -> Mapping[str, Any]:
    return MappingProxyType(_TABLES[kind])


def resolve(kind: Kind, name: str) -> Any:
    """Look ``name`` up; import its module if need be.

    Raises:
        UnknownNameError: no such name; the message lists the names and the nearest.
        UntrustedCodeError: a ``"package.module:Name"`` that nobody named but a file (``ejax.schema.trust``).
        ImportError: the entry's module, or the name in it, is not there.
    """
    if family := _family(kind, name):
        return partial(_import(ENV_FAMILIES[family]), name.partition(":")[2])
    known = registered_name(kind, name)
    if known not in _TABLES[kind]:
        return _attribute(import_trusted(known), known)
    entry = _TABLES[kind][known]
    return _import(entry) if isinstance(entry, str) else entry


def is_foreign_checkpoint(file: str) -> bool:
    """True for another system's: EmbodiChain's ``.pt``."""
    return file.endswith(tuple(CHECKPOINT_READERS))


def import_entry(table: Mapping[Any, str], key: Any) -> Any:
    """Import an entry of a table of places. ImportError: what it needs is not installed."""
    return _import(table[key])


def place_of_task(name: str) -> str:
    """Give the place of a task's class without importing it.

    Raises:
        UntrustedCodeError: one that is not registered, and that nobody named but a file.
    """
    if name not in DEMONSTRATORS:
        check_trusted(name)
    return DEMONSTRATORS.get(name, name)


def trusted_name(kind: Kind, name: str) -> str:
    """Give ``registered_name``, where the place of other code must have passed the gate. Imports nothing.

    Raises:
        UnknownNameError: no such name.
        UntrustedCodeError: a place that nobody named but a file.
    """
    known = registered_name(kind, name)
    if is_import_path(kind, known):
        try:
            check_trusted(known.partition(":")[2] if _family(kind, known) else known)
        except UntrustedCodeError as error:
            raise UntrustedCodeError(f"{error}{did_you_mean_family(known) if kind == 'env' else ''}") from None
    return known


def registered_name(kind: Kind, name: str) -> str:
    """Spell a name as registered; a family's, or a place of code, stays. UnknownNameError: no such name."""
    for known in _TABLES[kind]:
        if known.casefold() == name.casefold():
            return known
    if is_import_path(kind, name) or _family(kind, name):
        return name
    known_names = names(kind)
    if kind == "algorithm" and name.casefold() in _OFF_POLICY:
        raise UnknownNameError(
            f"no algorithm '{name}': ejax has no off-policy algorithms ({', '.join(_OFF_POLICY)}); there is "
            f"{', '.join(known_names)}, or 'package.module:Name'"
        )
    raise UnknownNameError(
        f"no {kind} '{name}'; there is {', '.join(known_names)}, or 'package.module:Name'"
        + did_you_mean(name, known_names)
    )


def names(kind: Kind) -> list[str]:
    """List the registered names of a kind, families as ``family:<name>``."""
    families = [f"{family}:<name>" for family in ENV_FAMILIES] if kind == "env" else []
    return sorted(_TABLES[kind], key=str.casefold) + families


def is_import_path(kind: Kind, name: str) -> bool:
    """True for a place of code, also in a family's name: ``torch:package.module:Name``."""
    return ":" in name and name not in _TABLES[kind] and (not _family(kind, name) or name.count(":") > 1)


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Give ``". Did you mean 'x'?"`` with the nearest candidate; ``cutoff`` 0: anything, 1: the same. Else ""."""
    if len(name) > _MAX_NAME_CHARS:
        return ""
    by_fold = {candidate.casefold(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.casefold(), by_fold, n=1, cutoff=cutoff)
    return f". Did you mean '{by_fold[near[0]]}'?" if near else ""


def did_you_mean_family(name: str) -> str:
    """Suggest a family for ``playgound:Name``, which reads as a module's place."""
    family, _, rest = name.partition(":")
    near = difflib.get_close_matches(family.casefold(), ENV_FAMILIES, n=1, cutoff=0.75)
    return f". Did you mean '{near[0]}:{rest}'?" if near and near[0] != family else ""


def _family(kind: Kind, name: str) -> str | None:
    family = name.partition(":")[0].casefold()
    return family if kind == "env" and ":" in name and family in ENV_FAMILIES else None


def _import(place: str) -> Any:
    return _attribute(importlib.import_module(place.partition(":")[0]), place)


def _attribute(module: Any, place: str) -> Any:
    module_name, _, attribute = place.partition(":")
    if not attribute:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ImportError(f"module '{module_name}' has no '{attribute}'{did_you_mean(attribute, public)}") from None
