"""The names of everything that ``trainer.events`` may ask for; without MuJoCo, which takes long to import."""

from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

from ejax.schema.tables import tables_beside

_TABLES = tables_beside(__file__)
_MODES: dict[str, list[str]] = _TABLES["physics"] | _TABLES["sensing"] | _TABLES["curriculum"]
CURRICULUM, PHYSICS_EVENTS, KINDS = "curriculum", tuple(_TABLES["physics"]), tuple(_MODES)
REFUSED: dict[str, str] = _TABLES["refused"]


def modes_of(func: str) -> tuple[str, ...]:
    """List what ``mode`` may be, the default first."""
    return tuple(_MODES.get(func, _MODES[PHYSICS_EVENTS[0]]))  # an unknown one is refused for its name, not its mode


def split_events(entries: Mapping[str, Any]) -> tuple[dict[str, Any], FrozenDict]:
    """Separate the entries of these names from the others."""
    own = {name: entry for name, entry in entries.items() if entry["func"] in KINDS or entry["func"] in REFUSED}
    return own, FrozenDict({name: entry for name, entry in entries.items() if name not in own})
