"""Kept episodes: what is written, what a crash leaves, what is read and drawn."""

import errno
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kept_episodes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from case_tables import cases, refused
from data_tasks import Toy
from kept_episodes import (
    CAMERA,
    SPEC,
    Countdown,
    camera_episode,
    check_numbers,
    copied,
    episode,
    instruction,
    keep,
    length,
    pictures,
)

import ejax.data.lerobot.format as fmt
import ejax.data.lerobot.write
from ejax.data import Episode, EpisodeSpec, OnlineDataEngine, OnlineDataEngineCfg, OnlineDataset, Origin
from ejax.data.chunks import MODES, draw_windows, find_runs, window_mask
from ejax.data.lerobot.format import combine_stats, feature_stats, policy_names
from ejax.data.lerobot.read import EpisodeReader
from ejax.data.lerobot.recorded import RecordedEpisodes
from ejax.data.lerobot.write import EpisodeWriter
from ejax.data.record import main, record, record_stream
from ejax.data.task import flatten

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_v3"
LOSS = 8
"""Most that a video may change a grey by, of 255; two pictures of one episode differ by more."""


@pytest.fixture(autouse=True, scope="module")
def plugged_in() -> Iterator[None]:
    """No test cuts the power, so nothing need wait for the disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight episodes of SPEC."""
    folder = tmp_path_factory.mktemp("kept") / "set"
    keep(folder, range(8))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def assert_same_tree(first: dict[str, Any], second: dict[str, Any]) -> None:
    first, second = flatten(first), flatten(second)
    assert first.keys() == second.keys()
    for path, array in first.items():
        np.testing.assert_array_equal(array, second[path], err_msg=path)


def test_episodes_come_back_with_every_field_and_dtype(kept: Path) -> None:
    reader = EpisodeReader(kept)
    assert len(reader) == 8 and reader.skipped == {}
    for number, back in enumerate(reader):
        made = episode(number)
        assert_same_tree(made.frames, back.frames)
        assert_same_tree(made.fields, back.fields)
        np.testing.assert_array_equal(made.segment_id, back.segment_id)
        assert back.terminated == made.terminated
        for path, (_, dtype) in SPEC.frames.items():
            assert flatten(back.frames)[path].dtype == dtype
    assert_same_tree(reader[-1].frames, episode(7).frames)
    with pytest.raises(IndexError, match="no episode 8"):
        reader[8]


def test_info_tells_what_lerobot_asks(kept: Path) -> None:
    info = json.loads((kept / "meta/info.json").read_text())
    total = sum(map(length, range(8)))
    expected = {"codebase_version": "v3.0", "total_episodes": 8, "total_frames": total, "total_tasks": 3, "fps": 20}
    assert expected.items() <= info.items()
    assert info["splits"] == {"train": "0:8"} and info["video_path"] is None
    assert info["features"]["obs.robot.qpos"] == {"dtype": "float32", "shape": [7], "names": None}
    assert info["features"]["rewards"] == {"dtype": "float32", "shape": [1], "names": None}
    assert info["features"]["note"]["dtype"] == "string"
    names = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    assert names <= info["features"].keys()


def test_frames_are_numbered_through_all_episodes(kept: Path) -> None:
    table = pq.read_table(kept / "data/chunk-000/file-000.parquet")
    lengths = [length(number) for number in range(8)]
    step = np.concatenate([np.arange(n) for n in lengths])
    np.testing.assert_array_equal(table["index"].to_numpy(), np.arange(sum(lengths)))
    np.testing.assert_array_equal(table["episode_index"].to_numpy(), np.repeat(np.arange(8), lengths))
    np.testing.assert_array_equal(table["frame_index"].to_numpy(), step)
    np.testing.assert_array_equal(table["timestamp"].to_numpy(), (step / 20).astype(np.float32))
    np.testing.assert_array_equal(table["task_index"].to_numpy(), np.repeat(np.arange(8) % 3, lengths))
    assert table.schema.field("obs.robot.qpos").type == pa.list_(pa.float32(), 7)
    ends = np.cumsum(lengths)
    assert [row["dataset_to_index"] for row in rows(kept)] == ends.tolist()
    assert [row["dataset_from_index"] for row in rows(kept)] == (ends - lengths).tolist()


