"""Folders that are not what they seem: nothing outside is read or written, and damage is named."""

import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kept_episodes
import numpy as np
import pyarrow.parquet as pq
import pytest
from case_tables import cases, refused
from kept_episodes import (
    CAMERA,
    SPEC,
    camera_episode,
    check_numbers,
    copied,
    episode,
    instruction,
    keep,
    length,
    pictures,
)
from PIL import Image

from ejax.data import Episode, EpisodeSpec
from ejax.data.lerobot.files import inside
from ejax.data.lerobot.pictures import decode_image, decode_video
from ejax.data.lerobot.read import EpisodeReader
from ejax.data.lerobot.write import EpisodeWriter
from ejax.data.task import flatten

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_v3"
DATA, INFO, OURS = "data/chunk-000/file-000.parquet", "meta/info.json", "meta/ejax.json"
ROWS, STATS, TASKS = "meta/episodes/chunk-000/file-000.parquet", "meta/stats.json", "meta/tasks.parquet"
VIDEO = "videos/obs.camera/chunk-000/file-000.mp4"
ALL = EpisodeSpec({**SPEC.frames, "obs/camera": CAMERA.frames["obs/camera"]}, SPEC.episode)
BOUND_S = 90
"""No test waits longer for what must not wait at all."""


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test that hangs fail, and nothing wait for the disk."""

    def hang(number: int, frame: int) -> None:
        raise AssertionError(f"no end within {BOUND_S} s")

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(BOUND_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", params=["png", "video"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five episodes of ALL, in each of the two ways to keep images."""
    folder = tmp_path_factory.mktemp("recorded") / request.param
    with EpisodeWriter(folder, ALL, fps=20, images=request.param) as writer:
        for number in range(5):
            writer.append(recorded_episode(number), instruction(number), seed=number)
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Three episodes of SPEC, to be spoiled."""
    keep(tmp_path / "set", range(3))
    return tmp_path / "set"


def recorded_episode(number: int) -> Episode:
    made = episode(number)
    frames = {**flatten(made.frames), "obs/camera": pictures(number, length(number))}
    return Episode(frames, segment_id=made.segment_id, fields=made.fields, terminated=made.terminated)


def content(folder: Path) -> list[dict[str, Any]]:
    """All that is read of a folder."""
    reader = EpisodeReader(folder)
    return [
        {
            **flatten(each.frames),
            **{f"episode/{path}": value for path, value in reader.fields(i).items()},
            "segment_id": each.segment_id,
            "terminated": each.terminated,
        }
        for i, each in enumerate(reader)
    ]


def snapshot(folder: Path) -> dict[str, Any]:
    """All below a folder but the lock, with what links lead to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name != ".lock":
            found[str(path)] = os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
    return found


def append(folder: Path, number: int = 3, **options: Any) -> None:
    with EpisodeWriter(folder, SPEC, fps=20, append=True, **options) as writer:
        writer.append(episode(number), instruction(number))


def replace(folder: Path, name: str, put: Callable[..., Any]) -> None:
    """Put something else in the place of a file."""
    (folder / name).unlink()
    put(folder / name)


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # a socket's name has a hundred characters at most
        try:
            made.bind(path.name)
        finally:
            os.fchdir(here)
            os.close(here)


@pytest.mark.parametrize("place", ["data", "data/chunk-000", "meta", "meta/episodes", ".staging"])
def test_a_folder_that_is_a_link_is_not_written_through(kept: Path, place: str) -> None:
    outside = kept.parent / "outside"
    if (kept / place).exists():
        shutil.move(kept / place, outside)
    else:
        outside.mkdir()
        (outside / "mine").write_text("precious")
    (kept / place).symlink_to(outside)
    before = snapshot(kept.parent)
    refused(append, kept, match=r"leads out of")
    assert snapshot(kept.parent) == before


@pytest.mark.parametrize("name", [DATA, INFO, OURS, ROWS, STATS, TASKS, ".lock"])
def test_a_file_that_is_a_link_to_another_elsewhere_is_neither_read_nor_written(kept: Path, name: str) -> None:
    outside = kept.parent / "outside"
    (kept / name).parent.mkdir(exist_ok=True, parents=True)
    outside.write_bytes((kept / name).read_bytes() if (kept / name).exists() else (kept / INFO).read_bytes())
    (kept / name).unlink(missing_ok=True)
    (kept / name).symlink_to(outside)
    before = snapshot(kept.parent)
    refused(append, kept, match=r"leads out of .*set.*, to .*outside; .*cp -rL")
    assert snapshot(kept.parent) == before


