"""What a run leaves: every event goes through its callbacks, ejax's own among them, in one order."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from numpy.typing import NDArray

from ejax.algorithms.step import RunState
from ejax.envs.host.calls import EnvAbandoned
from ejax.logs.metrics import MetricWriter
from ejax.logs.usage import TIME
from ejax.runtime.placing import own_copy
from ejax.runtime.processes import Group, count
from ejax.runtime.stopwatch import Stopwatch
from ejax.training.callbacks import Callback, Callbacks, TrainingRun
from ejax.training.environments import evaluation_env
from ejax.training.evaluators import make_evaluator, require_measured
from ejax.training.fresh import BROKEN_OFF, best_or_last, evaluate_fresh, fresh_seeds, params_of, write_fresh
from ejax.training.loop import Dispatch
from ejax.training.own_callbacks import BestKeeper, Checkpoints, MetricReporter, OnLog, SkippedUpdates, Verdict, Videos
from ejax.training.parts import cadence_of, rows_per_update
from ejax.training.progress import Progress
from ejax.training.recorder import VideoRecorder
from ejax.training.result import RunResult
from ejax.training.saver import Saver
from ejax.training.start import RunLocation, StartState
from ejax.training.steppers import Interrupted
from ejax.types import Metrics, Params, Phase


class RunSink:
    """The events of one run. Used once.

    Args:
        times: where the loop's seconds go.
        callbacks: of the caller; each event comes to them before it is logged and saved.
        started: when the call began that trains, of ``time.monotonic``.
        evaluates_first: the evaluation that was due when the state was saved has to be made.
        group: the processes that train together, of which this one writes. None: it is the only one.
    """

    def __init__(
        self,
        location: RunLocation,
        start: StartState,
        writer: MetricWriter,
        times: Stopwatch,
        callbacks: Iterable[Callback],
        on_log: OnLog | None,
        *,
        started: float,
        evaluates_first: bool,
        group: Group | None = None,
    ) -> None:
        config, parts, folder = location.config, start.parts, location.directory.path
        trainer = config.trainer
        self._config, self._parts, self._writer, self._times = config, parts, writer, times
        self._started, self._group = started, group
        self._directory, self._first, self._evaluates_first = location.directory, start.update, evaluates_first
        rows = rows_per_update(config, parts)
        (self._device,) = parts.state.update.devices()
        self._run = TrainingRun(
            config, folder, parts.policy, parts.env, cadence_of(trainer, rows), start.state, start.update, writer.note
        )
        self._progress, messages = Progress.of(start.meta, trainer)
        self.saver = Saver(
            config,
            location.directory,
            writer,
            parts.stepper,
            self._progress,
            (start.state, start.update),
            rows,
            parts.num_devices,
            callback_states=lambda: self._callbacks.states(),
        )
        self._evaluator = make_evaluator(config, parts, folder / "quarantine" / "eval")
        self._recorder = _recorder(location, start)
        skips = not config.algorithm.record.stops_at_nonfinite(config.algorithm.cfg)
        self._reporter = MetricReporter(writer, self._progress, times, self._device, on_log)
        self._checkpoints = Checkpoints(self.saver, self._progress, times, self._saved, self._judged)
        self._callbacks = Callbacks(
            [
                SkippedUpdates(self._progress, location.directory, skips=skips),
                BestKeeper(self._progress),
                *callbacks,
                self._reporter,
                self._checkpoints,
                Videos(self._recorder, self._device),
            ]
        )
        messages += self._callbacks.load(start.meta.get("callbacks", {}))
        for text in messages:
            writer.alarm(text)
        if listeners := self._callbacks.step_listeners():
            parts.stepper.watch_steps(listeners)
        self._stack = ExitStack()

    @property
    def stopped(self) -> bool:
        return self._run.stopped

    def note(self, text: str) -> None:
        self._writer.note(text)

    def compile(self, state: RunState) -> None:
        if self._config.trainer.enable_eval:
            self._evaluator.compile(state.train.params)

    def start(self, state: RunState, seconds: float) -> None:
        self._run.state = state
        self.saver.complete = state, self._first
        profile = self._config.trainer.profile
        self.note(f"built and compiled in {seconds:.1f} s; run folder {self._directory.path}")
        if profile is not None and profile.start < self._first:
            text = f"trainer.profile.start is {profile.start}, and the run goes on at {self._first}"
            self._writer.alarm(f"no profile: {text}")
        for each in self._callbacks:
            each.on_start(self._run)
        self._callbacks.states()  # one that cannot be saved is refused before anything is trained
        if self._evaluates_first:
            self._evaluate_now()

    def reached(self, state: RunState, update: int) -> Callable[[], Metrics] | None:
        self.saver.complete = state, update
        return self._begin_evaluation(state) if self._run.cadence.evaluates(update) else None

    def finish(self, dispatch: Dispatch[RunState], metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        """Log, save, and only then see what the evaluation gave."""
        run, trainer = self._run, self._config.trainer
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
        for name in [name for name in metrics if name.startswith(TIME)]:
            self._times.add(name.removeprefix(TIME).removesuffix("_s"), metrics.pop(name))
        collected = {tag: x for tag, x in metrics.items() if not tag.startswith("train/")}
        for each in self._callbacks:
            each.on_rollout(self._run, collected)
        for each in self._callbacks:
            each.on_update(self._run, metrics)

    def _saved(self, run: TrainingRun, path: Path) -> None:
        for each in self._callbacks:
            each.on_save(run, path)

    def _judged(self, verdict: Verdict) -> None:
        """Give the other processes the word on an evaluation that only this one makes."""
        if self._group is not None:
            self._group.gather(verdict, "evaluate")

    def _begin_evaluation(self, state: RunState) -> Callable[[], Metrics]:
        """With the parameters where evaluation is compiled for: learners may have them on several devices."""
        return self._evaluator.begin(own_copy(state.train.params, self._device))

    def _evaluate_now(self) -> None:
        self._record_evaluation(self._begin_evaluation(self._run.state))

    def _record_evaluation(self, evaluation: Callable[[], Metrics]) -> None:
        """Wait for an evaluation, write it, and keep the state if it is the best."""
        run = self._run
        try:
            metrics = self._results(evaluation)
            if metrics is None:
                self._judged("given up")
                return
            require_measured(self._config.trainer.best_eval_metric, metrics)
        except Exception:  # whatever it was, what was trained until here is kept
            run.evaluation_due = True
            self._judged("failed")
            self._checkpoints.save(run)
            raise
        run.evaluation_due = False
        for each in self._callbacks:
            each.on_evaluation(run, metrics)

    def _results(self, evaluation: Callable[[], Metrics]) -> dict[str, float] | None:
        """What an evaluation gave. None: the user asked the run to stop, and an environment does not return."""
        pauses = self._config.trainer.collector.pause_in_evaluation
        try:
            with self._parts.stepper.paused() if pauses else nullcontext(), self._times.of("evaluate"):
                return {name: float(x) for name, x in jax.device_get(evaluation()).items()}
        except EnvAbandoned as abandoned:
            self.note(f"no evaluation: {abandoned}")
            return None

    def _show_messages(self) -> None:
        for text in [*self._recorder.reports(), *self._parts.stepper.reports()]:
            self.note(text)

    def _evaluate_fresh(self, interrupted: Interrupted) -> dict[str, dict[str, Any]]:
        """Evaluate the best checkpoint and the last in fresh episodes, and write that down."""
        trainer, last = self._config.trainer, self.saver.latest
        seeds = fresh_seeds(trainer)
        if not seeds or last is None:
            return {}
        if count() > 1:  # all of them would have to read a checkpoint
            self.note("several processes play no fresh episodes; python -m ejax.evaluate RUN --seed S does")
            return {}
        params = own_copy(self._run.state.train.params, self._device)
        found: dict[str, dict[str, Any]] = {}
        best = best_or_last(self.saver.best, last, self._writer.alarm)
        for which, checkpoint in (("best", best), ("last", last)):
            own = params_of(checkpoint, last, params)

            def play(seed: int, own: Params = own) -> dict[str, float] | None:
                return None if interrupted() else self._results(self._evaluator.begin(own, seed))

            metrics = evaluate_fresh(seeds, play)
            if metrics is None:
                self.note(BROKEN_OFF)
                return {}
            found[which] = write_fresh(self._directory.path, which, checkpoint, trainer, metrics)
        return found

    def end(self, state: RunState, update: int, steps_per_s: float, interrupted: Interrupted) -> RunResult:
        """A last checkpoint and evaluation, where the loop has not made them; the facts of the run."""
        run, progress, finished = self._run, self._progress, update >= self._config.trainer.num_updates
        run.state, run.update = state, update
        run.evaluation_due = finished and self._config.trainer.enable_eval and progress.last_evaluated != update
        if not finished:
            self._recorder.break_off()
        self._checkpoints.save(run)
        if run.evaluation_due:
            self._evaluate_now()
        fresh = self._evaluate_fresh(interrupted) if finished else {}
        if not finished:
            self.note(
                f"stopped at {run.step} {self._config.step_name}; "
                f"go on with python -m ejax.train --run {self._directory.path} --resume latest"
            )
        self._reporter.seconds()
        result = RunResult(
            policy=self._parts.policy,
            params=state.train.params,
            run_dir=self._directory.path,
            global_step=run.step,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self._started,
            training_fps=steps_per_s,
            finished=finished,
            skipped_updates=progress.skipped_updates,
            best_eval_value=progress.best.value if progress.best else None,
            latest_checkpoint_path=self.saver.latest,
            best_checkpoint_path=self.saver.best,
            last_train_metrics=self._reporter.last,
            last_eval_metrics=progress.last_eval_metrics,
            train_history=self._reporter.train_history,
            eval_history=self._reporter.eval_history,
            fresh_eval_metrics=fresh,
            seconds=self._reporter.total.take(),
        )
        for each in self._callbacks:
            each.on_end(run, result)
        return result

    def __enter__(self) -> "RunSink":
        with ExitStack() as stack:
            stack.enter_context(self._evaluator)
            stack.enter_context(self._recorder)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if kind is None:
            self._show_messages()  # the last video is finished now


def _recorder(location: RunLocation, start: StartState) -> VideoRecorder:
    config, parts = location.config, start.parts
    trainer = config.trainer
    envs: dict[Phase, Any] = {"train": parts.env, "eval": evaluation_env(config, parts.env, parts.eval_env)}
    cameras = tuple(camera for camera in trainer.cameras if trainer.enable_eval or camera.phase == "train")
    return VideoRecorder(parts.policy, envs, cameras, location.directory.path / "videos")
