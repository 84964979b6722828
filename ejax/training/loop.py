"""THE loop: advance a run, and hand the results to a sink, until the end."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ejax.algorithms.replay_buffer import replays_in
from ejax.runtime.process_exit import interruptible
from ejax.runtime.sharding import is_main_process
from ejax.runtime.stopwatch import ENGINE
from ejax.training.open_run import OpenRun
from ejax.training.profile import Profiler
from ejax.training.reporter import TIME
from ejax.training.sink import Dispatch, RunSink

_SECONDS_PER_DISPATCH = 0.5
"""Short enough for a live console and for a signal to be answered, long enough for dispatch to cost nothing."""


class Throttle:
    """Updates per dispatch: ``max_updates``, or if it ``adapts`` as many of them as fit into half a second."""

    def __init__(self, max_updates: int, *, adapts: bool) -> None:
        self._max_updates = max_updates
        # one update at first, whose seconds are not known yet
        self.limit = 1 if adapts else max_updates
        self._adapts = adapts

    def took(self, count: int, seconds: float) -> None:
        if self._adapts:
            # grow slowly, so that one slow dispatch (an evaluation) does not shrink the next ones to nothing
            fitting = int(count * _SECONDS_PER_DISPATCH / max(seconds, 1e-3))  # of the time that the last dispatch took
            self.limit = max(1, min(fitting, 2 * self.limit, self._max_updates))


class Loop:
    """One call that trains, on the host, in a ``run`` that is built. Used once."""

    def __init__(self, run: OpenRun, sink: RunSink) -> None:
        self._run, self._sink, self._stepper = run, sink, run.parts.stepper
        profile = run.config.trainer.profile if is_main_process() else None
        self._profiler = Profiler(profile, run.directory.path / "profile")
        self._first, self._cadence, self._times, self._group = run.update, run.cadence, run.clock, run.group
        adapts = run.config.trainer.updates_per_dispatch == "auto"
        self._throttle = Throttle(self._stepper.max_updates, adapts=adapts)
        self._compiled_at = self._clock = run.started

    def run(self) -> Any:
        """Train to the end, or until a signal, or until the sink stops it."""
        update, total, state = self._first, self._run.config.trainer.num_updates, self._run.state
        stepper, sink, profiler = self._stepper, self._sink, self._profiler
        pending: Dispatch | None = None
        compiler = ThreadPoolExecutor(1, "ejax-compiler")
        with stepper, sink, compiler, profiler, interruptible() as should_stop:
            ENGINE.take()  # of what the process did before
            sink.note(f"environment built in {time.monotonic() - self._run.started:.1f} s; compiling …")
            state = stepper.start(state)
            # while the training runs: to lower it takes Python's lock, which the start of the training needs first
            compiler.submit(sink.compile, self._run.state)
            self._compiled_at = self._clock = time.monotonic()
            seconds = self._compiled_at - self._run.started
            self._times.add("compile", seconds)
            sink.start(state, seconds)
            consumes = bool(replays_in(state))
            while update < total:
                count = profiler.limit(update, self._cadence.updates_until_event(update, self._throttle.limit))
                stops = should_stop() or sink.stopped
                if self._group is not None:  # one that stopped alone would leave the others waiting
                    words = self._group.gather({"count": count, "stops": stops}, "begin an update")
                    count, stops = words[0]["count"], any(word["stops"] for word in words)  # by the first's clock
                if stops:
                    break
                profiler.before(update, state)
                moved = stepper.advance(state, count, should_stop)
                if moved is None:
                    break
                state, metrics = moved
                update += count
                launched = Dispatch(update, count, state, metrics, sink.reached(state, update))
                if pending is not None:  # the device works on what was launched while the host writes the former
                    self._finish(pending)
                pending = launched  # read one dispatch later, so that the device never waits for the host
                if consumes:  # the next dispatch writes into this state's replay buffer
                    self._finish(pending)
                    pending = None
                if profiler.ends(update):
                    with self._times.of("profile"):
                        for text in profiler.finish(state, stepper):
                            sink.note(text)
            if pending is not None:
                self._finish(pending)
            return sink.end(state, update, self._steps_per_s(update, time.monotonic()), should_stop)

    def _finish(self, dispatch: Dispatch) -> None:
        with self._times.of(self._stepper.timer_name):  # the wait for the device is the update's own time
            metrics = {name: np.asarray(x) for name, x in jax.device_get(dispatch.metrics).items()}
        now = time.monotonic()
        self._compiled_at += float(sum(metrics.get(f"{TIME}compile_s", ())))  # of programs that need a first rollout
        self._throttle.took(dispatch.count, now - self._clock)
        self._clock = now
        self._sink.finish(dispatch, metrics, self._steps_per_s(dispatch.update, now))

    def _steps_per_s(self, update: int, now: float) -> float:
        # without compilation, which would hide the speed of a short run
        return (update - self._first) * self._cadence.rows / max(now - self._compiled_at, 1e-9)
