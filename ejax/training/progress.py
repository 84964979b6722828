"""What the host knows of a run beside its state: counted while it trains, kept in the meta of each checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ejax.config.models import TrainerConfig
from ejax.logs.best import Best


@dataclass
class Progress:
    """Counters of a whole run, resumes included."""

    best: Best | None = None
    last_eval_metrics: dict[str, float] = field(default_factory=dict)
    last_evaluated: int | None = None
    """The update that was evaluated last."""
    skipped_updates: float = 0.0
    """Updates that were not applied, and the parts of others that were not."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], trainer: TrainerConfig) -> tuple["Progress", list[str]]:
        """The counters that a checkpoint kept, and messages about them.

        Args:
            meta: of the checkpoint that the run goes on from; empty for a run from the beginning.
            trainer: of the run that goes on; values of another ``best_eval_metric`` are not compared with its own.
        """
        progress = cls(
            last_eval_metrics=meta.get("last_eval_metrics", {}),
            last_evaluated=meta.get("last_evaluated"),
            skipped_updates=meta.get("skipped_updates", 0.0),
        )
        value = meta.get("best_eval_value")
        if value is None:
            return progress, []
        saved = meta.get("config", {}).get("trainer", {})
        now = trainer.best_eval_metric, trainer.best_eval_mode
        before = saved.get("best_eval_metric", now[0]), saved.get("best_eval_mode", now[1])
        if before != now:
            was, now_is = (f"the {mode} of {tag}" for tag, mode in (before, now))
            return progress, [f"the best so far, {was}, is not compared: from here on it is {now_is}"]
        progress.best = Best(value, meta.get("best_eval_step"), meta.get("best_eval_reward"))
        return progress, []

    def meta(self) -> dict[str, Any]:
        """These counters as part of a checkpoint's meta."""
        return {
            "best_eval_value": self.best.value if self.best else None,
            "best_eval_step": self.best.step if self.best else None,
            "best_eval_reward": self.best.reward if self.best else None,
            "last_eval_metrics": self.last_eval_metrics,
            "last_evaluated": self.last_evaluated,
            "skipped_updates": self.skipped_updates,
        }