def test_tasks_have_the_instruction_as_pandas_index(kept: Path) -> None:
    table = pq.read_table(kept / "meta/tasks.parquet")
    assert table.to_pylist() == [{"task_index": i, "task": instruction(i)} for i in range(3)]
    assert json.loads(table.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_statistics_are_those_of_all_frames(kept: Path) -> None:
    stats = json.loads((kept / "meta/stats.json").read_text())
    every = [flatten(episode(number).frames) for number in range(8)]
    for path, feature in (("actions", "actions"), ("obs/map", "obs.map"), ("rewards", "rewards")):
        values = np.concatenate([frames[path] for frames in every]).astype(np.float64)
        values = values if values.ndim > 1 else values[:, None]
        for name in ("min", "max", "mean", "std"):
            expected = getattr(np, name)(values, axis=0)
            np.testing.assert_allclose(stats[feature][name], expected, rtol=1e-9, atol=1e-12, err_msg=path + name)
        assert stats[feature]["count"] == [len(values)]
    assert "note" not in stats
    assert rows(kept)[2]["stats/rewards/max"] == [length(2) - 1.0]


def test_combined_statistics_are_those_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, (50, 4))
    together = combine_stats(feature_stats(values[:7]), feature_stats(values[7:]))
    for name, expected in feature_stats(values).items():
        np.testing.assert_allclose(together[name], expected, rtol=1e-12)


def test_images_have_statistics_per_channel() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3)).astype(np.uint8)
    stats = feature_stats(frames, image=True)
    assert stats["mean"].shape == (3, 1, 1)
    np.testing.assert_allclose(stats["mean"].ravel(), frames.reshape(-1, 3).mean(0) / 255)
    np.testing.assert_allclose(stats["std"].ravel(), frames.reshape(-1, 3).std(0) / 255)


def test_files_end_at_their_size_and_folders_at_their_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "FILES_PER_CHUNK", 2)
    monkeypatch.setattr(ejax.data.lerobot.write, "EPISODES_PER_FILE", 3)
    keep(tmp_path / "set", range(5), file_size_mb=0.02)
    keep(tmp_path / "set", range(5, 12), file_size_mb=0.02, append=True)
    places = [(row["data/chunk_index"], row["data/file_index"]) for row in rows(tmp_path / "set")]
    assert places == sorted(places) and len(set(places)) > 3
    assert {file for _, file in places} == {0, 1}
    assert len(set(places)) < 12  # several episodes a file
    assert len(list((tmp_path / "set/meta/episodes").glob("*/*"))) == 4
    assert all(path.stat().st_size < 0.02 * 2**20 for path in (tmp_path / "set/data").glob("*/*"))
    assert check_numbers(tmp_path / "set") == 12


@pytest.mark.parametrize(("images", "loss"), [("video", LOSS), ("png", 0)])
def test_pictures_come_back_in_their_place(tmp_path: Path, images: str, loss: int) -> None:
    names = {"obs/camera": "observation.images.front", "actions": "action"}
    with EpisodeWriter(tmp_path, CAMERA, fps=30, images=images, names=names, file_size_mb=0.004) as writer:
        for number in range(7):
            writer.append(camera_episode(number), "look")
    reader = EpisodeReader(tmp_path)
    for number, back in enumerate(reader):
        camera, expected = back.frames["obs"]["camera"], pictures(number, length(number))
        assert camera.shape == expected.shape
        inner = np.r_[0:10, 14:24]  # away from the edge between the two greys
        assert np.abs(camera[:, :, inner].astype(int) - expected[:, :, inner]).max() <= loss
    entry = reader.info["features"]["observation.images.front"]
    assert entry["dtype"] == ("video" if images == "video" else "image") and entry["shape"] == [16, 24, 3]
    if images == "video":
        key = "videos/observation.images.front"
        files = [(row[f"{key}/chunk_index"], row[f"{key}/file_index"]) for row in rows(tmp_path)]
        assert 1 < len(set(files)) < 7
        for (before, after), (file, next_file) in zip(
            itertools.pairwise(rows(tmp_path)), itertools.pairwise(files), strict=True
        ):
            begin = before[f"{key}/to_timestamp"] if file == next_file else 0.0
            assert after[f"{key}/from_timestamp"] == pytest.approx(begin)
        assert entry["info"]["video.codec"] == "h264"


