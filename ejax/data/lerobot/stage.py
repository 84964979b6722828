"""Change a recording by one episode: new versions of the files that have one more."""

import io
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.commit import Staged
from ejax.data.lerobot.files import KeptFiles, inside
from ejax.data.lerobot.format import Column, combine_stats, feature_stats
from ejax.data.lerobot.parquet import named, open_parquet
from ejax.data.lerobot.pictures import encode_png, encode_video, join_videos
from ejax.data.lerobot.recording import Recording, to_json
from ejax.data.task import Origin

_EPISODES_PER_FILE = 500
"""Rows of a file of ``meta/episodes``, which is rewritten with every episode."""


def write_start(staged: Staged, recording: Recording) -> Recording:
    staged.write(fmt.OURS, to_json(recording.format.ours()))
    staged.write(fmt.INFO, to_json(recording.info))
    return replace(recording, digests=staged.commit({}))


def write_episode(
    staged: Staged,
    recording: Recording,
    frames: Mapping[str, NDArray[Any]],
    fields: Mapping[str, NDArray[Any]],
    instruction: str,
    origin: Origin,
    terminated: bool,
) -> Recording:
    """Write all files that an episode changes, and commit; return the recording with it.

    ``frames`` [T, ...] by path include ``segment_id``; ``fields`` are the episode's. Raises OSError as
    ``Staged.commit``.
    """
    append, info, length = _Append(staged, recording), recording.info, len(frames["segment_id"])
    format, index, first = recording.format, info["total_episodes"], info["total_frames"]
    tasks = {**recording.tasks, instruction: recording.tasks.get(instruction, len(recording.tasks))}
    numbers = {
        "timestamp": (np.arange(length) / format.fps).astype(np.float32),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, index),
        "index": first + np.arange(length),
        "task_index": np.full(length, tasks[instruction]),
        "segment_id": np.asarray(frames["segment_id"], np.int64),
    }
    stats = {c.feature: feature_stats(frames[c.path], image=c.is_image) for c in format.columns if c.has_stats}
    stats |= {name: feature_stats(values) for name, values in numbers.items()}
    row = {"episode_index": index, "tasks": [instruction], "length": length}
    row |= {"dataset_from_index": first, "dataset_to_index": first + length}
    row |= append.data(frames, numbers)
    for column in format.columns:
        if column.kind == "video":
            row |= append.video(column, frames[column.path])
    row |= {f"stats/{feature}/{name}": value.tolist() for feature, of in stats.items() for name, value in of.items()}
    row |= {"ejax/written_at": time.time(), "ejax/terminated": terminated}
    row |= {f"ejax/{name}": value for name, value in origin._asdict().items()}
    starts = np.flatnonzero(np.diff(numbers["segment_id"], prepend=-1))
    row["ejax/segment_ids"] = numbers["segment_id"][starts].tolist()
    row["ejax/segment_lengths"] = np.diff(starts, append=length).tolist()
    for path, value in fields.items():
        row[f"ejax/episode/{path}"] = (np.char.decode(value, "utf-8") if value.dtype.kind == "S" else value).tolist()
    if len(tasks) > len(recording.tasks):
        staged.write(fmt.TASKS, _tasks_file(tasks))
    rows = append.row(row)
    together = {name: combine_stats(recording.stats[name], of) if index else of for name, of in stats.items()}
    staged.write(fmt.STATS_FILE, to_json({f: {n: v.tolist() for n, v in of.items()} for f, of in together.items()}))
    counts = {"total_episodes": index + 1, "total_frames": first + length, "total_tasks": len(tasks)}
    info = {**info, **counts, "splits": {"train": f"0:{index + 1}"}}
    staged.write(fmt.INFO, to_json(info))
    seeds = (*recording.seeds, origin.seed)
    digests = staged.commit(recording.digests)
    return replace(recording, info=info, tasks=tasks, stats=together, rows=rows, seeds=seeds, digests=digests)


