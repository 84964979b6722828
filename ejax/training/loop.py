"""THE loop: advance a run, and hand all that comes of it to a sink, until the end."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.logs.usage import TIME
from ejax.runtime.interrupt import interruptible
from ejax.runtime.processes import Group
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.training.cadence import Cadence, Throttle
from ejax.training.profile import Profiler
from ejax.training.steppers import Interrupted, Stepper
from ejax.types import Metrics

S = TypeVar("S")
R = TypeVar("R", covariant=True)
K = TypeVar("K", bound="Sink[Any, Any]")


@dataclass
class Dispatch(Generic[S]):
    """Updates in flight: dispatched, their results not read yet."""

    update: int
    """The last of them."""
    count: int
    state: S
    metrics: Metrics
    """[≥ count, ...] each."""
    evaluation: Callable[[], Metrics] | None
    """Gives the results of an evaluation after the last one, or raises what went wrong in it."""


class Sink(Protocol[S, R]):
    """Evaluates, shows and keeps what a run makes. A context manager: it owns what does so."""

    @property
    def stopped(self) -> bool:
        """Somebody asked the run to end, who is no signal."""
        ...

    def compile(self, state: S) -> None:
        """Compile what evaluates. In a thread, while the training is compiled."""
        ...

    def start(self, state: S, seconds: float) -> None:
        """All is compiled, after ``seconds`` since the call began."""
        ...

    def reached(self, state: S, update: int) -> Callable[[], Metrics] | None:
        """Note that ``state`` is under way on the device, and begin the evaluation that is due after it."""
        ...

    def finish(self, dispatch: Dispatch[S], metrics: dict[str, NDArray[Any]], steps_per_s: float) -> None:
        """Log, save and evaluate a dispatch whose metrics are there."""
        ...

    def end(self, state: S, update: int, steps_per_s: float, interrupted: Interrupted) -> R:
        """Save and evaluate for the last time."""
        ...

    def note(self, text: str) -> None:
        """Show a message."""
        ...

    def __enter__(self: K) -> K: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Loop(Generic[S, R]):
    """One call that trains, on the host. Used once.

    Args:
        first: updates that are made already.
        started: when the call began, of ``time.monotonic``.
        adapts: as many updates in a dispatch as take half a second; else as many as the stepper can.
        group: the processes that run this loop at the same time. None: this is the only one.
        times: where the seconds go; shared with the sink.
    """

    def __init__(
        self,
        stepper: Stepper[S],
        sink: Sink[S, R],
        cadence: Cadence,
        times: Stopwatch,
        *,
        first: int,
        started: float,
        adapts: bool,
        profiler: Profiler,
        group: Group | None = None,
    ) -> None:
        self._stepper, self._sink, self._cadence, self._times = stepper, sink, cadence, times
        self._first, self._started, self._profiler, self._group = first, started, profiler, group
        self._throttle = Throttle(stepper.max_updates, adapts=adapts)
        self._compiled_at = self._clock = started

    def run(self, state: S) -> R:
        """Train to the end, or until a signal, or until the sink stops it."""
        update, total = self._first, self._cadence.num_updates
        stepper, sink, profiler = self._stepper, self._sink, self._profiler
        pending: Dispatch[S] | None = None
        compiler = ThreadPoolExecutor(1, "ejax-compiler")
        with stepper, sink, compiler, profiler, interruptible() as interrupted:
            ENGINE.take()  # of what the process did before
            # at once: compilation leaves Python's lock alone, and takes longer than many a training
            compiler.submit(sink.compile, state)
            state = self._compile(state)
            while update < total:
                count = profiler.limit(update, self._cadence.updates_until_event(update, self._throttle.limit))
                count, stops = self._agreed(count, interrupted() or sink.stopped)
                if stops:
                    break
                profiler.before(update, state)
                moved = stepper.advance(state, count, interrupted)
                if moved is None:
                    break
                state, metrics = moved
                update += count
                launched = Dispatch(update, count, state, metrics, sink.reached(state, update))
                if pending is not None:  # the device works on what was launched while the host writes the former
                    self._finish(pending)
                pending = launched
                if profiler.ends(update):
                    with self._times.of("profile"):
                        notes = profiler.finish(state, stepper)
                    for text in notes:
                        sink.note(text)
            if pending is not None:
                self._finish(pending)
            return sink.end(state, update, self._steps_per_s(update, time.monotonic()), interrupted)

    def _compile(self, state: S) -> S:
        state = self._stepper.start(state)
        self._compiled_at = self._clock = time.monotonic()
        seconds = self._compiled_at - self._started
        self._times.add("compile", seconds)
        self._sink.start(state, seconds)
        return state

    def _agreed(self, count: int, stops: bool) -> tuple[int, bool]:
        """The updates of the next dispatch, and whether to stop instead: the first process has a clock, each may be
        asked to stop."""
        if self._group is None:
            return count, stops
        words = self._group.gather({"count": count, "stops": stops}, "begin an update")
        return words[0]["count"], any(word["stops"] for word in words)

    def _finish(self, dispatch: Dispatch[S]) -> None:
        """Wait for the metrics of a dispatch, and hand it on."""
        with self._times.of(self._stepper.awaited):
            metrics = {name: np.asarray(x) for name, x in jax.device_get(dispatch.metrics).items()}
        now = time.monotonic()
        self._compiled_at += float(sum(metrics.get(f"{TIME}compile_s", ())))  # of programs that need a first rollout
        self._throttle.took(dispatch.count, now - self._clock)
        self._clock = now
        self._sink.finish(dispatch, metrics, self._steps_per_s(dispatch.update, now))

    def _steps_per_s(self, update: int, now: float) -> float:
        return (update - self._first) * self._cadence.rows / max(now - self._compiled_at, 1e-9)
