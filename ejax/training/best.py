"""The best evaluation of a run: decided here and nowhere else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ejax.finite import NONFINITE_EPISODES

Mode = Literal["max", "min"]


@dataclass(frozen=True)
class Best:
    """The best value that the watched metric has had in this run."""

    value: float
    step: int | None = None
    """The env step that it was measured at; None: the checkpoint that it comes from did not keep it."""


def improves(metrics: Mapping[str, float], best: Best | None, *, tag: str, mode: Mode) -> bool:
    """Whether an evaluation is the best so far: better than ``best``, and finite throughout.

    Args:
        metrics: the evaluation's results, ``tag`` among them.
        mode: whether the highest or the lowest value is best.
    """
    value = metrics[tag]
    if not math.isfinite(value) or metrics.get(NONFINITE_EPISODES):
        return False
    if best is None:
        return True
    return value > best.value if mode == "max" else value < best.value
