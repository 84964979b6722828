"""Times of evaluations and saves, and the number of updates in a dispatch."""

from types import SimpleNamespace
from typing import Any

import pytest

from ejax.training.cadence import Cadence, crosses
from ejax.training.loop import Throttle


def cadence(**changes: int) -> Cadence:
    frequencies = {"eval_freq": 0, "save_freq": 0, "save_frequency_updates": 0, "log_freq_updates": 1}
    trainer: Any = SimpleNamespace(**{"enable_eval": True, "num_updates": 20, **frequencies, **changes})
    return Cadence(trainer, 100)


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("every", [0, 1, 99, 100, 101, 250])
def test_each_multiple_is_crossed_by_the_first_update_that_reaches_it(rows: int, every: int) -> None:
    """By modulo, 65,536 steps an update and a frequency of 201 would never meet. 0: never."""
    crossing = [update for update in range(1, 400) if crosses(update, rows, every)]
    first = {-(-multiple // rows) for multiple in range(every, 399 * rows + 1, every)} if every else set()
    assert crossing == sorted(first)


def test_a_dispatch_ends_at_the_next_event_at_its_limit_or_at_the_end() -> None:
    events = cadence(eval_freq=500, save_frequency_updates=3)  # evaluated at 5, 10, …; saved at 3, 6, …
    assert [events.updates_until_event(update, 64) for update in (0, 3, 5, 6)] == [3, 2, 1, 3]
    assert [events.updates_until_event(update, 2) for update in (0, 3, 5, 6)] == [2, 2, 1, 2]
    assert cadence().updates_until_event(17, 64) == 3


def test_a_run_that_stops_anywhere_has_the_events_of_one_that_does_not() -> None:
    events = cadence(eval_freq=230, save_freq=470)
    for first in range(20):
        update, ends = first, []
        while update < 20:
            update += events.updates_until_event(update, 64)
            ends.append(update)
        assert ends == [n for n in range(first + 1, 21) if events.evaluates(n) or events.saves(n) or n == 20]


def test_the_last_update_is_logged_whatever_the_frequency() -> None:
    assert [n for n in range(1, 21) if cadence(log_freq_updates=6).logs(n)] == [6, 12, 18, 20]


def test_videos_are_numbered_by_the_multiples_passed_and_the_last_has_the_next_number() -> None:
    events = cadence(eval_freq=300)
    assert [events.video_number(update) for update in (3, 6, 7)] == [1, 2, 3]
    assert cadence().video_number(20) == 2000


def test_a_throttle_grows_slowly_to_half_a_second_and_stops_at_its_limit() -> None:
    throttle = Throttle(64, adapts=True)
    limits = []
    for _ in range(8):
        limits.append(throttle.limit)
        throttle.took(throttle.limit, 0.01 * throttle.limit)
    assert limits == [1, 2, 4, 8, 16, 32, 50, 50]
    throttle.took(50, 60.0)  # an evaluation
    assert throttle.limit == 1
    fixed = Throttle(8, adapts=False)
    fixed.took(8, 60.0)
    assert fixed.limit == 8
