"""The format and the present content of an ``EpisodeWriter``'s folder."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.commit import Change, remove_leftovers
from ejax.data.lerobot.files import Digests, KeptFiles, inside, shown
from ejax.data.lerobot.format import STATS, Column, Stats, combine_stats
from ejax.data.lerobot.metadata import check_info, check_ours
from ejax.data.lerobot.parquet import load_rows, named, open_parquet, row_files
from ejax.data.lerobot.pictures import cut_video
from ejax.data.task import EpisodeSpec, flatten


@dataclass(frozen=True)
class Format:
    spec: EpisodeSpec
    columns: tuple[Column, ...]
    fps: int
    robot_type: str | None
    axes: Mapping[str, Sequence[str]]
    file_size_mb: float

    @property
    def videos(self) -> list[Column]:
        return [column for column in self.columns if column.kind == "video"]

    def ours(self) -> dict[str, Any]:
        """Make ``meta/ejax.json``."""
        frames = {c.path: {"feature": c.feature, "shape": list(c.shape), "dtype": c.dtype} for c in self.columns}
        fields = {path: {"shape": list(shape), "dtype": dtype} for path, (shape, dtype) in self.spec.episode.items()}
        return {"version": 1, "frames": frames, "episode": fields}

    def info(self) -> dict[str, Any]:
        """Make ``meta/info.json`` of no episodes."""
        return {
            "codebase_version": fmt.VERSION,
            "robot_type": self.robot_type,
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            "chunks_size": fmt.FILES_PER_CHUNK,
            "data_files_size_in_mb": self.file_size_mb,
            "video_files_size_in_mb": self.file_size_mb,
            "fps": self.fps,
            "splits": {},
            "data_path": fmt.DATA,
            "video_path": fmt.VIDEO if self.videos else None,
            "features": fmt.feature_entries(self.columns, self.axes, self.fps),
        }


@dataclass(frozen=True)
class Recording:
    """The content of the folder."""

    format: Format
    info: Mapping[str, Any]
    digests: Digests
    schema: pa.Schema
    """Schema of the files of episodes: one begun before ``Origin`` was kept goes on with the columns that it has."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """A row of ``meta/episodes`` per episode."""
    stats: Mapping[str, Stats] = field(default_factory=dict)
    """By feature."""

    @property
    def tasks(self) -> dict[str, int]:
        """Return the index of each instruction: its place in the order of their first use."""
        return {task: i for i, task in enumerate(dict.fromkeys(row["tasks"][0] for row in self.rows))}

    @property
    def last_rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of the last file of ``meta/episodes``."""
        names = ("meta/episodes/chunk_index", "meta/episodes/file_index")
        alike = takewhile(lambda row: all(row[name] == self.rows[-1][name] for name in names), reversed(self.rows))
        return list(alike)[::-1]

    def write_meta(self, change: Change) -> None:
        """Write the metadata that an episode changes: its rows, statistics, counts."""
        if self.rows:
            table = pa.Table.from_pylist(self.last_rows, self.schema)
            change.write(place(self.rows[-1], "meta/episodes", fmt.EPISODES), parquet_file(self.schema, [table]))
            change.write(fmt.TASKS, _tasks_file(self.tasks))
            stats = {name: {key: v.tolist() for key, v in of.items()} for name, of in self.stats.items()}
            change.write(fmt.STATS_FILE, _to_json(stats))
        change.write(fmt.INFO, _to_json(self.info))


def open_recording(folder: Path, format: Format) -> tuple[Recording, bool]:
    """Load a folder to which episodes of ``format`` are appended, or begin it; True: an episode was lost in a crash.
    Raises ValueError for other recordings, damaged files and links out of it; nothing is written then."""
    files = KeptFiles(folder)
    has_info, has_ours = (inside(folder, name).exists() for name in (fmt.INFO, fmt.OURS))
    if not has_info and not {*(files.digests or ())} - {fmt.INFO, fmt.OURS}:
        lost = remove_leftovers(folder)
        return _begin(folder, format), lost
    if not has_ours and fmt.OURS not in (files.digests or ()):
        raise ValueError(f"{folder} is not a recording of ejax's: there is no {fmt.OURS}; record into a new folder")
    info = check_info(files.read_json(fmt.INFO), folder / fmt.INFO)
    _check_alike(folder, info, check_ours(files.read_json(fmt.OURS), info, folder / fmt.OURS), format)
    rows = load_rows(files, info["total_episodes"], format.columns, list(format.spec.episode), stats=True)
    if info.get("total_frames") != sum(row["length"] for row in rows):
        raise ValueError(f"{folder} has other counts in {fmt.INFO} than in meta/episodes; restore it from a copy")
    names = _names_of(format, rows)
    recording = Recording(
        format,
        info | {name: size for name, size in format.info().items() if name.endswith("_size_in_mb")},
        {name: files.digest(name) for name in names} if files.digests is None else files.digests,
        _schema(files, format) if rows else fmt.episodes_schema(format.columns, format.spec),
        tuple(rows),
        _stats_of(rows, format.columns),
    )
    # of the files that changed last either version may be in place: a repair can be cut off, too
    changed = {name for name in names - {fmt.STATS_FILE, fmt.TASKS} if len(recording.digests.get(name, ())) > 1}
    there = {name: files.digest(name) for name in changed}
    lost = remove_leftovers(folder)  # nothing was written so far: all checks are passed
    if any(recording.digests[name][:1] != digest for name, digest in there.items()):
        return _repaired(folder, replace(recording, digests={**recording.digests, **there}), names, files), True
    return replace(recording, digests={name: each[:1] for name, each in recording.digests.items()}), lost


