"""THE loop: step, log, evaluate, save until the end."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.config.bind import bind
from ejax.envs.host.calls import EnvAbandoned, exits_are_errors
from ejax.registry import is_foreign_checkpoint
from ejax.training.build import build
from ejax.training.checkpoint import load_checkpoint, verify_checkpoint
from ejax.training.environments import evaluation_env
from ejax.training.evaluators import check_best_metric, make_evaluator, require_measured
from ejax.training.interrupt import interruptible
from ejax.training.leave import leave_now
from ejax.training.metrics import MetricWriter, best_candidate
from ejax.training.parts import Parts, rows_per_update
from ejax.training.recorder import FilmRecorder
from ejax.training.run_dir import (
    RunDirectory,
    RunMeta,
    check_same_run,
    create_run_directory,
    never_began,
    newest_run,
    open_run_directory,
)
from ejax.training.skipped import refuse_nonfinite, skip_notes, skipped_fraction
from ejax.training.warm_start import start_from_file, start_from_policy
from ejax.training.watchdog import Watchdog
from ejax.types import Metrics, Params, Phase, Policy

_SECONDS_PER_DISPATCH = 0.5
"""Short enough for a live console and for a signal to be answered, long enough for dispatch to cost nothing."""


@dataclass(kw_only=True)
class RunResult:
    """What a run ended with; EmbodiChain's names."""

    policy: Policy
    params: Params
    run_dir: Path
    global_step: int
    num_updates: int
    elapsed_time_sec: float
    """Of this call, compilation included."""
    training_fps: float
    """Environment steps per second of this call, after compilation; evaluation and logging included."""
    finished: bool
    """False after SIGTERM or Ctrl-C: the run can be resumed."""
    skipped_updates: float = 0.0
    """Of the whole run: updates that were not applied, and the parts of others that were not."""
    best_eval_value: float | None = None
    latest_checkpoint_path: Path | None = None
    best_checkpoint_path: Path | None = None
    last_train_metrics: dict[str, float] = field(default_factory=dict)
    last_eval_metrics: dict[str, float] = field(default_factory=dict)
    train_history: list[dict[str, float]] = field(default_factory=list)
    eval_history: list[dict[str, float]] = field(default_factory=list)

    @property
    def mostly_skipped(self) -> bool:
        """More than half of the run's updates were not applied."""
        return self.skipped_updates > 0.5 * self.num_updates


def train(
    config: RunConfig, *, resume: str | None = None, run_dir: Path | None = None, owns_process: bool = False
) -> RunResult:
    """Train as the config says: what ``python -m ejax.train`` runs.

    Args:
        resume: ``latest``, ``best``, or the path of a checkpoint of this very config. None: a new run. EmbodiChain's
            ``FILE.pt``: a new run that goes on where that training stands. ``latest`` of a run that was killed before
            its first checkpoint starts it from the beginning.
        run_dir: the run's folder. None: a new one, or with ``resume`` the newest of this ``exp_name``.
        owns_process: end the process, with the state saved, where an environment hangs in native code and nothing else
            helps. For command lines.

    Raises:
        ConfigError: the environment or the policy cannot be built from the config.
        CheckpointError: nothing to resume from, or a checkpoint of another config.
        NonFiniteUpdateError: a non-finite update, where ``skip_nonfinite_updates`` is off.
        HostEnvError: an environment failed, or tried to end the process.
        KeyboardInterrupt: a second Ctrl-C; its note says what is left of the run.
    """
    started = time.monotonic()
    place = _locate(config, resume, run_dir)
    try:
        with exits_are_errors(config.env.id):
            return _train(place, started, owns_process)
    except KeyboardInterrupt as error:
        error.add_note(place.directory.last_word())
        raise


@dataclass(frozen=True)
class _Place:
    """Where a run is, and what it starts from."""

    directory: RunDirectory
    config: RunConfig
    """Bound: what ``resolved.json`` holds, but for what a resumed run may change."""
    checkpoint: Path | None = None
    file: str | None = None
    """Of another system, to start from where there is no checkpoint."""
    is_new: bool = False
    """Its folder was made just now."""
    alarms: tuple[str, ...] = ()
    """What a person must see: of damaged checkpoints, of a run that starts from the beginning."""


