"""The owner's side of the worker: starts it, watches over it, ends it, and removes all that the run has left.

A monitor thread sees the worker end or hang, and publishes it to every consumer. It knows nothing of the engine, so an
engine that is no longer used is collected, and its worker ended.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any

from ejax.data.buffer import Layout, TrajectoryBuffer, attach, create_block
from ejax.data.control import CONTROL, Control, EngineState
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.events import EventLog, LifecycleEvent, event_words
from ejax.data.failures import OnlineDataWorkerError, pack_failure, raise_failure
from ejax.data.leftovers import clear_leftovers, make_folder
from ejax.data.quota import QUOTA
from ejax.data.worker import DEMAND, ORDER, POLL_S, TRACEBACK, WorkOrder

_KILL_TIMEOUT_S = 3.0
_TRACEBACK_S = 0.3
"""Time for a hanging worker to write its traceback."""
_MESSAGE_S = 5.0
"""Time limit for the rest of a message that has begun."""
_BOOTSTRAP = "import sys; sys.path[:] = {path}; from ejax.data.worker import main; main({descriptor}, {folder!r})"


class StartCancelledError(RuntimeError):
    """``start()`` was cancelled by ``stop()``."""


@dataclass(frozen=True)
class Ticket:
    """All that a process needs to find a run."""

    block: str
    layout: Layout
    folder: Path
    episode_sample_budget: int | None


class Supervisor:
    """One worker, from its start to the removal of its buffer. ``close`` may be called any number of times."""

    def __init__(self, cfg: OnlineDataEngineCfg, run_id: int) -> None:
        self.ticket: Ticket
        self.buffer: TrajectoryBuffer
        self.control: Control | None = None
        self._events: list[LifecycleEvent] = []
        """Taken from the log, and not popped yet."""
        self._log: EventLog | None = None
        self._taking = threading.Lock()
        self._cfg = cfg
        self._block: SharedMemory | None = None
        self._ending = threading.Event()
        self._monitor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        task = _pickle_task(cfg.task, cfg.task_cfg)
        order = WorkOrder(os.getpid(), run_id, replace(cfg, task="", task_cfg={}), task)
        clear_leftovers()
        self._folder = make_folder()
        try:
            os.mkfifo(self._folder / DEMAND)
            (self._folder / QUOTA).touch()
            (self._folder / ORDER).write_bytes(pickle.dumps(order))
            self._channel, theirs = multiprocessing.Pipe()
            _bound_reads(self._channel, _MESSAGE_S)
            with theirs:
                self._process = _spawn(theirs.fileno(), self._folder)
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def bring_up(self, timeout: float, cancelled: threading.Event) -> None:
        """Wait until the task is built, make the buffer it needs, wait until that is full.

        Raises:
            TimeoutError: that takes longer than ``timeout``, in s.
            StartCancelledError: ``cancelled`` was set meanwhile.
            Exception: what the task raised; OnlineDataWorkerError where the worker died without an error.
        """
        deadline = time.monotonic() + timeout
        while not self._channel.poll(POLL_S):
            self._check(deadline, timeout, cancelled, "to build its task")
        kind, answer = self._receive()
        if kind == "failure":
            raise_failure(answer)
        cfg = self._cfg
        words = CONTROL + event_words(cfg.lifecycle_event_capacity)
        if cfg.episode_sample_budget is not None:
            words += (("charged", ((cfg.buffer_size, 2), "int64")),)
        layout = Layout(cfg.buffer_size, cfg.max_episode_steps, answer, words)
        self._block = create_block(layout)
        self.ticket = Ticket(self._block.name, layout, self._folder, cfg.episode_sample_budget)
        self.buffer = attach(self._block.name, layout)
        self.control = Control(self.buffer)
        self._log = EventLog(self.buffer.control) if cfg.lifecycle_event_capacity else None
        self._send((self._block.name, layout))
        self._monitor = threading.Thread(
            target=self._watch, args=(self.control,), name="ejax-data-monitor", daemon=True
        )
        self._monitor.start()
        while self.control.state is EngineState.STARTING:
            cancelled.wait(POLL_S)
            self._take_events()  # else a log that the first episodes fill would hold the worker up
            self._check(deadline, timeout, cancelled, "to fill the buffer")
        if self.control.state is EngineState.FAILED:
            self.control.raise_failure()

    def pop_events(self) -> list[LifecycleEvent]:
        """The events of the log since the last call, also once the worker has ended."""
        self._take_events()
        with self._taking:
            events, self._events = self._events, []
        return events

    def close(self, shutdown_timeout: float) -> bytes | None:
        """End the worker, and remove the buffer and the run's folder.

        A signal interrupts the task and lets it close; after ``shutdown_timeout`` s the worker is
        killed.

        Returns:
            The packed failure of a worker that was still running and did not end cleanly.

        Raises:
            OnlineDataWorkerError: it had to be killed, or outlived even that; then ``close`` may be called again.
        """
        with self._lock:
            if self._closed:
                return None
            self._ending.set()
            if self._monitor is not None:
                self._monitor.join(_KILL_TIMEOUT_S)
            running = self._process.poll() is None
            killed = running and self._end(shutdown_timeout)
            failure = self._last_words()
            self._take_events()
            self._release()
            self._closed = True
        if killed:
            raise OnlineDataWorkerError(
                f"the worker did not end within {shutdown_timeout} s (shutdown_timeout) and was killed; what its task "
                f"writes elsewhere may be cut off"
            )
        return failure if running else None

    def _take_events(self) -> None:
        if self._log is not None:
            with self._taking:
                self._events += self._log.take()

    @property
    def exit_code(self) -> int | None:
        """The worker's exit code, negative where a signal ended it; None while it runs."""
        return self._process.poll()

    def _check(self, deadline: float, timeout: float, cancelled: threading.Event, what: str) -> None:
        if cancelled.is_set():
            raise StartCancelledError("start() was cancelled by stop()")
        if self._process.poll() is not None and self.control is None and not self._channel.poll():
            raise OnlineDataWorkerError(f"the worker {self._how_it_ended()} before its task was built")
        if time.monotonic() > deadline:
            remedy = "where it is only slow, raise initialization_timeout (of a config: data.initialization_timeout)"
            raise TimeoutError(f"the worker took longer than {timeout} s (initialization_timeout) {what}; {remedy}")

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except BrokenPipeError:
            raise OnlineDataWorkerError(f"the worker {self._how_it_ended()} while it was started") from None

    def _receive(self) -> Any:
        try:
            return self._channel.recv()
        except BlockingIOError:
            text = f"the worker stopped in the middle of a message, for {_MESSAGE_S} s"
            raise OnlineDataWorkerError(f"{text}, before its task was built") from None
        except (EOFError, ConnectionError):
            raise OnlineDataWorkerError(f"the worker {self._how_it_ended()} before its task was built") from None

    def _watch(self, control: Control) -> None:
        """Publish that the worker ended or hangs. Runs in the monitor thread."""
        beat, silent, looked = -1, 0.0, time.monotonic()
        while not self._ending.wait(POLL_S):
            if self._process.poll() is not None:
                control.publish_failure(
                    "owner", pack_failure(OnlineDataWorkerError(f"the worker {self._how_it_ended()} before stop()"))
                )
                return
            now = time.monotonic()
            silent += min(now - looked, 5 * POLL_S)  # a process group that was suspended did not hang meanwhile
            looked = now
            if (beaten := control.get("beat")) != beat or beaten == 0:  # the first attempt compiles: ``bring_up``'s
                beat, silent = beaten, 0.0
            if silent > (limit := self._cfg.worker_timeout):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(_TRACEBACK_S)
                text = (
                    f"the worker hangs: no attempt of its task ended for {limit} s (worker_timeout); "
                    "where attempts are only slow, raise worker_timeout (of a config: data.worker_timeout)"
                )
                control.publish_failure("owner", pack_failure(OnlineDataWorkerError(text + self._traceback())))
                self._process.kill()
                return

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        name = f", {signal.Signals(-code).name}" if code < 0 else ""
        return f"ended (exit code {code}{name}){self._traceback()}"

    def _traceback(self) -> str:
        try:
            text = (self._folder / TRACEBACK).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""
        return f"\n{text[-8192:]}\n" if text else ""

    def _end(self, timeout: float) -> bool:
        """End the process; True if it had to be killed."""
        self._process.terminate()
        try:
            self._process.wait(timeout)
            return False
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise OnlineDataWorkerError(
                f"the worker (pid {self._process.pid}) outlived SIGKILL by {_KILL_TIMEOUT_S} s; call stop() again"
            ) from None
        return True

    def _last_words(self) -> bytes | None:
        failure = None
        try:
            while self._channel.poll():
                kind, answer = self._channel.recv()
                failure = answer if kind == "failure" else failure
        except (EOFError, OSError):
            pass
        return failure

    def _release(self) -> None:
        self._channel.close()
        if self._block is not None:
            self._block.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)


def _bound_reads(channel: Connection, seconds: float) -> None:
    """Let a read of ``channel`` raise BlockingIOError after ``seconds`` without data: the worker may be suspended, or a
    process that it forked may hold its end open."""
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)


def _spawn(descriptor: int, folder: Path) -> "subprocess.Popen[bytes]":
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = _BOOTSTRAP.format(path=path, descriptor=descriptor, folder=str(folder))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a task that uses jax leaves the accelerator to the training
    return subprocess.Popen([get_executable(), "-c", code], stdin=subprocess.DEVNULL, pass_fds=[descriptor], env=env)


def _pickle_task(task: str | Callable[..., Any], task_cfg: Mapping[str, Any]) -> bytes:
    if isinstance(task, str) and not all(task.partition(":")):
        raise ValueError(f"task '{task}' does not name code; write 'package.module:Name'")
    if getattr(task, "__module__", None) == "__main__":
        raise ValueError(
            f"task {task!r} is defined in the main script, which the worker does not import; put it into a module of "
            f"its own"
        )
    return pickle.dumps((task, dict(task_cfg)))
