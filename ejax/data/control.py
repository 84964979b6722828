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
from typing import Any, Literal, NoReturn

import numpy as np

from ejax.data.buffer import TrajectoryBuffer, fence
from ejax.data.failures import CAPACITY, OnlineDataWorkerError, raise_failure
from ejax.data.task import Field

_WORDS = {
    **dict.fromkeys(("phase", "pid", "beat", "episodes", "failures", "fills", "samples"), "int64"),
    **dict.fromkeys(("ready_at", "generating_s"), "float64"),
    **dict.fromkeys(("verdict", "requested", "worker_failure_size", "owner_failure_size"), "int64"),
}
CONTROL: tuple[tuple[str, Field], ...] = (
    *((name, ((), dtype)) for name, dtype in _WORDS.items()),
    *((f"{author}_failure", ((CAPACITY,), "uint8")) for author in ("worker", "owner")),
)
"""``Layout.control`` of an engine's buffer. The owner writes ``verdict``, ``requested`` (the filling of the buffer that
it has requested; 0: none) and its failure, the worker's service thread ``samples``, the worker's main thread the rest.
"""

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
        self._words = buffer.control

    def get(self, name: str) -> Any:
        return self._words[name].item()

    def set(self, name: str, value: float) -> None:
        """Write a word; see ``CONTROL`` for where each may be written."""
        self._words[name][...] = value

    def add(self, name: str, value: float = 1) -> None:
        """As ``set``."""
        self._words[name] += value

    def publish_failure(self, author: Literal["worker", "owner"], failure: bytes) -> None:
        """Let every process see FAILED, and a packed failure."""
        self._words[f"{author}_failure"][: len(failure)] = np.frombuffer(failure, np.uint8)
        fence()
        self.set(f"{author}_failure_size", len(failure))
        fence()  # who sees the state finds the failure
        if author == "worker":
            self.set("phase", FAILED)
        else:
            self.set("verdict", CONDEMNED)

    @property
    def state(self) -> EngineState:
        verdict, phase = self.get("verdict"), self.get("phase")
        fence()
        if verdict == STOPPED:
            return EngineState.STOPPED
        if verdict == CONDEMNED or phase == FAILED:
            return EngineState.FAILED
        return EngineState.READY if phase == READY else EngineState.STARTING

    def raise_failure(self) -> NoReturn:
        """Raise the published failure: the worker's own if there is one, else the owner's, which only saw it end."""
        for author in ("worker", "owner"):
            if size := self.get(f"{author}_failure_size"):
                raise_failure(self._words[f"{author}_failure"][:size].tobytes())
        raise OnlineDataWorkerError("the engine failed, and left no account of it")
