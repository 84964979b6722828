"""Arrivals and departures of episodes: a bounded log in shared memory, from the worker to the owner.

A ring with one writer and one reader, each of which has a word of its own: how many events it has written, how many it
has taken. A full log holds the worker up, so no event is lost.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ejax.data.buffer import fence
from ejax.data.task import Field

_COLUMNS = ("published", "run_id", "index", "generation", "row", "num_frames", "monotonic_ns")


@dataclass(frozen=True)
class LifecycleEvent:
    """The arrival of an episode in its row, or its departure: it is about to be overwritten there."""

    kind: Literal["published", "evicted"]
    run_id: int
    index: int
    """Of the episode."""
    generation: int
    row: int
    num_frames: int
    sequence: int = -1
    """Number of the event, from 0; given when it is written, as is its time."""
    monotonic_ns: int = -1
    """``time.monotonic_ns()``, the same clock in all processes of the machine."""


def event_words(capacity: int) -> tuple[tuple[str, Field], ...]:
    """``Layout.control`` of a log."""
    words: dict[str, Field] = {"events": ((capacity, len(_COLUMNS)), "int64")}
    words |= {"events_written": ((1,), "int64"), "events_taken": ((1,), "int64")}
    return tuple(words.items()) if capacity else ()


class EventLog:
    """Either end of a log.

    Args:
        control: ``TrajectoryBuffer.control``.
    """

    def __init__(self, control: dict[str, NDArray[np.int64]]) -> None:
        self._records = control["events"]
        self._written, self._taken = control["events_written"], control["events_taken"]

    def wait_for_space(self, count: int, wait: Callable[[], object]) -> None:
        """Return once ``count`` events find room; ``wait`` is called in between. Called only in the worker."""
        while int(self._written[0]) - int(self._taken[0]) + count > len(self._records):
            wait()

    def write(self, event: LifecycleEvent) -> None:
        """Append an event. Called only in the worker, with room for it."""
        number = int(self._written[0])
        fields = asdict(event) | {"published": event.kind == "published", "monotonic_ns": time.monotonic_ns()}
        self._records[number % len(self._records)] = [fields[name] for name in _COLUMNS]
        fence()
        self._written[0] = number + 1

    def take(self) -> list[LifecycleEvent]:
        """The events since the last call. Called only in the owner."""
        first, end = int(self._taken[0]), int(self._written[0])
        fence()
        events = []
        for number in range(first, end):
            fields = dict(zip(_COLUMNS, self._records[number % len(self._records)].tolist(), strict=True))
            kind: Literal["published", "evicted"] = "published" if fields.pop("published") else "evicted"
            events.append(LifecycleEvent(sequence=number, kind=kind, **fields))
        fence()
        self._taken[0] = end
        return events
