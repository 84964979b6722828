"""Words in shared memory: all that an engine's owner, worker and consumers share besides the episodes.

State of an engine, the first that holds: STOPPED by its owner, FAILED with a packed failure, READY once the buffer was
filled, else STARTING. Every word has one writer at a time, so no lock. The log of events (arrivals and departures of
episodes) is a ring from the worker to the owner; a full one holds the worker up, so none is lost.
"""

import fcntl
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ejax.data.buffer import attach, create, fence
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.task import FieldForm

WORDS, BUFFER, COUNTS, LIFE = "words", "buffer", "counts", "traceback"
"""Files of a run: these words; the episodes; lock of the counts; the worker's lock for life, and its traceback."""
_SLOTS = 4096
"""Processes that count draws in separate words; further ones begin again at the first."""
_EVENT = "U9" + 7 * ",i8"
CAPACITY = 64 * 1024
"""Largest size of a packed failure, in bytes."""
_TEXT, _TRACE, _PART = 2000, 4000, 1000
"""Largest sizes of the text, of the traceback and of each part of that, in characters of four bytes at most."""


class OnlineDataWorkerError(RuntimeError):
    """A failure of an engine's worker. The message has its traceback if it left one."""


class EngineState(Enum):
    """States of an engine; FAILED and STOPPED are final."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class LifecycleEvent:
    """The arrival of an episode in its row, or its imminent overwriting there."""

    kind: Literal["published", "evicted"]
    run_id: int
    index: int
    generation: int
    row: int
    num_frames: int
    sequence: int = -1
    """Number of the event, from 0; set when it is written, as is its time."""
    monotonic_ns: int = -1
    """``time.monotonic_ns()``, the same clock in all processes of the machine."""


def make_words(folder: Path, cfg: OnlineDataEngineCfg) -> None:
    """Make the files of a run that its processes share from the beginning."""
    create(folder / WORDS, _words(cfg))
    (folder / COUNTS).touch()


class Control:
    """One process's access to the words of a run. FileNotFoundError if its owner has removed them."""

    def __init__(self, folder: Path, cfg: OnlineDataEngineCfg) -> None:
        self.folder = folder
        self._words: dict[str, NDArray[Any]] = attach(folder / WORDS, _words(cfg))
        self._life: int | None = None
        self._slot: int | None = None
        self._counting = threading.Lock()

    def __getitem__(self, name: str) -> Any:
        return self._words[name].item()

    def __setitem__(self, name: str, value: float) -> None:
        self._words[name][...] = value

    @property
    def state(self) -> EngineState:
        if self["stopped"]:
            return EngineState.STOPPED
        if self["failure_size"]:
            return EngineState.FAILED
        return EngineState.READY if self["fills"] else EngineState.STARTING

    @property
    def samples(self) -> int:
        """Chunks that all consumers together have drawn."""
        return int(self._words["samples"].sum())

    @property
    def charged(self) -> NDArray[np.int64]:
        """The counts of ``ejax.data.reader.Quota``."""
        return self._words["charged"]

    def publish_failure(self, error: BaseException) -> None:
        """Set FAILED, with a packed failure: called in the worker, and in the owner once that is gone. The first stays:
        what came after it followed from it."""
        failure = pack_failure(error)
        if not self["failure_size"]:
            self._words["failure"][: len(failure)] = np.frombuffer(failure, np.uint8)
            fence()  # who sees the state finds the failure
            self["failure_size"] = len(failure)

    def raise_failure(self) -> NoReturn:
        size = self["failure_size"]
        fence()
        raise_failure(self._words["failure"][:size].tobytes())

    def count_samples(self, count: int) -> None:
        """Count chunks that a consumer has drawn; ConnectionError if the worker is gone."""
        with self._counting:
            if self._slot is None:
                with counting(self.folder / COUNTS):
                    self._slot = self["consumers"] % _SLOTS
                    self["consumers"] += 1
            self._words["samples"][self._slot] += count
        # the kernel takes the lock from a worker that is gone: a consumer learns of it even where the owner is gone too
        try:
            if self._life is None:
                self._life = os.open(self.folder / LIFE, os.O_RDONLY)
                weakref.finalize(self, os.close, self._life)
            fcntl.lockf(self._life, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except FileNotFoundError:
            pass
        raise ConnectionError("the worker is gone")

    def has_room(self, count: int) -> bool:
        """Return whether the log has room for ``count`` events; without a capacity it always has."""
        capacity = len(self._words["events"])
        return not capacity or self["events_written"] - self["events_taken"] + count <= capacity

    def write_event(self, event: LifecycleEvent) -> None:
        """Append an event, for which there is room. Called only in the worker."""
        log, number = self._words["events"], self["events_written"]
        if len(log):
            log[number % len(log)] = astuple(replace(event, sequence=number, monotonic_ns=time.monotonic_ns()))
            fence()
            self["events_written"] = number + 1

    def take_events(self) -> list[LifecycleEvent]:
        """Return the events since the last call. Called only in the owner."""
        log, end = self._words["events"], self["events_written"]
        fence()
        events = [LifecycleEvent(*log[n % len(log)].item()) for n in range(self["events_taken"], end)]
        fence()  # the worker may overwrite them from here on
        self["events_taken"] = end
        return events


@contextmanager
def counting(path: Path) -> Iterator[None]:
    """Hold the lock of the counts; ConnectionError if the run has ended."""
    try:
        file = os.open(path, os.O_RDONLY)  # each time: threads must exclude each other, and a fork would share the lock
    except FileNotFoundError as error:
        raise ConnectionError(f"{path} is gone, and the run with it") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # held for microseconds
        yield
    finally:
        os.close(file)


def pack_failure(error: BaseException) -> bytes:
    """Pack the text, the end of the traceback, and the pickled exception if it fits, in ``CAPACITY`` bytes."""
    text = "".join(traceback.format_exception_only(error)).strip()[:_TEXT]
    trace = "".join(part[:_PART] for part in traceback.format_exception(error)).strip()[-_TRACE:]
    if isinstance(error, Exception):  # a SystemExit of the worker must not end a consumer
        with suppress(Exception):  # pickling runs the exception's own code
            packed = pickle.dumps((text, trace, type(error).__module__, pickle.dumps(error)))
            if len(packed) <= CAPACITY:
                return packed
    return pickle.dumps((text, trace, "", b""))


def raise_failure(packed: bytes) -> NoReturn:
    """Raise the exception again, with the worker's traceback as its cause. An exception whose module this process has
    not imported comes as OnlineDataWorkerError."""
    text, trace, module, pickled = pickle.loads(packed)
    cause, error = OnlineDataWorkerError(f"in the worker:\n{trace}"), None
    if module in sys.modules:
        with suppress(Exception):  # its __init__ or __setstate__ may do anything: the text has it all
            error = pickle.loads(pickled)
    raise (error if isinstance(error, Exception) else OnlineDataWorkerError(text)) from cause


def _words(cfg: OnlineDataEngineCfg) -> dict[str, FieldForm]:
    return {
        # the worker's; ``fills``: complete fillings of the buffer, ``beat``: attempts and waits that ended
        **dict.fromkeys(("beat", "episodes", "failures", "fills", "events_written"), ((), "int64")),
        **dict.fromkeys(("ready_at", "generating_s"), ((), "float64")),
        # the owner's; ``requested``: the filling of the buffer that it has requested, 0: none
        **dict.fromkeys(("stopped", "requested", "events_taken"), ((), "int64")),
        # the worker's, and the owner's after its end
        "failure_size": ((), "int64"),
        "failure": ((CAPACITY,), "uint8"),
        # a word of each consumer's, and how many were given out, under the lock of ``counting``
        "samples": ((_SLOTS,), "int64"),
        "consumers": ((), "int64"),
        "charged": ((0 if cfg.episode_sample_budget is None else cfg.buffer_size, 2), "int64"),
        "events": ((cfg.lifecycle_event_capacity,), _EVENT),
    }
