"""Change a recording by one episode: new versions of the files that have one more."""

import io
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.commit import Staged
from ejax.data.lerobot.feature_stats import combine_stats, feature_stats
from ejax.data.lerobot.format import Column
from ejax.data.lerobot.inside import inside
from ejax.data.lerobot.kept_files import Digests, KeptFiles
from ejax.data.lerobot.parquet import named, open_parquet
from ejax.data.lerobot.pictures import encode_png, encode_video, join_videos
from ejax.data.lerobot.recording import Format, Recording, new_recording, to_json
from ejax.data.task import Origin

_EPISODES_PER_FILE = 500
"""Rows of a file of ``meta/episodes``, which is rewritten with every episode."""


def write_start(staged: Staged, format: Format) -> Digests:
    """Begin a recording without episodes. Returns the digests of its files."""
    staged.write(fmt.OURS, to_json(format.ours()))
    staged.write(fmt.INFO, to_json(new_recording(format).info))
    return staged.commit({})


def write_episode(
    staged: Staged,
    recording: Recording,
    format: Format,
    frames: Mapping[str, NDArray[Any]],
    fields: Mapping[str, NDArray[Any]],
    instruction: str,
    origin: Origin,
    terminated: bool,
) -> Recording:
    """Write all files that an episode changes, and commit the change.

    Args:
        frames: by path [T, ...], with ``segment_id``.
        fields: of the episode, by path.

    Returns:
        The recording with the episode.

    Raises:
        OSError: as ``Staged.commit``.
    """
    info, length = recording.info, len(frames["segment_id"])
    index, first = info["total_episodes"], info["total_frames"]
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
    last = recording.rows[-1] if recording.rows else None
    row = {"episode_index": index, "tasks": [instruction], "length": length}
    row |= {"dataset_from_index": first, "dataset_to_index": first + length}
    files = KeptFiles(staged.folder)
    row |= _stage_data(staged, files, last, format, frames, numbers)
    for column in format.columns:
        if column.kind == "video":
            row |= _stage_video(staged, files, last, format, column, frames[column.path])
    row |= {f"stats/{feature}/{name}": value.tolist() for feature, of in stats.items() for name, value in of.items()}
    row |= {"ejax/written_at": time.time(), "ejax/terminated": terminated}
    row |= {f"ejax/{name}": value for name, value in origin._asdict().items()}
    row |= _segments(numbers["segment_id"]) | {f"ejax/episode/{path}": _plain(value) for path, value in fields.items()}
    if len(tasks) > len(recording.tasks):
        staged.write(fmt.TASKS, _tasks_file(tasks))
    rows = _stage_rows(staged, recording, format, row)
    together = {name: combine_stats(recording.stats[name], of) if index else of for name, of in stats.items()}
    staged.write(fmt.STATS_FILE, to_json({f: {n: v.tolist() for n, v in of.items()} for f, of in together.items()}))
    counts = {"total_episodes": index + 1, "total_frames": first + length, "total_tasks": len(tasks)}
    info = {**info, **counts, "splits": {"train": f"0:{index + 1}"}}
    staged.write(fmt.INFO, to_json(info))
    digests = staged.commit(recording.digests)
    return Recording(info, tasks, together, rows, (*recording.seeds, origin.seed), digests, recording.origins)


def _stage_data(
    staged: Staged,
    files: KeptFiles,
    last: Mapping[str, Any] | None,
    format: Format,
    frames: Mapping[str, NDArray[Any]],
    numbers: Mapping[str, NDArray[Any]],
) -> dict[str, int]:
    """A row group per episode, so that one can be read alone."""
    schema = fmt.data_schema(format.columns)
    arrays = [_array(frames[column.path], column) for column in format.columns if column.kind != "video"]
    table = pa.table([*arrays, *map(pa.array, numbers.values())], schema=schema)
    data = _parquet(schema, [table])
    place = _place(last, "data", files, fmt.DATA, len(data), format)
    name = fmt.DATA.format(chunk_index=place[0], file_index=place[1])
    if last is not None and place == _where(last, "data"):  # a Parquet file cannot grow: it is written again
        with open_parquet(files, name) as old, named(staged.folder / name):
            groups = [old.read_row_group(i) for i in range(old.num_row_groups)]
            data = _parquet(schema, [*groups, table])
    staged.write(name, data)
    return {"data/chunk_index": place[0], "data/file_index": place[1]}


