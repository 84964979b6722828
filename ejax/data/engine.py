"""The online data engine: a worker process keeps a buffer full of demonstrations, any number of processes draw chunks.

    CREATED ──start()──▶ STARTING ──buffer full──▶ READY ──stop()──▶ STOPPED
       │                     │                       │
       └─────── stop() ──────┼──▶ STOPPED            └── worker raises, dies or hangs ──▶ FAILED
                             └── raises, dies, times out ──▶ FAILED

Only the process that made an engine starts and stops it; copies (forked, or pickled after the start) draw. Names and
rules are EmbodiChain's.
"""

import atexit
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from ejax.data.buffer import BufferLayout
from ejax.data.checks import check_count
from ejax.data.chunks import WindowDraw
from ejax.data.control import EngineState, LifecycleEvent, OnlineDataWorkerError
from ejax.data.dataset import Chunks, ChunkSource
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.reader import Consumer, Taken, take_episodes
from ejax.data.supervisor import StartCancelledError, Supervisor
from ejax.data.task import nest_fields
from ejax.schema.messages import noting

_GIVE_UP_S = 10.0
"""Time for ``start`` to notice that it is cancelled, in addition to ending its worker."""
_POLL_S = 0.005
_GRACE_S = 1.0
"""Time that a consumer without a worker waits for the owner's explanation."""


