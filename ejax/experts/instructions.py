"""Words for the place of a goal: the instruction of a demonstration."""

from collections.abc import Sequence

import numpy as np

from ejax.experts.task import Rows

_NEARLY = 0.02
"""m: nearer to the middle than this, no side is named."""


def name_place(offset: Rows) -> str:
    """The place [x, y] m from the middle, as seen from the robot's base looking along −x: −y is the left.

    name_place(np.array([-0.1, -0.1]))  ->  "far left"
    """
    depth = "" if abs(offset[0]) < _NEARLY else "far" if offset[0] < 0 else "near"
    side = "" if abs(offset[1]) < _NEARLY else "left" if offset[1] < 0 else "right"
    return " ".join(word for word in (depth, side) if word) or "middle"


def phrase(rng: np.random.Generator, wordings: Sequence[str], offset: Rows) -> list[str]:
    """One of the wordings for each row, ``{place}`` filled in. ``offset``: [N, 2], m."""
    chosen = rng.integers(len(wordings), size=len(offset))
    return [wordings[i].format(place=name_place(each)) for i, each in zip(chosen, offset, strict=True)]
