"""The worker process, a fresh interpreter: runs a task, and puts its successful episodes into the buffer.

Owner and worker exchange files of the run's folder: ``order``, the WorkOrder, before the worker starts; ``spec``, the
task's EpisodeSpec, once the buffer is made.
"""

import faulthandler
import fcntl
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ejax.data.buffer import BufferLayout, TrajectoryBuffer, create
from ejax.data.control import BUFFER, LIFE, Control, LifecycleEvent
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.samplers import attempt_seeds
from ejax.data.task import (
    AttemptOutcome,
    DemonstrationTask,
    Episode,
    EpisodeSpec,
    EpisodeTooLongError,
    Failure,
    Origin,
    attempts,
    check_episode,
    judge,
)
from ejax.runtime.streams import keep_streams
from ejax.schema.trust import import_trusted, trust

POLL_S = 0.02
ORDER, SPEC = "order", "spec"


@dataclass(frozen=True)
class WorkOrder:
    owner_pid: int
    run_id: int
    cfg: OnlineDataEngineCfg
    """Config without the task."""
    task: bytes
    """Pickled ``(task, task_cfg)``, unpickled last, so that its module's errors can be reported."""
    trusted: set[str]
    """Names that the owner trusts, so that a gym config's functions run here too."""


class _Stop(BaseException):
    """The owner's SIGTERM, raised in the main thread."""


_stopping = threading.Event()


def _stop(number: int, frame: object) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: closing the task may take time
    _stopping.set()
    raise _Stop


def main(folder: str) -> None:
    """Run the worker; exit with 0 after the signal to stop, with 1 after a failure that it reported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the owner decides what happens
    signal.signal(signal.SIGTERM, _stop)
    keep_streams()
    order: WorkOrder = pickle.loads(Path(folder, ORDER).read_bytes())
    control = Control(Path(folder), order.cfg)
    try:
        _run(order, control)
    except _Stop:
        return
    except BaseException as error:  # SystemExit of a task too: it must be reported
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process ends anyway, and libraries clean up at its exit
        control.publish_failure(error)
        sys.exit(1)


def _run(order: WorkOrder, control: Control) -> None:
    folder = control.folder
    log = (folder / LIFE).open("w")  # open, and locked, until the process ends, however it ends
    fcntl.lockf(log, fcntl.LOCK_EX)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)  # the owner learns from it where a worker hangs
    threading.Thread(target=_watch_owner, args=(order.owner_pid, folder), name="ejax-data-owner", daemon=True).start()
    with ExitStack() as to_close:
        trust(*order.trusted)
        task = _make_task(order.task)
        if isinstance(task, AbstractContextManager):
            task = to_close.enter_context(task)
        try:
            spec = task.spec()
            if not isinstance(spec, EpisodeSpec):
                raise TypeError(f"spec() must return an EpisodeSpec, got {type(spec).__name__}")
            order.cfg.check_widths(spec)
            layout = BufferLayout(order.cfg.buffer_size, order.cfg.max_episode_steps, spec)
            create(folder / BUFFER, layout.arrays())
            # the owner reads it once rows are filled, so it need not appear immediately
            (folder / SPEC).write_bytes(pickle.dumps(spec))
            _Filler(order, task, TrajectoryBuffer(folder / BUFFER, layout), control).run()
        except Exception as error:  # now: to close the task may take time, or raise too
            control.publish_failure(error)
            raise


def _watch_owner(pid: int, folder: Path) -> None:
    """End the process once its owner is dead, and leave nothing behind."""
    while os.getppid() == pid:
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class _Filler:
    """The worker's loop: fill all rows, then again whenever enough was drawn, or the owner requests it."""

    def __init__(self, order: WorkOrder, task: DemonstrationTask, buffer: TrajectoryBuffer, control: Control) -> None:
        self._order, self._task, self._buffer, self._control = order, task, buffer, control
        seeds = attempt_seeds(order.cfg.seed)
        self._attempts = attempts(self._generate, seeds, order.cfg.max_generation_attempts, "max_generation_attempts")

    def run(self) -> None:
        cfg, control, counted = self._order.cfg, self._control, 0
        threshold = math.inf if cfg.refill_policy == "manual" else cfg.refill_threshold * cfg.buffer_size
        while True:
            self._fill()
            if not control["fills"]:
                control["ready_at"] = time.time()
            control["fills"] += 1
            # what was drawn while rows were filled counts for the next time
            while (samples := control.samples) - counted < threshold and control["requested"] <= control["fills"]:
                self._wait()
            if samples - counted >= threshold:
                counted = samples

    def _fill(self) -> None:
        written = 0
        while written < self._order.cfg.buffer_size:
            start = time.perf_counter()
            attempt, episodes, failures = next(self._attempts)
            self._control["failures"] += failures
            origin = attempt._replace(generation=self._control["fills"] + 1, run_id=self._order.run_id)
            for episode in episodes:
                self._put(episode, origin)
            self._control["generating_s"] += time.perf_counter() - start
            self._control["beat"] += 1
            written += len(episodes)

    def _put(self, episode: Episode, origin: Origin) -> None:
        index = self._control["episodes"]
        row = index % self._order.cfg.buffer_size
        # room for both events before the row is touched: a full log must hold the worker up while the episode is there
        while not self._control.has_room(2):
            self._wait()
        if self._buffer.version[row]:
            self._control.write_event(self._event("evicted", row))
        self._buffer.write(row, episode, origin, index=index, written_at=time.time())
        self._control.write_event(self._event("published", row))
        self._control["episodes"] += 1

    def _event(self, kind: Literal["published", "evicted"], row: int) -> LifecycleEvent:
        names = ("run_id", "index", "generation", "length")
        run_id, index, generation, length = (int(self._buffer.episode[name][row]) for name in names)
        return LifecycleEvent(kind, run_id, index, generation, row, length)

    def _wait(self) -> None:
        time.sleep(POLL_S)
        self._control["beat"] += 1

    def _generate(self, seed: int) -> list[AttemptOutcome]:
        try:
            made = self._task.generate(seed)
        finally:
            if _stopping.is_set():  # libraries wrap, or swallow, what their callbacks raise
                raise _Stop from None
        outcomes = judge(made)
        for i, outcome in enumerate(outcomes):
            try:
                if isinstance(outcome, Episode):
                    check_episode(outcome, self._buffer.layout.spec, self._buffer.layout.num_frames)
            except EpisodeTooLongError as error:
                outcomes[i] = Failure(str(error))
        return outcomes


def _make_task(pickled: bytes) -> DemonstrationTask:
    task, task_cfg = pickle.loads(pickled)
    if isinstance(task, str):
        trust(task)  # its owner ordered it, and has passed the gate
        task = getattr(import_trusted(task), task.partition(":")[2])
    return task(**task_cfg)
