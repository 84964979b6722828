"""Windows against loops; the modes; the rows' shares."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases, refused
from hypothesis import given
from hypothesis import strategies as st

from ejax.data import OnlineDataEngine, OnlineDataEngineCfg
from ejax.data.buffer import BufferLayout, TrajectoryBuffer, create
from ejax.data.chunks import MODES, WindowDraw, draw_windows, find_runs, window_mask
from ejax.data.reader import ChunkReader
from ejax.data.task import Episode, EpisodeSpec, Origin, flatten, nest_fields

SPEC = EpisodeSpec({"obs/x": ((2,), "float32"), "t": ((), "int64")}, {"name": ((), "S8")})


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    layout = BufferLayout(8, 50, SPEC)
    create(tmp_path / "buffer", layout.arrays())
    return TrajectoryBuffer(tmp_path / "buffer", layout)


def episode(length: int, value: float = 0.0, segment_id: Any | None = None) -> Episode:
    frames = {"obs": {"x": np.full((length, 2), value)}, "t": np.arange(length)}
    return Episode(frames, segment_id=segment_id, fields={"name": b"push"})


def write(buffer: TrajectoryBuffer, row: int, *args: Any, **kwargs: Any) -> None:
    buffer.write(row, episode(*args, **kwargs), Origin(row, row, 1, 7), index=row, written_at=1.5)


def fill(buffer: Any, length: int = 50) -> None:
    for row in range(8):
        write(buffer, row, length, value=float(row))


def allowed(valid: Any, segment_id: Any, start: int, size: int, mode: str) -> Any:
    """Apply the rule of the modes, by the letter."""
    window, ids = valid[start : start + size], segment_id[start : start + size]
    if len(window) < size or not window.all():
        return False
    alike = (ids == ids[0]).all()
    return {"episode": True, "segment": alike and ids[0] >= 0, "boundary": not alike}[mode]


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 14), st.sampled_from(MODES))
def test_windows_are_those_of_the_rule(seed: int, num_frames: int, size: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    valid = rng.random((3, num_frames)) < 0.8
    segment_id = np.repeat(rng.integers(-1, 3, (3, num_frames)), 2, axis=1)[:, :num_frames]
    mask = window_mask(find_runs(valid, segment_id), size, mode)
    for row in range(3):
        for start in range(num_frames):
            assert mask[row, start] == allowed(valid[row], segment_id[row], start, size, mode)


def test_rows_are_drawn_alike_and_then_the_windows_of_a_row() -> None:
    mask = np.zeros((3, 50), bool)
    mask[0, :40] = True
    mask[2, 7:9] = True
    rows, starts = draw_windows(mask, 20_000, np.random.default_rng(0))
    assert mask[rows, starts].all()
    share = (rows == 2).mean()
    assert 0.48 < share < 0.52  # 0.5 ± 5.6 σ, although row 0 has twenty times the windows
    counts = np.bincount(starts[rows == 0], minlength=40)
    assert counts.min() > 150 and counts.max() < 350  # 250 each
    np.testing.assert_allclose((starts[rows == 2] == 7).mean(), 0.5, atol=0.03)


def test_a_chunk_is_consecutive_frames_of_one_episode_with_its_fields(buffer: Any) -> None:
    fill(buffer)
    chunks = ChunkReader(buffer).draw(64, WindowDraw("episode", 10), np.random.default_rng(0))
    assert chunks["obs"]["x"].shape == (64, 10, 2) and chunks["t"].shape == (64, 10)
    assert (np.diff(chunks["t"], axis=1) == 1).all()
    np.testing.assert_array_equal(chunks["episode_step"], chunks["t"])
    row = chunks["episode"]["index"]
    np.testing.assert_array_equal(chunks["obs"]["x"], np.broadcast_to(row[:, None, None], (64, 10, 2)))
    assert set(chunks["episode"]["name"]) == {b"push"}
    assert (chunks["episode"]["length"] == 50).all() and (chunks["episode"]["written_at"] == 1.5).all()
    assert all(array.flags.c_contiguous and array.flags.owndata for array in flatten(chunks).values())


def test_rows_that_are_locked_are_never_drawn_whenever_they_were(buffer: Any) -> None:
    fill(buffer)
    reader, rng, known = ChunkReader(buffer), np.random.default_rng(0), set(range(8))
    for row in (2, 3):
        buffer.version[row] |= 1
        known.remove(row)
        assert set(reader.draw(256, WindowDraw("episode", 10), rng)["episode"]["index"]) == known


def test_what_is_behind_an_episodes_end_is_never_read(buffer: Any) -> None:
    fill(buffer)  # full rows first: what they leave behind shorter ones is stale
    buffer.frames["obs/x"][:] = 999.0
    for row in range(8):
        write(buffer, row, 20, value=1.0)
    assert (buffer.frames["obs/x"][:, 20:] == 999.0).all()
    chunks = ChunkReader(buffer).draw(500, WindowDraw("episode", 15), np.random.default_rng(0))
    assert (chunks["obs"]["x"] == 1.0).all() and chunks["valid"].all()


def test_frames_are_numbered_by_episode_and_segment(buffer: Any) -> None:
    write(buffer, 0, 5, segment_id=np.array([0, 0, 2, 2, 2]))
    assert buffer.frames["valid"][0].tolist() == [True] * 5 + [False] * 45
    row = {name: buffer.frames[name][0, :5].tolist() for name in buffer.frames}
    assert row["episode_step"] == [0, 1, 2, 3, 4]
    assert row["segment_id"] == [0, 0, 2, 2, 2]
    assert row["segment_step"] == [0, 1, 0, 1, 2]
    assert row["segment_start"] == [True, False, True, False, False]
    assert row["segment_end"] == [False, True, False, False, True]
    assert row["terminated"] == [False] * 4 + [True]
    assert row["truncated"] == [False] * 5


def test_without_a_window_the_message_tells_the_longest_episode(buffer: Any) -> None:
    reader, rng = ChunkReader(buffer), np.random.default_rng(0)
    with pytest.raises(RuntimeError, match="No unlocked valid chunk of 10 frames in mode 'episode'"):
        reader.draw(1, WindowDraw("episode", 10), rng)  # nothing was written yet
    write(buffer, 0, 12)
    with pytest.raises(RuntimeError, match=r"'boundary'.*the longest episode has 12 frames"):
        reader.draw(1, WindowDraw("boundary", 10), rng)


def test_a_row_that_stays_locked_is_waited_for_within_a_bound(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejax.data.reader.WAIT_S", 0.05)
    write(buffer, 0, 20)
    buffer.version[0] |= 1
    with pytest.raises(RuntimeError, match="of 8 rows 1 are being written"):
        ChunkReader(buffer).draw(1, WindowDraw("episode", 10), np.random.default_rng(0))


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
@pytest.mark.parametrize(("large", "copy"), [(10**9, "gather"), (0, "copy_window")], ids=["together", "singly"])
def test_a_copy_torn_by_a_write_is_drawn_again_within_a_bound(
    buffer: Any, monkeypatch: pytest.MonkeyPatch, large: int, copy: str, times: int
) -> None:
    """All rows are rewritten between the choice and the second look."""
    fill(buffer)
    original, torn = getattr(buffer, copy), []

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if len(torn) < times:
            torn.append(args)
            for row in range(8 if times == 1 else 0):
                write(buffer, row, 50, value=100.0)
            buffer.version[:] += 2
        return result

    monkeypatch.setattr("ejax.data.reader.LARGE_BYTES", large)
    monkeypatch.setattr(buffer, copy, interrupted)
    reader, rng = ChunkReader(buffer), np.random.default_rng(0)
    if times > 1:
        with pytest.raises(RuntimeError, match="1000 copies in a row were torn"):
            reader.draw(5, WindowDraw("episode", 10), rng)
        return
    chunks = reader.draw(5, WindowDraw("episode", 10), rng)
    assert reader.redrawn == (5 if copy == "gather" else 1)
    assert (chunks["obs"]["x"] == 100.0).all()  # nothing of what was copied first


def test_chunks_drawn_singly_are_like_those_drawn_together(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(buffer)
    made = []
    for large in (10**9, 0):
        monkeypatch.setattr("ejax.data.reader.LARGE_BYTES", large)
        made.append(flatten(ChunkReader(buffer).draw(64, WindowDraw("episode", 10), np.random.default_rng(0))))
    together, singly = made
    assert {path: (a.shape, a.dtype) for path, a in singly.items()} == {
        path: (a.shape, a.dtype) for path, a in together.items()
    }
    np.testing.assert_array_equal(singly["t"], singly["t"][:, :1] + np.arange(10))
    np.testing.assert_array_equal(singly["obs/x"][:, 0, 0], singly["episode/index"])


@cases(
    "request_ error message",
    ((0, 10, "episode"), ValueError, "batch_size must be at least 1, got 0"),
    ((1, 0, "episode"), ValueError, "chunk_size must be at least 1, got 0"),
    ((1, 51, "episode"), ValueError, "chunk_size 51 is more than max_episode_steps, 50"),
    ((1, 10, "row"), ValueError, "no sampling_mode 'row'; there is episode, segment, boundary"),
    ((1, 1, "boundary"), ValueError, "crosses no boundary"),
    ((1.0, 10, "episode"), TypeError, "batch_size must be an int, got float"),
    ((True, 10, "episode"), TypeError, "batch_size must be an int, got bool"),
)
def test_requests_that_no_buffer_serves_are_refused(request_: tuple, error: type, message: str) -> None:
    engine = OnlineDataEngine(OnlineDataEngineCfg("tasks:Toy", max_episode_steps=50))
    with pytest.raises(error, match=message):
        engine.sample_batch(*request_)


@cases(
    "changed message",
    ({"frames": {"t": np.arange(3)}}, r"missing \['obs/x'\], unknown \[\]"),
    ({"frames": {"obs/x": np.zeros((3, 2)), "t": np.arange(4)}}, "differ in length"),
    ({"frames": {"obs/x": np.zeros((3, 3)), "t": np.arange(3)}}, r"'obs/x' is float64\[3, 3\]; the spec has float32"),
    ({"frames": {"obs/x": np.zeros((3, 2)), "t": np.arange(3.0)}}, "'t' is float64"),
    ({"frames": {"obs/x": np.zeros((0, 2)), "t": np.arange(0)}}, "at least 1 frame"),
    ({"frames": {"obs/x": np.zeros((51, 2)), "t": np.arange(51)}}, "51 frames; max_episode_steps is 50"),
    ({"segment_id": np.array([0, -1, 0])}, "segment_id must be whole numbers ≥ 0"),
    ({"segment_id": np.array([0, 0])}, "differ in length"),
    ({"fields": {"name": b"much too long"}}, "'name' is |S13"),
    ({"fields": {}}, r"missing \['name'\]"),
)
def test_an_episode_that_is_not_the_specs_is_refused_and_the_row_stays(
    buffer: Any, changed: dict[str, Any], message: str
) -> None:
    write(buffer, 0, 3)
    before = {path: array.copy() for path, array in buffer.frames.items()}
    given = {"frames": {"obs/x": np.zeros((3, 2)), "t": np.arange(3)}, "fields": {"name": b"push"}} | changed
    refused(lambda: buffer.write(0, Episode(**given), Origin(1), index=1, written_at=0.0), match=message)
    assert buffer.version[0] == 2
    for path, array in buffer.frames.items():
        np.testing.assert_array_equal(array, before[path])


@cases(
    "frames message",
    ({}, "at least one frame field"),
    ({"valid": ((), "bool")}, "'valid' is given twice, or is a name that the buffer reserves"),
    ({"a": ((), "f4"), "a/b": ((), "f4")}, "'a/b' lies inside field 'a'"),
    ({"a//b": ((), "f4")}, "has an empty part"),
    ({"a": ((-1,), "f4")}, r"shape \(-1,\)"),
    ({"a": ((), "O")}, "no fixed size"),
    ({"a": ((), "S")}, "no fixed size"),
)
def test_fields_that_cannot_be_stored_are_refused(frames: dict[str, tuple[tuple[Any, ...], str]], message: str) -> None:
    refused(EpisodeSpec, frames, match=message)


def test_a_nested_dict_and_back() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {"a/b": 1, "a/c/d": 2, "e": 3} and nest_fields(flatten(tree)) == tree
    refused(flatten, {"a/b": 1, "a": {"b": 2}}, match="two fields are called 'a/b'")