class _Append:
    """The files that grow with an episode, each until it has its size; each method returns its part of the row."""

    def __init__(self, staged: Staged, recording: Recording) -> None:
        self._staged, self._recording, self._format = staged, recording, recording.format
        self._last = recording.rows[-1] if recording.rows else None
        self._files = KeptFiles(staged.folder)

    def data(self, frames: Mapping[str, NDArray[Any]], numbers: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        columns = [column for column in self._format.columns if column.kind != "video"]
        schema = fmt.data_schema(columns)
        arrays = [_array(frames[column.path], column) for column in columns]
        table = pa.table([*arrays, *map(pa.array, numbers.values())], schema=schema)
        data = _parquet(schema, [table])
        place, name, grows = self._place("data", fmt.DATA, len(data))
        if grows:  # a Parquet file cannot grow: it is written again
            with open_parquet(self._files, name) as old, named(self._files.folder / name):
                groups = [old.read_row_group(i) for i in range(old.num_row_groups)]
                data = _parquet(schema, [*groups, table])
        self._staged.write(name, data)
        return place

    def video(self, column: Column, frames: NDArray[np.uint8]) -> dict[str, Any]:
        key, fps, alone, before = f"videos/{column.feature}", self._format.fps, self._staged.scratch, 0
        # encoded alone and joined without encoding again: the frames before keep their bits, however often it grows
        encode_video(alone, frames, fps)
        pattern = fmt.VIDEO.replace("{video_key}", column.feature)
        place, name, grows = self._place(key, pattern, alone.stat().st_size)
        if self._last is not None and grows:
            before = round(self._last[f"{key}/to_timestamp"] * fps)
            join_videos([self._files.check(name), alone], self._staged.path(name))
            alone.unlink()
        else:
            alone.rename(self._staged.path(name))
        return place | {f"{key}/from_timestamp": before / fps, f"{key}/to_timestamp": (before + len(frames)) / fps}

    def row(self, row: dict[str, Any]) -> tuple[Mapping[str, Any], ...]:
        rows = self._recording.rows
        full = len(rows) == _EPISODES_PER_FILE
        place, name, _ = self._place("meta/episodes", fmt.EPISODES, None if full else 0)
        rows = (*(() if full else rows), {**row, **place})
        schema = fmt.episodes_schema(self._format.columns, self._format.spec, origins=self._recording.origins)
        self._staged.write(name, _parquet(schema, [pa.Table.from_pylist(list(rows), schema)]))
        return rows

    def _place(self, key: str, pattern: str, size: int | None) -> tuple[dict[str, Any], str, bool]:
        """Find the file for ``size`` bytes (0: they fit; None: not): its entries of a row, name, True if it grows."""
        chunk = file = 0
        grows = self._last is not None
        if self._last is not None:
            chunk, file = self._last[f"{key}/chunk_index"], self._last[f"{key}/file_index"]
            if size:
                there = inside(self._files.folder, pattern.format(chunk_index=chunk, file_index=file)).stat().st_size
                grows = there + size <= self._format.file_size_mb * 2**20
            if size is None or not grows:
                grows, (chunk, file) = False, (chunk, file + 1) if file + 1 < fmt.FILES_PER_CHUNK else (chunk + 1, 0)
        name = pattern.format(chunk_index=chunk, file_index=file)
        return {f"{key}/chunk_index": chunk, f"{key}/file_index": file}, name, grows


def _array(values: NDArray[Any], column: Column) -> pa.Array:
    if column.kind != "png":
        return fmt.to_arrow(values, column)
    return pa.array([{"bytes": encode_png(frame), "path": None} for frame in values], fmt.PNG_TYPE)


def _tasks_file(tasks: Mapping[str, int]) -> bytes:
    """Make the file of instructions, with the metadata that makes them pandas' index, as LeRobot expects."""
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), "task": pa.array(tasks, pa.string())})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, kind, dtype in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    table = table.replace_schema_metadata({"pandas": json.dumps(note)})
    return _parquet(table.schema, [table])


def _parquet(schema: pa.Schema, groups: Iterable[pa.Table]) -> bytes:
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=len(group))
    return file.getvalue()
