"""Episodes written to a LeRobot v3.0 dataset, which grows by whole episodes and is readable after each.

When ``append`` returns, the episode is on the disk; until then the folder has the episodes before. An episode costs
rewriting half of ``file_size_mb`` on average, as Parquet and MP4 files cannot grow; so files are smaller here than
LeRobot's.
"""

import fcntl
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import inside
from ejax.data.lerobot.format import Column, Images, combine_stats, feature_stats, make_columns
from ejax.data.lerobot.parquet import open_parquet, parquet_file
from ejax.data.lerobot.pictures import encode_png, encode_video, join_videos
from ejax.data.lerobot.recording import STAGING, Format, Recording, file_of, marked, open_recording
from ejax.data.task import Episode, EpisodeSpec, Origin, check_episode
from ejax.schema.plain_files import is_side_file
from ejax.schema.writing import append_file, make_folder

EPISODES_PER_FILE = 500
"""Rows of a file of ``meta/episodes``, which is rewritten with every episode."""
_FORMER_DIGESTS = "meta/ejax_digests.json"
"""List of SHA-256 that earlier releases kept, and that an append would make wrong."""


def write_episode(recording: Recording, episode: Episode, instruction: str, origin: Origin) -> Recording:
    """Write all files that an episode changes; return the recording with it.

    ``episode`` has checked arrays: ``frames`` [T, ...] and ``fields`` by path. OSError: the disk is full, or fails; the
    folder is then as after a crash.
    """
    format, info, length = recording.format, recording.info, len(next(iter(episode.frames.values())))
    index, first, tasks = len(recording.rows), info["total_frames"], recording.tasks
    tasks.setdefault(instruction, len(tasks))
    segment_id = np.zeros(length) if episode.segment_id is None else episode.segment_id
    numbers = {
        "timestamp": (np.arange(length) / format.fps).astype(np.float32),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, index),
        "index": first + np.arange(length),
        "task_index": np.full(length, tasks[instruction]),
        "segment_id": np.asarray(segment_id, np.int64),
    }
    stats = {c.feature: feature_stats(episode.frames[c.path], image=c.is_image) for c in format.columns if c.has_stats}
    stats |= {name: feature_stats(values) for name, values in numbers.items()}
    row = {"episode_index": index, "tasks": [instruction], "length": length}
    row |= {"dataset_from_index": first, "dataset_to_index": first + length}
    row |= {f"stats/{feature}/{name}": value.tolist() for feature, of in stats.items() for name, value in of.items()}
    row |= {"ejax/written_at": time.time(), "ejax/terminated": episode.terminated}
    row |= {f"ejax/{name}": value for name, value in origin._asdict().items()}
    # ids are at least 0: the first frame differs from -1
    starts = np.flatnonzero(np.diff(numbers["segment_id"], prepend=-1))
    row["ejax/segment_ids"] = numbers["segment_id"][starts].tolist()
    row["ejax/segment_lengths"] = np.diff(starts, append=length).tolist()
    for path, value in episode.fields.items():
        row[f"ejax/episode/{path}"] = (np.char.decode(value, "utf-8") if value.dtype.kind == "S" else value).tolist()
    counts = {"total_episodes": index + 1, "total_frames": first + length, "total_tasks": len(tasks)}
    with marked(recording.folder) as (staging, was_cut_off):
        append = _Append(recording, staging, was_cut_off)
        row |= append.data(episode.frames, numbers)
        for column in format.videos:
            row |= append.video(column, episode.frames[column.path])
        new = replace(
            recording,
            info={**info, **counts, "splits": {"train": f"0:{index + 1}"}},
            stats={name: combine_stats(recording.stats[name], of) if index else of for name, of in stats.items()},
            rows=(*recording.rows, row | append.meta()),
        )
        # all is encoded and checked: what fails from here on is the disk
        for name in (_FORMER_DIGESTS, *append.gone):
            inside(recording.folder, name).unlink(missing_ok=True)
        new.put_in_place(append.files)
    return new


