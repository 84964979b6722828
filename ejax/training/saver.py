"""Checkpoints of a run: periodic ones, the best, and an asynchronous collector's schedule before either."""

import math
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from ejax.config import RunConfig
from ejax.config.models import TrainerConfig
from ejax.logs.best import REWARD, Best, improves
from ejax.logs.metrics import MetricWriter
from ejax.runtime.process_exit import hard_exit
from ejax.runtime.stopwatch import Stopwatch
from ejax.store.checkpoint import rewrite_meta
from ejax.store.run_dir import RunDirectory
from ejax.store.schedule_file import write_schedule
from ejax.training.callbacks import Callback, TrainingRun
from ejax.training.steppers import Stepper

Verdict = Literal["best", "not the best", "given up", "failed"]


@dataclass
class Progress(Callback):
    """Host-side counters of a whole run, resumes included: the meta of each checkpoint keeps them by these names."""

    best_eval_value: float | None = None
    best_eval_step: int | None = None
    best_eval_reward: float | None = None
    last_eval_metrics: dict[str, float] = field(default_factory=dict)
    last_evaluated: int | None = None
    skipped_updates: float = 0.0
    """Updates that were not applied, and the parts of others."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], trainer: TrainerConfig) -> tuple["Progress", list[str]]:
        """Take up the counters that a checkpoint's ``meta`` kept (empty: from the beginning), with messages about them.

        Values of another ``best_eval_metric`` than this trainer's are dropped.
        """
        progress = cls(**{each.name: meta[each.name] for each in fields(cls) if each.name in meta})
        progress.last_eval_metrics = {k: math.nan if x is None else x for k, x in progress.last_eval_metrics.items()}
        saved = meta.get("config", {}).get("trainer", {})
        now = trainer.best_eval_metric, trainer.best_eval_mode
        before = saved.get("best_eval_metric", now[0]), saved.get("best_eval_mode", now[1])
        if progress.best is None or before == now:
            return progress, []
        progress.best_eval_value = progress.best_eval_step = progress.best_eval_reward = None
        was, now_is = (f"the {mode} of {tag}" for tag, mode in (before, now))
        return progress, [f"the best so far, {was}, is not compared: from here on it is {now_is}"]

    @property
    def best(self) -> Best | None:
        if self.best_eval_value is None:
            return None
        return Best(self.best_eval_value, self.best_eval_step, self.best_eval_reward)

    def judge(self, trainer: TrainerConfig, metrics: Mapping[str, float], update: int, step: int) -> bool:
        """Take in an evaluation; True if it is the best so far."""
        tag, mode = trainer.best_eval_metric, trainer.best_eval_mode
        is_best = improves(metrics, self.best, tag=tag, mode=mode)
        if is_best:
            self.best_eval_value, self.best_eval_step = metrics[tag], step
            self.best_eval_reward = metrics.get(REWARD)
        self.last_evaluated, self.last_eval_metrics = update, dict(metrics)
        return is_best

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Decide if it is the best; ``Saver`` saves it, once it is in the log."""
        self.judge(run.config.trainer, metrics, run.update, run.step)


