"""The best evaluation of a run: decided here and nowhere else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ejax.numerics.finite import NONFINITE_EPISODES

Mode = Literal["max", "min"]
REWARD = "eval/avg_reward"


@dataclass(frozen=True)
class Best:
    """The best value that the watched metric has had in this run."""

    value: float
    step: int | None = None
    """The env step that it was measured at; None: not kept."""
    reward: float | None = None
    """``eval/avg_reward`` of the same evaluation, which decides between equal values; None: not known."""


def improves(metrics: Mapping[str, float], best: Best | None, *, tag: str, mode: Mode) -> bool:
    """Decide if an evaluation is the best so far: better than ``best``, and finite throughout.

    Of equal values the one with the higher reward is better: a success rate of 1 is soon reached, and the policy goes
    on learning. Where that is equal too, or not known, the first stays.
    """
    value = metrics[tag]
    if not math.isfinite(value) or metrics.get(NONFINITE_EPISODES):  # an episode that broke flatters or spoils a mean
        return False
    if best is None:
        return True
    if value == best.value:
        reward = metrics.get(REWARD)
        return reward is not None and best.reward is not None and reward > best.reward
    return value > best.value if mode == "max" else value < best.value
