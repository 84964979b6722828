"""The format and the present content of an ``EpisodeWriter``'s folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.commit import COMMIT, pending
from ejax.data.lerobot.files import DIGESTS, Digests, KeptFiles, inside, open_inside, read_json_inside, sha256, shown
from ejax.data.lerobot.format import STATS, Column, Stats
from ejax.data.lerobot.metadata import check_info, check_ours, may_have
from ejax.data.lerobot.parquet import load_rows, read_parquet, row_files
from ejax.data.task import EpisodeSpec


@dataclass(frozen=True)
class Format:
    spec: EpisodeSpec
    columns: tuple[Column, ...]
    fps: int
    robot_type: str | None
    axes: Mapping[str, Sequence[str]]
    file_size_mb: float

    def ours(self) -> dict[str, Any]:
        """Make ``meta/ejax.json``."""
        frames = {c.path: {"feature": c.feature, "shape": list(c.shape), "dtype": c.dtype} for c in self.columns}
        fields = {path: {"shape": list(shape), "dtype": dtype} for path, (shape, dtype) in self.spec.episode.items()}
        return {"version": 1, "frames": frames, "episode": fields}


@dataclass(frozen=True)
class Recording:
    """The content of the folder."""

    format: Format
    info: Mapping[str, Any]
    tasks: Mapping[str, int]
    """Index by instruction."""
    stats: Mapping[str, Stats]
    """By feature."""
    rows: tuple[Mapping[str, Any], ...]
    """The rows of the last file of ``meta/episodes``."""
    seeds: tuple[int, ...]
    digests: Digests
    origins: bool = True
    """As in ``episodes_schema``: a recording keeps the columns that it has."""


def new_recording(format: Format) -> Recording:
    info = {
        "codebase_version": fmt.VERSION,
        "robot_type": format.robot_type,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": fmt.FILES_PER_CHUNK,
        "data_files_size_in_mb": format.file_size_mb,
        "video_files_size_in_mb": format.file_size_mb,
        "fps": format.fps,
        "splits": {},
        "data_path": fmt.DATA,
        "video_path": fmt.VIDEO if any(column.kind == "video" for column in format.columns) else None,
        "features": fmt.feature_entries(format.columns, format.axes, format.fps),
    }
    return Recording(format, info, {}, {}, (), (), {})


def check_format(folder: Path, format: Format) -> None:
    """Raise ValueError unless episodes of ``format`` can be appended to ``folder``, once a cut-off change is finished.
    It must be a recording of an ``EpisodeWriter`` without files that lead out of it. Nothing is written."""
    coming, files = pending(folder), KeptFiles(folder)
    places = {name: folder / COMMIT / name if name in coming else inside(folder, name) for name in (fmt.INFO, fmt.OURS)}
    if not places[fmt.OURS].exists():
        if not places[fmt.INFO].exists():
            return  # nothing is there yet
        raise ValueError(f"{folder} is not a recording of ejax's: there is no {fmt.OURS}; record into a new folder")
    info, ours = (
        read_json_inside(folder / COMMIT, name) if name in coming else files.read_json(name) for name in places
    )
    check_ours(ours, check_info(info, places[fmt.INFO]), places[fmt.OURS])
    _check_alike(folder, info, ours, format)


def load_recording(folder: Path, format: Format) -> Recording:
    """Load ``folder``, which ``check_format`` has accepted; ValueError for files that are damaged, or do not match."""
    files, new = KeptFiles(folder), new_recording(format)
    files.check(fmt.OURS)
    sizes = {name: new.info[name] for name in ("data_files_size_in_mb", "video_files_size_in_mb")}
    info = files.read_json(fmt.INFO) | sizes
    digests = _digests_of(folder) if files.digests is None else files.digests
    if not info["total_episodes"]:
        return replace(new, info=info, digests=digests)
    rows = load_rows(files, info["total_episodes"], format.columns, list(format.spec.episode))
    last, origins = _load_last_rows(files, format)
    counts = (info.get("total_frames"), last[-1]["episode_index"] + 1)
    if counts != (sum(row["length"] for row in rows), len(rows)):
        raise ValueError(f"{folder} has other counts in {fmt.INFO} than in meta/episodes; restore it from a copy")
    seeds = tuple(row.get("ejax/seed", -1) for row in rows)
    return Recording(format, info, _load_tasks(files), _load_stats(files, format), last, seeds, digests, origins)


def _check_alike(folder: Path, info: Mapping[str, Any], ours: Mapping[str, Any], format: Format) -> None:
    expected = json.loads(to_json(new_recording(format).info)) | {"ejax": json.loads(to_json(format.ours()))}
    there = {**info, "ejax": ours}
    for name in ("codebase_version", "robot_type", "fps", "features", "ejax", "data_path", "video_path"):
        if there.get(name) != expected[name]:
            where, has, needs = _first_difference(name, there.get(name), expected[name])
            raise ValueError(
                f"{folder} has {where} {has}, the writer {needs}; make the writer alike, or record into a new folder"
            )


def _first_difference(where: str, there: Any, expected: Any) -> tuple[str, str, str]:
    """Return the place of the first difference between two trees, and each one's value there, shortened."""
    if isinstance(there, dict) and isinstance(expected, dict):
        if there.keys() != expected.keys():
            return where, shown(list(there), 200), shown(list(expected), 200)
        name = next(name for name in there if there[name] != expected[name])
        return _first_difference(f"{where}.{name}", there[name], expected[name])
    return where, shown(there, 200), shown(expected, 200)


def _load_tasks(files: KeptFiles) -> dict[str, int]:
    table = read_parquet(files, fmt.TASKS, ("task", "task_index"))
    tasks = dict(zip(table["task"].to_pylist(), table["task_index"].to_pylist(), strict=True))
    if list(tasks.values()) != list(range(len(table))) or not all(isinstance(task, str) for task in tasks):
        raise ValueError(
            f"{files.folder / fmt.TASKS} must number the instructions from 0 on, each once; restore it from a copy"
        )
    return tasks


def _load_stats(files: KeptFiles, format: Format) -> dict[str, Stats]:
    read, stats = files.read_json(fmt.STATS_FILE), {}
    for feature, rank in fmt.stats_ranks(format.columns).items():
        try:
            stats[feature] = {name: np.array(read[feature][name]) for name in STATS}
            whole = all(values.dtype.kind in "iuf" for values in stats[feature].values())
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole or any(stats[feature][name].ndim != (1 if name == "count" else rank) for name in STATS):
            raise ValueError(
                f"{files.folder / fmt.STATS_FILE} lacks statistics of '{feature}', or has no numbers there; restore it "
                f"from a copy"
            )
    return stats


def _load_last_rows(files: KeptFiles, format: Format) -> tuple[tuple[Mapping[str, Any], ...], bool]:
    name = row_files(files)[-1]
    table = read_parquet(files, name)
    for origins in (True, False):
        if table.schema.equals(fmt.episodes_schema(format.columns, format.spec, origins=origins)):
            return tuple(table.to_pylist()), origins
    raise ValueError(f"{files.folder / name} has other columns than the writer's; record into a new folder")


def _digests_of(folder: Path) -> Digests:
    made = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if may_have(name) and name != DIGESTS:
            with open_inside(folder, name) as file:
                made[name] = (sha256(file),)
    return made


def to_json(tree: Any) -> bytes:
    """Encode JSON as stored in files; numbers are finite."""
    return json.dumps(tree, indent=2, allow_nan=False).encode()
