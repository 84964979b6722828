"""Several processes: each runs the loop; the first has the sink that writes, the others the one that is here.

All of them advance, stop and save at the same updates, by the first one's word where only it knows what comes next.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.runtime.process_exit import hard_exit
from ejax.runtime.processes import Group, RescueCall, report_failure
from ejax.runtime.sharding import exchange, give_copy, is_main_process, process_count
from ejax.schema.messages import noting
from ejax.store.checkpoint import save_arrays
from ejax.store.run_dir import RunDirectory
from ejax.training.callbacks import RunResult
from ejax.training.host_steppers import HostStepper
from ejax.training.loop import Dispatch, Sink
from ejax.training.recorder import cameras_of
from ejax.training.saver import Verdict
from ejax.training.sink import RunSink
from ejax.training.start import Call, RunLocation, StartState
from ejax.training.steppers import ShouldStop
from ejax.types import Metrics, PyTree


def group_of(config: RunConfig) -> Group | None:
    """Form the group of all processes. None: this is the only one. ConfigError if joined for a run of one."""
    if process_count() == 1:
        return None
    if not config.trainer.distributed:
        text = "got false in one of several processes that were joined, which would all train the same"
        raise ConfigError([Problem("trainer.distributed", f"{text}; give true")])
    return Group(config.trainer.process_timeout_s)


def locate_together(group: Group | None, find: Callable[[], RunLocation]) -> RunLocation:
    """Have the first process find the run's place, and the others go by its word."""
    if group is None:
        return find()
    location = find() if is_main_process() else None
    word = location and {
        "config": location.config.to_dict(),
        "run_dir": str(location.directory.path.absolute()),
        "checkpoint": str(location.checkpoint.absolute()) if location.checkpoint else None,
        "file": location.file,
    }
    found = group.gather(word, "find the run")[0]  # others may see the disk later, or another newest run
    if location is not None:
        return location
    directory = RunDirectory(Path(found["run_dir"]), found["config"]["trainer"]["exp_name"])
    checkpoint = Path(found["checkpoint"]) if found["checkpoint"] else None
    return RunLocation(directory, parse_untrusted(found["config"]), checkpoint, found["file"])


def saving_all_envs(call: Call, start: StartState) -> Call:
    """Have checkpoints hold the environments of all processes, where each has its own outside the program."""
    stepper, location = start.parts.stepper, call.location
    if call.group is None:
        return call

    def save(folder: Path, state: PyTree) -> None:
        if isinstance(stepper, HostStepper) and state.envs != ():
            # each process has its own environments, and a checkpoint those of all
            state = replace(state, envs=tuple(each for groups in exchange(state.envs) for each in groups))
        save_arrays(folder, state)

    return replace(call, location=replace(location, directory=replace(location.directory, save_arrays=save)))


def rescue(sink: Sink[Any, Any], group: Group | None, reason: str, requested: bool) -> NoReturn:
    """End this process while its main thread is stuck in an environment.

    The first process saves, and the others write their parts of that checkpoint; another one that is stuck reports it.
    """
    if isinstance(sink, RunSink):
        if group is not None:
            group.call_for_rescue()  # before saving, which waits for the others' parts
        sink.saver.rescue(reason, requested)
    report_failure(reason)
    print(f"ejax: {reason}", file=sys.stderr)
    hard_exit(1)


class FollowerSink(Sink[RunState, RunResult]):
    """Sink of every process but the first: writes its part of the arrays of each checkpoint, and gives it parameters.

    Those that lie across processes come together for an evaluation and for a video, in step with ``RunSink``.
    """

    def __init__(self, call: Call, start: StartState, group: Group) -> None:
        self._trainer, self._directory, self._group = call.location.config.trainer, call.location.directory, group
        self._start, self._started = start, call.started
        self._complete = start.state, start.update
        self._last_evaluated = start.meta.get("last_evaluated")
        self._last_saved: int | None = None

    def start(self, state: RunState, seconds: float) -> None:
        del seconds
        self._complete = state, self._start.update
        if self._start.evaluation_due:
            give_copy(state.train.params)
            self._follow_evaluation(state, self._start.update)

    def reached(self, state: RunState, update: int) -> Callable[[], Metrics] | None:
        self._complete = state, update
        if not self._start.cadence.evaluates(update):
            return None
        give_copy(state.train.params)
        return dict  # the first process evaluates alone

    def finish(self, dispatch: Dispatch[RunState], metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        del metrics, steps_per_s
        if self._start.cadence.saves(dispatch.update):
            self._save_and_film(dispatch.state, dispatch.update)
        if dispatch.evaluation is not None:
            self._follow_evaluation(dispatch.state, dispatch.update)

    def end(self, state: RunState, update: int, steps_per_s: float, should_stop: ShouldStop) -> RunResult:
        del should_stop
        finished = update >= self._trainer.num_updates
        self._save_and_film(state, update)
        if finished and self._trainer.enable_eval and self._last_evaluated != update:
            give_copy(state.train.params)
            self._follow_evaluation(state, update)
        return RunResult(
            policy=self._start.parts.policy,
            params=state.train.params,
            run_dir=self._directory.path,
            global_step=update * self._start.cadence.rows,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self._started,
            training_fps=steps_per_s,
            finished=finished,
        )

    def _follow_evaluation(self, state: RunState, update: int) -> None:
        # an evaluation may take its time: failures and deaths end the wait
        verdict: Verdict = self._group.gather(None, "evaluate", timeout_s=math.inf)[0]
        if verdict in ("best", "not the best"):
            self._last_evaluated = update
        if verdict == "best":
            self._directory.save_share(state, update * self._start.cadence.rows, best=True)
        if verdict in ("best", "not the best"):
            self._film(state)
        if verdict == "failed":
            self._save(state, update)

    def _save_and_film(self, state: RunState, update: int) -> None:
        is_new = update != self._last_saved
        self._save(state, update)
        if is_new and not self._trainer.enable_eval:
            self._film(state)

    def _film(self, state: RunState) -> None:
        if cameras_of(self._trainer):
            give_copy(state.train.params)

    def _save(self, state: RunState, update: int) -> None:
        if update != self._last_saved:  # as the first process, once for each update
            self._last_saved = update
            self._directory.save_share(state, update * self._start.cadence.rows)

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, RescueCall):  # this process's part of what the first one saves while it hangs
            with noting(error, "saving"):
                self._save(*self._complete)