def test_the_lock_of_a_folder_empties_no_file(kept: Path) -> None:
    (kept / ".lock").write_text("mine")
    append(kept)
    assert (kept / ".lock").read_text() == "mine"


@pytest.mark.parametrize("put", ["data", "meta", "*"])
@pytest.mark.parametrize("grows", [True, False], ids=["files grow", "files begin"])
def test_what_is_ahead_of_the_count_is_left_out_by_the_next_append(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool, put: str
) -> None:
    """As a crash leaves it while files are put in place, ``info.json`` last; also those of another recording."""
    options = {"file_size_mb": 16.0 if grows else 1e-6}
    monkeypatch.setattr("ejax.data.lerobot.write.EPISODES_PER_FILE", 500 if grows else 1)
    append(kept, 3, **options)
    before, ahead = copied(kept, tmp_path), tmp_path / "ahead"
    shutil.copytree(kept, ahead)
    append(ahead, 7, **options)
    for path in filter(Path.is_file, ahead.glob(f"{put}/**/*")):
        name = path.relative_to(ahead)
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, kept / name)
    (kept / INFO).write_bytes((before / INFO).read_bytes())
    (kept / ".staging/payload").mkdir(parents=True)
    (kept / ".staging/payload/README.md").write_text("of no writer")
    with pytest.warns(UserWarning, match="was when the recording was cut off"):
        assert check_numbers(kept) == 4
    with pytest.warns(UserWarning, match="is lost, and the 4 before it are complete"):
        append(kept, 4, **options)
    append(before, 4, **options)
    assert pq.read_table(kept / "data") == pq.read_table(before / "data")
    assert json.loads((kept / STATS).read_text()) == json.loads((before / STATS).read_text())
    assert check_numbers(kept) == 5


def test_a_recording_that_was_cut_off_before_its_first_file_is_begun_again(tmp_path: Path) -> None:
    """Folders are made before the change counts."""
    (tmp_path / "set/meta").mkdir(parents=True)
    (tmp_path / "set/.staging/meta").mkdir(parents=True)
    append(tmp_path / "set", 0)
    assert check_numbers(tmp_path / "set") == 1


def test_a_video_with_frames_ahead_of_the_count_grows_no_further(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, CAMERA, fps=30) as writer:
        writer.append(camera_episode(0), "look")
        info = (tmp_path / INFO).read_bytes()
        writer.append(camera_episode(7), "look")
    (tmp_path / INFO).write_bytes(info)
    (tmp_path / ".staging").mkdir()
    with (
        pytest.warns(UserWarning, match="is lost, and the 1 before"),
        EpisodeWriter(tmp_path, CAMERA, fps=30, append=True) as writer,
    ):
        for number in (1, 2):
            writer.append(camera_episode(number), "look")
    assert len(list(tmp_path.glob("videos/*/*/*.mp4"))) == 2
    for number, back in enumerate(EpisodeReader(tmp_path)):
        inner, expected = np.r_[0:10, 14:24], pictures(number, length(number))  # away from the edge of the greys
        off = back.frames["obs"]["camera"][:, :, inner].astype(int) - expected[:, :, inner]
        assert np.abs(off).max() <= 8


def test_a_folder_that_lost_its_counts_is_not_begun_again(kept: Path) -> None:
    (kept / INFO).unlink()
    before = snapshot(kept)
    refused(append, kept, match=r"meta/info\.json is missing", error=FileNotFoundError)
    assert snapshot(kept) == before


def test_an_append_to_a_recording_of_an_earlier_release_removes_its_list_of_digests(kept: Path) -> None:
    (kept / "meta/ejax_digests.json").write_text("{}")
    assert check_numbers(kept) == 3
    append(kept)
    assert check_numbers(kept) == 4 and not (kept / "meta/ejax_digests.json").exists()


