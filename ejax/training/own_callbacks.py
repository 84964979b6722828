"""Callbacks of ejax itself: count skipped updates, log and record; ``saver`` has those that keep the best and save."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from ejax.logs.metrics import MetricWriter
from ejax.logs.usage import memory_in_use, times
from ejax.runtime.sharding import own_copy
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.store.run_dir import RunDirectory
from ejax.training.callbacks import Callback, TrainingRun
from ejax.training.recorder import VideoRecorder
from ejax.training.saver import Progress
from ejax.training.skipped import refuse_nonfinite, skip_notes, skipped_fraction

OnLog: TypeAlias = Callable[[int, dict[str, float]], object]


class SkippedUpdates(Callback):
    """Count updates that were not applied. ``skips`` False: the first update that is not finite ends the run."""

    def __init__(self, progress: Progress, directory: RunDirectory, *, skips: bool) -> None:
        self._progress, self._directory, self._skips = progress, directory, skips

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        if not self._skips:
            refuse_nonfinite(run.update, metrics, next(iter(self._directory.periodic()), None))
        self._progress.skipped_updates += skipped_fraction(metrics)
        for text in skip_notes(run.update, metrics):
            run.note(text)


class MetricReporter(Callback):
    """Log updates and evaluations. ``clock`` holds the loop's seconds; ``device`` is the one whose memory is logged."""

    def __init__(
        self, writer: MetricWriter, progress: Progress, clock: Stopwatch, device: jax.Device, on_log: OnLog | None
    ) -> None:
        self._writer, self._progress, self._clock, self._device = writer, progress, clock, device
        self._on_log, self.total = on_log, Stopwatch()
        self.last: dict[str, float] = {}
        self.train_history: list[dict[str, float]] = []
        self.eval_history: list[dict[str, float]] = []

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        if not run.cadence.logs(run.update):
            return
        shown = {tag: x for tag, x in metrics.items() if not math.isnan(x)} | {"charts/SPS": run.steps_per_s}
        shown |= times(self.seconds()) | memory_in_use(self._device)
        self._log(run, shown)
        self.last = shown
        self.train_history.append({"global_step": run.step, **shown})

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self._log(run, dict(metrics))
        self.eval_history.append({"global_step": run.step, **metrics})

    def seconds(self) -> dict[str, float]:
        """Take the seconds since the last call, by activity, and add them to ``total``."""
        seconds = self._clock.take() | ENGINE.take()
        for name, value in seconds.items():
            self.total.add(name, value)
        return seconds

    def _log(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        metrics |= run.extra
        run.extra = {}
        with self._clock.of("log"):
            self._writer.write(run.step, metrics, self._progress.best)
        if self._on_log is not None and self._on_log(run.step, dict(metrics)) is False:
            run.stop()


class Videos(Callback):
    """Record the policy after each evaluation; of a run without evaluations, at each checkpoint."""

    def __init__(self, recorder: VideoRecorder, device: jax.Device) -> None:
        self._recorder, self._device = recorder, device

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        del metrics
        self._record(run, run.cadence.video_number(run.update))

    def on_save(self, run: TrainingRun, path: Path) -> None:
        del path
        if not run.config.trainer.enable_eval:
            self._record(run, run.update)

    def _record(self, run: TrainingRun, number: int) -> None:
        params: Any = own_copy(run.state.train.params, self._device)
        self._recorder.record(params, jax.random.key(run.config.trainer.eval_seed), number)
