"""The members of a population compared: summaries over them, and ``population.json`` with the best of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.config.models import TrainerConfig
from ejax.config.population import Member
from ejax.training.saver import Progress


@dataclass(kw_only=True)
class PopulationResult:
    """The end of a population's training."""

    run_dir: Path
    members: tuple[Member, ...]
    global_step: int
    """Environment steps of each member."""
    num_updates: int
    elapsed_time_sec: float
    training_fps: float
    """Environment steps of all members per second, after compilation."""
    finished: bool
    alive: tuple[bool, ...]
    """False: the member's parameters were not finite; it is held as it was before."""
    skipped_updates: tuple[float, ...]
    best_member: int | None
    """The one with the best evaluation; without evaluations, with the highest reward in training."""
    best_eval_values: tuple[float | None, ...]
    best_eval_steps: tuple[int | None, ...]
    latest_checkpoint_path: Path | None
    last_eval_metrics: dict[str, float]
    """Summaries over the members."""


def summaries(metrics: Mapping[str, NDArray[Any]], *, best: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return median and interquartile mean over each tag's finite values [M], as ``<tag>/median`` and ``<tag>/iqm``.

    The latter leaves out ⌊M/4⌋ members at either end (Agarwal et al. 2021). ``best``: ``max`` or ``min`` for
    ``<tag>/best``.
    """
    rows: dict[str, float] = {}
    for tag, values in metrics.items():
        finite = np.sort(values[np.isfinite(values)].astype(np.float64))
        if len(finite) == 0:
            continue
        cut = len(finite) // 4  # Agarwal et al.: the middle half
        rows[f"{tag}/median"] = float(np.median(finite))
        rows[f"{tag}/iqm"] = float(finite[cut : len(finite) - cut].mean())
        if tag in (best or {}):
            rows[f"{tag}/best"] = float(finite[-1] if (best or {})[tag] == "max" else finite[0])
    return rows


def best_member(trainer: TrainerConfig, progress: Sequence[Progress], rewards: Sequence[float]) -> int | None:
    """Return the member with the best evaluation, of equal ones that of the higher reward.

    Without evaluations: the one of the highest of ``rewards``, in training (NaN: not known). None: nothing is known.
    """
    sign = 1.0 if trainer.best_eval_mode == "max" else -1.0  # so that the largest is the best
    bests = {i: each.best for i, each in enumerate(progress) if each.best is not None}
    if bests:
        own = {i: -math.inf if best.reward is None else best.reward for i, best in bests.items()}
        return max(bests, key=lambda i: (sign * bests[i].value, own[i], -i))  # equal ones: the first
    known = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    return max(known, key=lambda i: (rewards[i], -i), default=None)