@pytest.mark.parametrize("key", ["data_path", "video_path"])
@cases(
    "template why",
    ("../elsewhere/file-{file_index:03d}", r"leads out of the folder by '\.\.'"),
    ("data/../../file-{file_index:03d}", r"leads out of the folder by '\.\.'"),
    ("/etc/passwd", "is an absolute path"),
    ("https://example.org/{file_index}.mp4", "is a URL"),
    ("concat:data/a.mp4|data/b.mp4", "is a URL"),
    ("data/{chunk_index.__class__}", "has the field '{chunk_index.__class__}'"),
    ("data/{chunk_index!r}", "has the field '{chunk_index!r}'"),
    ("data/{chunk_index:0999999999d}", "has the field"),
    ("data/{episode_index:06d}", "has the field '{episode_index:06d}'"),
    ("data/{0}", "has the field"),
    ("data/{", "has the field '{'"),
    ("data/\n{file_index}", "cannot be printed"),
    ("x" * 5000, "has 5000 characters"),
    ("", "is not a path|lacks"),
    (7, "is not a path"),
    (["data"], "is not a path"),
)
def test_a_path_of_the_metadata_that_is_none_below_the_folder_is_refused_by_name(
    tmp_path: Path, key: str, template: int | list[str] | str, why: str
) -> None:
    folder = copied(GOLDEN, tmp_path)
    info = json.loads((folder / INFO).read_text())
    (folder / INFO).write_text(json.dumps(info | {key: template}))
    raised = refused(EpisodeReader, folder, match=why)
    assert "info.json" in str(raised) and key in str(raised) and len(str(raised)) < 800


def test_the_number_of_a_file_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = copied(GOLDEN, tmp_path)
    path = folder / ROWS
    table = pq.read_table(path)
    column = table.schema.get_field_index("data/file_index")
    pq.write_table(table.set_column(column, "data/file_index", [["../../../x"] * len(table)]), path)
    refused(EpisodeReader, folder, match=r"column data/file_index is text, and must be int64")


@pytest.mark.parametrize("name", [INFO, ROWS, DATA, "videos/observation.images.front/chunk-000/file-000.mp4"])
@cases(
    "put kind",
    (os.mkfifo, "is a named pipe, no"),
    (bind_socket, "is a socket, no"),
    (Path.mkdir, "Is a directory"),
    (lambda path: path.symlink_to("/dev/zero"), "leads out of"),
    (lambda path: path.symlink_to(GOLDEN / INFO), "leads out of"),
    (lambda path: path.symlink_to(path.name), "has no file"),
    ids=["pipe", "socket", "folder", "device", "link", "circle"],
)
def test_what_is_no_plain_file_is_refused_and_never_waited_for(
    tmp_path: Path, name: str, put: Callable[..., Any], kind: str
) -> None:
    folder = copied(GOLDEN, tmp_path)
    replace(folder, name, put)
    raised = refused(content, folder, match=kind)
    assert Path(name).name in str(raised)


@pytest.mark.parametrize("name", [INFO, OURS])
def test_small_files_are_bounded(kept: Path, name: str) -> None:
    os.truncate(kept / name, 1 << 27)
    refused(append, kept, match=r"has 134217728 bytes; at most 67108864 are read; restore it")
    refused(content, kept, match=r"has 134217728 bytes; at most 67108864 are read; restore it")


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    folder = copied(GOLDEN, tmp_path)
    (folder / DATA).rename(folder / "frames")
    (folder / DATA).symlink_to("../../frames")
    (tmp_path / "link").symlink_to(folder)  # and the folder itself may be one
    np.testing.assert_equal(content(tmp_path / "link"), content(GOLDEN))


