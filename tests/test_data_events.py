"""The log of episodes that come and go: a ring that loses nothing."""

import time

import numpy as np
import pytest

from ejax.data.events import EventLog, LifecycleEvent, event_words


def log(capacity: int) -> EventLog:
    return EventLog({name: np.zeros(shape, dtype) for name, (shape, dtype) in event_words(capacity)})


def event(index: int, kind: str = "published") -> LifecycleEvent:
    return LifecycleEvent(kind, run_id=2**62, index=index, generation=1, row=index % 4, num_frames=7)  # type: ignore[arg-type]


def test_events_come_out_as_they_went_in_numbered_and_timed() -> None:
    ring, before = log(3), time.monotonic_ns()
    taken = []
    for index in range(0, 10, 2):
        ring.write(event(index))
        ring.write(event(index, "evicted"))
        taken += ring.take()
    assert ring.take() == []
    assert [each.sequence for each in taken] == list(range(10))
    assert [each.index for each in taken] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert [each.kind for each in taken] == ["published", "evicted"] * 5
    assert {(each.run_id, each.num_frames) for each in taken} == {(2**62, 7)}
    times = [before, *(each.monotonic_ns for each in taken), time.monotonic_ns()]
    assert times == sorted(times)


def test_a_full_log_is_waited_for_until_some_are_taken() -> None:
    ring, waits = log(4), []
    for index in range(3):
        ring.write(event(index))

    def wait() -> None:
        waits.append(len(waits))
        if len(waits) == 3:
            ring.take()

    ring.wait_for_space(1, wait)
    assert waits == []
    ring.wait_for_space(2, wait)
    assert waits == [0, 1, 2]


def test_without_a_capacity_there_are_no_words() -> None:
    assert event_words(0) == ()
    with pytest.raises(KeyError):
        EventLog({})
