"""The log of a run: a line for each update that is logged and each evaluation, with the caller's own numbers."""

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax

from ejax.logs.metrics import MetricWriter
from ejax.logs.usage import memory_in_use, times
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.training.callbacks import Callback, TrainingRun
from ejax.training.saver import Progress

OnLog: TypeAlias = Callable[[int, dict[str, float]], object]
OWN = "own/"
"""Put before the caller's tags that ejax logs too."""


class MetricReporter(Callback):
    """Log updates and evaluations. ``clock`` holds the loop's seconds; ``device`` is the one whose memory is logged."""

    def __init__(
        self, writer: MetricWriter, progress: Progress, clock: Stopwatch, device: jax.Device, on_log: OnLog | None
    ) -> None:
        self._writer, self._progress, self._clock, self._device = writer, progress, clock, device
        self._on_log, self.total = on_log, Stopwatch()
        self._renamed: set[str] = set()
        self.last: dict[str, float] = {}
        self.train_history: list[dict[str, float]] = []
        self.eval_history: list[dict[str, float]] = []

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        if not run.cadence.logs(run.update):  # between two lines only callbacks see the metrics
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
        for tag in sorted(run.extra.keys() & metrics.keys()):
            run.extra[f"{OWN}{tag}"] = run.extra.pop(tag)  # an error would cost the training since the last save
            if tag not in self._renamed:
                self._writer.alarm(f"run.log: ejax logs '{tag}' too; the number of that name is logged as {OWN}{tag}")
            self._renamed.add(tag)
        metrics |= run.extra
        run.extra = {}  # numbers of the caller are in one line only
        with self._clock.of("log"):
            self._writer.write(run.step, metrics, self._progress.best)
        if self._on_log is not None and self._on_log(run.step, dict(metrics)) is False:
            run.stop()