class OnlineDataEngine(ChunkSource):
    """A worker that demonstrates, and draws from its episodes. A context manager: entering starts, leaving stops it."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        self.cfg = cfg
        self.run_id = secrets.randbits(63)
        """This engine's ``episode/run_id``."""
        self._owner_pid: int | None = os.getpid()
        """None: a pickled copy."""
        self._phase: EngineState | None = EngineState.CREATED
        """None: as the shared memory has it."""
        self._lock = threading.Lock()
        """Held while the engine starts, stops, or requests a refill."""
        self._cancelled = threading.Event()
        self._supervisor: Supervisor | None = None
        self._ticket: tuple[Path, BufferLayout] | None = None
        """Folder and layout of the run, by which any process finds it."""
        self._consumer: Consumer | None = None
        self._events: list[LifecycleEvent] = []
        self._reported = False
        """True once a failure was raised: by the draw that met it, else by ``stop``."""

    @property
    def state(self) -> EngineState:
        """Return the state as seen from any process."""
        if self._phase is not None:
            return self._phase
        try:
            return self._consume().control.state
        except FileNotFoundError:  # the owner stopped before this copy ever looked
            return EngineState.STOPPED

    @property
    def max_episode_steps(self) -> int:
        return self.cfg.max_episode_steps

    @property
    def buffer_size(self) -> int:
        """Return the number of rows, one episode each."""
        return self.cfg.buffer_size

    @property
    def device(self) -> str:
        """Return where the buffer is: "cpu", in memory that processes share."""
        return "cpu"

    @property
    def is_init(self) -> bool:
        """Return True once chunks can be drawn, until the engine stops or fails."""
        return self.state is EngineState.READY

    @property
    def shared_buffer(self) -> Chunks:
        """Return read-only views of all rows: a nested dict of frame fields [R, T, ...], and under ``episode`` of the
        episode fields [R, ...]. The worker may be writing to any row; ``sample_batch`` copies whole ones. Raises
        RuntimeError if there is no buffer: the engine is not started, or is stopped."""
        buffer = self._consume().buffer
        arrays = {**buffer.frames, **{f"episode/{path}": array for path, array in buffer.episode.items()}}
        views = {path: array.view() for path, array in arrays.items()}
        for view in views.values():
            view.flags.writeable = False
        return nest_fields(views)

    def start(self) -> None:
        """Start the worker, and wait until every row holds an episode.

        Raises:
            RuntimeError: not the owner; started before; cancelled by ``stop``.
            TimeoutError: not full within ``initialization_timeout``.
            Exception: the task's own error.
        """
        self._require_owner("start")
        with self._lock:
            if self._phase is not EngineState.CREATED:
                text = f"start() requires state CREATED; current state is {self.state.name}; make a new engine"
                raise RuntimeError(text)
            self._phase = EngineState.STARTING
            try:
                self._supervisor = Supervisor(self.cfg, self.run_id)
                self._events = self._supervisor.events  # the list itself: events can be drained after the end
                self._finalizer = weakref.finalize(self, _abandon, self._supervisor, os.getpid())
                self._finalizer.atexit = False  # its own hook may come after multiprocessing's; this one does not:
                atexit.register(self._finalizer)
                layout = self._supervisor.bring_up(self._cancelled)
                self._ticket, self._phase = (self._supervisor.folder, layout), None
            except BaseException as error:
                if self._supervisor is not None:
                    control = self._supervisor.control
                    has_failed = control.state is EngineState.FAILED
                    with noting(error, "stopping the worker"):
                        self._supervisor.close()
                        if not has_failed and control["failure_size"]:  # its task raised while it was closed
                            control.raise_failure()
                self._phase = EngineState.STOPPED if isinstance(error, StartCancelledError) else EngineState.FAILED
                self._reported = True
                raise

    def stop(self) -> None:
        """End the worker and remove the buffer. Does nothing the second time.

        Raises:
            RuntimeError: not the owner.
            OnlineDataWorkerError: the worker had to be killed, or died before, which was not yet reported.
            Exception: the task's own error, not yet reported, or from its closing.
        """
        self._require_owner("stop")
        self._cancelled.set()  # another thread may be in start(), which ends its worker itself once it sees this
        if not self._lock.acquire(timeout=self.cfg.shutdown_timeout + _GIVE_UP_S):
            raise TimeoutError("start() has not given up yet; call stop() again")
        try:
            self._stop()
        finally:
            self._lock.release()

    def _stop(self) -> None:
        supervisor = self._supervisor
        if supervisor is None or self._phase is EngineState.STOPPED:
            self._phase = EngineState.STOPPED if self._phase is EngineState.CREATED else self._phase
            return
        try:
            supervisor.close()
        except BaseException:
            self._phase, self._reported = EngineState.FAILED, True
            raise
        self._supervisor = self._ticket = self._consumer = None  # and with them the memory
        self._finalizer.detach()
        atexit.unregister(self._finalizer)
        has_failed = bool(supervisor.control["failure_size"])
        if has_failed or self._phase is None:  # an engine that failed to start stays so
            self._phase = EngineState.FAILED if has_failed else EngineState.STOPPED
        if has_failed and not self._reported:  # a failure is raised once: by the draw that met it, or else here
            self._reported = True
            supervisor.control.raise_failure()

    def request_refill(self) -> int:
        """Have all rows refilled, one by one, and return their generation; a request while one is open joins it. Raises
        RuntimeError if not the owner or not READY, else as ``sample_batch``."""
        self._require_owner("request_refill")
        control = self._ready_consumer("request_refill").control
        with self._lock:  # of two threads, the second joins the first's request
            control["requested"] = generation = max(control["requested"], control["fills"] + 1)
        return int(generation)

    def wait_for_generation(self, generation: int, timeout: float = 300.0) -> None:
        """Wait up to ``timeout`` s until filling number ``generation`` ≥ 1 of the buffer is complete.

        Raises:
            ValueError, TypeError: a generation that is neither made nor requested; a time that is not finite.
            TimeoutError: it takes longer.
            RuntimeError, Exception: as ``sample_batch``.
        """
        check_count("generation", generation)
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout must be finite and above 0 s, got {timeout}")
        deadline = time.monotonic() + timeout
        while True:
            control = self._ready_consumer("wait_for_generation").control  # each time: a failed worker makes no more
            made = control["fills"]
            if made >= generation:
                return
            if self.cfg.refill_policy == "manual" and generation > control["requested"]:
                raise ValueError(
                    f"generation {generation} was not requested, {made} have been made; request_refill() gives the next"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"generation {generation} was not complete after {timeout} s; {made} are")
            time.sleep(_POLL_S)

    def drain_lifecycle_events(self) -> list[LifecycleEvent]:
        """Return the events since the last call, in order, also after the end; RuntimeError if not the owner."""
        self._require_owner("drain_lifecycle_events")
        if self._supervisor is not None:
            self._supervisor.take_events()
        drained = self._events.copy()
        del self._events[: len(drained)]
        return drained

    def episodes(self) -> Iterator[Taken]:
        """Yield whole episodes as they are made, without end: each at most once, in order. Raises as ``sample_batch``.

        Without a new one all rows are refilled; under ``refill_policy`` manual a copy of the engine waits for its owner
        to do so. Episodes overwritten before they are taken leave gaps in the indices.
        """
        after, requested, manual = -1, False, self.cfg.refill_policy == "manual"
        threshold = self.cfg.refill_threshold * self.cfg.buffer_size
        while True:
            taken = take_episodes(self._ready_consumer().buffer, after)
            for each in taken:
                after, requested = each.index, False
                yield each
            # those that came meanwhile may be more: a refill is requested only once none did
            if taken:
                continue
            if manual and not requested and os.getpid() == self._owner_pid:
                self.request_refill()
            with self._drawing() as consumer:  # also with nothing to request: the owner may be gone, and not report it
                consumer.control.count_samples(0 if requested or manual else threshold)
            if requested:
                time.sleep(_POLL_S)
            requested = True

    def stats(self) -> dict[str, float]:
        """Return ``Consumer.stats``; RuntimeError if the engine never started, or was stopped."""
        if self.state not in (EngineState.READY, EngineState.FAILED) or self._ticket is None:
            raise RuntimeError(f"stats() requires state READY or FAILED; current state is {self.state.name}")
        return self._consume().stats()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with noting(error, "stopping the engine"):
            self.stop()

    def __getstate__(self) -> dict[str, Any]:
        if self._ticket is None:
            text = f"an engine in state {self.state.name} cannot be handed to another process; start() it first"
            raise RuntimeError(text)
        # by name: a consumer never imports the task
        return {"cfg": self.cfg.named(), "ticket": self._ticket, "run_id": self.run_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copy = OnlineDataEngine(state["cfg"])
        copy.run_id = state["run_id"]
        copy._owner_pid, copy._phase, copy._ticket = None, None, state["ticket"]  # it owns nothing: it only draws
        self.__dict__.update(copy.__dict__)

    def _require_owner(self, verb: str) -> None:
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                f"{verb}() is for the process that made the engine; this is a copy of it, in process {os.getpid()}, "
                f"which may only draw"
            )

    def _ready_consumer(self, verb: str = "sample_batch") -> Consumer:
        state = self.state
        if state is EngineState.FAILED and self._phase is None:
            self._reported = True
            self._consume().control.raise_failure()
        if state is not EngineState.READY:
            raise RuntimeError(f"{verb} requires state READY; current state is {state.name}")
        return self._consume()

    def _draw(self, count: int, draw: WindowDraw, rng: np.random.Generator | None) -> Chunks:
        with self._drawing() as consumer:
            chunks = consumer.reader.draw(count, draw, consumer.rng if rng is None else rng)
            consumer.control.count_samples(count)
        return chunks

    @contextmanager
    def _drawing(self) -> Iterator[Consumer]:
        """Return the consumer of a READY engine; a worker that is gone meanwhile is explained by its owner."""
        consumer = self._ready_consumer()
        try:
            yield consumer
        except ConnectionError:
            deadline = time.monotonic() + _GRACE_S
            while consumer.control.state is EngineState.READY and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._ready_consumer()
            self._reported = True
            raise OnlineDataWorkerError("the worker is gone, and its owner gives no reason") from None

    def _consume(self) -> Consumer:
        """Return this process's consumer, recreated after a fork: locks and generator were the parent's."""
        consumer = self._consumer
        if consumer is None or consumer.pid != os.getpid():
            if self._ticket is None:
                raise RuntimeError(f"the engine is in state {self.state.name} and has no buffer")
            self._consumer = consumer = Consumer(*self._ticket, self.cfg)
        return consumer


def _abandon(supervisor: Supervisor, owner_pid: int) -> None:
    """Close an engine that was collected, or still runs when the interpreter ends."""
    if os.getpid() == owner_pid:  # a forked copy owns nothing, and may end as it likes
        with suppress(OnlineDataWorkerError):
            supervisor.close()
