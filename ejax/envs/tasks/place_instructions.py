"""Instructions of ``InstructedPlaceRL``: sentences that name a colour and a zone, and their bytes. Some wordings and
pairs are kept for testing; training has each word of a pair in other pairs, and all but one or two of a wording's."""

from types import MappingProxyType
from typing import Literal

import numpy as np

from ejax.envs.text import as_bytes

Split = Literal["train", "held_out", "all"]

COLOURS: dict[str, tuple[float, float, float, float]] = {
    "red": (0.85, 0.13, 0.12, 1.0),
    "blue": (0.10, 0.28, 0.85, 1.0),
    "yellow": (0.95, 0.80, 0.10, 1.0),
    "purple": (0.55, 0.16, 0.68, 1.0),
}
ZONES = ("left", "middle", "right")
"""As seen from the robot's base: −y is the left."""
HELD_OUT_PAIRS = (("red", "left"), ("blue", "middle"), ("yellow", "right"))
_PAIRS = tuple((colour, zone) for colour in COLOURS for zone in ZONES)

_TRAIN_WORDINGS = (
    "put the {colour} cube in the {zone} zone",
    "place the {colour} cube on the {zone} disc",
    "move the {colour} block to the {zone} zone",
    "pick up the {colour} cube and set it down in the {zone} zone",
    "bring the {colour} one to the {zone} circle",
    "take the {colour} block and put it on the {zone} circle",
    "the {colour} cube belongs in the {zone} zone",
    "i want the {colour} block on the {zone} disc",
    "set the {colour} one down on the {zone} disc",
    "on the {zone} circle put the {colour} cube",
)
_HELD_OUT_WORDINGS = (
    "take the {colour} cube and bring it to the {zone} disc",
    "in the {zone} zone place the {colour} block",
    "please move the {colour} one to the {zone} circle",
    "the {zone} zone is where the {colour} cube belongs",
)
WORDINGS = (*_TRAIN_WORDINGS, *_HELD_OUT_WORDINGS)
LENGTH = 64
"""Bytes of an instruction in an observation."""


def wordings(split: Split) -> tuple[int, ...]:
    """Indices into ``WORDINGS``."""
    first = len(_TRAIN_WORDINGS)
    return tuple(i for i in range(len(WORDINGS)) if _belongs(i >= first, split))


def pairs(split: Split) -> tuple[tuple[int, int], ...]:
    """Colours and zones that belong together, as indices into ``COLOURS`` and ``ZONES``."""
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
