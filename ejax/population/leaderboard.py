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
from ejax.population.step import FITNESS
from ejax.schema.frozen import thaw
from ejax.schema.plain_files import to_json
from ejax.schema.writing import by_product, replace_file
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

    @classmethod
    def of(cls, progress: Sequence[Progress], alive: Sequence[bool], **facts: Any) -> "PopulationResult":
        return cls(
            alive=tuple(alive),
            skipped_updates=tuple(each.skipped_updates for each in progress),
            best_eval_values=tuple(each.best_eval_value for each in progress),
            best_eval_steps=tuple(each.best_eval_step for each in progress),
            **facts,
        )


def summaries(metrics: Mapping[str, NDArray[Any]], *, best: Mapping[str, str] | None = None) -> dict[str, float]:
    """Give median and interquartile mean over each tag's finite values [M], as ``<tag>/median`` and ``<tag>/iqm``.

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
    """Give the member with the best evaluation, of equal ones that of the higher reward.

    Without evaluations: the one of the highest of ``rewards``, in training (NaN: not known). None: nothing is known.
    """
    sign = 1.0 if trainer.best_eval_mode == "max" else -1.0  # so that the largest is the best
    bests = {i: each.best for i, each in enumerate(progress) if each.best is not None}
    if bests:
        own = {i: -math.inf if best.reward is None else best.reward for i, best in bests.items()}
        return max(bests, key=lambda i: (sign * bests[i].value, own[i], -i))  # equal ones: the first
    known = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    return max(known, key=lambda i: (rewards[i], -i), default=None)


def write_summary(
    folder: Path,
    trainer: TrainerConfig,
    members: Sequence[Member],
    progress: Sequence[Progress],
    *,
    step: int,
    rewards: Sequence[float],
    alive: Sequence[bool],
    values: Mapping[str, Sequence[Any]],
) -> int | None:
    """Write ``population.json`` and give the best member. ``values``: those that move, of each member now."""
    best = best_member(trainer, progress, rewards)
    rows = []
    for i, (member, own) in enumerate(zip(members, progress, strict=True)):
        row: dict[str, Any] = {"member": i, "seed": member.seed}
        row |= {key: thaw(value) for key, value in member.values.items()}
        row |= {f"{key} now": each[i] for key, each in values.items()}
        if own.best is not None:
            row |= {"best_eval_value": own.best_eval_value, "best_eval_step": own.best_eval_step}
        row |= {"last_eval": own.last_eval_metrics, FITNESS: rewards[i] if math.isfinite(rewards[i]) else None}
        rows.append(row | {"alive": bool(alive[i]), "skipped_updates": own.skipped_updates})
    facts = {"best": best, "metric": trainer.best_eval_metric, "step": step, "members": rows}
    with by_product(f"{folder / 'population.json'}, with the best member"):
        replace_file(folder / "population.json", to_json(facts, indent=2), folder)
    return best