def _train(place: _Place, started: float, owns_process: bool) -> RunResult:
    directory, config, checkpoint = place.directory, place.config, place.checkpoint
    try:
        parts, state, meta, told = _begin(place)
        check_best_metric(config, parts)
    except BaseException:
        if place.is_new:
            directory.take_back()
        raise
    trainer = config.trainer
    rows = rows_per_update(config, parts)
    first_update = int(state.update)
    evaluates_again = trainer.enable_eval and meta.get("evaluation_due", False)
    with MetricWriter(
        directory.path,
        trainer.exp_name,
        total_steps=trainer.num_updates * rows,
        start_step=first_update * rows,
        resume_step=None if place.is_new else first_update * rows,
        logged=meta.get("log"),
        evaluates_again=evaluates_again,
        config=config.to_dict(),
        use_wandb=trainer.use_wandb,
        wandb_project_name=trainer.wandb_project_name,
        console=trainer.console,
        best_metric=trainer.best_eval_metric,
        best_mode=trainer.best_eval_mode,
    ) as writer:
        for text in place.alarms:
            writer.alarm(text)
        for text in told:
            writer.note(text)
        if trainer.distributed:
            writer.note(f"{parts.num_devices} devices, {trainer.num_envs} environments on each")
        if not place.is_new:
            for aside in directory.set_aside_after(first_update * rows):
                writer.note(f"set aside {aside}: the run goes on from before it")
        if checkpoint is not None:
            for problem in directory.check_sealed(meta["schema_version"]):
                writer.alarm(problem)
            if first_update and parts.stepper.versions() is not None:
                for problem in directory.check_schedule(first_update, meta.get("schedule_sha256")):
                    writer.alarm(problem)
            writer.note(f"resumed from {checkpoint} at {first_update * rows} {config.step_name}")
        return _Loop(config, parts, directory, writer, meta, started, owns_process).run(
            state, evaluates_first=evaluates_again
        )


@dataclass
class _Launched:
    """Updates in flight: dispatched, their results not read yet."""

    update: int
    count: int
    state: RunState
    metrics: Metrics
    evaluation: Callable[[], Metrics] | None
    """Gives its results, or raises what went wrong in it."""
    save: bool