def _stage_video(
    staged: Staged,
    files: KeptFiles,
    last: Mapping[str, Any] | None,
    format: Format,
    column: Column,
    frames: NDArray[np.uint8],
) -> dict[str, Any]:
    key = f"videos/{column.feature}"
    pattern = fmt.VIDEO.replace("{video_key}", column.feature)
    # encoded alone and joined without encoding again: the frames before keep their bits, however often it grows
    alone = staged.scratch
    encode_video(alone, frames, format.fps)
    place = _place(last, key, files, pattern, alone.stat().st_size, format)
    name = pattern.format(chunk_index=place[0], file_index=place[1])
    before = 0
    if last is not None and place == _where(last, key):
        before = round(last[f"{key}/to_timestamp"] * format.fps)
        join_videos([files.check(name), alone], staged.path(name))
        alone.unlink()
    else:
        alone.rename(staged.path(name))
    made: dict[str, float] = {"chunk_index": place[0], "file_index": place[1]}
    made |= {"from_timestamp": before / format.fps, "to_timestamp": (before + len(frames)) / format.fps}
    return {f"{key}/{part}": value for part, value in made.items()}


def _stage_rows(
    staged: Staged, recording: Recording, format: Format, row: dict[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    key, rows = "meta/episodes", recording.rows
    place = _where(rows[-1], key) if rows else (0, 0)
    if len(rows) == _EPISODES_PER_FILE:
        rows, place = (), _next(place)
    rows = (*rows, {**row, f"{key}/chunk_index": place[0], f"{key}/file_index": place[1]})
    schema = fmt.episodes_schema(format.columns, format.spec, origins=recording.origins)
    table = pa.Table.from_pylist(list(rows), schema)
    staged.write(fmt.EPISODES.format(chunk_index=place[0], file_index=place[1]), _parquet(schema, [table]))
    return rows


def _place(
    last: Mapping[str, Any] | None, key: str, files: KeptFiles, pattern: str, size: int, format: Format
) -> tuple[int, int]:
    """Chunk and file that the next ``size`` bytes go to."""
    if last is None:
        return 0, 0
    place = _where(last, key)
    there = inside(files.folder, pattern.format(chunk_index=place[0], file_index=place[1])).stat().st_size
    return place if there + size <= format.file_size_mb * 2**20 else _next(place)


def _where(row: Mapping[str, Any], key: str) -> tuple[int, int]:
    return row[f"{key}/chunk_index"], row[f"{key}/file_index"]


def _next(place: tuple[int, int]) -> tuple[int, int]:
    chunk, file = place
    return (chunk, file + 1) if file + 1 < fmt.FILES_PER_CHUNK else (chunk + 1, 0)


def _array(values: NDArray[Any], column: Column) -> pa.Array:
    if column.kind != "png":
        return fmt.to_arrow(values, column)
    return pa.array([{"bytes": encode_png(frame), "path": None} for frame in values], fmt.PNG_TYPE)


def _segments(segment_id: NDArray[np.int64]) -> dict[str, list[int]]:
    starts = np.flatnonzero(np.diff(segment_id, prepend=-1))
    lengths = np.diff(starts, append=len(segment_id))
    return {"ejax/segment_ids": segment_id[starts].tolist(), "ejax/segment_lengths": lengths.tolist()}


def _plain(value: NDArray[Any]) -> Any:
    return (np.char.decode(value, "utf-8") if value.dtype.kind == "S" else value).tolist()


def _tasks_file(tasks: Mapping[str, int]) -> bytes:
    """The file of instructions, with the metadata that makes them pandas' index, as LeRobot expects."""
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), "task": pa.array(tasks, pa.string())})
    kinds = {"task_index": "int64", "task": "object"}
    columns = [
        {"name": name, "field_name": name, "pandas_type": "int64" if kind == "int64" else "unicode", "numpy_type": kind}
        for name, kind in kinds.items()
    ]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": [c | {"metadata": None} for c in columns]}
    table = table.replace_schema_metadata({"pandas": json.dumps(note)})
    return _parquet(table.schema, [table])


def _parquet(schema: pa.Schema, groups: Iterable[pa.Table]) -> bytes:
    """A Parquet file of one row group each."""
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=len(group))
    return file.getvalue()