def test_a_file_elsewhere_in_the_system_is_not_inside(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set-2").mkdir()
    (tmp_path / "set-2/x").write_text("")
    (tmp_path / "set/x").symlink_to("../set-2/x")
    with pytest.raises(ValueError, match="leads out of"):  # though its name begins alike
        inside(tmp_path / "set", "x")
    assert inside(tmp_path / "set", "not/there") == tmp_path / "set/not/there"


@pytest.mark.parametrize("listed", ["#EXTM3U\n#EXTINF:1,\n{}\n", "ffconcat version 1.0\nfile '{}'\n"])
def test_a_video_that_is_a_list_of_other_files_is_not_followed(tmp_path: Path, listed: str) -> None:
    secret = tmp_path / "secret.mp4"
    shutil.copy(GOLDEN / "videos/observation.images.front/chunk-000/file-000.mp4", secret)
    (tmp_path / "video.mp4").write_text(listed.format(secret))
    refused(decode_video, tmp_path / "video.mp4", 0.0, 10.0, (64, 96, 3), 1, match=r"video\.mp4 is not an MP4 file")


def test_images_of_other_formats_are_not_tried() -> None:
    for name in ("BMP", "GIF", "EPS"):
        file = io.BytesIO()
        Image.new("RGB", (4, 4)).save(file, name)
        refused(decode_image, file.getvalue(), (4, 4, 3), "frame 3", match="frame 3: not a PNG or JPEG image")
    file = io.BytesIO()
    Image.new("RGB", (4, 6)).save(file, "PNG")
    with pytest.raises(ValueError, match=r"an image is \[6, 4, 3\]; in info.json it is \[4, 6, 3\]"):
        decode_image(file.getvalue(), (4, 6, 3))


INT8 = {"dtype": "int8"}


@cases(
    "name key value message",
    (INFO, "", [], "is LeRobot"),
    (INFO, "codebase_version", ["v3.0"], "is LeRobot"),
    (INFO, "codebase_version", "v2.1", r"is LeRobot v2\.1; v3\.0 can be read\. .*convert_dataset_v21_to_v30"),
    (INFO, "codebase_version", "v4.0", r"is LeRobot v4\.0; v3\.0 can be read"),
    (INFO, "fps", None, "has 'fps' None: Input should be a valid number"),
    (INFO, "fps", "20", "has 'fps' '20': Input should be a valid number"),
    (INFO, "fps", -1, "'fps' -1: Input should be greater than 0"),
    (INFO, "fps", True, "'fps' True"),
    (INFO, "total_episodes", -1, "'total_episodes' -1: "),
    (INFO, "total_episodes", 1.5, "'total_episodes' 1.5: "),
    (INFO, "total_episodes", 10**40, "total_episodes"),
    (INFO, "total_episodes", 9, "has 3 episodes in meta/episodes, its info.json has 9"),
    (INFO, "features", [], r"has 'features' \[\]"),
    (INFO, "features", {}, "in info.json it is None"),
    (INFO, "features.actions", 3, "has 'features.actions' 3"),
    (INFO, "features.x", {"dtype": 3}, "has 'features.x.dtype' 3"),
    (INFO, "features.x", {**INT8, "shape": [-1]}, r"features\.x'.*shape \[-1\] must be"),
    (INFO, "features.x", {**INT8, "shape": None}, r"features\.x'.*shape None must be"),
    (INFO, "features...", {"dtype": "video", "shape": [2]}, r"a video '\.\.'"),
    (OURS, "version", 2, "has 'version' 2: Input should be 1"),
    (OURS, "", [], r"has 'content' \[\]"),
    (OURS, "frames", None, "has 'frames' None"),
    (OURS, "episode", {"mark": 3}, "has 'episode.mark' 3"),
    (OURS, "episode", {"mark": {"shape": [], "dtype": "O"}}, "fields that no episode can have"),
    (OURS, "episode", {"mark": {"shape": [], "dtype": "f4,(9,9)f4"}}, "should match pattern"),
    (OURS, "frames.actions.feature", "y", "as .y., .*in info.json it is None"),
    (OURS, "frames.actions", {"shape": [], "dtype": "float32", "feature": "rewards"}, "is another field's, too"),
)
def test_metadata_of_another_kind_are_refused_with_what_is_wrong(
    kept: Path, name: str, key: str, value: Any, message: str
) -> None:
    tree = node = json.loads((kept / name).read_text())
    *sections, last = key.split(".", 1) if key == "features..." else key.split(".")
    for section in sections:
        node = node[section]
    node[last] = value
    (kept / name).write_text(json.dumps(tree if key else value))
    before = snapshot(kept)
    for use in (EpisodeReader, append):
        raised = refused(use, kept, match=message)
        assert str(kept) in str(raised) and len(str(raised)) < 800
    assert snapshot(kept) == before


def test_a_writer_names_the_entry_in_which_a_folder_differs(kept: Path) -> None:
    spec = EpisodeSpec({**SPEC.frames, "actions": ((5,), "float32")}, SPEC.episode)
    with pytest.raises(ValueError, match=r"set has features/actions/shape \[4\], the writer \[5\]; make the"):
        EpisodeWriter(kept, spec, fps=20, append=True)


def test_a_file_that_is_cut_off_is_named_with_the_remedy(recorded: Path, tmp_path: Path) -> None:
    folder = copied(recorded, tmp_path)
    for name in (INFO, OURS, ROWS, DATA, *([VIDEO] if (folder / VIDEO).exists() else [])):
        whole = (folder / name).read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:size])
            raised = refused(content, folder, error=(ValueError, RuntimeError))
            assert str(folder / name) in str(raised)
        (folder / name).unlink()
        if name in (DATA, VIDEO):
            refused(content, folder, match=f"is missing; restore it: '.*{Path(name).name}'", error=FileNotFoundError)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("name", [STATS, TASKS])
