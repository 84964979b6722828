"""Checkpoints of a run: periodic ones, the best, and an asynchronous collector's schedule before either."""

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.config.models import TrainerConfig
from ejax.logs.best import Best
from ejax.logs.metrics import MetricWriter
from ejax.runtime.process_exit import hard_exit
from ejax.store.checkpoint import rewrite_meta
from ejax.store.run_dir import RunDirectory
from ejax.store.schedule_file import write_schedule
from ejax.training.steppers import Stepper


@dataclass
class Progress:
    """Host-side counters of a whole run, resumes included: the meta of each checkpoint keeps them."""

    best: Best | None = None
    last_eval_metrics: dict[str, float] = field(default_factory=dict)
    last_evaluated: int | None = None
    skipped_updates: float = 0.0
    """Updates that were not applied, and the parts of others."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], trainer: TrainerConfig) -> tuple["Progress", list[str]]:
        """The counters that a checkpoint's ``meta`` kept (empty: from the beginning), and messages about them.

        Values of another ``best_eval_metric`` than this trainer's are dropped.
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
        return {
            "best_eval_value": self.best.value if self.best else None,
            "best_eval_step": self.best.step if self.best else None,
            "best_eval_reward": self.best.reward if self.best else None,
            "last_eval_metrics": self.last_eval_metrics,
            "last_evaluated": self.last_evaluated,
            "skipped_updates": self.skipped_updates,
        }


class Saver:
    """Saves the states of one run, each update at most once.

    Args:
        first: the run's state when it was started or resumed, and its update.
        rows: env steps of one update.
    """

    complete: tuple[RunState, int]
    """The last complete state and its update: what ``rescue`` saves."""
    latest: Path | None = None
    best: Path | None

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        writer: MetricWriter,
        stepper: Stepper[Any],
        progress: Progress,
        first: tuple[RunState, int],
        rows: int,
        num_devices: int,
        *,
        callback_states: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._config, self._directory, self._writer = config, directory, writer
        self._stepper, self._progress, self._rows = stepper, progress, rows
        self._num_devices, self._callback_states = num_devices, callback_states
        self.complete, self._first_update = first, first[1]
        self.best = next(iter(directory.best()), None)
        self._last_saved: int | None = None
        self._schedule_sha256: str | None = None
        self._held: tuple[RunState, dict[str, Any]] | None = None
        self._lock = threading.RLock()

    def has(self, update: int) -> bool:
        """Recognize the update of the last checkpoint."""
        return update == self._last_saved

    def save(self, state: RunState, update: int, *, evaluation_due: bool = False) -> Path:
        """Save a periodic checkpoint, and give its path. ``evaluation_due``: a run that goes on from here evaluates."""
        with self._lock:
            self._write_schedule(update)
            meta = self._meta(update) | {"evaluation_due": evaluation_due}
            self.latest = self._directory.save(state, meta, keep=self._config.trainer.keep_checkpoints)
            self._last_saved = update
            self._writer.note(f"saved {self.latest}")
            return self.latest

    def save_best(self, state: RunState, update: int) -> Path:
        """Save the best checkpoint in place of the former one. Its path."""
        with self._lock:
            self._write_schedule(update)
            self.best = self._directory.save_best(state, self._meta(update))
            return self.best

    def hold_best(self, state: RunState, update: int) -> None:
        """``save_best``, written with ``write_held``: for who goes on from another checkpoint, which is not older."""
        self._held = state, self._meta(update)

    def write_held(self) -> None:
        """Write what ``hold_best`` was given last, unless it is written."""
        with self._lock:
            if self._held is not None:
                self.best = self._directory.save_best(*self._held)
                self._held = None

    def mark_evaluated(self, update: int) -> None:
        """Note in the checkpoint of ``update``, if there is one, that its evaluation is made."""
        if self.has(update) and self.latest is not None:
            with self._lock:
                rewrite_meta(self.latest, self._meta(update))

    def rescue(self, reason: str, requested: bool) -> NoReturn:
        """Save what is complete and end the process while the main thread is stuck in an environment.

        Args:
            reason: what the main thread hangs in.
            requested: the user wanted the run to stop, so this is no failure.
        """
        code = 1
        with self._lock:  # for good: should the main thread come back after all, it saves nothing beside this
            try:
                if not self.has(self.complete[1]):
                    self.save(*self.complete)
                code = 0 if requested else 1
                print(f"ejax: {reason}; leaving with {self.latest}", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                hard_exit(code)

    def _write_schedule(self, update: int) -> None:
        """Before the checkpoint: a run that goes on from it needs the versions of the rollouts before it."""
        versions = self._stepper.versions()
        if versions is not None:
            written = versions[: update - self._first_update]
            self._schedule_sha256 = write_schedule(self._directory.path, self._first_update, written)

    def _meta(self, update: int) -> dict[str, Any]:
        return {
            "global_step": update * self._rows,
            "num_updates": update,
            **self._progress.meta(),
            "evaluation_due": False,
            "log": self._writer.logged(),
            "schedule_sha256": self._schedule_sha256,
            "num_devices": self._num_devices,
            "config": self._config.to_dict(),
            **({"callbacks": states} if (states := self._callback_states()) else {}),
        }
