"""Change a recording by one episode: new versions of the files that have one more."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.commit import Change
from ejax.data.lerobot.files import KeptFiles, inside
from ejax.data.lerobot.format import Column, combine_stats, feature_stats
from ejax.data.lerobot.pictures import encode_png, encode_video, join_videos
from ejax.data.lerobot.recording import Recording, data_groups, parquet_file, place, video_pattern
from ejax.data.task import Episode, Origin

_EPISODES_PER_FILE = 500
"""Rows of a file of ``meta/episodes``, which is rewritten with every episode."""


def write_episode(
    change: Change,
    recording: Recording,
    episode: Episode,
    instruction: str,
    origin: Origin,
) -> Recording:
    """Write all files that an episode changes, and commit; return the recording with it.

    ``episode`` has checked arrays: ``frames`` [T, ...] and ``fields`` by path. Raises OSError as ``Change.commit``.
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
    append = _Append(change, recording)
    row = {"episode_index": index, "tasks": [instruction], "length": length}
    row |= {"dataset_from_index": first, "dataset_to_index": first + length}
    row |= append.data(episode.frames, numbers)
    for column in format.videos:
        row |= append.video(column, episode.frames[column.path])
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
    new = replace(
        recording,
        info={**info, **counts, "splits": {"train": f"0:{index + 1}"}},
        stats={name: combine_stats(recording.stats[name], of) if index else of for name, of in stats.items()},
        rows=(*recording.rows, row | append.meta()),
    )
    new.write_meta(change)  # last of the files: it has the places of all others
    return replace(new, digests=change.commit(recording.digests))


class _Append:
    """The files that grow with an episode, each until it has its size; each method returns its part of the row."""

    def __init__(self, change: Change, recording: Recording) -> None:
        self._change, self._recording, self._format = change, recording, recording.format
        self._files = KeptFiles(change.folder)

    def data(self, frames: Mapping[str, NDArray[Any]], numbers: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        schema = fmt.data_schema(self._format.columns)
        arrays = [_array(frames[column.path], column) for column in self._format.columns if column.kind != "video"]
        groups = [pa.table([*arrays, *map(pa.array, numbers.values())], schema=schema)]
        data = parquet_file(schema, groups)
        entries, grows = self._place("data", fmt.DATA, len(data))
        name = place(entries, "data", fmt.DATA)
        if grows:  # a Parquet file cannot grow: it is written again
            before = data_groups(self._files, name, len(self._recording.rows))
            data = parquet_file(schema, [*before, *groups])
        self._change.write(name, data)
        return entries

    def video(self, column: Column, frames: NDArray[np.uint8]) -> dict[str, Any]:
        key, pattern, fps, before = f"videos/{column.feature}", video_pattern(column), self._format.fps, 0
        # encoded alone and joined without encoding again: the frames before keep their bits, however often it grows
        alone = self._change.path("episode.mp4")
        encode_video(alone, frames, fps)
        entries, grows = self._place(key, pattern, alone.stat().st_size)
        name = place(entries, key, pattern)
        if grows:
            before = round(self._recording.rows[-1][f"{key}/to_timestamp"] * fps)  # frames, counted from the time
            join_videos([self._files.check(name), alone], self._change.path(name))
            alone.unlink()
        else:
            alone.rename(self._change.path(name))
        return entries | {f"{key}/from_timestamp": before / fps, f"{key}/to_timestamp": (before + len(frames)) / fps}

    def meta(self) -> dict[str, Any]:
        is_full = len(self._recording.last_rows) >= _EPISODES_PER_FILE
        return self._place("meta/episodes", fmt.EPISODES, 0, new=is_full)[0]

    def _place(self, key: str, pattern: str, size: int, *, new: bool = False) -> tuple[dict[str, Any], bool]:
        """Find the file for ``size`` more bytes: its entries of a row, and True if it is there and grows."""
        if not self._recording.rows:
            return {f"{key}/chunk_index": 0, f"{key}/file_index": 0}, False
        last = self._recording.rows[-1]
        chunk, file = last[f"{key}/chunk_index"], last[f"{key}/file_index"]
        there = inside(self._files.folder, place(last, key, pattern)).stat().st_size
        grows = not new and (size == 0 or there + size <= self._format.file_size_mb * 2**20)
        if not grows:
            chunk, file = (chunk, file + 1) if file + 1 < fmt.FILES_PER_CHUNK else (chunk + 1, 0)
        return {f"{key}/chunk_index": chunk, f"{key}/file_index": file}, grows


def _array(values: NDArray[Any], column: Column) -> pa.Array:
    if column.kind != "png":
        return fmt.to_arrow(values, column)
    return pa.array([{"bytes": encode_png(frame), "path": None} for frame in values], fmt.PNG_TYPE)