def test_what_follows_from_the_rows_is_made_right_by_an_append(kept: Path, tmp_path: Path, name: str) -> None:
    whole = copied(kept, tmp_path)
    (kept / name).write_bytes(b"damaged")
    for folder in (kept, whole):
        append(folder)
    assert (kept / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("name", [ROWS, DATA])
def test_a_bit_of_a_page_that_flipped_is_found_and_not_taken_over_into_what_is_appended(kept: Path, name: str) -> None:
    meta, data = pq.read_metadata(kept / name), bytearray((kept / name).read_bytes())
    columns = [meta.row_group(0).column(i) for i in range(meta.num_columns)]
    named = "actions" if name == DATA else "ejax/written_at"  # any other number would do
    (column,) = (each for each in columns if each.path_in_schema.startswith(named))
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    (kept / name).write_bytes(data)
    before = snapshot(kept)
    for use in (content, append):
        refused(use, kept, match=f"{Path(name).name} cannot be read.*restore")
    assert snapshot(kept) == before


def test_a_damaged_video_is_not_joined_to(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, CAMERA, fps=30) as writer:
        writer.append(camera_episode(0), "look")
        whole = (tmp_path / VIDEO).read_bytes()
        (tmp_path / VIDEO).write_bytes(b"damaged" + whole)
        before = snapshot(tmp_path)
        with pytest.raises(ValueError, match=r"file-000\.mp4 is not an MP4 file, or is damaged; restore it"):
            writer.append(camera_episode(1), "look")
        assert snapshot(tmp_path) == before
        (tmp_path / VIDEO).write_bytes(whole)
        writer.append(camera_episode(1), "look")


@pytest.mark.slow
def test_damage_raises_nothing_but_errors_that_name_the_file(recorded: Path, tmp_path: Path) -> None:
    """Some of it goes unnoticed, such as a number of ``stats.json``; the rest is reported."""
    folder, chance = copied(recorded, tmp_path), random.Random(1)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    reported = 0
    for number in range(60):
        path = files[number % len(files)]
        data = path.read_bytes()
        start = chance.randrange(len(data))
        path.write_bytes(data[:start] + chance.randbytes(8) + data[start + chance.randrange(16) :])
        try:
            content(folder)
        except (ValueError, RuntimeError) as error:
            assert str(folder) in str(error) and (isinstance(error, ValueError) or "ffmpeg" in str(error))
            assert len(str(error)) < 1200
            reported += 1
        path.write_bytes(data)
    assert reported > 20


@pytest.mark.slow
def test_a_reader_reads_on_while_its_files_are_replaced(kept: Path) -> None:
    reader = EpisodeReader(kept, cache_mb=0)
    for number in range(3, 8):
        append(kept, number)
        for index in range(3):
            np.testing.assert_array_equal(reader[index].frames["actions"], episode(index).frames["actions"])


@pytest.mark.slow
def test_readers_meet_no_damage_in_the_middle_of_appends(tmp_path: Path) -> None:
    keep(tmp_path / "set", [0])
    helper = [sys.executable, kept_episodes.__file__, "keep", str(tmp_path / "set")]
    writing = subprocess.Popen(helper, stdout=subprocess.PIPE, text=True)
    try:
        writing.stdout.readline()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*an episode is being written")
            seen = [check_numbers(tmp_path / "set")]
            deadline = time.monotonic() + 60.0
            while (len(seen) < 30 or seen[-1] == seen[0]) and time.monotonic() < deadline:
                seen.append(check_numbers(tmp_path / "set"))
    finally:
        writing.kill()
        writing.communicate()
    assert seen == sorted(seen) and seen[-1] > seen[0]


def test_files_that_systems_and_editors_leave_are_no_part_of_it(kept: Path) -> None:
    for folder in [kept, *(path for path in kept.rglob("*") if path.is_dir())]:
        for path in [*folder.iterdir(), folder / "x.parquet"]:
            path.with_name(f"._{path.name}").write_bytes(b"\0\5\26\7" + bytes(4092))
        (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert check_numbers(kept) == 3
    append(kept)
    assert check_numbers(kept) == 4
    new = kept.with_name("new")
    new.mkdir()
    (new / ".DS_Store").write_bytes(b"")
    keep(new, [0])  # as into an empty folder
    assert check_numbers(new) == 1