class _Loop:
    """The host side of one ``train`` call: counters, and what to do with results. Used once."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        directory: RunDirectory,
        writer: MetricWriter,
        meta: dict[str, Any],
        started: float,
        owns_process: bool,
    ) -> None:
        trainer = config.trainer
        self.config, self.trainer, self.parts = config, trainer, parts
        self.directory, self.writer = directory, writer
        self.rows = rows_per_update(config, parts)
        self.skips_nonfinite: bool = not config.algorithm.record.stops_at_nonfinite(config.algorithm.cfg)
        self.best: float | None = meta.get("best_eval_value")
        self.result = RunResult(
            policy=parts.policy,
            params=parts.state.train.params,
            run_dir=directory.path,
            global_step=0,
            num_updates=0,
            elapsed_time_sec=0.0,
            training_fps=0.0,
            finished=False,
            skipped_updates=meta.get("skipped_updates", 0.0),
            best_eval_value=self.best,
            best_checkpoint_path=next(iter(directory.best()), None),
            last_eval_metrics=meta.get("last_eval_metrics", {}),
        )
        envs: dict[Phase, Any] = {"train": parts.env, "eval": evaluation_env(config, parts.env)}
        cameras = tuple(camera for camera in trainer.cameras if trainer.enable_eval or camera.phase == "train")
        self.recorder = FilmRecorder(parts.policy, envs, cameras, directory.path / "videos")
        self.evaluator = make_evaluator(config, parts, directory.path / "quarantine" / "eval")
        self.compiler = ThreadPoolExecutor(1, "ejax-compiler")
        self.started = self.compiled_at = self.clock = started
        self.last_saved: int | None = None
        self.schedule_sha256: str | None = None
        self.last_evaluated: int | None = meta.get("last_evaluated")
        self.per_dispatch = 1
        self.first_update = 0
        self.complete = parts.state, 0
        """The last complete state and its update."""
        self.saving = threading.Lock()
        self.watchdog = Watchdog(
            env_timeout_s=trainer.collector.env_timeout_s,
            stop_timeout_s=trainer.collector.stop_timeout_s,
            rescue=self._rescue if owns_process else None,
        )
        (self.device,) = parts.state.update.devices()

    def run(self, state: RunState, *, evaluates_first: bool = False) -> RunResult:
        """Train to the end, or until a signal.

        Args:
            evaluates_first: the evaluation that was due when the state was saved has to be made.
        """
        trainer, total = self.trainer, self.trainer.num_updates
        update = first = self.first_update = int(state.update)
        stepper = self.parts.stepper
        pending: _Launched | None = None
        with self.watchdog, stepper, self.evaluator, self.compiler, self.recorder, interruptible() as interrupted:
            # both programs at once: compilation leaves Python's lock alone, and takes longer than many a training
            if trainer.enable_eval:
                self.compiler.submit(self.evaluator.compile, state.train.params)
            state = stepper.start(state)
            self.complete = state, update
            self.compiled_at = self.clock = time.monotonic()
            seconds = self.compiled_at - self.started
            self.writer.note(f"built and compiled in {seconds:.1f} s; run folder {self.directory.path}")
            if evaluates_first:
                self._record_evaluation(_Launched(update, 0, state, {}, self._evaluate(state, update), save=False))
            while update < total and not interrupted():
                limit = self.per_dispatch if trainer.updates_per_dispatch == "auto" else stepper.most
                count = self._until_event(update, min(limit, stepper.most, total - update))
                moved = stepper.advance(state, count, interrupted)
                if moved is None:
                    break
                state, metrics = moved
                update += count
                self.complete = state, update
                evaluates = self._fires(update, trainer.eval_freq) and trainer.enable_eval
                launched = _Launched(
                    update,
                    count,
                    state,
                    metrics,
                    self._evaluate(state, update) if evaluates else None,
                    self._fires(update, trainer.save_freq) or _divides(trainer.save_frequency_updates, update),
                )
                if pending is not None:  # the device works on what was launched while the host writes the former
                    self._finish(pending, first)
                pending = launched
            if pending is not None:
                self._finish(pending, first)
            result = self._end(state, update, first, finished=update >= total)
        self._tell()  # the last one is finished now
        return result

    def _until_event(self, update: int, limit: int) -> int:
        """Updates up to and including the next one that is evaluated or saved; at most ``limit``."""
        trainer = self.trainer
        for count in range(1, limit):
            then = update + count
            evaluates = trainer.enable_eval and self._fires(then, trainer.eval_freq)
            saves = self._fires(then, trainer.save_freq) or _divides(trainer.save_frequency_updates, then)
            if evaluates or saves:
                return count
        return limit

    def _fires(self, update: int, freq: int) -> bool:
        """An update whose env steps reach or pass a multiple of ``freq``: a function of the update alone."""
        return freq > 0 and update * self.rows // freq > (update - 1) * self.rows // freq

    def _evaluate(self, state: RunState, update: int) -> Callable[[], Metrics]:
        trainer = self.trainer
        key = jax.random.key(trainer.eval_seed)
        params = self._one_copy(state)
        self.recorder.record(params, key, self._film_number(update))
        return self.evaluator.begin(params)

    def _one_copy(self, state: RunState) -> Params:
        """The parameters where evaluation is compiled for: learners may have them on several devices."""
        return jax.device_put(state.train.params, self.device)

    def _film_number(self, update: int) -> int:
        """Multiples of ``eval_freq`` passed; an evaluation at the end, between two of them, has the next number."""
        freq = self.trainer.eval_freq
        number = update * self.rows // max(1, freq)
        return number if freq == 0 or self._fires(update, freq) else number + 1

    def _finish(self, launched: _Launched, first: int) -> None:
        """Wait for results, write them, save, and only then see what the evaluation gave."""
        metrics = {name: np.asarray(x) for name, x in jax.device_get(launched.metrics).items()}
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        # grow slowly, so that one slow dispatch (an evaluation) does not shrink the next ones to nothing
        fitting = launched.count * _SECONDS_PER_DISPATCH / max(seconds, 1e-3)
        self.per_dispatch = max(1, min(int(fitting), 2 * self.per_dispatch, self.parts.stepper.most))
        fps = (launched.update - first) * self.rows / (now - self.compiled_at)
        for i in range(launched.count):
            self._log_update(
                launched.update - launched.count + i + 1, {n: float(x[i]) for n, x in metrics.items()}, fps
            )
        if launched.save:
            at_end = self.trainer.enable_eval and launched.update >= self.trainer.num_updates
            self._save(launched.state, launched.update, evaluation_due=launched.evaluation is not None or at_end)
        if launched.evaluation is not None:
            self._record_evaluation(launched)
        self._tell()

    def _tell(self) -> None:
        for report in [*self.recorder.reports(), *self.parts.stepper.reports()]:
            self.writer.note(report)

    def _log_update(self, update: int, metrics: dict[str, float], fps: float) -> None:
        if not self.skips_nonfinite:
            refuse_nonfinite(update, metrics, next(iter(self.directory.periodic()), None))
        self.result.skipped_updates += skipped_fraction(metrics)
        for text in skip_notes(update, metrics):
            self.writer.note(text)
        if update % self.trainer.log_freq_updates and update != self.trainer.num_updates:
            return
        shown = {name: value for name, value in metrics.items() if not math.isnan(value)} | {"charts/SPS": fps}
        self.writer.write(update * self.rows, shown)
        self.result.last_train_metrics = shown
        self.result.train_history.append({"global_step": update * self.rows, **shown})

    def _record_evaluation(self, launched: _Launched) -> None:
        step, tag = launched.update * self.rows, self.trainer.best_eval_metric
        try:
            metrics = self._results(launched)
            if metrics is None:
                return
            require_measured(tag, metrics)
        except Exception:  # whatever it was, what was trained until here is kept
            self._save(launched.state, launched.update, evaluation_due=True)
            raise
        self.last_evaluated = launched.update
        self.writer.write(step, metrics)
        self.result.last_eval_metrics = metrics
        self.result.eval_history.append({"global_step": step, **metrics})
        value = best_candidate(metrics, tag)
        sign = 1.0 if self.trainer.best_eval_mode == "max" else -1.0
        if value is not None and (self.best is None or sign * value > sign * self.best):
            self.best = value
            with self.saving:
                self._write_schedule(launched.update)
                path = self.directory.save_best(launched.state, self._meta(launched.update))
            self.result.best_eval_value, self.result.best_checkpoint_path = value, path
        if launched.update == self.last_saved and self.result.latest_checkpoint_path is not None:
            with self.saving:
                self.directory.rewrite_meta(self.result.latest_checkpoint_path, self._meta(launched.update))

    def _results(self, launched: _Launched) -> dict[str, float] | None:
        """What an evaluation that was begun gave. None: the user asked the run to stop, and an environment does not
        return."""
        pause = self.parts.stepper.paused() if self.trainer.collector.pause_in_evaluation else nullcontext()
        try:
            with pause:
                means = launched.evaluation() if launched.evaluation is not None else {}
                return {name: float(x) for name, x in jax.device_get(means).items()}
        except EnvAbandoned as abandoned:
            self.writer.note(f"no evaluation: {abandoned}")
            return None

    def _rescue(self, text: str, asked: bool) -> NoReturn:
        """In the watchdog's thread, while the main one is stuck in an environment: save what is complete, and leave."""
        code = 1
        with self.saving:  # for good: should the main thread come back after all, it saves nothing beside this
            try:
                self._save_once(*self.complete)
                code = 0 if asked else 1
                print(f"ejax: {text}; leaving with {self.result.latest_checkpoint_path}", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                leave_now(code)

    def _save(self, state: RunState, update: int, *, evaluation_due: bool = False) -> None:
        with self.saving:
            self._save_once(state, update, evaluation_due=evaluation_due)

    def _save_once(self, state: RunState, update: int, *, evaluation_due: bool = False) -> None:
        if update == self.last_saved:
            return
        if not self.trainer.enable_eval:
            self.recorder.record(self._one_copy(state), jax.random.key(self.trainer.eval_seed), update)
        self._write_schedule(update)
        meta = self._meta(update) | {"evaluation_due": evaluation_due}
        path = self.directory.save(state, meta, keep=self.trainer.keep_checkpoints)
        self.last_saved, self.result.latest_checkpoint_path = update, path
        self.writer.note(f"saved {path}")

    def _write_schedule(self, update: int) -> None:
        """Before the checkpoint, so that whoever goes on from it finds the versions of the rollouts before it."""
        versions = self.parts.stepper.versions()
        if versions is not None:
            written = versions[: update - self.first_update]
            self.schedule_sha256 = self.directory.write_schedule(self.first_update, written)

    def _meta(self, update: int) -> dict[str, Any]:
        return {
            "global_step": update * self.rows,
            "num_updates": update,
            "best_eval_value": self.best,
            "last_eval_metrics": self.result.last_eval_metrics,
            "skipped_updates": self.result.skipped_updates,
            "last_evaluated": self.last_evaluated,
            "evaluation_due": False,
            "log": self.writer.logged(),
            "schedule_sha256": self.schedule_sha256,
            "config": self.config.to_dict(),
        }

    def _end(self, state: RunState, update: int, first: int, *, finished: bool) -> RunResult:
        """A last checkpoint and evaluation, where the loop has not made them; the facts of the run."""
        trained_for = time.monotonic() - self.compiled_at
        evaluates = finished and self.trainer.enable_eval and self.last_evaluated != update
        if not finished:
            self.recorder.break_off()
        self._save(state, update, evaluation_due=evaluates)
        if evaluates:
            self._record_evaluation(_Launched(update, 0, state, {}, self._evaluate(state, update), save=False))
        if not finished:
            self.writer.note(
                f"stopped at {update * self.rows} {self.config.step_name}; "
                f"go on with --run {self.directory.path} --resume latest"
            )
        result = self.result
        result.params, result.finished = state.train.params, finished
        result.num_updates, result.global_step = update, update * self.rows
        result.elapsed_time_sec = time.monotonic() - self.started
        result.training_fps = (update - first) * self.rows / trained_for
        return result


def _locate(config: RunConfig, resume: str | None, run_dir: Path | None) -> _Place:
    """The run's folder, and the checkpoint to go on from."""
    if resume is None or is_foreign_checkpoint(resume):
        config = bind(config)
        return _Place(create_run_directory(config, run_dir, origin=resume), config, file=resume, is_new=True)
    checkpoint = file = None
    if resume not in ("latest", "best"):
        checkpoint = verify_checkpoint(Path(resume), RunMeta).path
        run_dir = run_dir or checkpoint.absolute().parents[1]
    elif resume == "latest" and run_dir is not None and never_began(run_dir):
        alarm = f"a kill came before {run_dir} was a run: it starts from the beginning"
        config = bind(config)
        return _Place(create_run_directory(config, run_dir), config, is_new=True, alarms=(alarm,))
    path = run_dir or newest_run(Path(config.trainer.output_dir), config.trainer.exp_name)
    directory, saved = open_run_directory(path)
    num_updates = saved.trainer.num_updates  # a schedule keeps the horizon that the run was started with
    config, saved = bind(config, num_updates), bind(saved, num_updates)
    check_same_run(config, saved)
    alarms = directory.recover()
    if resume == "latest" and not directory.has_checkpoints():
        file = directory.origin()
        alarms.append(
            f"{path} has no checkpoint, a kill came before the first: it starts from {file or 'the beginning'}"
        )
    elif resume in ("latest", "best"):
        checkpoint = directory.find(resume, alarms.append)
    return _Place(directory, config, checkpoint, file, alarms=tuple(alarms))


def _begin(place: _Place) -> tuple[Parts, RunState, dict[str, Any], list[str]]:
    """What the run is made of, the state that it starts from, that one's meta, and what there is to tell of it."""
    directory, config, checkpoint = place.directory, place.config, place.checkpoint
    parts = build(config, quarantine=directory.path / "quarantine")
    if checkpoint is not None:
        return parts, *load_checkpoint(checkpoint, parts.state), []
    if place.file is None:
        state, told = start_from_policy(parts, config)
        return parts, state, {}, told
    state, told = start_from_file(Path(place.file), parts, config)
    if parts.stepper.versions() is not None:  # of the rollouts made there, each by the newest parameters
        directory.write_schedule(0, range(int(state.update)))
    return parts, state, {}, [f"goes on from {place.file}", *told]


def _divides(every: int, update: int) -> bool:
    return every > 0 and update % every == 0
