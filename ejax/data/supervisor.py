"""The owner's side of the worker: starts it, watches over it, ends it, and removes all that the run has left.

A run's folder is ``/dev/shm/ejax-data-<random>``. Its owner holds a lock on it and removes it at the end; if that is
killed, its worker does; if both are, the next engine of the same user, which finds the lock free.

It does not refer to the engine, so an engine that is no longer used is collected, and its worker ended.
"""

import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.spawn import get_executable
from pathlib import Path

from ejax.data.buffer import BufferLayout
from ejax.data.control import LIFE, Control, EngineState, LifecycleEvent, OnlineDataWorkerError, make_words
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.worker import ORDER, POLL_S, SPEC, WorkOrder
from ejax.schema.trust import trusted

PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_PREFIX = "ejax-data-"
_KILL_TIMEOUT_S = 3.0
_TRACEBACK_S = 0.3
_BOOTSTRAP = "import sys; sys.path[:] = {path}; from ejax.data.worker import main; main({folder!r})"


class StartCancelledError(RuntimeError):
    """A ``start()`` that ``stop()`` cancelled."""


class Supervisor:
    """One worker, from its start to the removal of its buffer. ``close`` may be called any number of times."""

    def __init__(self, cfg: OnlineDataEngineCfg, run_id: int) -> None:
        self.events: list[LifecycleEvent] = []
        """Events that ``take_events`` found; readers take them out."""
        self._cfg = cfg
        self._ending = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="ejax-data-monitor", daemon=True)
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._closed = False
        self._beat, self._silent, self._looked = 0, 0.0, time.monotonic()
        task, task_cfg = cfg.demonstrator
        if isinstance(task, str) and not all(task.partition(":")):
            raise ValueError(f"task '{task}' does not name code; write 'package.module:Name'")
        if getattr(task, "__module__", None) == "__main__":
            raise ValueError(
                f"task {task!r} is defined in the main script, which the worker does not import; put it into another "
                f"module"
            )
        order = WorkOrder(os.getpid(), run_id, cfg.named(), pickle.dumps((task, task_cfg)), trusted())
        clear_leftovers()  # first: they may hold the memory that this run needs
        self.folder, self._held = make_run_folder()
        try:
            make_words(self.folder, cfg)
            self.control = Control(self.folder, cfg)
            (self.folder / ORDER).write_bytes(pickle.dumps(order))
            self._process = _spawn(self.folder)
        except BaseException:
            self._remove_folder()
            raise

    def bring_up(self, cancelled: threading.Event) -> BufferLayout:
        """Wait until the task is built and the buffer full. Raises TimeoutError: beyond ``initialization_timeout``;
        StartCancelledError: ``cancelled`` was set; the task's own error, or OnlineDataWorkerError: the worker died."""
        deadline = time.monotonic() + self._cfg.initialization_timeout
        while self.control.state is EngineState.STARTING:
            if cancelled.wait(POLL_S):
                raise StartCancelledError("start() was cancelled by stop()")
            self.take_events()  # else a log that the first episodes fill would hold the worker up
            self._look()
            if time.monotonic() > deadline:
                what = "to fill the buffer" if (self.folder / SPEC).exists() else "to build its task"
                limit = f"{self._cfg.initialization_timeout} s (initialization_timeout)"
                raise TimeoutError(
                    f"the worker took longer than {limit} {what}; if it is only slow, raise initialization_timeout "
                    f"(of a config: data.engine.initialization_timeout)"
                )
        if self.control.state is EngineState.FAILED:
            self.control.raise_failure()
        self._monitor.start()
        spec = pickle.loads((self.folder / SPEC).read_bytes())
        return BufferLayout(self._cfg.buffer_size, self._cfg.max_episode_steps, spec)

    def take_events(self) -> None:
        with self._taking:
            self.events += self.control.take_events()

    def close(self) -> None:
        """End the worker, and remove the run's folder; after ``shutdown_timeout`` the worker is killed. Raises
        OnlineDataWorkerError: it had to be killed, or outlived even that; then ``close`` may be called again."""
        with self._lock:
            if self._closed:
                return
            if self.control.state is EngineState.READY:
                self._look()  # a worker that died since the monitor last looked was not ended from here
            if self.control.state is not EngineState.FAILED:
                self.control["stopped"] = 1
            # the monitor first: the end of the worker is not a failure from here on
            self._ending.set()
            if self._monitor.is_alive():
                self._monitor.join(_KILL_TIMEOUT_S)
            try:
                if self._process.poll() is None:
                    self._end(self._cfg.shutdown_timeout)
            except OnlineDataWorkerError as error:
                self.control["stopped"] = 0
                self.control.publish_failure(error)
                raise
            finally:
                if self._process.poll() is not None:
                    self.take_events()
                    self._remove_folder()
                    self._closed = True

    def _watch(self) -> None:
        while self.control.state is EngineState.READY and not self._ending.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        """Publish the failure of a worker that has ended, or hangs; one that raised an error did so itself."""
        code, now, beat = self._process.poll(), time.monotonic(), self.control["beat"]
        # a process group that was suspended did not hang meanwhile
        self._silent += min(now - self._looked, 5 * POLL_S)
        self._looked = now
        if beat != self._beat or not beat:  # the first attempt compiles: ``bring_up`` bounds it
            self._beat, self._silent = beat, 0.0
        if code is not None:
            signal_name = f", {signal.Signals(-code).name}" if code < 0 else ""
            when = "stop()" if (self.folder / SPEC).exists() else "its task was built"
            text = f"the worker ended (exit code {code}{signal_name}){self._traceback()} before {when}"
        elif self._silent > self._cfg.worker_timeout:
            self._process.send_signal(signal.SIGUSR1)  # faulthandler writes where it hangs
            time.sleep(_TRACEBACK_S)
            self._process.kill()
            text = (
                f"the worker hangs: no attempt of its task ended for {self._cfg.worker_timeout} s (worker_timeout); "
                f"if attempts are only slow, raise worker_timeout (of a config: data.engine.worker_timeout)"
                f"{self._traceback()}"
            )
        else:
            return
        self.control.publish_failure(OnlineDataWorkerError(text))

    def _traceback(self) -> str:
        with suppress(FileNotFoundError):
            text = (self.folder / LIFE).read_bytes().decode(errors="replace").strip()
            return f"\n{text[-4096:]}\n" if text else ""
        return ""

    def _end(self, timeout: float) -> None:
        """End the process. OnlineDataWorkerError: it had to be killed, or even that did not help."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
            raise OnlineDataWorkerError(
                f"the worker did not end within {timeout} s (shutdown_timeout) and was killed; what its task writes "
                f"elsewhere may be cut off"
            )
        text = f"the worker (pid {self._process.pid}) outlived SIGKILL by {_KILL_TIMEOUT_S} s; call stop() again"
        raise OnlineDataWorkerError(text)

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._held)


def make_run_folder() -> tuple[Path, int]:
    """Make a folder that no other user can look into (mode 0700), locked as long as the descriptor is open."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=PLACE))
        # before it was locked, another engine may have taken it for a leftover
        if (held := _lock(folder)) is not None and folder.exists():
            return folder, held


def clear_leftovers() -> None:
    """Remove folders of this user's ended engines, where it can; several processes may do so together."""
    for folder in PLACE.glob(f"{_PREFIX}*"):
        if (held := _lock(folder)) is not None:
            if os.fstat(held).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def _lock(folder: Path) -> int | None:
    """Lock a folder; None: it is gone, another user's, a link, or a living process has locked it."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the kernel releases when its process ends
    except OSError:
        os.close(held)
        return None
    return held


def _spawn(folder: Path) -> "subprocess.Popen[bytes]":
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = _BOOTSTRAP.format(path=path, folder=str(folder))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a task that uses jax leaves the accelerator to the training
    # no fork: a copy of jax's threads and locks would hang
    return subprocess.Popen([get_executable(), "-c", code], stdin=subprocess.DEVNULL, env=env)