class Saver(Callback):
    """Saves the states of one run, each update at most once.

    Args:
        first: the run's state when it was started or resumed, and its update.
        rows: env steps of one update.
        more: gives what else the meta of a checkpoint has.
        saved: called with the path of each checkpoint that an event of the run has made.
        judged: called with the verdict on each evaluation, before the best is saved: other processes write their parts
            before this one can complete it.
    """

    complete: tuple[Any, int]
    """The last complete state and its update: what ``rescue`` saves."""
    latest: Path | None = None
    best: Path | None

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        writer: MetricWriter,
        progress: Progress,
        clock: Stopwatch,
        first: tuple[Any, int],
        rows: int,
        *,
        stepper: Stepper[Any] | None = None,
        num_devices: int = 1,
        more: Callable[[], Mapping[str, Any]] = dict,
        saved: Callable[[Path], None] = lambda path: None,
        judged: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._config, self._directory, self._writer, self._progress = config, directory, writer, progress
        self._clock, self._rows, self._stepper, self._num_devices = clock, rows, stepper, num_devices
        self._more, self._saved, self._judged = more, saved, judged
        self.complete, self._first_update = first, first[1]
        self.best = next(iter(directory.best()), None)
        self._last_saved: int | None = None
        self._schedule_sha256: str | None = None
        self._held: tuple[Any, dict[str, Any]] | None = None
        self._lock = threading.RLock()  # the watchdog's thread saves too, in a rescue

    def save(self, state: Any, update: int, *, evaluation_due: bool = False) -> bool:
        """Save a periodic checkpoint, unless this update has one: then False.

        ``evaluation_due``: a run that goes on from here evaluates.
        """
        if update == self._last_saved:
            return False
        with self._clock.of("save"), self._lock:
            self._write_schedule(update)
            meta = self._meta(update) | {"evaluation_due": evaluation_due}
            self.latest = self._directory.save(state, meta, keep=self._config.trainer.keep_checkpoints)
            self._last_saved = update
            self._writer.note(f"saved {self.latest}")
        return True

    def save_best(self, state: Any, update: int) -> Path:
        """Save the best checkpoint in place of the former one, and give its path."""
        with self._clock.of("save"), self._lock:
            self._write_schedule(update)
            self.best = self._directory.save_best(state, self._meta(update))
            return self.best

    def hold_best(self, state: Any, update: int) -> None:
        """``save_best``, written with ``write_held``: for who goes on from another checkpoint, which is not older."""
        self._held = state, self._meta(update)  # the meta of now: later evaluations are not this state's

    def write_held(self) -> None:
        """Write what ``hold_best`` was given last, unless it is written."""
        if self._held is not None:
            with self._clock.of("save"):
                self.best = self._directory.save_best(*self._held)
            self._held = None

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        del metrics
        if run.cadence.saves(run.update):
            self.save_now(run)

    def save_now(self, run: TrainingRun) -> None:
        """Save a run where it is."""
        if self.save(run.state, run.update, evaluation_due=run.evaluation_due) and self.latest is not None:
            self._saved(self.latest)

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        del metrics
        best = self._progress.best
        is_best = best is not None and best.step == run.step
        self._judged("best" if is_best else "not the best")
        if is_best:
            self._saved(self.save_best(run.state, run.update))
        if run.update == self._last_saved and self.latest is not None:
            with self._lock:  # from here on a run that goes on from that checkpoint need not evaluate
                rewrite_meta(self.latest, self._meta(run.update))

    def rescue(self, reason: str, requested: bool) -> NoReturn:
        """Save what is complete and end the process while the main thread is stuck in an environment.

        Args:
            reason: what the main thread hangs in.
            requested: the user wanted the run to stop, so this is no failure.
        """
        code = 1
        with self._lock:  # for good: should the main thread come back after all, it saves nothing beside this
            try:
                self.save(*self.complete)
                code = 0 if requested else 1
                print(f"ejax: {reason}; leaving with {self.latest}", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                hard_exit(code)

    def _write_schedule(self, update: int) -> None:
        """Before the checkpoint: a run that goes on from it needs the versions of the rollouts before it."""
        versions = None if self._stepper is None else self._stepper.versions()
        if versions is not None:
            written = versions[: update - self._first_update]  # the collector may be ahead of the updates
            self._schedule_sha256 = write_schedule(self._directory.path, self._first_update, written)

    def _meta(self, update: int) -> dict[str, Any]:
        return {
            "global_step": update * self._rows,
            "num_updates": update,
            **asdict(self._progress),
            "evaluation_due": False,
            "log": self._writer.logged(),
            "schedule_sha256": self._schedule_sha256,
            "num_devices": self._num_devices,
            "config": self._config.to_dict(),
            **self._more(),
        }
