"""The format and the present content of an ``EpisodeWriter``'s folder.

An append writes every file whole and forces it to the disk, ``meta/info.json`` last, whose count of episodes is what
holds. While ``.staging`` is there, other files may be ahead of it, with rows or frames at their end which no reader
uses: of a recording that was cut off, until the next append leaves them out.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import inside
from ejax.data.lerobot.format import STATS, Column, Stats, combine_stats
from ejax.data.lerobot.metadata import load_info, load_ours
from ejax.data.lerobot.parquet import load_episode_rows, open_parquet, parquet_file, row_files
from ejax.data.task import EpisodeSpec, flatten
from ejax.schema.messages import short_repr
from ejax.schema.writing import make_folder, move, replace_file, sync

STAGING = ".staging"


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

    folder: Path
    format: Format
    info: Mapping[str, Any]
    schema: pa.Schema
    """Schema of the files of episodes: a recording begun before ``Origin`` was kept continues with its columns."""
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

    def put_in_place(self, files: Mapping[str, bytes | Path]) -> None:
        """Put new versions in place, on the disk: ``files`` by name, their content or a file below ``.staging``; then
        the metadata that an episode changes, the counts last. OSError: the disk is full, or fails."""
        meta: dict[str, bytes] = {}
        if self.rows:
            table = pa.Table.from_pylist(self.last_rows, self.schema)
            stats = {name: {key: v.tolist() for key, v in of.items()} for name, of in self.stats.items()}
            meta[file_of(self.rows[-1], "meta/episodes", fmt.EPISODES)] = parquet_file(self.schema, [table])
            meta |= {fmt.TASKS: _tasks_file(self.tasks), fmt.STATS_FILE: _to_json(stats)}
        for name, new in {**files, **meta, fmt.INFO: _to_json(self.info)}.items():
            made = self.folder / STAGING / "new" if isinstance(new, bytes) else new
            if isinstance(new, bytes):
                replace_file(made, new, self.folder)
            sync(made)  # each before the next: a loss of power could else leave the counts alone
            move(made, self.folder / name, self.folder)


def open_recording(folder: Path, format: Format) -> Recording:
    """Load a folder to which episodes of ``format`` are appended, or begin it. Raises ValueError for other recordings,
    damaged files and links out of it; nothing is written then."""
    for name in (STAGING, fmt.INFO, fmt.OURS, fmt.TASKS, fmt.STATS_FILE):
        inside(folder, name)
    expected = fmt.episodes_schema(format.columns, format.spec)
    if not (folder / fmt.INFO).exists() and not row_files(folder):
        recording = Recording(folder, format, format.info(), expected)
        with marked(folder):
            recording.put_in_place({fmt.OURS: _to_json(format.ours())})
        return recording
    info = load_info(folder)
    if not (folder / fmt.OURS).exists():
        raise ValueError(f"{folder} is not a recording of ejax's: {fmt.OURS} is missing; record into a new folder")
    _check_alike(folder, info, load_ours(folder, info), format)
    rows = load_episode_rows(folder, info["total_episodes"], format.columns, list(format.spec.episode), stats=True)
    if info.get("total_frames") != sum(row["length"] for row in rows):
        raise ValueError(f"{folder} has other counts in {fmt.INFO} than in meta/episodes; restore it from a copy")
    sizes = {name: size for name, size in format.info().items() if name.endswith("_size_in_mb")}
    schema = expected
    if rows:
        name = row_files(folder)[0]
        with open_parquet(folder, name) as file:
            schema = file.schema_arrow
        before_origins = pa.schema([field for field in expected if field.name not in fmt.ORIGINS])
        if schema not in (expected, before_origins):
            raise ValueError(f"{folder / name} has other columns than the writer's; record into a new folder")
    return Recording(folder, format, info | sizes, schema, tuple(rows), _stats_of(rows, format.columns))


@contextmanager
def marked(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Mark the folder by ``.staging``, which may hold what is not in place yet, while files may be ahead of
    ``meta/info.json``: until the block ends, without an error of the disk. True: files may have been ahead before."""
    staging = folder / STAGING
    was_cut_off = staging.exists()
    make_folder(staging, folder)
    _clear(staging)
    try:
        yield staging, was_cut_off
    except BaseException as error:
        with suppress(OSError):  # the exception under way says more; the next append clears it too
            _clear(staging)
            if isinstance(error, ValueError | RuntimeError) and not was_cut_off:  # of an episode, not of the disk
                staging.rmdir()
        raise
    staging.rmdir()


def file_of(row: Mapping[str, Any], key: str, pattern: str, **video: str) -> str:
    """Return the name of the file in which a row of ``meta/episodes`` finds ``key``."""
    return pattern.format(chunk_index=row[f"{key}/chunk_index"], file_index=row[f"{key}/file_index"], **video)


def _clear(staging: Path) -> None:
    for left in staging.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _check_alike(folder: Path, info: Mapping[str, Any], ours: Mapping[str, Any], format: Format) -> None:
    keys = ("codebase_version", "robot_type", "fps", "features", "ejax", "data_path", "video_path")
    expected = json.loads(_to_json(format.info() | {"ejax": format.ours()}))
    has, needs = (flatten({key: tree.get(key) for key in keys}) for tree in ({**info, "ejax": ours}, expected))
    for path in (*needs, *has):
        if has.get(path) != needs.get(path):
            raise ValueError(
                f"{folder} has {path} {short_repr(has.get(path))}, the writer {short_repr(needs.get(path))}; make the "
                f"writer's arguments equal, or record into a new folder"
            )


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