def test_windows_of_pictures_are_those_of_the_whole_episode(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, CAMERA, fps=30) as writer:
        for number in range(3):
            writer.append(camera_episode(number), "look")
    bounded, whole = EpisodeReader(tmp_path, cache_mb=0.001), EpisodeReader(tmp_path)
    for index, start in ((0, 0), (1, 3), (2, 5)):
        np.testing.assert_array_equal(
            bounded.window(index, start, 3)["obs/camera"], whole[index].frames["obs"]["camera"][start : start + 3]
        )


def spoiled(**changes: Callable[..., Any]) -> Episode:
    made = episode(0)
    frames = {**made.frames, **{name: change(made.frames[name]) for name, change in changes.items()}}
    return Episode(frames, segment_id=made.segment_id, fields=made.fields)


@cases(
    "bad message",
    (lambda: spoiled(actions=lambda a: np.where(np.arange(4) == 2, np.nan, a)), r"'actions' is nan at \[0, 2\]"),
    (lambda: spoiled(actions=lambda a: a[:, :3]), r"frame field 'actions' is float32\[6, 3\]"),
    (lambda: spoiled(rewards=lambda a: a[:-1]), "differ in length"),
    (lambda: Episode(episode(0).frames, fields=episode(0).fields, success=False), "unsuccessful episode is"),
    (lambda: Episode(episode(0).frames, fields=episode(0).fields, complete=False), "incomplete"),
    (lambda: Episode(episode(0).frames), "missing .*'goal'"),
)
def test_a_wrong_episode_is_refused_and_the_next_one_kept(tmp_path: Path, bad: Callable, message: str) -> None:
    with EpisodeWriter(tmp_path, SPEC, fps=20) as writer:
        refused(lambda: writer.append(bad(), "x"), match=message)
        writer.append(episode(0), instruction(0))
    assert check_numbers(tmp_path) == 1


@cases(
    "spec options message",
    (SPEC, {"names": {"action": "a"}}, r"names has \['action'\], which are not frame fields"),
    (SPEC, {"names": {"actions": "index"}}, "cannot be feature 'index'"),
    (SPEC, {"names": {"actions": "rewards"}}, "cannot be feature 'rewards'"),
    (SPEC, {"names": {"actions": "a/b"}}, "has a slash"),
    (SPEC, {"fps": 0}, "fps must be a whole number"),
    (SPEC, {"fps": 29.97}, "fps must be a whole number"),
    (SPEC, {"file_size_mb": 0}, "file_size_mb must be finite and above 0"),
    (SPEC, {"images": "gif"}, "images is 'gif'; use one of video, png"),
    (EpisodeSpec({"c": ((15, 24, 3), "uint8")}), {}, "15 x 24; a video needs even sides"),
    (EpisodeSpec({"c": ((2,), "complex64")}), {}, "cannot be kept"),
)
def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, spec: EpisodeSpec, options: dict, message: str) -> None:
    refused(EpisodeWriter, tmp_path / "set", spec, **{"fps": 20, **options}, match=message)
    assert not (tmp_path / "set").exists()


