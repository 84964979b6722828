"""The budget of an episode: it is drawn exactly as often as it may be, by any number of processes."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ejax.data import DataBudgetExhaustedError, Episode, EpisodeSpec, Origin
from ejax.data.buffer import BufferLayout, TrajectoryBuffer, attach, create
from ejax.data.chunks import WindowDraw
from ejax.data.control import counting
from ejax.data.reader import ChunkReader, Quota, draw_rows

NUM_ROWS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "quota").touch()
    return tmp_path / "quota"


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    layout = BufferLayout(NUM_ROWS, 5, EpisodeSpec({"x": ((), "float32")}))
    create(tmp_path / "buffer", layout.arrays())
    buffer = TrajectoryBuffer(tmp_path / "buffer", layout)
    for index in range(NUM_ROWS):
        write(buffer, index)
    return buffer


@pytest.fixture
def charged(tmp_path: Path) -> Any:
    arrays = {"charged": ((NUM_ROWS, 2), "int64")}
    create(tmp_path / "words", arrays)
    return attach(tmp_path / "words", arrays)["charged"]


def write(buffer: Any, index: int) -> None:
    buffer.write(index % NUM_ROWS, Episode({"x": np.zeros(5)}), Origin(), index=index, written_at=0.0)


def counts(chunks: dict[str, Any]) -> list[int]:
    return np.bincount(chunks["episode"]["index"], minlength=NUM_ROWS).tolist()


def test_rows_are_drawn_alike_until_they_are_used_up() -> None:
    """Rows take turns: which one goes first is even, and none goes oftener than it may."""
    rng, first = np.random.default_rng(0), []
    for _ in range(3000):
        rows = draw_rows(np.array([2, 0, 1]), 3, rng)
        assert sorted(rows.tolist()) == [0, 0, 2]
        first.append(rows.tolist().index(2))
    # P(row 2 first) = 1/2, second = 1/4, last = 1/4
    np.testing.assert_allclose(np.bincount(first) / 3000, [0.5, 0.25, 0.25], atol=0.04)


def test_without_a_row_used_up_the_draw_is_the_usual_one() -> None:
    usual = np.array([1, 2])[np.random.default_rng(4).integers(2, size=9)]
    np.testing.assert_array_equal(draw_rows(np.array([0, 99, 99]), 9, np.random.default_rng(4)), usual)


def test_an_episode_is_drawn_as_often_as_it_may_be_and_a_new_one_begins_anew(
    buffer: Any, charged: Any, path: Path
) -> None:
    reader, rng = ChunkReader(buffer, Quota(charged, path, 3)), np.random.default_rng(0)
    assert reader.chunks_left() == 12
    total = np.sum([counts(reader.draw(5, WindowDraw("episode", 2), rng)) for _ in range(2)], axis=0)
    assert reader.chunks_left() == 2 and total.max() <= 3
    with pytest.raises(DataBudgetExhaustedError, match=r"for 2 more chunks .* and 3 were requested"):
        reader.draw(3, WindowDraw("episode", 2), rng)
    assert counts(reader.draw(2, WindowDraw("episode", 2), rng)) == [
        3 - each for each in total
    ]  # nothing was charged for the three
    write(buffer, NUM_ROWS + 1)
    assert reader.chunks_left() == 3
    assert set(reader.draw(3, WindowDraw("episode", 2), rng)["episode"]["index"]) == {NUM_ROWS + 1}
    assert reader.chunks_left() == 0


def test_a_batch_that_is_not_delivered_costs_nothing(
    buffer: Any, charged: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Singly, each chunk is charged as it is chosen: the fifth finds nothing left."""
    monkeypatch.setattr("ejax.data.reader.LARGE_BYTES", 0)
    reader = ChunkReader(buffer, Quota(charged, path, 1))
    with pytest.raises(DataBudgetExhaustedError):
        reader.draw(5, WindowDraw("episode", 2), np.random.default_rng(0))
    assert reader.chunks_left() == 4
    assert counts(reader.draw(4, WindowDraw("episode", 2), np.random.default_rng(0))) == [1] * 4


def test_a_torn_copy_does_not_cost_the_episode_that_tore_it(
    buffer: Any, charged: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, torn = buffer.gather, []

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if not torn:
            torn.append(args)
            for row in range(NUM_ROWS):
                write(buffer, NUM_ROWS + row)
        return result

    monkeypatch.setattr(buffer, "gather", interrupted)
    reader = ChunkReader(buffer, Quota(charged, path, 2))
    chunks = reader.draw(8, WindowDraw("episode", 2), np.random.default_rng(0))
    assert reader.redrawn == 8 and sorted(set(chunks["episode"]["index"])) == [4, 5, 6, 7]
    assert reader.chunks_left() == 0


def test_who_knows_an_older_episode_of_a_row_cannot_draw_from_it(buffer: Any, charged: Any, path: Path) -> None:
    quota, rng = Quota(charged, path, 2), np.random.default_rng(0)
    able = np.array([True, False, False, False])
    assert quota.reserve(able, np.array([4, 1, 2, 3]), 1, rng) is not None
    assert quota.reserve(able, np.array([0, 1, 2, 3]), 1, rng) is None
    assert quota.left(np.array([4, 1, 2, 3])).tolist() == [1, 2, 2, 2]


def draw_all(charged: Any, path: Path, results: Any) -> None:
    quota, rng, drawn = Quota(charged, path, 200), np.random.default_rng(), 0
    while (rows := quota.reserve(np.ones(NUM_ROWS, bool), np.arange(NUM_ROWS), 1, rng)) is not None:
        drawn += len(rows)
    results.put(drawn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_processes_that_draw_at_once_share_one_budget(buffer: Any, charged: Any, path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=draw_all, args=(charged, path, results)) for _ in range(3)]
    for child in children:
        child.start()
    drawn = [results.get() for _ in children]
    for child in children:
        child.join()
    assert sum(drawn) == 200 * NUM_ROWS and charged[:, 1].tolist() == [200] * NUM_ROWS


def hold(path: Path, held: Any) -> None:
    with counting(path):
        held.put(True)
        time.sleep(60.0)


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_consumer_that_is_killed_while_it_counts_holds_nobody_up(buffer: Any, charged: Any, path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.SimpleQueue()
    child = context.Process(target=hold, args=(path, held))
    child.start()
    held.get()
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    reader = ChunkReader(buffer, Quota(charged, path, 1))
    assert counts(reader.draw(4, WindowDraw("episode", 2), np.random.default_rng(0))) == [1] * 4


def test_a_run_that_has_ended_is_found_so(buffer: Any, charged: Any, path: Path) -> None:
    reader = ChunkReader(buffer, Quota(charged, path, 1))
    path.unlink()
    with pytest.raises(ConnectionError, match="is gone, and the run with it"):
        reader.draw(1, WindowDraw("episode", 2), np.random.default_rng(0))
