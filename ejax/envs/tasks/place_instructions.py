"""Instructions of ``InstructedPlaceRL``: sentences that name a colour and a zone, and their bytes. Some wordings and
pairs are kept for testing; training has each word of a pair in other pairs, and all but one or two of a wording's."""

from types import MappingProxyType
from typing import Literal

import numpy as np

from ejax.numerics.text import as_bytes
from ejax.schema.tables import tables_beside

Split = Literal["train", "held_out", "all"]

_TABLES = tables_beside(__file__)
COLOURS: dict[str, tuple[float, float, float, float]] = {name: tuple(x) for name, x in _TABLES["colours"].items()}
ZONES = ("left", "middle", "right")
"""As seen from the robot's base: −y is the left."""
HELD_OUT_PAIRS = (("red", "left"), ("blue", "middle"), ("yellow", "right"))
_PAIRS = tuple((colour, zone) for colour in COLOURS for zone in ZONES)
WORDINGS = (*_TABLES["wordings"]["train"], *_TABLES["wordings"]["held_out"])
LENGTH = 64  # Bytes of an instruction in an observation


def wordings(split: Split) -> tuple[int, ...]:
    """List the wordings, as indices into ``WORDINGS``."""
    held_out = _TABLES["wordings"]["held_out"]
    return tuple(i for i, wording in enumerate(WORDINGS) if _belongs(wording in held_out, split))


def pairs(split: Split) -> tuple[tuple[int, int], ...]:
    """List colours and zones that belong together, as indices into ``COLOURS`` and ``ZONES``."""
    colours, kept = list(COLOURS), [pair for pair in _PAIRS if _belongs(pair in HELD_OUT_PAIRS, split)]
    return tuple((colours.index(colour), ZONES.index(zone)) for colour, zone in kept)


def _belongs(held_out: bool, split: Split) -> bool:
    return split == "all" or held_out == (split == "held_out")


BYTES = np.array(
    [[[as_bytes(wording.format(colour=c, zone=z), LENGTH) for z in ZONES] for c in COLOURS] for wording in WORDINGS]
)
"""[wordings, colours, zones, 64] uint8: every instruction."""
MEANING = MappingProxyType({w.format(colour=c, zone=z): (c, z) for w in WORDINGS for c, z in _PAIRS})
"""Text -> the colour and the zone that it names."""
