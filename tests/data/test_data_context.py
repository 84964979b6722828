"""Windows around a frame against loops: of a buffer, of kept episodes, of a dataset."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases, refused

from ejax.data import DataUnavailableError, Episode, EpisodeSpec, OnlineDataset, Origin, SequenceSpecCfg
from ejax.data.buffer import BufferLayout, TrajectoryBuffer, create
from ejax.data.chunks import WindowDraw, find_runs, run_bounds
from ejax.data.lerobot.recorded import RecordedEpisodes
from ejax.data.lerobot.write import EpisodeWriter
from ejax.data.reader import ChunkReader
from ejax.data.task import flatten

SPEC = EpisodeSpec({"obs/x": ((2,), "float32"), "t": ((), "int64"), "word": ((), "S4")}, {"mark": ((), "int64")})
LENGTHS = (1, 4, 9, 12)


def episode(row: int) -> Episode:
    """Row ``row`` has ``LENGTHS[row]`` frames, three a segment; no number of a frame is 0."""
    step = np.arange(LENGTHS[row])
    frames = {"obs/x": 100.0 * row + step[:, None] + [1, 2], "t": step + 1, "word": np.array([b"word"] * len(step))}
    return Episode(frames, segment_id=step // 3, fields={"mark": row}, terminated=row % 2 == 0)


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    layout = BufferLayout(len(LENGTHS), 12, SPEC)
    create(tmp_path / "buffer", layout.arrays())
    buffer = TrajectoryBuffer(tmp_path / "buffer", layout)
    for row in range(len(LENGTHS)):
        buffer.write(row, episode(row), Origin(row, row, 1 + row % 2, 7), index=row, written_at=1.5)
    return buffer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedEpisodes:
    folder = tmp_path_factory.mktemp("context") / "kept"
    with EpisodeWriter(folder, SPEC, fps=20) as writer:
        for row in range(len(LENGTHS)):
            writer.append(episode(row), "x", origin=Origin(row, row, 1 + row % 2, 7))
    return RecordedEpisodes(folder)


def check_by_the_letter(chunks: dict[str, Any], spec: SequenceSpecCfg) -> list[tuple[int, int]]:
    """Each entry of each frame is the episode's, or padding; returns (row, frame) of what was drawn."""
    now, drawn = spec.history_length - 1, []
    for i, row in enumerate(chunks["episode"]["mark"].tolist()):
        there, anchor = flatten(episode(row).frames), int(chunks["episode_step"][i, now])
        drawn.append((row, anchor))
        for c in range(spec.length):
            t = anchor - now + c
            real = 0 <= t < LENGTHS[row] and (spec.sampling_mode == "episode" or t // 3 == anchor // 3)
            assert chunks["valid"][i, c] == real
            assert chunks["loss_mask"][i, c] == (real and c >= now)
            assert chunks["episode_step"][i, c] == (t if real else -1)
            assert chunks["segment_id"][i, c] == (t // 3 if real else -1)
            assert chunks["segment_step"][i, c] == (t % 3 if real else -1)
            last = real and t == LENGTHS[row] - 1
            assert chunks["terminated"][i, c] == (last and row % 2 == 0)
            assert chunks["truncated"][i, c] == (last and row % 2 == 1)
            np.testing.assert_array_equal(chunks["obs"]["x"][i, c], there["obs/x"][t] if real else 0.0)
            assert chunks["t"][i, c] == (t + 1 if real else 0)
            assert chunks["word"][i, c] == (b"word" if real else b"")
    return drawn


@pytest.mark.parametrize("large", [10**9, 0], ids=["together", "singly"])
@pytest.mark.parametrize(("history", "horizon"), [(1, 1), (1, 5), (3, 4), (20, 2)])
@pytest.mark.parametrize("mode", ["episode", "segment"])
def test_windows_of_a_buffer_are_those_of_the_rule(
    buffer: Any, monkeypatch: pytest.MonkeyPatch, mode: Any, history: int, horizon: int, large: int
) -> None:
    monkeypatch.setattr("ejax.data.reader.LARGE_BYTES", large)
    spec = SequenceSpecCfg(history, horizon, mode)
    chunks = ChunkReader(buffer).draw(300, spec.draw, np.random.default_rng(0))
    drawn = check_by_the_letter(chunks, spec)
    assert set(drawn) == {(row, t) for row, length in enumerate(LENGTHS) for t in range(length)}  # every frame
    assert all(array.flags.c_contiguous and array.flags.owndata for array in flatten(chunks).values())


@pytest.mark.parametrize("mode", ["episode", "segment"])
def test_kept_episodes_give_the_windows_of_the_buffer(buffer: Any, recorded: RecordedEpisodes, mode: Any) -> None:
    spec = SequenceSpecCfg(3, 4, mode)
    live = ChunkReader(buffer).draw(50, spec.draw, np.random.default_rng(1))
    kept = recorded.sample_batch_with_context(50, 3, 4, mode, rng=np.random.default_rng(1))
    check_by_the_letter(kept, spec)
    live, kept = flatten(live), flatten(kept)
    assert live.keys() == kept.keys() - {"episode/instruction"}
    for path in live.keys() - {"episode/written_at"}:
        np.testing.assert_array_equal(live[path], kept[path])
        assert live[path].dtype == kept[path].dtype


def test_episodes_are_drawn_alike_whatever_their_length(buffer: Any) -> None:
    chunks = ChunkReader(buffer).draw(4000, SequenceSpecCfg(2, 3).draw, np.random.default_rng(0))
    assert np.bincount(chunks["episode"]["mark"]).min() > 850  # 1000 each


def test_generations_choose_the_episodes(buffer: Any, recorded: RecordedEpisodes) -> None:
    live = ChunkReader(buffer).draw(100, SequenceSpecCfg(2, 3, generations=[2]).draw, np.random.default_rng(0))
    kept = recorded.sample_batch_with_context(100, 2, 3, generations=[2], rng=np.random.default_rng(0))
    for chunks in (live, kept):
        assert set(chunks["episode"]["mark"]) == {1, 3} and set(chunks["episode"]["generation"]) == {2}
    with pytest.raises(DataUnavailableError, match="in generations 3, 4: of 4 rows"):
        ChunkReader(buffer).draw(1, SequenceSpecCfg(2, 3, generations=[3, 4]).draw, np.random.default_rng(0))
    with pytest.raises(DataUnavailableError, match="in 0 episodes"):
        recorded.sample_batch_with_context(1, 2, 3, generations=[3])


@pytest.mark.parametrize(("batch_size", "lead"), [(None, (6,)), (5, (5, 6))])
def test_a_dataset_of_windows_masks_what_is_no_target(
    recorded: RecordedEpisodes, batch_size: int | None, lead: tuple[int, ...]
) -> None:
    dataset = OnlineDataset(recorded, batch_size=batch_size, sequence=SequenceSpecCfg(3, 4), seed=2)
    again = OnlineDataset(recorded, batch_size=batch_size, sequence=SequenceSpecCfg(3, 4), seed=2)
    for chunks, same in zip(itertools.islice(dataset, 4), again, strict=False):
        assert chunks["obs"]["x"].shape == (*lead, 2) and chunks["loss_mask"].shape == lead
        assert not chunks["loss_mask"][..., :2].any() and chunks["loss_mask"][..., 2].all()
        np.testing.assert_array_equal(chunks["t"], same["t"])


def test_a_window_that_is_all_there_is_a_chunk(buffer: Any) -> None:
    """The same draw as a chunk of one frame, seen with what is around it."""
    alone = ChunkReader(buffer).draw(64, WindowDraw("episode", 1), np.random.default_rng(3))
    around = ChunkReader(buffer).draw(64, SequenceSpecCfg(1, 1).draw, np.random.default_rng(3))
    assert around.pop("loss_mask").all()
    for path, array in flatten(alone).items():
        np.testing.assert_array_equal(array, flatten(around)[path])


def test_a_run_begins_and_ends_where_frames_change() -> None:
    valid = np.array([[1, 1, 1, 0, 1, 1]], bool)
    runs = find_runs(valid, np.array([[0, 0, 1, -1, 1, 1]]))
    begin, end = run_bounds(runs, "episode")
    assert begin[0, [0, 1, 2, 4, 5]].tolist() == [0, 0, 0, 4, 4] and end[0, [0, 2, 4]].tolist() == [3, 3, 6]
    begin, end = run_bounds(runs, "segment")
    assert begin[0, [0, 1, 2, 4, 5]].tolist() == [0, 0, 2, 4, 4] and end[0, [0, 2, 4]].tolist() == [2, 3, 6]


@cases(
    "wrong error message",
    ({"history_length": 0}, ValueError, "history_length must be at least 1, got 0"),
    ({"prediction_horizon": 1.5}, TypeError, "prediction_horizon must be an int"),
    ({"sampling_mode": "boundary"}, ValueError, "no sampling_mode 'boundary' for windows around a frame"),
    ({"generations": []}, ValueError, "generations is empty"),
    ({"generations": [0]}, ValueError, "generations must be at least 1"),
)
def test_windows_that_there_are_not_are_refused(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SequenceSpecCfg(**wrong)


def test_a_dataset_has_either_chunks_or_windows(recorded: RecordedEpisodes) -> None:
    refused(lambda: OnlineDataset(recorded, 4, sequence=SequenceSpecCfg()), match="sequence gives the windows' length")
    with pytest.raises(ValueError, match="sequence gives the windows' length"):
        OnlineDataset(recorded, sampling_mode="segment", sequence=SequenceSpecCfg())
    refused(OnlineDataset, recorded, match="got NoneType")
    with pytest.raises(ValueError, match="'loss_mask' is given twice, or is a name that the buffer reserves"):
        EpisodeSpec({"loss_mask": ((), "bool")})


def test_reading_kept_episodes_leaves_them_as_they_are(recorded: RecordedEpisodes) -> None:
    """Padding is written into copies: the reader's cache hands out the same arrays each time."""
    first = recorded.sample_batch_with_context(30, 3, 4, rng=np.random.default_rng(5))
    again = recorded.sample_batch_with_context(30, 3, 4, rng=np.random.default_rng(5))
    np.testing.assert_array_equal(first["obs"]["x"], again["obs"]["x"])
    np.testing.assert_array_equal(recorded.reader[3].frames["t"], np.arange(12) + 1)
