"""Sink of one run: evaluate, and hand each event to the callbacks, ejax's own and the caller's."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import jax
from numpy.typing import NDArray

from ejax.algorithms.step import RunState
from ejax.envs.host.calls import EnvAbandoned
from ejax.evaluation import unfinished_note
from ejax.logs.metrics import MetricWriter
from ejax.logs.usage import TIME, memory_in_use, times
from ejax.runtime.sharding import own_copy, process_count
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.schema.messages import noting
from ejax.schema.paths import unique
from ejax.store.run_dir import RunDirectory
from ejax.training.callbacks import Callback, Callbacks, RunResult, TrainingRun
from ejax.training.environments import evaluation_env
from ejax.training.evaluators import make_evaluator, require_measured
from ejax.training.fresh import BROKEN_OFF, best_or_last, fresh_seeds, params_of, play_best_and_last, write_fresh
from ejax.training.loop import Dispatch, Sink
from ejax.training.open_run import OpenRun
from ejax.training.recorder import VideoRecorder, cameras_of
from ejax.training.saver import Progress, Saver, Verdict
from ejax.training.skipped import refuse_nonfinite, skip_notes, skipped_fraction
from ejax.training.steppers import ShouldStop
from ejax.types import Metrics, Params, Phase

OnLog: TypeAlias = Callable[[int, dict[str, float]], object]


class RunSink(Sink[RunState, RunResult]):
    """The events of one run. Used once.

    Args:
        callbacks: of the caller; each event comes to them before it is logged and saved.
    """

    def __init__(self, start: OpenRun, callbacks: Iterable[Callback] = (), on_log: OnLog | None = None) -> None:
        config, parts, directory = start.config, start.parts, start.directory
        self._start, self._trainer, self._parts = start, config.trainer, parts
        self._config, self._directory, self._clock = config, directory, start.clock
        self._writer = writer = start.open_log()
        (self._device,) = parts.state.update.devices()
        self._run = TrainingRun(
            config, directory.path, parts.policy, parts.env, start.cadence, start.state, start.update, writer.note
        )
        self._callbacks = Callbacks(callbacks)
        self._progress, messages = Progress.of(start.meta, self._trainer)
        self.saver = Saver(
            config,
            directory,
            writer,
            self._progress,
            start.clock,
            (start.state, start.update),
            start.cadence.rows,
            stepper=parts.stepper,
            num_devices=parts.num_devices,
            more=self._callbacks.meta,
            saved=self._saved,
            judged=self._judged,
        )
        self._evaluator = make_evaluator(config, parts, directory.path / "quarantine" / "eval")
        envs: dict[Phase, Any] = {"train": parts.env, "eval": evaluation_env(config, parts.env, parts.eval_env)}
        folder = directory.path / "videos"
        self._recorder = VideoRecorder(parts.policy, envs, cameras_of(self._trainer), folder, self._device)
        skips = not config.algorithm.record.stops_at_nonfinite(config.algorithm.cfg)
        self._reporter = MetricReporter(writer, self._progress, start.clock, self._device, on_log)
        # in the order of their calls: numbers that the caller adds are logged before the state is saved
        self._all: list[Callback] = [
            SkippedUpdates(self._progress, directory, skips=skips),
            self._progress,
            *self._callbacks,
            self._reporter,
            self.saver,
            self._recorder,
        ]
        for text in [*messages, *self._callbacks.load(start.meta.get("callbacks", {}))]:
            writer.alarm(text)
        if listeners := self._callbacks.step_listeners():
            parts.stepper.watch_steps(listeners)

    @property
    def stopped(self) -> bool:
        return self._run.stopped

    def note(self, text: str) -> None:
        self._writer.note(text)

    def compile(self, state: RunState) -> None:
        if self._trainer.enable_eval:
            self._evaluator.compile(state.train.params)

    def start(self, state: RunState, seconds: float) -> None:
        first, profile = self._start.update, self._trainer.profile
        self._run.state = state
        self.saver.complete = state, first
        self.note(f"built and compiled in {seconds:.1f} s")
        if profile is not None and profile.start < first:
            text = f"trainer.profile.start is {profile.start}, and the run goes on at {first}"
            self._writer.alarm(f"no profile: {text}")
        for each in self._all:
            each.on_start(self._run)
        self._callbacks.meta()  # one that cannot be saved is refused before anything is trained
        if self._start.evaluation_due:
            self._evaluate_now()

    def reached(self, state: RunState, update: int) -> Callable[[], Metrics] | None:
        self.saver.complete = state, update  # a rescue saves this one while an environment hangs
        return self._begin_evaluation(state) if self._run.cadence.evaluates(update) else None

    def finish(self, dispatch: Dispatch[RunState], metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        """Log, save, and only then see what the evaluation gave."""
        run, trainer = self._run, self._trainer
        run.state, run.steps_per_s = dispatch.state, steps_per_s
        at_end = trainer.enable_eval and dispatch.update >= trainer.num_updates
        for i in range(dispatch.count):
            run.update = dispatch.update - dispatch.count + i + 1
            run.evaluation_due = run.update == dispatch.update and (dispatch.evaluation is not None or at_end)
            self._updated({name: float(x[i]) for name, x in metrics.items()})
        if dispatch.evaluation is not None:
            self._record_evaluation(dispatch.evaluation)
        self._show_messages()

    def _updated(self, metrics: dict[str, float]) -> None:
        run = self._run
        for name in [name for name in metrics if name.startswith(TIME)]:
            self._clock.add(name.removeprefix(TIME).removesuffix("_s"), metrics.pop(name))
        collected = {tag: x for tag, x in metrics.items() if not tag.startswith("train/")}
        for each in self._all:
            each.on_rollout(run, collected)
        for each in self._all:
            each.on_update(run, metrics)

    def _saved(self, path: Path) -> None:
        for each in self._all:
            each.on_save(self._run, path)

    def _judged(self, verdict: Verdict) -> None:
        if self._start.group is not None:
            self._start.group.gather(verdict, "evaluate")

    def _begin_evaluation(self, state: RunState) -> Callable[[], Metrics]:
        """Begin where the evaluation is compiled for: learners may have the parameters on several devices."""
        return self._evaluator.begin(own_copy(state.train.params, self._device))

    def _evaluate_now(self) -> None:
        self._record_evaluation(self._begin_evaluation(self._run.state))

    def _record_evaluation(self, evaluation: Callable[[], Metrics]) -> None:
        run = self._run
        try:
            metrics = self._results(evaluation)
            if metrics is None:
                self._judged("given up")
                return
            require_measured(self._trainer.best_eval_metric, metrics)
            if text := unfinished_note(metrics, self._trainer.num_eval_episodes):
                self._writer.alarm(text)
        except Exception as error:  # of any kind: what was trained until here is kept
            run.evaluation_due = True
            with noting(error, "saving the run"):
                self._judged("failed")  # other processes save with this one, and then see it fail
                self.saver.save_now(run)
            raise
        run.evaluation_due = False  # only now: a kill before this makes the evaluation again
        for each in self._all:
            each.on_evaluation(run, metrics)

    def _results(self, evaluation: Callable[[], Metrics]) -> dict[str, float] | None:
        """Wait for the metrics of an evaluation. None: the run is to stop, and an environment does not return."""
        pauses = self._trainer.collector.pause_in_evaluation
        try:
            with self._parts.stepper.paused() if pauses else nullcontext(), self._clock.of("evaluate"):
                return {name: float(x) for name, x in jax.device_get(evaluation()).items()}
        except EnvAbandoned as abandoned:
            self.note(f"no evaluation: {abandoned}")
            return None

    def _show_messages(self) -> None:
        for text in [*self._recorder.reports(), *self._parts.stepper.reports()]:
            self.note(text)

    def _evaluate_fresh(self, should_stop: ShouldStop) -> dict[str, dict[str, Any]]:
        trainer, last = self._trainer, self.saver.latest
        if not fresh_seeds(trainer) or last is None:
            return {}
        if process_count() > 1:  # all of them would have to read a checkpoint
            self.note("several processes play no fresh episodes; python -m ejax.evaluate RUN --seed S does")
            return {}
        params = own_copy(self._run.state.train.params, self._device)
        best = best_or_last(self.saver.best, last, self._writer.alarm)

        def play(params: Params, seed: int) -> dict[str, float] | None:
            return None if should_stop() else self._results(self._evaluator.begin(params, seed))

        found = play_best_and_last(trainer, params_of(best, last, params), params, play)
        if found is None:
            self.note(BROKEN_OFF)
            return {}
        folder, checkpoints = self._directory.path, {"best": best, "last": last}
        return {which: write_fresh(folder, which, path, trainer, found[which]) for which, path in checkpoints.items()}

    def end(self, state: RunState, update: int, steps_per_s: float, should_stop: ShouldStop) -> RunResult:
        """Save and evaluate for the last time, where the loop has not; give the facts of the run."""
        run, progress, finished = self._run, self._progress, update >= self._trainer.num_updates
        run.state, run.update = state, update
        run.evaluation_due = finished and self._trainer.enable_eval and progress.last_evaluated != update
        if not finished:
            self._recorder.break_off()
        self.saver.save_now(run)
        if run.evaluation_due:
            self._evaluate_now()
        fresh = self._evaluate_fresh(should_stop) if finished else {}  # of an unfinished run they would be played again
        if not finished:
            self.note(
                f"stopped at {run.step} {self._config.step_name}; "
                f"go on with python -m ejax.train --run {self._directory.path} --resume latest"
            )
        self._reporter.seconds()  # of what came after the last line of the log
        result = RunResult(
            policy=self._parts.policy,
            params=state.train.params,
            run_dir=self._directory.path,
            global_step=run.step,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self._start.started,
            training_fps=steps_per_s,
            finished=finished,
            skipped_updates=progress.skipped_updates,
            best_eval_value=progress.best_eval_value,
            latest_checkpoint_path=self.saver.latest,
            best_checkpoint_path=self.saver.best,
            last_train_metrics=self._reporter.last,
            last_eval_metrics=progress.last_eval_metrics,
            train_history=self._reporter.train_history,
            eval_history=self._reporter.eval_history,
            fresh_eval_metrics=fresh,
            seconds=self._reporter.total.take(),
        )
        for each in self._all:
            each.on_end(run, result)
        return result

    def __enter__(self) -> "RunSink":
        self._open = ExitStack()
        self._open.enter_context(self._evaluator)
        self._open.enter_context(self._recorder)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
        if error[0] is None:
            self._show_messages()  # the last video is finished now


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
        metrics = unique((*metrics.items(), *run.extra.items()), "metrics")
        run.extra = {}  # numbers of the caller are in one line only
        with self._clock.of("log"):
            self._writer.write(run.step, metrics, self._progress.best)
        if self._on_log is not None and self._on_log(run.step, dict(metrics)) is False:
            run.stop()