def test_a_folder_is_gone_on_with_only_if_asked_and_alike(kept: Path) -> None:
    refused(EpisodeWriter, kept, SPEC, fps=20, match="pass append=True", error=FileExistsError)
    refused(EpisodeWriter, kept, SPEC, fps=30, append=True, match="has fps 20, the writer 30")
    refused(EpisodeWriter, kept, CAMERA, fps=20, append=True, match="has features")
    with pytest.raises(ValueError, match=r"not a recording of ejax's: meta/ejax\.json is missing"):
        EpisodeWriter(GOLDEN, SPEC, fps=20, append=True)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        EpisodeWriter(tmp_path, SPEC, fps=20) as writer,
        pytest.raises(BlockingIOError, match="is being written to by another EpisodeWriter"),
    ):
        EpisodeWriter(tmp_path, SPEC, fps=20, append=True)
    refused(lambda: writer.append(episode(0), "x"), match="is closed", error=RuntimeError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(is lost|append removes it)")
def test_a_full_disk_at_any_write_loses_nothing_that_was_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder, failures = tmp_path / "set", 0
    keep(folder, [0])
    for steps in itertools.count():
        with EpisodeWriter(folder, SPEC, fps=20, append=True) as writer, monkeypatch.context() as patched:
            there = check_numbers(folder)
            Countdown(steps, full).patch(patched.setattr)
            try:
                writer.append(episode(there), instruction(there))
                break
            except OSError as error:
                assert error.errno == errno.ENOSPC and str(folder) in str(error) and "No space left" in str(error)
                assert f"the {there} before it are complete" in str(error)
        failures += 1
        left = check_numbers(folder)
        assert left in (there, there + 1)
        EpisodeWriter(folder, SPEC, fps=20, append=True).close()
        assert check_numbers(folder) == left
    assert failures > 20
    assert check_numbers(folder) > 1


def test_the_same_writer_goes_on_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EpisodeWriter(tmp_path, SPEC, fps=20) as writer:
        for steps in (1, 12):
            there = writer.num_episodes
            with monkeypatch.context() as patched:
                Countdown(steps, full).patch(patched.setattr)
                with pytest.raises(OSError, match="could not be kept"):
                    writer.append(episode(there), instruction(there))
            writer.append(episode(there), instruction(there))
        writer.append(episode(2), instruction(2))
    assert check_numbers(tmp_path) == 3


def test_ffmpeg_on_a_full_disk_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "ffmpeg could not write x (exit status 228): av_interleaved_write_frame(): No space left on device"
        )

    with EpisodeWriter(tmp_path, CAMERA, fps=30) as writer:
        monkeypatch.setattr("ejax.data.lerobot.pictures.write_video", full)
        raised = refused(lambda: writer.append(camera_episode(0), "look"), match="No space left", error=OSError)
    assert raised.errno == errno.ENOSPC and str(tmp_path) in str(raised)


