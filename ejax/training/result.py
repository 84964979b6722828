"""The facts of a run that has ended."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejax.logs.latest import duration, number
from ejax.logs.notebook import result_html
from ejax.types import Params, Policy


@dataclass(kw_only=True)
class RunResult:
    """What a run ended with; EmbodiChain's names."""

    policy: Policy
    params: Params
    run_dir: Path
    global_step: int
    num_updates: int
    elapsed_time_sec: float
    """Duration of this call, compilation included."""
    training_fps: float
    """Environment steps per second of this call, after compilation; evaluation and logging included."""
    finished: bool
    """False after SIGTERM or Ctrl-C: the run can be resumed."""
    skipped_updates: float = 0.0
    """In the whole run: updates that were not applied, and the parts of others that were not."""
    best_eval_value: float | None = None
    latest_checkpoint_path: Path | None = None
    best_checkpoint_path: Path | None = None
    last_train_metrics: dict[str, float] = field(default_factory=dict)
    last_eval_metrics: dict[str, float] = field(default_factory=dict)
    train_history: list[dict[str, float]] = field(default_factory=list)
    eval_history: list[dict[str, float]] = field(default_factory=list)
    fresh_eval_metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``best`` and ``last``: of that checkpoint over ``trainer.final_eval_episodes``, and which and how many they were.
    Empty for a run that is not finished or not evaluated."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where they went, as in the log's ``time/``: those of the loop, and of the C engine within them."""

    def _repr_html_(self) -> str:
        """What a notebook shows of it: curves and facts."""
        finished = "yes" if self.finished else 'no; go on with train(config, resume="latest")'
        facts = {
            "run": str(self.run_dir),
            "steps": f"{self.global_step:,}, in {self.num_updates:,} updates",
            "wall time": f"{duration(self.elapsed_time_sec)}, {self.training_fps:,.0f} steps/s",
            "finished": finished,
            **({} if self.best_eval_value is None else {"best evaluation": number(self.best_eval_value)}),
            "best checkpoint": str(self.best_checkpoint_path or "none"),
            "latest checkpoint": str(self.latest_checkpoint_path or "none"),
        }
        return result_html(facts, [*self.train_history, *self.eval_history])

    @property
    def mostly_skipped(self) -> bool:
        """More than half of the run's updates were not applied."""
        return self.skipped_updates > 0.5 * self.num_updates
