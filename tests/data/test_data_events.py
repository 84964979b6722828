"""The log of episodes that come and go: a ring that loses nothing."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ejax.data import LifecycleEvent, OnlineDataEngineCfg
from ejax.data.control import Control, make_words


@pytest.fixture
def log(tmp_path: Path) -> Callable[[int], Control]:
    def make(capacity: int) -> Control:
        cfg = OnlineDataEngineCfg("module:Task", buffer_size=max(capacity // 2, 1), lifecycle_event_capacity=capacity)
        make_words(tmp_path, cfg)
        return Control(tmp_path, cfg)

    return make


def event(index: int, kind: str = "published") -> LifecycleEvent:
    return LifecycleEvent(kind, run_id=2**62, index=index, generation=1, row=index % 4, num_frames=7)  # type: ignore[arg-type]


def test_events_come_out_as_they_went_in_numbered_and_timed(log: Callable[[int], Control]) -> None:
    ring, before = log(4), time.monotonic_ns()
    taken = []
    for index in range(0, 10, 2):
        ring.write_event(event(index))
        ring.write_event(event(index, "evicted"))
        taken += ring.take_events()
    assert ring.take_events() == []
    assert [each.sequence for each in taken] == list(range(10))
    assert [each.index for each in taken] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert [each.kind for each in taken] == ["published", "evicted"] * 5
    assert {(each.run_id, each.num_frames) for each in taken} == {(2**62, 7)}
    times = [before, *(each.monotonic_ns for each in taken), time.monotonic_ns()]
    assert times == sorted(times)


def test_a_full_log_has_no_room_until_some_are_taken(log: Callable[[int], Control]) -> None:
    ring = log(4)
    for index in range(3):
        ring.write_event(event(index))
    assert ring.has_room(1) and not ring.has_room(2)
    ring.take_events()
    assert ring.has_room(4) and not ring.has_room(5)


def test_without_a_capacity_nothing_is_kept_or_waited_for(log: Callable[[int], Control]) -> None:
    ring = log(0)
    ring.write_event(event(0))
    assert ring.has_room(2) and ring.take_events() == []
