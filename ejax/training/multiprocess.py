"""Several processes: each runs the loop; the first has the sink that writes, the others the one that is here.

All of them advance, stop and save at the same updates, by the first one's word where only it knows what comes next.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

from numpy.typing import NDArray

from ejax.algorithms.step import RunState
from ejax.runtime.process_exit import hard_exit
from ejax.runtime.processes import Group, RescueCall, report_failure
from ejax.runtime.sharding import give_copy
from ejax.schema.messages import noting
from ejax.training.callbacks import RunResult
from ejax.training.loop import Dispatch, Sink
from ejax.training.open_run import OpenRun
from ejax.training.recorder import cameras_of
from ejax.training.saver import Verdict
from ejax.training.sink import RunSink
from ejax.training.steppers import ShouldStop
from ejax.types import Metrics


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

    def __init__(self, run: OpenRun) -> None:
        self._run, self._trainer, self._directory = run, run.config.trainer, run.directory
        self._complete = run.state, run.update
        self._last_evaluated = run.meta.get("last_evaluated")
        self._last_saved: int | None = None

    def start(self, state: RunState, seconds: float) -> None:
        del seconds
        self._complete = state, self._run.update
        if self._run.evaluation_due:
            give_copy(state.train.params)
            self._follow_evaluation(state, self._run.update)

    def reached(self, state: RunState, update: int) -> Callable[[], Metrics] | None:
        self._complete = state, update
        if not self._run.cadence.evaluates(update):
            return None
        give_copy(state.train.params)
        return dict  # the first process evaluates alone

    def finish(self, dispatch: Dispatch[RunState], metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        del metrics, steps_per_s
        if self._run.cadence.saves(dispatch.update):
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
            policy=self._run.parts.policy,
            params=state.train.params,
            run_dir=self._directory.path,
            global_step=update * self._run.cadence.rows,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self._run.started,
            training_fps=steps_per_s,
            finished=finished,
        )

    def _follow_evaluation(self, state: RunState, update: int) -> None:
        # an evaluation may take its time: failures and deaths end the wait
        verdict: Verdict = cast(Group, self._run.group).gather(None, "evaluate", timeout_s=math.inf)[0]
        if verdict in ("best", "not the best"):
            self._last_evaluated = update
        if verdict == "best":
            self._directory.save_share(state, update * self._run.cadence.rows, best=True)
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
            self._directory.save_share(state, update * self._run.cadence.rows)

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, RescueCall):  # this process's part of what the first one saves while it hangs
            with noting(error, "saving"):
                self._save(*self._complete)