class _Append:
    """The files that grow with an episode, each until it has its size; a method for each kind returns its row's part.

    Where a recording was cut off, the last file of frames may have rows of the lost episode, or that began the next
    one; either goes. A video may have its frames at the end, which nobody reads: it grows no further.
    """

    def __init__(self, recording: Recording, staging: Path, was_cut_off: bool) -> None:
        self._recording, self._staging, self._was_cut_off = recording, staging, was_cut_off
        self._folder, self._format = recording.folder, recording.format
        self.files: dict[str, bytes | Path] = {}
        """New versions by name, as ``Recording.put_in_place`` takes them."""
        self.gone: list[str] = []
        """Files to be removed."""

    def data(self, frames: Mapping[str, NDArray[Any]], numbers: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        schema = fmt.data_schema(self._format.columns)
        arrays = [_array(frames[column.path], column) for column in self._format.columns if column.kind != "video"]
        groups = [pa.table([*arrays, *map(pa.array, numbers.values())], schema=schema)]
        data = parquet_file(schema, groups)
        entries, grows = self._place("data", fmt.DATA, len(data), grows=True if self._was_cut_off else None)
        name = file_of(entries, "data", fmt.DATA)
        if grows:  # a Parquet file cannot grow: it is written again
            with open_parquet(self._folder, name) as file:
                before = [file.read_row_group(i) for i in range(file.num_row_groups)]
            count = len(self._recording.rows)
            before = [group for group in before if group["episode_index"][0].as_py() < count]
            data = parquet_file(schema, [*before, *groups])
        if grows and self._was_cut_off:
            self.gone.append(file_of(_after(entries, "data"), "data", fmt.DATA))
        self.files[name] = data
        return entries

    def video(self, column: Column, frames: NDArray[np.uint8]) -> dict[str, Any]:
        key, pattern = f"videos/{column.feature}", fmt.VIDEO.replace("{video_key}", column.feature)
        fps, before = self._format.fps, 0
        # encoded alone and joined without encoding again: the frames before keep their bits, however often it grows
        new = alone = self._staging / f"{len(self.files)}.mp4"
        encode_video(alone, frames, fps)
        size = alone.stat().st_size
        entries, grows = self._place(key, pattern, size, grows=False if self._was_cut_off else None)
        name = file_of(entries, key, pattern)
        if grows:
            before = round(self._recording.rows[-1][f"{key}/to_timestamp"] * fps)  # frames, counted from the time
            new = alone.with_name(f"joined_{alone.name}")
            join_videos([inside(self._folder, name), alone], new)
            alone.unlink()
        self.files[name] = new
        return entries | {f"{key}/from_timestamp": before / fps, f"{key}/to_timestamp": (before + len(frames)) / fps}

    def meta(self) -> dict[str, Any]:
        is_full = len(self._recording.last_rows) >= EPISODES_PER_FILE
        return self._place("meta/episodes", fmt.EPISODES, 0, grows=not is_full)[0]

    def _place(self, key: str, pattern: str, size: int, *, grows: bool | None) -> tuple[dict[str, Any], bool]:
        """Find the file for ``size`` more bytes: its entries of a row, and True if it is there and grows. ``grows``
        None: where it has room."""
        if not self._recording.rows:
            return {f"{key}/chunk_index": 0, f"{key}/file_index": 0}, False
        last = self._recording.rows[-1]
        if grows is None:
            there = inside(self._folder, file_of(last, key, pattern)).stat().st_size
            grows = there + size <= self._format.file_size_mb * 2**20
        entries = {name: last[name] for name in (f"{key}/chunk_index", f"{key}/file_index")}
        return entries if grows else _after(entries, key), grows


def _after(entries: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the place of the file after the one at ``entries``."""
    chunk, file = entries[f"{key}/chunk_index"], entries[f"{key}/file_index"] + 1
    chunk, file = (chunk, file) if file < fmt.FILES_PER_CHUNK else (chunk + 1, 0)
    return {f"{key}/chunk_index": chunk, f"{key}/file_index": file}


def _array(values: NDArray[Any], column: Column) -> pa.Array:
    if column.kind != "png":
        return fmt.to_arrow(values, column)
    return pa.array([{"bytes": encode_png(frame), "path": None} for frame in values], fmt.PNG_TYPE)


_LOCK = ".lock"
_MAX_FRAMES = 2**31 - 1
"""Frames that a 32-bit offset can count."""


class EpisodeWriter:
    """A folder that episodes are appended to. A context manager; only one at a time may have the folder.

    Args:
        folder: a new or an empty one; with ``append`` also one that an ``EpisodeWriter`` made before.
        spec: the fields of the episodes. Frame fields of uint8 [H, W, 3] are images.
        names: features by path, see ``make_columns``; LeRobot's policies look for
            ``observation.state``, ``observation.images.<camera>`` and ``action``.
        axes: names of the entries of a field by path, for ``info.json``.
        file_size_mb: size, in MiB, from which the next file is begun.
        append: continue with the folder's episodes; a warning where a crash left a part of one.

    Raises:
        FileExistsError: the folder has something in it and ``append`` is not given.
        BlockingIOError: another writer has it.
        ValueError: fields, rates or names that the format or the folder's content does not allow; a folder with files
            that are damaged, or lead out of it. Nothing was written then.
    """

    def __init__(
        self,
        folder: Path | str,
        spec: EpisodeSpec,
        *,
        fps: int,
        robot_type: str | None = None,
        names: Mapping[str, str] | None = None,
        axes: Mapping[str, Sequence[str]] | None = None,
        images: Images = "video",
        file_size_mb: float = 16.0,
        append: bool = False,
    ) -> None:
        if isinstance(fps, bool) or not isinstance(fps, int | np.integer) or fps < 1:
            raise ValueError(f"fps must be a whole number of at least 1, got {fps!r}")
        if not (math.isfinite(file_size_mb) and file_size_mb > 0):
            raise ValueError(f"file_size_mb must be finite and above 0, got {file_size_mb}")
        self.folder = Path(folder)
        columns = tuple(make_columns(spec, names or {}, images))
        self._format = Format(spec, columns, int(fps), robot_type, axes or {}, file_size_mb)
        make_folder(self.folder)  # after all checks that need no folder
        self._lock: IO[bytes] | None = _lock(self.folder)
        try:
            found = {path.name for path in self.folder.iterdir()} - {_LOCK}
            there = sorted(name for name in found if not is_side_file(name))
            if there and not append:
                raise FileExistsError(
                    f"{self.folder} is not empty, it has {', '.join(there[:5])}; pass append=True to continue with it, "
                    f"or a new folder"
                )
            self._recording = open_recording(self.folder, self._format)
        except BaseException:
            self.close()
            raise
        if (self.folder / STAGING).exists() and self.num_episodes:
            warnings.warn(
                f"{self.folder}: a recording was cut off; an episode that it had not finished is lost, and the "
                f"{self.num_episodes} before it are complete",
                stacklevel=2,
            )

    @property
    def num_episodes(self) -> int:
        return len(self._recording.rows)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of all episodes, in order; -1: unknown."""
        return tuple(row.get("ejax/seed", -1) for row in self._recording.rows)

    def append(self, episode: Episode, instruction: str, *, seed: int = -1, origin: Origin | None = None) -> int:
        """Keep an episode, on the disk when this returns; return its index.

        Args:
            instruction: the demonstrated task in words, LeRobot's "task".
            seed: -1: unknown.
            origin: with its seed in place of ``seed``; a recording begun without whole origins keeps the seed alone.

        Raises:
            ValueError: an episode that is not complete or no success, does not fit the spec, or has a number that is
                not finite. Nothing was written; the writer remains usable.
            OSError: it could not be written, e.g. because the disk is full; the episodes before are as they were.
            RuntimeError: the writer is closed.
        """
        if self._lock is None:
            raise RuntimeError(f"the writer of {self.folder} is closed; make a new one with append=True")
        if not (episode.complete and episode.success):
            raise ValueError("an incomplete or unsuccessful episode is not kept; make it a Failure")
        frames, fields = check_episode(episode, self._format.spec, _MAX_FRAMES)
        for path, values in (frames | fields).items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                where = np.argwhere(~np.isfinite(values))[0].tolist()  # the first of them
                text = f"field '{path}' is {values[tuple(where)]} at {where}; an episode has finite numbers only"
                raise ValueError(text)
        checked, origin = replace(episode, frames=frames, fields=fields), Origin(seed) if origin is None else origin
        try:
            self._recording = write_episode(self._recording, checked, instruction, origin)
        except OSError as error:
            raise OSError(
                error.errno,
                f"episode {self.num_episodes} could not be kept in {self.folder}: {error.strerror or error}; the "
                f"{self.num_episodes} before it are complete. Make room, then continue with append=True",
            ) from error
        return self.num_episodes - 1

    def close(self) -> None:
        """Release the folder. Everything is on the disk already."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _lock(folder: Path) -> IO[bytes]:
    """Return the locked file; the system releases it when the process ends, however it ends."""
    file = append_file(inside(folder, _LOCK), folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        text = f"{folder} is being written to by another EpisodeWriter; close that first"
        raise BlockingIOError(error.errno, text) from error
    return file
