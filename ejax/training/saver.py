"""Checkpoints of a run: periodic ones, the best, and an asynchronous collector's schedule before either."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from ejax.algorithms.replay_buffer import replays_in
from ejax.config import RunConfig
from ejax.config.models import TrainerConfig
from ejax.logs.best import REWARD, Best, improves
from ejax.logs.metrics import MetricWriter
from ejax.runtime.process_exit import hard_exit
from ejax.schema.messages import number
from ejax.store.checkpoint import rewrite_meta
from ejax.store.run_dir import RunDirectory
from ejax.store.schedule_file import write_schedule
from ejax.training.callbacks import Callback, TrainingRun
from ejax.training.open_run import OpenRun

BestDecision = Literal["best", "not the best", "given up", "failed"]
"""The outcome of an evaluation."""
_SECONDS_BETWEEN_BESTS = 10.0  # a short training improves at each evaluation, and a save takes a few updates' time


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

    def update_best(self, trainer: TrainerConfig, metrics: Mapping[str, float], update: int, step: int) -> bool:
        """Take in an evaluation; return whether it is the best so far."""
        tag, mode = trainer.best_eval_metric, trainer.best_eval_mode
        is_best = improves(metrics, self.best, tag=tag, mode=mode)
        if is_best:
            self.best_eval_value, self.best_eval_step = metrics[tag], step
            self.best_eval_reward = metrics.get(REWARD)
        self.last_evaluated, self.last_eval_metrics = update, dict(metrics)
        return is_best

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Decide whether it is the best, which is saved once it is in the log."""
        self.update_best(run.config.trainer, metrics, run.update, run.step)


class Lane:
    """A single run, or one member of a population: its folder, log and counters, and how its states are saved, each
    update at most once, and the best.

    Args:
        run: whose state the lane is, or has a part of.
        more: returns what else the meta of a checkpoint has; called before anything is written.
        writes: False in all processes but the first: they write their parts of the arrays.
    """

    latest: Path | None = None

    def __init__(
        self,
        run: OpenRun,
        config: RunConfig,
        directory: RunDirectory,
        writer: MetricWriter,
        progress: Progress,
        more: Callable[[], Mapping[str, Any]] = dict,
        *,
        writes: bool = True,
    ) -> None:
        self.config, self.directory, self.writer, self.progress = config, directory, writer, progress
        self._run, self._more, self._writes = run, more, writes
        self.complete: tuple[Any, int] = run.state, run.update
        """The last complete state and its update: what ``rescue`` saves."""
        self.best = next(iter(directory.best()), None)
        self._last_saved: int | None = None
        self._held: tuple[Any, int, dict[str, Any]] | None = None  # the best, not saved yet: state, update, meta
        self._wrote_best = -math.inf
        self._schedule_sha256: str | None = None
        self._lock = threading.RLock()  # the watchdog's thread saves too, in a rescue

    def save(self, state: Any, update: int, *, evaluation_due: bool = False) -> bool:
        """Save a periodic checkpoint, unless this update has one: then False.

        ``evaluation_due``: a run that continues from it evaluates first.
        """
        if update == self._last_saved:
            return False
        self.save_best()  # first, since this checkpoint's meta names it
        with self._run.clock.of("save"), self._lock:
            if self._writes:
                meta = self.meta(update) | {"evaluation_due": evaluation_due}
                self.latest = self.directory.save(state, meta, keep=self.config.trainer.keep_checkpoints)
                self.writer.note(f"saved {self.latest}")
            else:
                self.directory.save_share(state, update * self._run.cadence.rows)
            self._last_saved = update
        return True

    def hold_best(self, state: Any, update: int) -> None:
        """Take a state as the best, for ``save_best``; nothing may write into its arrays."""
        with self._lock:
            self._held = state, update, self.meta(update) if self._writes else {}

    def save_best(self, *, can_wait: bool = False) -> Path | None:
        """Save the new best state, if any, in place of the former, and return its checkpoint. ``can_wait``: not soon
        after the last one, unless a checkpoint names it, its replay buffer changes, or other processes save it too."""
        if self._held is None:
            return None
        state, update, meta = self._held
        soon = can_wait and time.monotonic() - self._wrote_best < _SECONDS_BETWEEN_BESTS
        if soon and update != self._last_saved and self._run.group is None and not replays_in(state):
            return None
        with self._run.clock.of("save"), self._lock:
            if self._writes:
                self.best = self.directory.save_best(state, meta)
            else:
                self.directory.save_share(state, update * self._run.cadence.rows, best=True)
            self._held, self._wrote_best = None, time.monotonic()
        return self.best

    def last_is_better(self, state: Any, update: int, best: Mapping[str, float], last: Mapping[str, float]) -> bool:
        """Make the last state the best, if it did better than the best in the same fresh episodes: a best of many
        evaluations was lucky in some of them. ``best``, ``last``: what was measured."""
        trainer, progress = self.config.trainer, self.progress
        tag, mode, now = trainer.best_eval_metric, trainer.best_eval_mode, progress.last_eval_metrics
        if not improves(last, Best(best[tag], reward=best.get(REWARD)), tag=tag, mode=mode):
            return False
        progress.best_eval_value, progress.best_eval_reward = now[tag], now.get(REWARD)
        progress.best_eval_step = update * self._run.cadence.rows
        self.hold_best(state, update)
        self.save_best()
        self.evaluated(update)
        text = f"the last checkpoint is the best: in the same fresh episodes {tag} is {number(last[tag])} beside"
        self.writer.note(f"{text} {number(best[tag])}")
        return True

    def evaluated(self, update: int) -> None:
        """Note the evaluation in the checkpoint of ``update``, if it has one: a run that continues from it has it."""
        if update == self._last_saved and self.latest is not None:
            with self._lock:
                rewrite_meta(self.latest, self.meta(update))

    def rescue(self, reason: str, requested: bool) -> NoReturn:
        """Save the last complete state and end the process while the main thread is stuck in an environment.

        Args:
            reason: what the main thread hangs in.
            requested: the user wanted the run to stop, so this is not a failure.
        """
        code = 1
        with self._lock:  # for good: should the main thread come back after all, it saves nothing more
            try:
                self.save(*self.complete)
                code = 0 if requested else 1
                print(f"ejax: {reason}; leaving with {self.latest}", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                hard_exit(code)

    def meta(self, update: int) -> dict[str, Any]:
        """Return the meta of a checkpoint of now, and write the schedule that it names."""
        more, versions, first = self._more(), self._run.parts.stepper.versions(), self._run.update
        if versions is not None:  # a run that continues from it needs those of the rollouts before it
            written = versions[: update - first]  # the collector may be ahead of the updates
            self._schedule_sha256 = write_schedule(self.directory.path, first, written)
        return {
            "global_step": update * self._run.cadence.rows,
            "num_updates": update,
            **asdict(self.progress),
            "evaluation_due": False,
            "log": self.writer.logged(),
            "schedule_sha256": self._schedule_sha256,
            "num_devices": self._run.parts.num_devices,
            "config": self.config.to_dict(),
            **more,
        }
