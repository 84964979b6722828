"""The worker process: runs a task, and puts its successful episodes into the buffer.

It is a fresh interpreter, neither forked nor made to import the owner's main module: a task meets no device, thread or
lock of the training. Two threads: the main one runs the task; the service thread counts the consumers' draws, and ends
the process at once when the owner is gone.
"""

import faulthandler
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from ejax.data.buffer import TrajectoryBuffer, attach
from ejax.data.control import READY, Control
from ejax.data.demand import DemandReader
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.events import EventLog, LifecycleEvent
from ejax.data.failures import pack_failure
from ejax.data.samplers import attempt_seeds
from ejax.data.task import (
    DemonstrationTask,
    Episode,
    EpisodeSpec,
    EpisodeTooLongError,
    Failure,
    Origin,
    Outcome,
    check_episode,
    judge,
)
from ejax.schema.trust import import_trusted, trust

POLL_S = 0.02
"""Polling interval of the service thread, in s."""
_ATTEMPT_MAY_END_S = 1.0
"""Time that an attempt may go on, in s, after the owner's signal to stop."""
ORDER, DEMAND, TRACEBACK = "order", "demand", "traceback"
"""Files of a run's folder: the pickled WorkOrder; the pipe of ``ejax.data.demand``; the interpreter's output when
it crashes or hangs."""


@dataclass(frozen=True)
class WorkOrder:
    """Everything the worker is given before its task is built."""

    owner_pid: int
    run_id: int
    cfg: OnlineDataEngineCfg
    """Without the task."""
    task: bytes
    """Pickled ``(task, task_cfg)``: unpickled last, so that its module's errors can be reported."""


class _Stop(BaseException):
    """The owner's SIGTERM, raised in the main thread to interrupt the task."""


def main(descriptor: int, folder: str) -> None:
    """The worker's entry point. Exits with status 0 after the signal to stop, 1 after a failure that it reported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the owner decides what happens
    signal.signal(signal.SIGTERM, _STOP)
    os.set_inheritable(descriptor, False)  # processes that the task starts must not keep the channel open
    channel = Connection(descriptor)
    try:
        _run(Path(folder), channel)
    except (_Stop, EOFError):
        return
    except BaseException as error:  # SystemExit of a task too: it must be reported to the owner
        with suppress(OSError, _Stop):  # the owner may be gone, or may have read it already
            channel.send(("failure", pack_failure(error)))
        sys.exit(1)


def _run(folder: Path, channel: Connection) -> None:
    order: WorkOrder = pickle.loads((folder / ORDER).read_bytes())
    log = (folder / TRACEBACK).open("w")  # open until the process ends, however it ends
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)  # the owner learns from it where a worker hangs
    service = _Service(order, folder)
    with ExitStack() as to_close:
        task = _make_task(order.task)
        if isinstance(task, AbstractContextManager):
            task = to_close.enter_context(task)
        spec = task.spec()
        if not isinstance(spec, EpisodeSpec):
            raise TypeError(f"spec() must return an EpisodeSpec, got {type(spec).__name__}")
        channel.send(("spec", spec))
        buffer = attach(*channel.recv())  # ends with the owner, which closes its end
        service.control = control = Control(buffer)
        control.set("pid", os.getpid())
        try:
            _Filler(order, task, buffer, control, service.refill).run()
        except _Stop:
            raise
        except BaseException as error:
            control.publish_failure("worker", pack_failure(error))
            raise


class _Filler:
    """The main thread's work: fill all rows, then again whenever enough was drawn."""

    def __init__(
        self,
        order: WorkOrder,
        task: DemonstrationTask,
        buffer: TrajectoryBuffer,
        control: Control,
        refill: threading.Event,
    ) -> None:
        self._order, self._task, self._buffer, self._control, self._refill = order, task, buffer, control, refill
        self._seeds = attempt_seeds(order.cfg.seed)
        self._last_failure = ""
        self._log = EventLog(buffer.control) if "events" in buffer.control else None
        self._inside: dict[int, LifecycleEvent] = {}
        """The event by which the episode of each row came; empty without a log."""

    def run(self) -> None:
        """Never returns: ``_Stop`` ends it."""
        while True:
            self._fill()
            self._control.add("fills")
            if self._control.get("phase") != READY:
                self._control.set("ready_at", time.time())
                self._control.set("phase", READY)
            while not self._refill.wait(POLL_S) and self._control.get("requested") <= self._control.get("fills"):
                self._control.add("beat")
            self._refill.clear()

    def _fill(self) -> None:
        """Write at least as many episodes as there are rows."""
        written = failed = 0
        while written < self._order.cfg.buffer_size:
            start = time.perf_counter()
            attempt, seed = next(self._seeds)
            origin = Origin(seed, attempt, self._control.get("fills") + 1, self._order.run_id)
            episodes = self._attempt(seed)
            for episode in episodes:
                self._put(episode, origin)
            self._control.add("generating_s", time.perf_counter() - start)
            self._control.add("beat")
            written += len(episodes)
            # in a row: a task that never succeeds must not keep its owner waiting
            failed = 0 if episodes else failed + 1
            if failed >= self._order.cfg.max_generation_attempts:
                raise RuntimeError(
                    f"no successful demonstration in {failed} attempts in a row (max_generation_attempts); the last "
                    f"one, with seed {seed}: {self._last_failure}"
                )

    def _put(self, episode: Episode, origin: Origin) -> None:
        """Write an episode into the next row."""
        index = self._control.get("episodes")
        row = index % self._order.cfg.buffer_size
        # room for both events before the row is touched: a full log must hold the worker up while the episode is there
        if self._log is not None:
            self._log.wait_for_space(2, self._wait)
            if row in self._inside:
                self._log.write(replace(self._inside.pop(row), kind="evicted"))
        self._buffer.write(row, episode, origin, index=index, written_at=time.time())
        if self._log is not None:
            length = int(self._buffer.episode["length"][row])
            came = LifecycleEvent("published", origin.run_id, index, origin.generation, row, length)
            self._log.write(came)
            self._inside[row] = came
        self._control.add("episodes")

    def _wait(self) -> None:
        time.sleep(POLL_S)
        self._control.add("beat")

    def _attempt(self, seed: int) -> list[Episode]:
        """Let the task demonstrate; return the episodes that are samples."""
        with _STOP.postponed():
            made = self._task.generate(seed)
        episodes = []
        for outcome in map(self._fitted, judge(made)):
            if isinstance(outcome, Episode):
                episodes.append(outcome)
            else:
                self._control.add("failures")
                self._last_failure = outcome.reason
        return episodes

    def _fitted(self, outcome: Outcome) -> Outcome:
        """Return an episode that is too long for a row as a Failure."""
        if isinstance(outcome, Episode):
            try:
                check_episode(outcome, self._buffer.layout.spec, self._buffer.layout.num_frames)
            except EpisodeTooLongError as error:
                return Failure(str(error))
        return outcome