def place(row: Mapping[str, Any], key: str, pattern: str) -> str:
    """Return the name of the file in which a row of ``meta/episodes`` finds ``key``."""
    return pattern.format(chunk_index=row[f"{key}/chunk_index"], file_index=row[f"{key}/file_index"])


def video_pattern(column: Column) -> str:
    return fmt.VIDEO.replace("{video_key}", column.feature)


def parquet_file(schema: pa.Schema, groups: Iterable[pa.Table]) -> bytes:
    """Encode tables as the row groups of a Parquet file."""
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema) as writer:
        for group in groups:
            # a group per episode: one can be left out without decoding it
            writer.write_table(group, row_group_size=len(group))
    return file.getvalue()


def data_groups(files: KeptFiles, name: str, count: int) -> list[pa.Table]:
    """Read the row groups of a file of frames, one for each of the first ``count`` episodes that it has."""
    with open_parquet(files, name) as file, named(files.folder / name):
        groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    return [group for group in groups if group["episode_index"][0].as_py() < count]


def _begin(folder: Path, format: Format) -> Recording:
    recording = Recording(format, format.info(), {}, fmt.episodes_schema(format.columns, format.spec))
    with Change(folder) as change:
        change.write(fmt.OURS, _to_json(format.ours()))
        recording.write_meta(change)
        return replace(recording, digests=change.commit({}))


def _repaired(folder: Path, recording: Recording, names: set[str], files: KeptFiles) -> Recording:
    """Remove what is ahead of ``meta/info.json``: files that no episode names, and the ends of those that it names."""
    # before the list forgets them: a reader takes a file outside the list for damage
    for name in recording.digests.keys() - names:
        inside(folder, name).unlink(missing_ok=True)
    digests = {name: each for name, each in recording.digests.items() if name in names}
    with Change(folder) as change:
        if recording.rows:
            last, format = recording.rows[-1], recording.format
            name = place(last, "data", fmt.DATA)
            groups = data_groups(files, name, len(recording.rows))
            change.write(name, parquet_file(fmt.data_schema(format.columns), groups))
            for column in format.videos:
                key = f"videos/{column.feature}"
                name, count = place(last, key, video_pattern(column)), round(last[f"{key}/to_timestamp"] * format.fps)
                cut_video(files.check(name), count, change.path(name))
        recording.write_meta(change)
        return replace(recording, digests=change.commit(digests))


def _names_of(format: Format, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    patterns = {"data": fmt.DATA, "meta/episodes": fmt.EPISODES}
    patterns |= {f"videos/{column.feature}": video_pattern(column) for column in format.videos}
    names = {place(row, key, pattern) for row in rows for key, pattern in patterns.items()}
    return names | {fmt.INFO, fmt.OURS, *((fmt.TASKS, fmt.STATS_FILE) if rows else ())}


def _check_alike(folder: Path, info: Mapping[str, Any], ours: Mapping[str, Any], format: Format) -> None:
    keys = ("codebase_version", "robot_type", "fps", "features", "ejax", "data_path", "video_path")
    expected = json.loads(_to_json(format.info() | {"ejax": format.ours()}))
    has, needs = (flatten({key: tree.get(key) for key in keys}) for tree in ({**info, "ejax": ours}, expected))
    for path in (*needs, *has):
        if has.get(path) != needs.get(path):
            raise ValueError(
                f"{folder} has {path} {shown(has.get(path), 200)}, the writer {shown(needs.get(path), 200)}; make the "
                f"writer alike, or record into a new folder"
            )


def _schema(files: KeptFiles, format: Format) -> pa.Schema:
    name, expected = row_files(files)[0], fmt.episodes_schema(format.columns, format.spec)
    with open_parquet(files, name) as file:
        there = file.schema_arrow
    before_origins = pa.schema([field for field in expected if field.name not in fmt.ORIGINS])
    if there not in (expected, before_origins):
        raise ValueError(f"{files.folder / name} has other columns than the writer's; record into a new folder")
    return expected if there == expected else before_origins


def _stats_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> dict[str, Stats]:
    """Summarize all episodes from their rows: ``meta/stats.json`` may be ahead of them, and cannot be undone."""
    stats: dict[str, Stats] = {}
    # one by one, as they were appended: the same bits
    for row in rows:
        for feature in fmt.stats_ranks(columns):
            of = {name: np.array(row[f"stats/{feature}/{name}"]) for name in STATS}
            stats[feature] = combine_stats(stats[feature], of) if feature in stats else of
    return stats


def _tasks_file(tasks: Mapping[str, int]) -> bytes:
    """Make the file of instructions, with the metadata that makes them pandas' index, as LeRobot expects."""
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), "task": pa.array(tasks, pa.string())})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, kind, dtype in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    table = table.replace_schema_metadata({"pandas": json.dumps(note)})
    return parquet_file(table.schema, [table])


def _to_json(tree: Any) -> bytes:
    """Encode JSON as stored in files; numbers are finite."""
    return json.dumps(tree, indent=2, allow_nan=False).encode()
