"""The owner's side of the worker: starts it, watches over it, ends it, and removes all that the run has left.

It does not refer to the engine, so an engine that is no longer used is collected, and its worker ended.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any

from ejax.data.buffer import attach
from ejax.data.control import BUFFER, COUNTS, LIFE, Control, EngineState, LifecycleEvent, Ticket, make_layout
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.failures import OnlineDataWorkerError, pack_failure, raise_failure
from ejax.data.leftovers import clear_leftovers, make_folder
from ejax.data.worker import FAILURE, ORDER, POLL_S, SPEC, WorkOrder, put

_KILL_TIMEOUT_S = 3.0
_TRACEBACK_S = 0.3
_BOOTSTRAP = "import sys; sys.path[:] = {path}; from ejax.data.worker import main; main({folder!r})"


class StartCancelledError(RuntimeError):
    """A ``start()`` that ``stop()`` cancelled."""


class Supervisor:
    """One worker, from its start to the removal of its buffer. ``close`` may be called any number of times."""

    def __init__(self, cfg: OnlineDataEngineCfg, run_id: int) -> None:
        self.ticket: Ticket
        self.control: Control | None = None
        self.events: list[LifecycleEvent] = []
        """Events that ``take_events`` found; readers take them out."""
        self._cfg = cfg
        self._ending = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="ejax-data-monitor", daemon=True)
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._closed = False
        self._beat, self._silent, self._looked = -1, 0.0, time.monotonic()
        task = _pickle_task(cfg.task, cfg.task_cfg)
        order = WorkOrder(os.getpid(), run_id, replace(cfg, task="", task_cfg={}), task)
        clear_leftovers()
        self._folder = make_folder()
        try:
            (self._folder / COUNTS).touch()
            put(self._folder / ORDER, pickle.dumps(order))
            self._process = _spawn(self._folder)
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def bring_up(self, cancelled: threading.Event) -> None:
        """Wait until the task is built and the buffer full.

        Raises:
            TimeoutError: that takes longer than ``initialization_timeout``.
            StartCancelledError: ``cancelled`` was set meanwhile.
            Exception: the task's own error; OnlineDataWorkerError if the worker died without one.
        """
        deadline = time.monotonic() + self._cfg.initialization_timeout
        while not (self._folder / SPEC).exists():
            self._wait(deadline, cancelled, "to build its task")
        layout = make_layout(self._cfg, pickle.loads(self._read(SPEC)))
        self.ticket = Ticket(self._folder, layout)
        self.control = Control(attach(self._folder / BUFFER, layout).control, self._folder)
        while self.control.state is EngineState.STARTING:
            self.take_events()  # else a log that the first episodes fill would hold the worker up
            self._wait(deadline, cancelled, "to fill the buffer")
        self._monitor.start()

    def take_events(self) -> None:
        with self._taking:
            if self.control is not None:
                self.events += self.control.take_events()

    def close(self) -> bytes:
        """End the worker, and remove the run's folder; after ``shutdown_timeout`` the worker is killed.

        Returns:
            The packed failure of a worker that raised an error, or nothing.

        Raises:
            OnlineDataWorkerError: it had to be killed, or outlived even that; then ``close`` may be called again.
        """
        with self._lock:
            if self._closed:
                return b""
            if self.control is not None and self.control.state is not EngineState.FAILED:
                self.control["stopped"] = 1
            self._ending.set()
            if self._monitor.is_alive():
                self._monitor.join(_KILL_TIMEOUT_S)
            try:
                killed = self._process.poll() is None and self._end(self._cfg.shutdown_timeout)
                failure = self._read(FAILURE)
                self.take_events()
                shutil.rmtree(self._folder, ignore_errors=True)
                self._closed = True
                if killed:
                    raise OnlineDataWorkerError(
                        f"the worker did not end within {self._cfg.shutdown_timeout} s (shutdown_timeout) and was "
                        f"killed; what its task writes elsewhere may be cut off"
                    )
            except OnlineDataWorkerError as error:
                if self.control is not None:
                    self.control["stopped"] = 0
                    self.control.publish_failure(pack_failure(error))
                raise
        return failure

    def _wait(self, deadline: float, cancelled: threading.Event, what: str) -> None:
        if cancelled.wait(POLL_S):
            raise StartCancelledError("start() was cancelled by stop()")
        if failure := self._find_failure():
            raise_failure(failure)
        if time.monotonic() > deadline:
            remedy = "where it is only slow, raise initialization_timeout (of a config: data.initialization_timeout)"
            limit = f"{self._cfg.initialization_timeout} s (initialization_timeout)"
            raise TimeoutError(f"the worker took longer than {limit} {what}; {remedy}")

    def _watch(self) -> None:
        while self.control is not None and not self._ending.wait(POLL_S):
            if failure := self._find_failure():
                self.control.publish_failure(failure)
                return

    def _find_failure(self) -> bytes | None:
        """Return the packed failure of a worker that raised an error, ended or hangs; None: it goes on."""
        code = self._process.poll()  # first: what it has left is there then
        if failure := self._read(FAILURE):
            return failure
        if code is not None:
            signal_name = f", {signal.Signals(-code).name}" if code < 0 else ""
            when = "stop()" if (self._folder / SPEC).exists() else "its task was built"
            text = f"the worker ended (exit code {code}{signal_name}){self._traceback()} before {when}"
            return pack_failure(OnlineDataWorkerError(text))
        if self._hangs():
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_TRACEBACK_S)
            self._process.kill()
            text = (
                f"the worker hangs: no attempt of its task ended for {self._cfg.worker_timeout} s (worker_timeout); "
                "where attempts are only slow, raise worker_timeout (of a config: data.worker_timeout)"
            )
            return pack_failure(OnlineDataWorkerError(text + self._traceback()))
        return None

    def _hangs(self) -> bool:
        now, beat = time.monotonic(), 0 if self.control is None else self.control["beat"]
        # a process group that was suspended did not hang meanwhile
        self._silent += min(now - self._looked, 5 * POLL_S)
        self._looked = now
        if beat != self._beat or not beat:  # the first attempt compiles: ``bring_up`` bounds it
            self._beat, self._silent = beat, 0.0
        return self._silent > self._cfg.worker_timeout

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return b""

    def _traceback(self) -> str:
        text = self._read(LIFE).decode(errors="replace").strip()
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


def _spawn(folder: Path) -> "subprocess.Popen[bytes]":
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = _BOOTSTRAP.format(path=path, folder=str(folder))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a task that uses jax leaves the accelerator to the training
    return subprocess.Popen([get_executable(), "-c", code], stdin=subprocess.DEVNULL, env=env)


def _pickle_task(task: str | Callable[..., Any], task_cfg: Mapping[str, Any]) -> bytes:
    if isinstance(task, str) and not all(task.partition(":")):
        raise ValueError(f"task '{task}' does not name code; write 'package.module:Name'")
    if getattr(task, "__module__", None) == "__main__":
        raise ValueError(
            f"task {task!r} is defined in the main script, which the worker does not import; put it into a module of "
            f"its own"
        )
    return pickle.dumps((task, dict(task_cfg)))
