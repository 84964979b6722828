"""Several processes: each runs the loop; the first has the sink that writes, the others the one that is here.

All of them advance, stop and save at the same updates. Where the first alone knows what comes next, as after an
evaluation, it gives the others its word (``ejax.runtime.processes``).
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.runtime.placing import exchange
from ejax.runtime.process_exit import leave_now, owns_process
from ejax.runtime.processes import Group, ProcessesError, count, report_failure
from ejax.store.checkpoint import save_arrays
from ejax.store.run_dir import RunDirectory
from ejax.training.host_steppers import HostStepper
from ejax.training.loop import Dispatch
from ejax.training.own_callbacks import Verdict
from ejax.training.parts import cadence_of, rows_per_update
from ejax.training.progress import Progress
from ejax.training.result import RunResult
from ejax.training.saver import Saver
from ejax.training.start import RunLocation, StartState
from ejax.training.steppers import DeviceStepper, Interrupted
from ejax.training.watchdog import Watchdog
from ejax.types import Metrics, PyTree


def group_of(config: RunConfig) -> Group | None:
    """The processes that train together. None: this is the only one.

    Raises:
        ConfigError: they were joined, but the run is not of several.
    """
    if count() == 1:
        return None
    if not config.trainer.distributed:
        text = "got false in one of several processes that were joined, which would all train the same"
        raise ConfigError([Problem("trainer.distributed", f"{text}; give true")])
    return Group(config.trainer.process_timeout_s)


def share_location(group: Group, location: RunLocation | None) -> RunLocation:
    """Give the others the place of the run that the first process found; they pass None."""
    word = location and {
        "config": location.config.to_dict(),
        "run_dir": str(location.directory.path.absolute()),
        "checkpoint": str(location.checkpoint.absolute()) if location.checkpoint else None,
        "file": location.file,
    }
    found = group.gather(word, "find the run")[0]
    if location is not None:
        return location
    directory = RunDirectory(Path(found["run_dir"]), found["config"]["trainer"]["exp_name"])
    checkpoint = Path(found["checkpoint"]) if found["checkpoint"] else None
    return RunLocation(directory, parse_untrusted(found["config"]), checkpoint, found["file"])


def saving_all_envs(location: RunLocation, start: StartState) -> RunLocation:
    """Have checkpoints hold the environments of all processes, where each has its own outside the program."""
    stepper = start.parts.stepper
    if not isinstance(stepper, DeviceStepper | HostStepper):
        raise ProcessesError(f"{type(stepper).__name__} is for one process")

    def save(folder: Path, state: PyTree) -> None:
        if isinstance(stepper, HostStepper) and state.envs != ():
            state = replace(state, envs=tuple(each for groups in exchange(state.envs) for each in groups))
        save_arrays(folder, state)

    return replace(location, directory=replace(location.directory, save_arrays=save))


def rescue_of(saver: Saver | None, group: Group | None) -> Callable[[str, bool], None]:
    """What ends this process while its main thread is stuck in an environment.

    The first process saves, and the others, which wait for its word, write their parts of the checkpoint. Where another
    one is stuck, it says so, and all end.

    Args:
        saver: of the first process. None: of another.
    """

    def rescue(reason: str, asked: bool) -> None:
        if saver is not None:
            if group is not None:
                group.call_for_rescue()
            saver.rescue(reason, asked)
        report_failure(reason)
        print(f"ejax: {reason}", file=sys.stderr)
        leave_now(1)

    return rescue


class FollowerSink:
    """Of every process but the first: writes its part of the arrays of each checkpoint, and nothing else."""

    stopped = False

    def __init__(self, location: RunLocation, start: StartState, group: Group, started: float) -> None:
        trainer, rows = location.config.trainer, rows_per_update(location.config, start.parts)
        self._trainer, self._rows, self._directory, self._group = trainer, rows, location.directory, group
        self._cadence, self._policy = cadence_of(trainer, rows), start.parts.policy
        self._first, self._started = start.update, started
        self._complete = start.state, start.update
        self._evaluates_first = trainer.enable_eval and start.meta.get("evaluation_due", False)
        self._last_evaluated = Progress.of(start.meta, trainer)[0].last_evaluated
        self._last_saved: int | None = None

    def compile(self, state: RunState) -> None:
        """Nothing: the first process evaluates."""

    def start(self, state: RunState, seconds: float) -> None:
        del seconds
        self._complete = state, self._first
        if self._evaluates_first:
            self._follow_evaluation(state, self._first)

    def reached(self, state: RunState, update: int) -> Callable[[], Metrics] | None:
        self._complete = state, update
        return dict if self._cadence.evaluates(update) else None

    def finish(self, dispatch: Dispatch[RunState], metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        del metrics, steps_per_s
        if self._cadence.saves(dispatch.update):
            self._save(dispatch.state, dispatch.update)
        if dispatch.evaluation is not None:
            self._follow_evaluation(dispatch.state, dispatch.update)

    def end(self, state: RunState, update: int, steps_per_s: float, interrupted: Interrupted) -> RunResult:
        del interrupted
        finished = update >= self._trainer.num_updates
        self._save(state, update)
        if finished and self._trainer.enable_eval and self._last_evaluated != update:
            self._follow_evaluation(state, update)
        return RunResult(
            policy=self._policy,
            params=state.train.params,
            run_dir=self._directory.path,
            global_step=update * self._rows,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self._started,
            training_fps=steps_per_s,
            finished=finished,
        )

    def note(self, text: str) -> None:
        """Nothing: the first process speaks."""

    def save_rescued(self) -> None:
        """Write this process's part of what the first one saves while it hangs."""
        self._save(*self._complete)

    def _follow_evaluation(self, state: RunState, update: int) -> None:
        # an evaluation may take its time: failures and deaths end the wait
        verdict: Verdict = self._group.gather(None, "evaluate", timeout_s=math.inf)[0]
        if verdict in ("best", "not the best"):
            self._last_evaluated = update
        if verdict == "best":
            self._directory.save_share(state, update * self._rows, best=True)
        if verdict == "failed":
            self._save(state, update)

    def _save(self, state: RunState, update: int) -> None:
        if update != self._last_saved:
            self._last_saved = update
            self._directory.save_share(state, update * self._rows)

    def __enter__(self) -> "FollowerSink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


def guard(watchdog: Watchdog, saver: Saver | None, group: Group | None) -> None:
    """Have the watchdog of a command line rescue the run where nothing else can end a call."""
    if owns_process():
        watchdog.rescue = rescue_of(saver, group)
