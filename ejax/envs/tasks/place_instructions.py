"""Instructions of ``InstructedPlaceRL``: sentences that name a colour and a zone, and their bytes. Some wordings and
pairs are kept for testing; training has each word of a pair in other pairs, and all but one or two of a wording's."""

import re
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ejax.numerics.text import as_bytes, as_text
from ejax.schema.tables import tables_beside

Split = Literal["train", "held_out", "all"]
Wordings = Literal["train", "held_out", "all", "paraphrases"]

_TABLES = tables_beside(__file__)
COLOURS: dict[str, tuple[float, float, float, float]] = {name: tuple(x) for name, x in _TABLES["colours"].items()}
ZONES = ("left", "middle", "right")
"""As seen from the robot's base: −y is the left."""
HELD_OUT_PAIRS = (("red", "left"), ("blue", "middle"), ("yellow", "right"))
_PAIRS = tuple((colour, zone) for colour in COLOURS for zone in ZONES)
WORDINGS = (*_TABLES["wordings"]["train"], *_TABLES["wordings"]["held_out"])
LENGTH = 64  # Bytes of an instruction in an observation
_NUM_PARAPHRASES = 192  # of each pair


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
"""[wordings, colours, zones, 64] uint8: every instruction but the paraphrases."""
MEANING = MappingProxyType({w.format(colour=c, zone=z): (c, z) for w in WORDINGS for c, z in _PAIRS})
"""Text -> the colour and the zone that it names."""


def table(split: Wordings) -> NDArray[np.uint8]:
    """Make [wordings, colours, zones, 64] of the wordings of ``split``."""
    return _paraphrases() if split == "paraphrases" else BYTES[list(wordings(split))]


@cache
def _paraphrases() -> NDArray[np.uint8]:
    """Draw sentences of the grammar, the same in each process: the wordings of training, then others; none held out."""
    rng, rules = np.random.default_rng(0), _TABLES["paraphrases"]
    kept_for_testing = {text for i in wordings("held_out") for text in map(as_text, BYTES[i].reshape(-1, LENGTH))}

    def one(meaning: dict[str, str]) -> NDArray[np.uint8]:
        while True:
            text = "{sentence}"
            while found := re.search(r"{(\w+)}", text):
                name = found[1]
                choices = rules[name][meaning[name]] if name in meaning else rules[name]
                text = text.replace(found[0], choices[rng.integers(len(choices))], 1)
            if len(text) <= LENGTH and text not in kept_for_testing:
                return as_bytes(text, LENGTH)

    drawn = np.empty((_NUM_PARAPHRASES, len(COLOURS), len(ZONES), LENGTH), np.uint8)
    drawn[: len(wordings("train"))] = BYTES[list(wordings("train"))]
    for i, (c, colour), (z, zone) in product(
        range(len(wordings("train")), len(drawn)), enumerate(COLOURS), enumerate(ZONES)
    ):
        drawn[i, c, z] = one({"colour": colour, "zone": zone, "side": zone})
    return drawn