def run_helper(*arguments: Path | str, **options: Any) -> subprocess.Popen:
    command = [sys.executable, kept_episodes.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_a_crash_at_any_step_loses_the_episode_in_flight_at_most_and_says_so(tmp_path: Path) -> None:
    process = run_helper("crash", tmp_path / "set")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    steps, lost, episodes = map(int, said.split())
    assert steps > 20 and 0 < lost < steps and episodes > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(is lost|append removes it)")
def test_what_append_returned_survives_kill_9(tmp_path: Path) -> None:
    chance, folder, promised = random.Random(0), tmp_path / "set", 0
    for _ in range(5):
        process = run_helper("keep", folder)
        promised = int(process.stdout.readline()) + 1
        time.sleep(chance.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
        promised += said.count("\n")
        EpisodeWriter(folder, SPEC, fps=20, append=True).close()
        assert check_numbers(folder) in (promised, promised + 1)


def test_an_unfinished_episode_is_told_of_to_who_reads(tmp_path: Path) -> None:
    keep(tmp_path, [0])
    (tmp_path / ".staging").mkdir()
    (tmp_path / ".staging/left").write_bytes(b"half")
    with pytest.warns(UserWarning, match="next append removes it"):
        assert len(EpisodeReader(tmp_path)) == 1
    with pytest.warns(UserWarning, match="is lost, and the 1 before it are complete"):
        keep(tmp_path, [1], append=True)
    assert not (tmp_path / ".staging").exists()


def test_a_dataset_of_lerobots_is_read() -> None:
    reader = EpisodeReader(GOLDEN)
    assert len(reader) == 3 and reader.skipped == {"remark": "dtype string"} and reader.fps == 10.0
    assert [reader.instruction(e) for e in range(3)] == ["push the cube", "lift the ball", "push the cube"]
    for e, back in enumerate(reader):
        step = np.arange(6 + e)
        np.testing.assert_array_equal(back.frames["observation"]["state"], np.stack([0 * step + e, step, e * step], 1))
        np.testing.assert_array_equal(back.frames["action"], np.stack([0 * step + e, -step], 1))
        np.testing.assert_array_equal(back.frames["next"]["reward"][:, 0], step)
        for name, shape, loss in (("front", (64, 96, 3), LOSS), ("wrist", (32, 48, 3), 0)):
            images = back.frames["observation"]["images"][name].astype(int)
            assert images.shape == (6 + e, *shape)
            assert np.abs(images[:, :, : shape[1] // 2 - 4] - (60 * e + 20)).max() <= loss
            assert np.abs(images[:, :, shape[1] // 2 + 4 :] - (20 * step + 20)[:, None, None, None]).max() <= loss


def test_chunks_of_a_dataset_of_lerobots_are_drawn() -> None:
    chunks = RecordedEpisodes(GOLDEN, episodes=[0, 2]).sample_batch(8, 4)
    assert chunks["observation"]["images"]["front"].shape == (8, 4, 64, 96, 3)
    assert set(chunks["episode"]["index"].tolist()) == {0, 2}
    assert set(chunks["episode"]["instruction"].tolist()) == {"push the cube"}
    assert (chunks["episode"]["seed"] == -1).all()
    np.testing.assert_array_equal(chunks["next"]["reward"][..., 0], chunks["episode_step"])


def test_missing_files_are_named(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a LeRobot dataset: meta/info\.json is missing"):
        EpisodeReader(tmp_path)
    folder = copied(kept, tmp_path)
    (folder / "data/chunk-000/file-000.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"file-000\.parquet"):
        EpisodeReader(folder)[0]


def test_a_cut_off_video_is_an_error_that_names_it(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, CAMERA, fps=30) as writer:
        writer.append(camera_episode(3), "look")
        writer.append(camera_episode(0), "look")
    first, second = rows(tmp_path)
    shifted = {**second, "videos/obs.camera/from_timestamp": first["videos/obs.camera/to_timestamp"] + 0.1}
    path = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pa.Table.from_pylist([first, shifted], pq.read_schema(path)), path)
    with pytest.raises(ValueError, match=r"file-000\.mp4 gives .* bytes for 6 frames"):
        EpisodeReader(tmp_path)[1]


@pytest.mark.parametrize(("cache_mb", "num_reads"), [(0.005, 16), (512.0, 8)])
def test_what_stays_decoded_is_bounded(
    kept: Path, monkeypatch: pytest.MonkeyPatch, cache_mb: float, num_reads: int
) -> None:
    reads, read_table = [], pq.read_table
    monkeypatch.setattr(pq, "read_table", lambda *args, **options: reads.append(1) or read_table(*args, **options))
    reader = EpisodeReader(kept, cache_mb=cache_mb)
    for number in [*range(8), *range(8)]:
        assert_same_tree(reader[number].frames, episode(number).frames)
    assert len(reads) == num_reads


@pytest.mark.parametrize("mode", MODES)
def test_draws_are_those_of_the_engines_masks(tmp_path: Path, mode: str) -> None:
    rng = np.random.default_rng(3)
    spec = EpisodeSpec({"x": ((), "int64")})
    ids = [np.repeat(np.arange(4), rng.integers(1, 6, 4)) for _ in range(6)]
    with EpisodeWriter(tmp_path, spec, fps=20) as writer:
        for segment_id in ids:
            writer.append(Episode({"x": np.arange(len(segment_id))}, segment_id=segment_id), "x")
    source = RecordedEpisodes(tmp_path)
    longest = max(map(len, ids))
    valid = np.array([np.arange(longest) < len(each) for each in ids])
    runs = find_runs(valid, np.array([np.pad(each, (0, longest - len(each)), constant_values=-1) for each in ids]))
    for size in range(2 if mode == "boundary" else 1, longest + 1):
        mask = window_mask(runs, size, mode)
        if not mask.any():
            with pytest.raises(RuntimeError, match=f"No valid chunk of {size} frames in mode '{mode}'"):
                source.sample_batch(1, size, mode)
            continue
        chunks = source.sample_batch(200, size, mode, rng=np.random.default_rng(size))
        expected = draw_windows(mask, 200, np.random.default_rng(size))
        np.testing.assert_array_equal(chunks["episode"]["index"], expected[0])
        np.testing.assert_array_equal(chunks["episode_step"][:, 0], expected[1])
        np.testing.assert_array_equal(chunks["x"], expected[1][:, None] + np.arange(size))


def test_chunks_have_the_form_of_the_engines(tmp_path: Path) -> None:
    cfg = OnlineDataEngineCfg(task=Toy, task_cfg={"segments": 3}, buffer_size=4, max_episode_steps=20)
    with OnlineDataEngine(cfg) as engine, EpisodeWriter(tmp_path, Toy().spec(), fps=20) as writer:
        record(Toy(segments=3), writer, 4)
        live, kept = engine.sample_batch(3, 5), RecordedEpisodes(tmp_path).sample_batch(3, 5)
    live, kept = flatten(live), flatten(kept)
    assert {path: (array.shape, array.dtype) for path, array in live.items()} == {
        path: (array.shape, array.dtype) for path, array in kept.items()
    }


@pytest.mark.parametrize(("batch_size", "lead"), [(None, (4,)), (16, (16, 4))])
def test_an_online_dataset_draws_from_kept_episodes(kept: Path, batch_size: int | None, lead: tuple[int, ...]) -> None:
    source = RecordedEpisodes(kept)
    first, again = (OnlineDataset(source, 4, batch_size, sampling_mode="segment", seed=5) for _ in range(2))
    for chunks, same in zip(itertools.islice(first, 5), again, strict=False):
        assert chunks["obs"]["robot"]["qpos"].shape == (*lead, 7)
        assert_same_tree(chunks, same)
        assert (chunks["segment_id"] == chunks["segment_id"][..., :1]).all()


def test_draws_are_seeded_and_go_on_where_their_state_was_taken(kept: Path) -> None:
    source, other = RecordedEpisodes(kept, seed=3), RecordedEpisodes(kept, seed=3)
    source.sample_batch(10, 3)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.sample_batch(10, 3)
    assert not np.array_equal(expected["obs"]["map"], other.sample_batch(10, 3)["obs"]["map"])
    other.load_state_dict(state)
    assert_same_tree(other.sample_batch(10, 3), expected)
    refused(lambda: RecordedEpisodes(kept, seed=4).load_state_dict(state), match="taken with seed 3, here it is 4")


def test_a_pickled_source_draws_the_same(kept: Path) -> None:
    source = RecordedEpisodes(kept)
    source.sample_batch(4, 3)
    twin = pickle.loads(pickle.dumps(source))
    assert_same_tree(source.sample_batch(4, 3), twin.sample_batch(4, 3))


@cases(
    "episodes error message",
    ([], ValueError, "no episode"),
    ([8], IndexError, "0 to 7"),
    ([1, 1], ValueError, "twice"),
    ([True, False], ValueError, r"whole numbers, got bool; of a mask, pass np.flatnonzero\(mask\)"),
    ([0.7], ValueError, "whole numbers, got float64"),
    ("01", ValueError, "whole numbers, got <U2"),
)
def test_a_wrong_choice_of_episodes_is_refused(kept: Path, episodes: list, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        RecordedEpisodes(kept, episodes=episodes)


def test_a_recording_has_the_episodes_of_an_engine_with_its_seed(tmp_path: Path) -> None:
    task_cfg = {"lengths": (5, 9), "at": {1: "fail"}}
    with EpisodeWriter(tmp_path, Toy().spec(), fps=20) as writer:
        tally = record(Toy(**task_cfg), writer, 4, seed=7)
    assert (tally.kept, tally.failed) == (4, 1)
    cfg = OnlineDataEngineCfg(task=Toy, task_cfg=task_cfg, buffer_size=4, max_episode_steps=9, seed=7)
    with OnlineDataEngine(cfg) as engine:
        live = list(itertools.islice(engine.episodes(), 4))
    for kept, taken in zip(EpisodeReader(tmp_path), live, strict=True):
        assert_same_tree(kept.frames, taken.episode.frames)
        assert_same_tree(kept.fields, taken.episode.fields)
    assert [taken.origin.seed for taken in live] == list(writer.seeds)


def test_origins_are_kept(tmp_path: Path) -> None:
    """A stream gives all of them; a task that runs by itself seed and attempt; unknown is -1."""
    cfg = OnlineDataEngineCfg(task=Toy, task_cfg={"at": {1: "fail"}}, buffer_size=3, max_episode_steps=20, seed=2)
    with OnlineDataEngine(cfg) as engine, EpisodeWriter(tmp_path, Toy().spec(), fps=20) as writer:
        record_stream(engine, writer, 4)
        live = next(engine.episodes()).origin
        record(Toy(at={0: "fail"}), writer, 1, seed=9)
        writer.append(Toy().episode(3), "by hand", seed=3)
    reader = EpisodeReader(tmp_path)
    kept = [Origin(*(int(reader.fields(i)[name]) for name in Origin._fields)) for i in range(6)]
    assert [each.attempt for each in kept] == [0, 2, 3, 4, 1, -1]
    assert [each.generation for each in kept] == [1, 1, 1, 2, -1, -1]
    assert [each.run_id for each in kept] == [engine.run_id] * 4 + [-1, -1] and live.run_id == engine.run_id
    assert [each.seed for each in kept] == list(writer.seeds) and kept[5].seed == 3


def test_a_recording_from_before_there_were_origins_is_read_and_goes_on_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "ORIGINS", ())
        keep(tmp_path, range(2))
    names = pq.read_schema(tmp_path / fmt.EPISODES.format(chunk_index=0, file_index=0)).names
    assert "ejax/seed" in names and "ejax/attempt" not in names
    keep(tmp_path, range(2, 4), append=True)
    assert pq.read_schema(tmp_path / fmt.EPISODES.format(chunk_index=0, file_index=0)).names == names
    assert check_numbers(tmp_path) == 4
    drawn = RecordedEpisodes(tmp_path).sample_batch(50, 3)["episode"]
    assert set(drawn["seed"]) == {0, 1, 2, 3}
    assert {name: set(drawn[name]) for name in ("attempt", "generation", "run_id")} == {
        name: {-1} for name in ("attempt", "generation", "run_id")
    }


@pytest.mark.parametrize("several", [0, 3])
def test_a_stopped_recording_goes_on_as_if_it_had_not_been(tmp_path: Path, several: int) -> None:
    task_cfg = {"several": several, "at": {2: "unsuccessful"}}
    for folder, parts in (("whole", [8]), ("parts", [4, 1, 3])):
        for part in parts:
            with EpisodeWriter(tmp_path / folder, Toy().spec(), fps=20, append=True) as writer:
                record(Seeded(**task_cfg), writer, part, seed=1)
    whole, parts = EpisodeReader(tmp_path / "whole"), EpisodeReader(tmp_path / "parts")
    assert [whole.fields(i)["seed"] for i in range(8)] == [parts.fields(i)["seed"] for i in range(8)]
    for first, second in zip(whole, parts, strict=True):
        assert_same_tree(first.frames, second.frames)


class Seeded(Toy):
    """Misbehaves by the seed, not by the number of the attempt: a task that depends on nothing else."""

    def generate(self, seed: int) -> Any:
        self.attempts = 2 if seed % 5 == 0 else 100
        return super().generate(seed)


def test_a_stream_of_an_engine_is_recorded_in_order(tmp_path: Path) -> None:
    cfg = OnlineDataEngineCfg(task=Toy, buffer_size=4, max_episode_steps=20)
    with OnlineDataEngine(cfg) as engine, EpisodeWriter(tmp_path, Toy().spec(), fps=20) as writer:
        record_stream(engine, writer, 11)
    seeds = list(writer.seeds)
    assert len(seeds) == 11 and seeds == sorted(set(seeds))
    reader = EpisodeReader(tmp_path)
    for number, back in enumerate(reader):
        assert (back.frames["actions"] == seeds[number] % 2**20).all()
        assert reader.instruction(number) == "push the cube"


def test_a_task_without_success_is_given_up(tmp_path: Path) -> None:
    with (
        EpisodeWriter(tmp_path, Toy().spec(), fps=20) as writer,
        pytest.raises(RuntimeError, match=r"in 3 attempts in a row.*: no way to the goal"),
    ):
        record(Toy(at=dict.fromkeys(range(9), "fail")), writer, 1, max_attempts=3)


def test_the_command_line_takes_the_rate_of_the_task_and_the_names_of_lerobots_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "control_period", 0.04, raising=False)
    command = ["--task", "data_tasks:Toy", "--task-cfg", '{"lengths": [7]}', "--episodes", "1", "--to"]
    for name, options, fps in (("own", [], 25), ("given", ["--fps", "20"], 20)):
        assert main([*command, str(tmp_path / name), *options]) == 0
        assert json.loads((tmp_path / name / "meta/info.json").read_text())["fps"] == fps
    frames = {
        "obs/state": ((3,), "float32"),
        "obs/wrist/color": ((8, 8, 3), "uint8"),
        "actions": ((2,), "float32"),
        "rewards": ((), "float32"),
    }
    names = {"obs/state": "observation.state", "obs/wrist/color": "observation.images.wrist.color"}
    assert policy_names(EpisodeSpec(frames), {}) == {**names, "actions": "action"}
    assert policy_names(EpisodeSpec(frames), {"rewards": "action"}) == {**names, "rewards": "action"}


def test_the_command_line_records_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--task", "data_tasks:Toy", "--task-cfg", '{"lengths": [7]}', "--to", str(tmp_path), "--fps", "20"]
    assert main([*command, "--episodes", "2"]) == 0
    assert main([*command, "--episodes", "2"]) == 1
    assert "pass append=True" in capsys.readouterr().err
    assert main([*command, "--episodes", "3", "--append"]) == 0
    assert f"{tmp_path} has 5 episodes" in capsys.readouterr().out
    assert EpisodeReader(tmp_path).lengths.tolist() == [7] * 5
    assert main(["--task", "Toy", "--episodes", "1", "--to", str(tmp_path)]) == 1
    assert "write it as package.module:Name" in capsys.readouterr().err


def test_without_pyarrow_the_extra_is_named_and_the_engine_works() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; import ejax.data; import ejax.data.lerobot.recorded"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install -e '.[data]'" in done.stderr
    code = "import sys, ejax.data; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def with_features(folder: Path, features: dict[str, Any]) -> Path:
    """Copy LeRobot's set with further features: numbers [1] of every frame, or those of the last one and 0 before."""
    shutil.copytree(GOLDEN, folder)
    info = json.loads((folder / "meta/info.json").read_text())
    (file,) = folder.glob("data/*/*.parquet")
    table = pq.read_table(file)
    lasts = np.cumsum([6, 7, 8]) - 1
    for name, value in features.items():
        column = np.zeros(21, bool if isinstance(value, bool) else np.float32)
        column[lasts if isinstance(value, bool) else slice(None)] = value
        info["features"][name] = {"dtype": column.dtype.name, "shape": [1], "names": None}
        table = table.append_column(name, pa.array(column))
    pq.write_table(table, file)
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def test_features_named_like_parts_of_others_are_beside_them(tmp_path: Path) -> None:
    inner = {"action.original": 1.0, "action.original.x": 2.0, "observation.state.joint.position": 3.0, "remark.x": 4.0}
    reader = EpisodeReader(with_features(tmp_path / "set", inner))
    frames = reader[0].frames
    assert frames["action"].shape == (6, 2) and frames["observation"]["state"].shape == (6, 3)
    assert frames["action.original"][0] == 1.0 and frames["action.original.x"][0] == 2.0
    assert frames["observation"]["state.joint.position"][0] == 3.0
    assert frames["remark"]["x"][0] == 4.0, "text is skipped, so there is nothing to be beside"
    assert RecordedEpisodes(reader.folder).sample_batch(2, 3)["action.original"].shape == (2, 3, 1)


def test_names_that_stay_equal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"info\.json.*'reward/x' is given twice"):
        EpisodeReader(with_features(tmp_path / "set", {"reward.x": 0.0, "reward/x": 1.0}))


@cases(
    "flags terminated",
    ({}, True),
    ({"next.done": True}, True),
    ({"next.done": False}, False),
    ({"next.done": False, "next.truncated": True}, False),
    ({"next.done": True, "next.truncated": True}, False),
    ({"next.done": True, "next.truncated": True, "next.success": True}, True),
    ({"next.done": True, "next.truncated": False}, True),
    ({"next.truncated": True}, False),
    ({"next.truncated": False}, True),
    ({"next.terminated": False, "next.done": True}, False),
    ({"next.terminated": True, "next.truncated": True}, True),
    ({"is_terminal": False}, False),
    ({"next.success": True}, True),
    ({"next.success": False}, False),
)
def test_an_episode_ends_as_the_flags_of_its_last_frame_say(tmp_path: Path, flags: dict, terminated: bool) -> None:
    reader = EpisodeReader(with_features(tmp_path / "set", flags))
    assert reader[1].terminated is terminated
    assert reader[1].success is flags.get("next.success", True)
    window = reader.window(1, 5, 2)
    assert window["terminated"].tolist() == [False, terminated]
    assert window["truncated"].tolist() == [False, not terminated]


@cases("splits training", ({"train": "0:2", "val": "2:3"}, [0, 1]), ({"test": "0:3"}, [0, 1, 2]), (None, [0, 1, 2]))
def test_the_training_split_of_a_set_is_drawn_from(tmp_path: Path, splits: Any, training: list[int]) -> None:
    folder = with_features(tmp_path / "set", {})
    info = json.loads((folder / "meta/info.json").read_text()) | {"splits": splits}
    (folder / "meta/info.json").write_text(json.dumps(info))
    assert list(EpisodeReader(folder).training) == training
    assert len(RecordedEpisodes(folder)) == len(training) and len(RecordedEpisodes(folder, episodes=[2])) == 1
