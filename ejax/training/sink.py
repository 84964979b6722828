"""Sink of a run or of a population: evaluate, save, and hand each event to the callbacks, ejax's and the caller's.

Of several processes all have one, and the first's writes: they advance, stop and save at the same updates, by its word
where it alone knows the next one.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.host.calls import EnvAbandoned
from ejax.evaluation import evaluation_notes
from ejax.logs.metrics import MetricWriter
from ejax.numerics.weight_average import acting_params
from ejax.runtime.process_exit import hard_exit
from ejax.runtime.processes import Group, RescueCall, report_failure
from ejax.runtime.sharding import local_copy, process_count
from ejax.schema.messages import noting
from ejax.training.callbacks import Callback, Callbacks, RunResult, TrainingRun
from ejax.training.environments import evaluation_env
from ejax.training.evaluators import (
    Evaluator,
    evaluate_fresh,
    fresh_seeds,
    load_best,
    make_evaluator,
    require_measured,
    write_fresh,
)
from ejax.training.open_run import OpenRun
from ejax.training.recorder import VideoRecorder
from ejax.training.reporter import TIME, MetricReporter, OnLog, SkippedUpdates
from ejax.training.saver import BestDecision, Lane, Progress
from ejax.training.steppers import ShouldStop
from ejax.types import Metrics, Params, Phase, PyTree


class Members(Callback, Protocol):
    """The lanes of a population; a callback whose metrics are [M], of all members."""

    lanes: Sequence[Lane]
    """They save each member's best state, and its last."""
    evaluator: Evaluator

    def take(self, tree: PyTree, index: int) -> PyTree:
        """Return one member's part of what has a first axis [M]."""
        ...

    def meta(self) -> Mapping[str, Any]:
        """Return what the meta of a checkpoint of all has of the members."""
        ...

    def result(self, run: TrainingRun, facts: Mapping[str, Any]) -> Any:
        """Return the result of the training, with those ``facts`` that a run has too."""
        ...


@dataclass
class Dispatch:
    """Updates in flight: dispatched, their results not read yet."""

    update: int
    """The last of them."""
    count: int
    state: Any
    metrics: Metrics
    """[≥ count, ...] each."""
    evaluation: Callable[[], Metrics] | None
    """Gives the results of an evaluation after the last one, or raises what went wrong in it."""


