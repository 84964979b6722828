"""Messages between worker, owner and consumers in shared memory. Every word has one writer only, so no lock.

State of an engine, as any process sees it:

    worker's phase     owner's verdict    state
    any                stopped            STOPPED
    any                failed             FAILED
    failed             any                FAILED
    ready              running            READY
    loading            running            STARTING
"""

from enum import Enum
from typing import NoReturn

import numpy as np

from ejax.data.buffer import TrajectoryBuffer, fence
from ejax.data.failures import CAPACITY, OnlineDataWorkerError, raise_failure
from ejax.data.task import Field

_COUNTS = ("phase", "pid", "beat", "episodes", "failures", "fills", "samples", "failure_size")
_TIMES = ("ready_at", "generating_s")
_OWNER = ("verdict", "failure_size", "requested")

CONTROL: tuple[tuple[str, Field], ...] = (
    ("counts", ((len(_COUNTS),), "int64")),
    ("times", ((len(_TIMES),), "float64")),
    ("worker_failure", ((CAPACITY,), "uint8")),
    ("owner", ((len(_OWNER),), "int64")),
    ("owner_failure", ((CAPACITY,), "uint8")),
)
"""``Layout.control`` of an engine's buffer."""

LOADING, READY, FAILED = 0, 1, 2
RUNNING, STOPPED, CONDEMNED = 0, 1, 2


class EngineState(Enum):
    """The state of an engine; FAILED and STOPPED are final."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class Control:
    """The engine's words in a buffer."""

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        self._counts, self._times = buffer.control["counts"], buffer.control["times"]
        self._owner = buffer.control["owner"]
        self._failures = {name: buffer.control[name] for name in ("worker_failure", "owner_failure")}

    def count(self, name: str) -> int:
        return int(self._counts[_COUNTS.index(name)])

    def time(self, name: str) -> float:
        return float(self._times[_TIMES.index(name)])

    def set_count(self, name: str, value: int) -> None:
        """Called only in the worker's main thread."""
        self._counts[_COUNTS.index(name)] = value

    def add(self, name: str, value: int = 1) -> None:
        """As ``set_count``; ``samples`` only in the worker's service thread."""
        self._counts[_COUNTS.index(name)] += value

    def set_time(self, name: str, value: float) -> None:
        """Called only in the worker."""
        self._times[_TIMES.index(name)] = value

    def publish_by_worker(self, failure: bytes) -> None:
        self._write("worker_failure", failure)
        self.set_count("failure_size", len(failure))
        fence()
        self.set_count("phase", FAILED)

    def publish_by_owner(self, failure: bytes) -> None:
        self._write("owner_failure", failure)
        self._owner[_OWNER.index("failure_size")] = len(failure)
        fence()
        self._owner[_OWNER.index("verdict")] = CONDEMNED

    @property
    def requested(self) -> int:
        """The filling of the buffer that the owner has requested; 0: none."""
        return int(self._owner[_OWNER.index("requested")])

    def request(self, generation: int) -> None:
        """Called only in the owner."""
        self._owner[_OWNER.index("requested")] = generation

    def publish_stop(self) -> None:
        self._owner[_OWNER.index("verdict")] = STOPPED

    @property
    def state(self) -> EngineState:
        verdict, phase = int(self._owner[_OWNER.index("verdict")]), self.count("phase")
        fence()
        if verdict == STOPPED:
            return EngineState.STOPPED
        if verdict == CONDEMNED or phase == FAILED:
            return EngineState.FAILED
        return EngineState.READY if phase == READY else EngineState.STARTING

    def raise_failure(self) -> NoReturn:
        """Raise the published failure: the worker's own if there is one, else the owner's, which only saw it end."""
        owner_size = int(self._owner[_OWNER.index("failure_size")])
        sizes = {"worker_failure": self.count("failure_size"), "owner_failure": owner_size}
        for name, size in sizes.items():
            if size:
                raise_failure(self._failures[name][:size].tobytes())
        raise OnlineDataWorkerError("the engine failed, and left no account of it")

    def _write(self, name: str, failure: bytes) -> None:
        self._failures[name][: len(failure)] = np.frombuffer(failure, np.uint8)
        fence()
