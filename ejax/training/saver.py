"""What a run saves: periodic checkpoints, the best one, and the schedule of an asynchronous collector before either."""

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.logs.metrics import MetricWriter
from ejax.runtime.process_exit import leave_now
from ejax.store.checkpoint import rewrite_meta
from ejax.store.run_dir import RunDirectory
from ejax.store.schedule_file import write_schedule
from ejax.training.progress import Progress
from ejax.training.steppers import Stepper


class Saver:
    """Saves the states of one run, each update at most once.

    Args:
        first: the run's state when it was started or resumed, and its update.
        rows: env steps of one update.
        callback_states: gives what callbacks keep.
    """

    complete: tuple[RunState, int]
    """The last complete state and its update: what ``rescue`` saves."""
    latest: Path | None = None
    """The periodic checkpoint made last."""
    best: Path | None
    """The best checkpoint of the run."""

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
        self._lock = threading.Lock()

    def has(self, update: int) -> bool:
        """Whether the last checkpoint is that of ``update``."""
        return update == self._last_saved

    def save(self, state: RunState, update: int, *, evaluation_due: bool = False) -> None:
        """Save a periodic checkpoint, unless there is one of this update.

        Args:
            evaluation_due: the evaluation of this update is not made yet: a run that goes on from here makes it.
        """
        with self._lock:
            self._save(state, update, evaluation_due)

    def save_best(self, state: RunState, update: int) -> None:
        """Save the best checkpoint in place of the former one."""
        with self._lock:
            self._write_schedule(update)
            self.best = self._directory.save_best(state, self._meta(update))

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
        """Have the checkpoint of ``update``, if there is one, say that its evaluation is made."""
        if self.has(update) and self.latest is not None:
            with self._lock:
                rewrite_meta(self.latest, self._meta(update))

    def rescue(self, reason: str, asked: bool) -> NoReturn:
        """Save what is complete and end the process, while the main thread is stuck in an environment.

        Args:
            reason: what the main thread hangs in.
            asked: the user had asked the run to stop, so this is no failure.
        """
        code = 1
        with self._lock:  # for good: should the main thread come back after all, it saves nothing beside this
            try:
                self._save(*self.complete)
                code = 0 if asked else 1
                print(f"ejax: {reason}; leaving with {self.latest}", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                leave_now(code)

    def _save(self, state: RunState, update: int, evaluation_due: bool = False) -> None:
        if self.has(update):
            return
        self._write_schedule(update)
        meta = self._meta(update) | {"evaluation_due": evaluation_due}
        self.latest = self._directory.save(state, meta, keep=self._config.trainer.keep_checkpoints)
        self._last_saved = update
        self._writer.note(f"saved {self.latest}")

    def _write_schedule(self, update: int) -> None:
        """Before the checkpoint, so that a run that goes on from it finds the versions of the rollouts before it."""
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
