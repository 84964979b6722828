"""The names of EmbodiChain's gym configs that ejax reads otherwise, or not at all: ``vocabulary.toml``."""

from collections.abc import Mapping, Sequence

from ejax.schema.tables import tables_beside


def _by_key(reasons: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys}


_TABLES = tables_beside(__file__)
IGNORED = {section.replace("top level", ""): _by_key(reasons) for section, reasons in _TABLES["ignored"].items()}
"""section -> key that changes nothing -> reason"""
CONTRACTS: dict[str, str] = _TABLES["contracts"]  # The meaning of an action -> its functor
REFUSED_FUNCTORS = {section: _by_key(reasons) for section, reasons in _TABLES["refused_functors"].items()}
"""section of ``env`` -> functor that ejax does not have -> reason"""
ACTION_TYPES: dict[str, str] = _TABLES["action_types"]  # ``action_type`` of the first releases -> action functor
SETTINGS_ELSEWHERE: dict[str, str] = _TABLES["settings_elsewhere"]
"""A setting that an extension of the same name replaces -> where ejax reads it."""
OTHER_TASKS: tuple[str, ...] = tuple(_TABLES["other_tasks"]["ids"])
"""The part before the first hyphen of ids of EmbodiChain's that ejax does not have."""
TASKS_ELSEWHERE: dict[str, str] = _TABLES["tasks_elsewhere"]  # Likewise of ids that ejax has as classes -> the class