class _Service:
    """The service thread, and the data it shares with the main one."""

    def __init__(self, order: WorkOrder, folder: Path) -> None:
        self.control: Control | None = None
        self.refill = threading.Event()
        self._order, self._folder = order, folder
        self._demand = DemandReader(folder / DEMAND)
        threading.Thread(target=self._serve, name="ejax-data-service", daemon=True).start()

    def _serve(self) -> None:
        cfg, drawn = self._order.cfg, 0
        threshold = math.inf if cfg.refill_policy == "manual" else cfg.refill_threshold * cfg.buffer_size
        while True:
            time.sleep(POLL_S)
            if os.getppid() != self._order.owner_pid:  # the owner is dead
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(1)  # at once: the task may be anywhere
            count = self._demand.drain()
            if count and self.control is not None:
                self.control.add("samples", count)
            drawn += count
            if drawn >= threshold and not self.refill.is_set():
                drawn = 0
                self.refill.set()


class _StopSignal:
    """SIGTERM ends the worker: at once, or after the attempt under way, if that ends soon.

    Raised inside an attempt, ``_Stop`` may surface as another error: libraries wrap what their callbacks raise.
    """

    def __init__(self) -> None:
        self._attempting = self._stopping = False

    def __call__(self, number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: closing the task may take time
        self._stopping = True
        if not self._attempting:
            raise _Stop
        signal.signal(signal.SIGALRM, self._give_up)
        signal.setitimer(signal.ITIMER_REAL, _ATTEMPT_MAY_END_S)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Around an attempt."""
        self._attempting = True
        try:
            yield
        except BaseException:
            if self._stopping:
                raise _Stop from None  # the attempt's own error is no longer of interest
            raise
        finally:
            self._attempting = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if self._stopping:
            raise _Stop

    def _give_up(self, number: int, frame: object) -> None:
        del number, frame
        raise _Stop


_STOP = _StopSignal()


def _make_task(pickled: bytes) -> DemonstrationTask:
    task, task_cfg = pickle.loads(pickled)
    if isinstance(task, str):
        trust(task)  # its owner ordered it, and has passed the gate
        task = getattr(import_trusted(task), task.partition(":")[2])
    return task(**task_cfg)