class RunSink:
    """The events of one run, which has one lane, or of a population's members. A context manager, used once.

    Args:
        callbacks: of the caller; each event comes to them before it is logged and saved.
        members: makes the lanes of a population from the log of all. None: the run is one lane.
        writes: False in all processes but the first: they write their parts of checkpoints, and come together for
            evaluations and videos, which need parameters that lie across processes.
    """

    def __init__(
        self,
        start: OpenRun,
        callbacks: Iterable[Callback] = (),
        on_log: OnLog | None = None,
        *,
        members: Callable[[MetricWriter], Members] | None = None,
        writes: bool = True,
    ) -> None:
        config, parts, directory, path = start.config, start.parts, start.directory, start.directory.path
        self._start, self._trainer, self._parts, self._writes = start, config.trainer, parts, writes
        self._directory, self._clock = directory, start.clock
        self._writer = writer = start.open_log() if writes else cast(MetricWriter, _Unwritten())
        self._device = next(iter(parts.state.update.devices()))
        self._run = TrainingRun(
            config, path, parts.policy, parts.env, start.cadence, start.state, start.update, writer.note
        )
        self._callbacks, self._noted = Callbacks(callbacks), list[str]()
        self._progress, messages = Progress.of(start.meta, self._trainer)
        self._members = None if members is None else members(writer)
        more = self._callbacks.meta if self._members is None else self._members.meta
        self.lane = Lane(start, config, directory, writer, self._progress, more, writes=writes)
        self._lanes = [self.lane] if self._members is None else self._members.lanes
        self._reporter = MetricReporter(writer, self._progress, start.clock, self._device, on_log)
        # a process that does not write has no callbacks and does not evaluate: it only takes part
        self._all: list[Callback] = []
        self._evaluator: Evaluator | None = None
        # without evaluations there is only the training to see
        cameras = tuple(each for each in self._trainer.cameras if self._trainer.enable_eval or each.phase == "train")
        if self._members is not None:
            self._all, self._evaluator, cameras = [self._members], self._members.evaluator, ()
            # evaluated together, but for members that broke before
            known = [each.progress.last_evaluated for each in self._members.lanes]
            self._progress.last_evaluated = max((update for update in known if update is not None), default=None)
        elif writes:
            skips = not config.algorithm.record.stops_at_nonfinite(config.algorithm.cfg)
            counter = SkippedUpdates(self._progress, directory, skips=skips)
            # in the order of their calls: numbers that the caller adds are logged before the state is saved
            self._all = [counter, self._progress, *self._callbacks, self._reporter]
            self._evaluator = make_evaluator(config, parts, path / "quarantine" / "eval")
        envs: dict[Phase, Any] = {"train": parts.env, "eval": evaluation_env(config, parts.env, parts.eval_env)}
        self._recorder = VideoRecorder(parts.policy, envs, cameras, path / "videos", self._device, draws=writes)
        for text in [*messages, *self._callbacks.load(start.meta.get("callbacks", {}))]:
            writer.alarm(text)
        if listeners := self._callbacks.step_listeners():
            parts.stepper.watch_steps(listeners)

    @property
    def stopped(self) -> bool:
        """The run is to end, though no signal came."""
        return self._run.stopped

    def note(self, text: str) -> None:
        self._writer.note(text)

    def compile(self, state: Any) -> None:
        """Compile what evaluates. In a thread, while the training runs."""
        if self._trainer.enable_eval and self._evaluator is not None:
            self._evaluator.compile(state.train.params)

    def start(self, state: Any, seconds: float) -> None:
        """All is compiled, after ``seconds`` since the call began."""
        first, profile = self._start.update, self._trainer.profile
        self._run.state = state
        self.lane.complete = state, first
        self.note(f"built and compiled in {seconds:.1f} s")
        if profile is not None and profile.start < first:
            text = f"trainer.profile.start is {profile.start}, and the run continues at {first}"
            self._writer.alarm(f"no profile: {text}")
        for each in self._all:
            each.on_start(self._run)
        self._callbacks.meta()  # one that cannot be saved is refused before anything is trained
        if self._start.evaluation_due:
            self._record_evaluation(self._begin_evaluation(state))

    def reached(self, state: Any, update: int) -> Callable[[], Metrics] | None:
        """Note that ``state`` is under way on the device, and begin the evaluation that is due after it."""
        self.lane.complete = state, update  # a rescue saves this one while an environment hangs
        return self._begin_evaluation(state) if self._run.cadence.evaluates(update) else None

    def finish(self, dispatch: Dispatch, metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        """Log, save, and only then see what the evaluation gave."""
        run, trainer = self._run, self._trainer
        run.state, run.steps_per_s = dispatch.state, steps_per_s
        at_end = trainer.enable_eval and dispatch.update >= trainer.num_updates
        for i in range(dispatch.count):
            run.update = dispatch.update - dispatch.count + i + 1
            run.evaluation_due = run.update == dispatch.update and (dispatch.evaluation is not None or at_end)
            row = {name: self._value(x[i]) for name, x in metrics.items()}
            for name in [name for name in row if name.startswith(TIME)]:
                self._clock.add(name.removeprefix(TIME).removesuffix("_s"), float(row.pop(name)))
            collected = {tag: x for tag, x in row.items() if not tag.startswith("train/")}
            for each in self._all:
                each.on_rollout(run, collected)
            for each in self._all:
                each.on_update(run, row)
            if run.cadence.saves(run.update):
                self._save()
        if dispatch.evaluation is not None:
            self._record_evaluation(dispatch.evaluation)
        self._save_best(can_wait=True)
        self._show_messages()

    def _value(self, x: Any) -> Any:
        return float(x) if self._members is None else np.asarray(x)

    def _save(self) -> None:
        run = self._run
        self._save_best()
        if self.lane.save(run.state, run.update, evaluation_due=run.evaluation_due):
            self._saved(self.lane.latest)

    def _save_best(self, *, can_wait: bool = False) -> None:
        if (path := self.lane.save_best(can_wait=can_wait)) is not None:
            self._saved(path)

    def _saved(self, path: Path | None) -> None:
        for each in self._all if path is not None else ():
            each.on_save(self._run, cast(Path, path))
        self._recorder.on_save(self._run, path)

    def _on_best_decided(self, decision: BestDecision) -> None:
        """Notify the other processes before this one completes the best checkpoint with their parts."""
        if self._start.group is not None:
            self._start.group.gather(decision, "evaluate")

    def _own_params(self, params: Params) -> Params:
        """Copy them to where they are evaluated: learners may have them on several devices."""
        return local_copy(params, self._device) if self._members is None else params

    def _begin_evaluation(self, state: Any) -> Callable[[], Metrics]:
        params = self._own_params(acting_params(state.train))
        return dict if self._evaluator is None else self._evaluator.begin(params)  # the first process evaluates alone

    def _record_evaluation(self, evaluation: Callable[[], Metrics]) -> None:
        run = self._run
        if not self._writes:
            self._follow_evaluation()
            return
        try:
            metrics = self._results(evaluation)
            if metrics is None:
                self._on_best_decided("given up")
                return
            require_measured(self._trainer.best_eval_metric, metrics)
            # of a population the first member speaks for all: they have one environment
            notes = evaluation_notes(self._of_lane(metrics, 0), self._trainer.num_eval_episodes)
            for text in notes if notes != self._noted else ():  # once, until they change
                self._writer.alarm(text)
            self._noted = notes
        except Exception as error:  # of any kind: the training until here is kept
            run.evaluation_due = True
            with noting(error, "saving the run"):
                self._on_best_decided("failed")  # other processes save with this one, and then see it fail
                self._save()
            raise
        run.evaluation_due = False  # only now: a kill before this makes the evaluation again
        self._progress.last_evaluated = run.update
        for each in self._all:
            each.on_evaluation(run, metrics)
        best = self._progress.best
        is_best = best is not None and best.step == run.step
        self._on_best_decided("best" if is_best else "not the best")
        if is_best:
            self.lane.hold_best(run.state, run.update)
            self._save_best(can_wait=True)
        self.lane.evaluated(run.update)
        self._recorder.on_evaluation(run, metrics)

    def _follow_evaluation(self) -> None:
        """Do what the first process's decision on an evaluation asks of the others."""
        run = self._run
        # an evaluation may take its time: failures and deaths end the wait
        decision: BestDecision = cast(Group, self._start.group).gather(None, "evaluate", timeout_s=math.inf)[0]
        if decision == "failed":
            self._save()
        elif decision != "given up":
            self._progress.last_evaluated = run.update
            if decision == "best":
                self.lane.hold_best(run.state, run.update)
                self.lane.save_best()
            self._recorder.on_evaluation(run, {})

    def _results(self, evaluation: Callable[[], Metrics]) -> dict[str, Any] | None:
        """Wait for the metrics of an evaluation. None: the run is to stop, and an environment does not return."""
        pauses = self._trainer.collector.pause_in_evaluation
        try:
            with self._parts.stepper.paused() if pauses else nullcontext(), self._clock.of("evaluate"):
                return {name: self._value(x) for name, x in jax.device_get(evaluation()).items()}
        except EnvAbandoned as abandoned:
            self.note(f"no evaluation: {abandoned}")
            return None

    def _show_messages(self) -> None:
        for text in [*self._recorder.reports(), *self._parts.stepper.reports()]:
            self.note(text)

    def _of_lanes(self, tree: PyTree) -> list[PyTree]:
        """Return each lane's part of an array, a state or metrics."""
        return [self._of_lane(tree, i) for i in range(len(self._lanes))]

    def _of_lane(self, tree: PyTree, index: int) -> PyTree:
        return tree if self._members is None else self._members.take(tree, index)

    def _evaluate_fresh(self, should_stop: ShouldStop) -> list[dict[str, dict[str, Any]]]:
        """Play each lane's best checkpoint and its last in fresh episodes, and return the facts; empty: none."""
        trainer, evaluator, seeds = self._trainer, self._evaluator, fresh_seeds(self._trainer)
        lasts = [each.latest for each in self._lanes if each.latest is not None]
        if not seeds or evaluator is None or len(lasts) < len(self._lanes):
            return []
        if process_count() > 1:  # all of them would have to read a checkpoint
            self.note("several processes play no fresh episodes; ejax evaluate RUN --seed S does")
            return []
        params = self._own_params(acting_params(self._run.state.train))
        lanes = zip(self._lanes, lasts, self._of_lanes(params), strict=True)
        found_bests = [load_best(lane.best, last, own, self._writer.alarm) for lane, last, own in lanes]
        bests, kept = zip(*found_bests, strict=True)
        # members' are stacked, so that one program plays all
        best = kept[0] if self._members is None else jax.tree.map(lambda *own: jnp.stack(own), *kept)

        def play(params: Params, seed: int) -> dict[str, Any]:
            metrics = None if should_stop() else self._results(evaluator.begin(params, seed))
            if metrics is None:
                raise _BrokenOffError
            return metrics

        try:
            of_best, of_last = (evaluate_fresh(seeds, partial(play, own)) for own in (best, params))
        except _BrokenOffError:
            self.note("the fresh episodes were broken off; --resume latest plays them")
            return []
        rows = {"best": self._of_lanes(of_best), "last": self._of_lanes(of_last)}
        facts = []
        for i, (lane, best_path, last) in enumerate(zip(self._lanes, bests, lasts, strict=True)):
            found = {which: {tag: float(x) for tag, x in rows[which][i].items()} for which in rows}
            run = self._run
            if best_path != last and lane.last_is_better(self._of_lane(run.state, i), run.update, **found):
                best_path, found["best"] = cast(Path, lane.best), found["last"]
            paths, folder = {"best": best_path, "last": last}, last.parents[1]  # RUN/checkpoints/NAME
            facts.append({which: write_fresh(folder, which, paths[which], trainer, found[which]) for which in paths})
        return facts

    def end(self, state: Any, update: int, steps_per_s: float, should_stop: ShouldStop) -> Any:
        """Save and evaluate for the last time, where the loop has not; return the facts of the run."""
        run, progress, finished = self._run, self._progress, update >= self._trainer.num_updates
        run.state, run.update, run.steps_per_s = state, update, steps_per_s
        run.evaluation_due = finished and self._trainer.enable_eval and progress.last_evaluated != update
        if not finished:
            self._recorder.break_off()
        self._save()
        if run.evaluation_due:
            self._record_evaluation(self._begin_evaluation(state))
        for lane, own in zip(self._lanes, self._of_lanes(state), strict=True):
            lane.save(own, update)  # a member can be continued alone; a single run is saved already
        fresh = self._evaluate_fresh(should_stop) if finished else []  # of an unfinished run they would come again
        if not finished:
            self.note(
                f"stopped at {run.step} {run.config.step_name}{'' if self._members is None else ' of each member'}; "
                f"continue with {self._directory.resume_command}"
            )
        self._reporter.seconds()  # those after the last line of the log
        facts: dict[str, Any] = {
            "run_dir": self._directory.path,
            "global_step": run.step,
            "num_updates": update,
            "elapsed_time_sec": time.monotonic() - self._start.started,
            "finished": finished,
            "latest_checkpoint_path": self.lane.latest,
        }
        if self._members is not None:
            return self._members.result(run, facts | {"training_fps": steps_per_s * len(self._lanes)})
        result = RunResult(
            policy=self._parts.policy,
            params=acting_params(state.train),
            **facts,
            training_fps=steps_per_s,
            skipped_updates=progress.skipped_updates,
            best_eval_value=progress.best_eval_value,
            best_checkpoint_path=self.lane.best,
            last_train_metrics=self._reporter.last,
            last_eval_metrics=progress.last_eval_metrics,
            train_history=self._reporter.train_history,
            eval_history=self._reporter.eval_history,
            fresh_eval_metrics=fresh[0] if fresh else {},
            seconds=self._reporter.total.take(),
        )
        for each in self._all:
            each.on_end(run, result)
        return result

    def rescue(self, reason: str, requested: bool) -> NoReturn:
        """End this process while its main thread is stuck in an environment.

        The first process saves, and the others write their parts of that checkpoint; another that is stuck reports it.
        """
        if self._writes:
            if self._start.group is not None:
                self._start.group.call_for_rescue()  # before saving, which waits for the others' parts
            self.lane.rescue(reason, requested)
        report_failure(reason)
        print(f"ejax: {reason}", file=sys.stderr)
        hard_exit(1)

    def __enter__(self) -> "RunSink":
        self._open = ExitStack()
        if self._evaluator is not None:
            self._open.enter_context(self._evaluator)
        self._open.enter_context(self._recorder)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        with noting(error, "saving"):
            if isinstance(error, RescueCall) and not self._writes:
                # the first process hangs, and saves with this one's part
                self.lane.save(*self.lane.complete)
            elif error is not None:
                self.lane.save_best()
        self._open.__exit__(kind, error, where)
        if error is None:
            self._show_messages()  # the last video is finished now


class _BrokenOffError(Exception):
    """The fresh episodes are not played to their end."""


class _Unwritten:
    """In place of a log, in processes that have none."""

    def note(self, message: str) -> None:
        return

    alarm = note
