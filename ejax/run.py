"""THE loop: step, log, evaluate, save until the end."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.envs.host.calls import EnvAbandoned
from ejax.logs.best import REWARD, Best, improves
from ejax.logs.latest import duration, number
from ejax.logs.metrics import MetricWriter
from ejax.logs.notebook import result_html
from ejax.logs.usage import TIME, memory_in_use, times
from ejax.runtime.device import matmul_precision
from ejax.runtime.interrupt import interruptible
from ejax.runtime.process_exit import owns_process
from ejax.runtime.processes import Channel, count, leads, own_copy
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.training.cadence import Throttle
from ejax.training.environments import evaluation_env
from ejax.training.evaluators import make_evaluator, require_measured
from ejax.training.fresh import BROKEN_OFF, best_or_last, evaluate_fresh, fresh_seeds, params_of, write_fresh
from ejax.training.parts import cadence_of, rows_per_update
from ejax.training.profile import Profiler
from ejax.training.progress import Progress
from ejax.training.recorder import VideoRecorder
from ejax.training.saver import Saver
from ejax.training.skipped import refuse_nonfinite, skip_notes, skipped_fraction
from ejax.training.start import RunLocation, StartState, announce_start, build_start, locate_run
from ejax.training.together import follow, gather, lead, leading
from ejax.training.watchdog import Watchdog, guarded_calls
from ejax.types import Metrics, Params, Phase, Policy

OnLog: TypeAlias = Callable[[int, dict[str, float]], object]


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


def train(
    config: RunConfig,
    *,
    resume: str | None = None,
    run_dir: Path | None = None,
    fork: Path | None = None,
    on_log: OnLog | None = None,
) -> RunResult:
    """Train as the config says: what ``python -m ejax.train`` runs.

    Args:
        resume: ``latest``, ``best``, or the path of a checkpoint of this very config. None: a new run. EmbodiChain's
            ``FILE.pt``: a new run that goes on where that training stands. ``latest`` of a run that was killed before
            its first checkpoint starts it from the beginning.
        run_dir: the run's folder. None: a new one, or with ``resume`` the newest of this ``exp_name``.
        fork: a checkpoint, or a run, its best one: a new run that begins with that whole state (parameters, optimizer,
            environments, counts) and may have another config, as long as the state has the same arrays.
        on_log: called with ``(env step, metrics)`` after each line of the log, which it cannot change; if it returns
            False, the run stops as after Ctrl-C. Of several processes only the leading one calls it, which cannot stop
            the others.

    Raises:
        ConfigError: the environment or the policy cannot be built from the config.
        CheckpointError: nothing to resume from, or a checkpoint of another config.
        NonFiniteUpdateError: a non-finite update, where ``skip_nonfinite_updates`` is off.
        ProcessesError: another of several processes failed.
        HostEnvError: an environment failed, or tried to end the process.
        KeyboardInterrupt: a second Ctrl-C; its note says what is left of the run.
    """
    if config.population is not None:
        raise ConfigError(
            [Problem("population", "is trained by ejax.population.train_population; train trains one run")]
        )
    started = time.monotonic()
    precision = matmul_precision(config.trainer.matmul_precision, config.trainer.device)
    guarded = guarded_calls(config.env.id, config.trainer.collector)
    if not leads():
        with guarded as watchdog, precision:
            return _followed(config, started, watchdog)
    with leading(config) as others, guarded as watchdog, precision, ExitStack() as locks:
        place = locate_run(config, resume, run_dir, fork, locks=locks)
        if others is not None:
            gather(others, place)
        try:
            return _train(place, started, on_log, watchdog, others)
        except KeyboardInterrupt as error:
            error.add_note(place.directory.last_word())
            raise


def _followed(config: RunConfig, started: float, watchdog: Watchdog) -> RunResult:
    """The result of a process that followed another, which keeps the metrics."""
    place, start, state = follow(config, watchdog)
    seconds, update = time.monotonic() - started, int(state.update)
    rows = rows_per_update(place.config, start.parts)
    return RunResult(
        policy=start.parts.policy,
        params=state.train.params,
        run_dir=place.directory.path,
        global_step=update * rows,
        num_updates=update,
        elapsed_time_sec=seconds,
        training_fps=(update - start.update) * rows / seconds,
        finished=update >= place.config.trainer.num_updates,
    )


def _train(
    place: RunLocation, started: float, on_log: OnLog | None, watchdog: Watchdog, others: Channel | None
) -> RunResult:
    start = build_start(place)
    if others is not None:
        place = lead(others, place, start.parts)
    trainer, rows = place.config.trainer, rows_per_update(place.config, start.parts)
    evaluates_first = trainer.enable_eval and start.meta.get("evaluation_due", False)
    with MetricWriter(
        place.directory.path,
        trainer.exp_name,
        total_steps=trainer.num_updates * rows,
        start_step=start.update * rows,
        resume_step=None if place.is_new else start.update * rows,
        logged=start.meta.get("log"),
        evaluates_again=evaluates_first,
        config=place.config.to_dict(),
        use_wandb=trainer.use_wandb,
        wandb_project_name=trainer.wandb_project_name,
        console=trainer.console,
        started=started,
    ) as writer:
        announce_start(place, start, writer, rows)
        return _Loop(place, start, writer, started, on_log, watchdog).run(evaluates_first=evaluates_first)


@dataclass
class _Launched:
    """Updates in flight: dispatched, their results not read yet."""

    update: int
    count: int
    state: RunState
    metrics: Metrics
    evaluation: Callable[[], Metrics] | None
    """Gives its results, or raises what went wrong in it."""


class _Loop:
    """One ``train`` call on the host. Used once."""

    def __init__(
        self,
        place: RunLocation,
        start: StartState,
        writer: MetricWriter,
        started: float,
        on_log: OnLog | None,
        watchdog: Watchdog,
    ) -> None:
        config, parts, folder = place.config, start.parts, place.directory.path
        trainer = config.trainer
        self.config, self.trainer, self.parts, self.writer = config, trainer, parts, writer
        self.directory, self.state, self.first = place.directory, start.state, start.update
        self.rows = rows_per_update(config, parts)
        self.cadence = cadence_of(trainer, self.rows)
        self.on_log, self.stopped = on_log, False
        self.times, self.total = Stopwatch(), Stopwatch()
        self.profiler = Profiler(trainer.profile, folder / "profile")
        self.throttle = Throttle(parts.stepper.max_updates, adapts=trainer.updates_per_dispatch == "auto")
        self.progress, messages = Progress.of(start.meta, trainer)
        for text in messages:
            writer.alarm(text)
        self.saver = Saver(
            config,
            place.directory,
            writer,
            parts.stepper,
            self.progress,
            (start.state, start.update),
            self.rows,
            parts.num_devices,
        )
        envs: dict[Phase, Any] = {"train": parts.env, "eval": evaluation_env(config, parts.env)}
        cameras = tuple(camera for camera in trainer.cameras if trainer.enable_eval or camera.phase == "train")
        self.recorder = VideoRecorder(parts.policy, envs, cameras, folder / "videos")
        self.evaluator = make_evaluator(config, parts, folder / "quarantine" / "eval")
        self.compiler = ThreadPoolExecutor(1, "ejax-compiler")
        if owns_process():
            watchdog.rescue = self.saver.rescue
        self.skips_nonfinite = not config.algorithm.record.stops_at_nonfinite(config.algorithm.cfg)
        self.started = self.compiled_at = self.clock = started
        (self.device,) = parts.state.update.devices()
        self.last_train_metrics: dict[str, float] = {}
        self.train_history: list[dict[str, float]] = []
        self.eval_history: list[dict[str, float]] = []

    def run(self, *, evaluates_first: bool) -> RunResult:
        """Train to the end, or until a signal.

        Args:
            evaluates_first: the evaluation that was due when the state was saved has to be made.
        """
        state, update, total = self.state, self.first, self.trainer.num_updates
        stepper, pending = self.parts.stepper, None
        with (
            stepper,
            self.evaluator,
            self.compiler,
            self.recorder,
            self.profiler,
            interruptible() as interrupted,
        ):
            ENGINE.take()  # of what the process did before
            if self.trainer.profile is not None and self.trainer.profile.start < update:
                text = f"trainer.profile.start is {self.trainer.profile.start}, and the run goes on at {update}"
                self.writer.alarm(f"no profile: {text}")
            state = self._compile(state)
            if evaluates_first:
                self._evaluate_now(state, update)
            while update < total and not interrupted() and not self.stopped:
                number = self.profiler.limit(update, self.cadence.updates_until_event(update, self.throttle.limit))
                self.profiler.before(update, state)
                moved = stepper.advance(state, number, interrupted)
                if moved is None:
                    break
                state, metrics = moved
                update += number
                self.saver.complete = state, update
                evaluation = self._begin_evaluation(state, update) if self.cadence.evaluates(update) else None
                launched = _Launched(update, number, state, metrics, evaluation)
                if pending is not None:  # the device works on what was launched while the host writes the former
                    self._finish(pending)
                pending = launched
                if self.profiler.ends(update):
                    with self.times.of("profile"):
                        notes = self.profiler.finish(state, stepper)
                    for text in notes:
                        self.writer.note(text)
            if pending is not None:
                self._finish(pending)
            result = self._end(state, update, interrupted)
        self._show_messages()  # the last video is finished now
        return result

    def _compile(self, state: RunState) -> RunState:
        """Training and evaluation at once: compilation leaves Python's lock alone, and takes longer than many a
        training."""
        if self.trainer.enable_eval:
            self.compiler.submit(self.evaluator.compile, state.train.params)
        state = self.parts.stepper.start(state)
        self.saver.complete = state, self.first
        self.compiled_at = self.clock = time.monotonic()
        seconds = self.compiled_at - self.started
        self.times.add("compile", seconds)
        self.writer.note(f"built and compiled in {seconds:.1f} s; run folder {self.directory.path}")
        return state

    def _finish(self, launched: _Launched) -> None:
        """Wait for results, write them, save, and only then see what the evaluation gave."""
        with self.times.of(self.parts.stepper.awaited):
            metrics = {name: np.asarray(x) for name, x in jax.device_get(launched.metrics).items()}
        now = time.monotonic()
        self.compiled_at += float(sum(metrics.get(f"{TIME}compile_s", ())))  # of programs that need a first rollout
        self.throttle.took(launched.count, now - self.clock)
        self.clock = now
        fps = (launched.update - self.first) * self.rows / (now - self.compiled_at)
        for i in range(launched.count):
            each = {name: float(x[i]) for name, x in metrics.items()}
            self._log_update(launched.update - launched.count + i + 1, each, fps)
        if self.cadence.saves(launched.update):
            at_end = self.trainer.enable_eval and launched.update >= self.trainer.num_updates
            self._save(launched.state, launched.update, evaluation_due=launched.evaluation is not None or at_end)
        if launched.evaluation is not None:
            self._record_evaluation(launched.state, launched.update, launched.evaluation)
        self._show_messages()

    def _log_update(self, update: int, metrics: dict[str, float], fps: float) -> None:
        if not self.skips_nonfinite:
            refuse_nonfinite(update, metrics, next(iter(self.directory.periodic()), None))
        self.progress.skipped_updates += skipped_fraction(metrics)
        for text in skip_notes(update, metrics):
            self.writer.note(text)
        for name in [name for name in metrics if name.startswith(TIME)]:
            self.times.add(name.removeprefix(TIME).removesuffix("_s"), metrics.pop(name))
        if self.cadence.logs(update):
            shown = {name: value for name, value in metrics.items() if not math.isnan(value)} | {"charts/SPS": fps}
            shown |= times(self._seconds()) | memory_in_use(self.device)
            self._write(update * self.rows, shown)
            self.last_train_metrics = shown
            self.train_history.append({"global_step": update * self.rows, **shown})

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        with self.times.of("log"):
            self.writer.write(step, metrics, self.progress.best)
        if self.on_log is not None and self.on_log(step, dict(metrics)) is False:
            if count() > 1:
                raise ValueError(
                    "on_log returned False, but one of several processes cannot stop the others; send SIGTERM"
                )
            self.stopped = True

    def _seconds(self) -> dict[str, float]:
        """Since they were last asked for."""
        seconds = self.times.take() | ENGINE.take()
        for name, value in seconds.items():
            self.total.add(name, value)
        return seconds

    def _begin_evaluation(self, state: RunState, update: int) -> Callable[[], Metrics]:
        params = self._video(state, self.cadence.video_number(update))
        return self.evaluator.begin(params)

    def _evaluate_now(self, state: RunState, update: int) -> None:
        self._record_evaluation(state, update, self._begin_evaluation(state, update))

    def _record_evaluation(self, state: RunState, update: int, evaluation: Callable[[], Metrics]) -> None:
        """Wait for an evaluation, write it, and keep the state if it is the best."""
        trainer, progress, step = self.trainer, self.progress, update * self.rows
        try:
            metrics = self._results(evaluation)
            if metrics is None:
                return
            require_measured(trainer.best_eval_metric, metrics)
        except Exception:  # whatever it was, what was trained until here is kept
            self._save(state, update, evaluation_due=True)
            raise
        tag, mode = trainer.best_eval_metric, trainer.best_eval_mode
        is_best = improves(metrics, progress.best, tag=tag, mode=mode)
        if is_best:
            progress.best = Best(metrics[tag], step, metrics.get(REWARD))
        progress.last_evaluated, progress.last_eval_metrics = update, metrics
        self._write(step, metrics)
        self.eval_history.append({"global_step": step, **metrics})
        if is_best:
            with self.times.of("save"):
                self.saver.save_best(state, update)
        self.saver.mark_evaluated(update)

    def _results(self, evaluation: Callable[[], Metrics]) -> dict[str, float] | None:
        """What an evaluation gave. None: the user asked the run to stop, and an environment does not return."""
        pause = self.parts.stepper.paused() if self.trainer.collector.pause_in_evaluation else nullcontext()
        try:
            with pause, self.times.of("evaluate"):
                return {name: float(x) for name, x in jax.device_get(evaluation()).items()}
        except EnvAbandoned as abandoned:
            self.writer.note(f"no evaluation: {abandoned}")
            return None

    def _save(self, state: RunState, update: int, *, evaluation_due: bool = False) -> None:
        if not self.trainer.enable_eval and not self.saver.has(update):  # else each evaluation is recorded
            self._video(state, update)
        with self.times.of("save"):
            self.saver.save(state, update, evaluation_due=evaluation_due)

    def _video(self, state: RunState, number: int) -> Params:
        """Have the policy of this moment recorded. Its parameters, where evaluation is compiled for: learners may have
        them on several devices."""
        params = own_copy(state.train.params, self.device)
        self.recorder.record(params, jax.random.key(self.trainer.eval_seed), number)
        return params

    def _show_messages(self) -> None:
        for text in [*self.recorder.reports(), *self.parts.stepper.reports()]:
            self.writer.note(text)

    def _evaluate_fresh(self, state: RunState, interrupted: Callable[[], bool]) -> dict[str, dict[str, Any]]:
        """Evaluate the best checkpoint and the last in fresh episodes, and write that down."""
        seeds, last = fresh_seeds(self.trainer), self.saver.latest
        if not seeds or last is None:
            return {}
        if count() > 1:  # all of them would have to read a checkpoint
            self.writer.note("several processes play no fresh episodes; python -m ejax.evaluate RUN --seed S does")
            return {}
        params = own_copy(state.train.params, self.device)
        found: dict[str, dict[str, Any]] = {}
        best = best_or_last(self.saver.best, last, self.writer.alarm)
        for which, checkpoint in (("best", best), ("last", last)):
            own = params_of(checkpoint, last, params)

            def play(seed: int, own: Params = own) -> dict[str, float] | None:
                return None if interrupted() else self._results(self.evaluator.begin(own, seed))

            metrics = evaluate_fresh(seeds, play)
            if metrics is None:
                self.writer.note(BROKEN_OFF)
                return {}
            found[which] = write_fresh(self.directory.path, which, checkpoint, self.trainer, metrics)
        return found

    def _end(self, state: RunState, update: int, interrupted: Callable[[], bool]) -> RunResult:
        """A last checkpoint and evaluation, where the loop has not made them; the facts of the run."""
        trained_for, finished = time.monotonic() - self.compiled_at, update >= self.trainer.num_updates
        evaluates = finished and self.trainer.enable_eval and self.progress.last_evaluated != update
        if not finished:
            self.recorder.break_off()
        self._save(state, update, evaluation_due=evaluates)
        if evaluates:
            self._evaluate_now(state, update)
        fresh = self._evaluate_fresh(state, interrupted) if finished else {}
        if not finished:
            self.writer.note(
                f"stopped at {update * self.rows} {self.config.step_name}; "
                f"go on with python -m ejax.train --run {self.directory.path} --resume latest"
            )
        best = self.progress.best
        self._seconds()
        return RunResult(
            policy=self.parts.policy,
            params=state.train.params,
            run_dir=self.directory.path,
            global_step=update * self.rows,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self.started,
            training_fps=(update - self.first) * self.rows / trained_for,
            finished=finished,
            skipped_updates=self.progress.skipped_updates,
            best_eval_value=best.value if best else None,
            latest_checkpoint_path=self.saver.latest,
            best_checkpoint_path=self.saver.best,
            last_train_metrics=self.last_train_metrics,
            last_eval_metrics=self.progress.last_eval_metrics,
            train_history=self.train_history,
            eval_history=self.eval_history,
            fresh_eval_metrics=fresh,
            seconds=self.total.take(),
        )
