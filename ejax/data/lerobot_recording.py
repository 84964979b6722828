"""What an ``EpisodeWriter`` knows of its folder: how episodes are kept there, and what is there."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ejax.data.lerobot_format as fmt
from ejax.data.extra import pq
from ejax.data.feature_stats import Stats
from ejax.data.lerobot_format import Column
from ejax.data.task import EpisodeSpec


@dataclass(frozen=True)
class Format:
    """How episodes are kept; the same for all of a recording."""

    spec: EpisodeSpec
    columns: tuple[Column, ...]
    fps: int
    robot_type: str | None
    axes: Mapping[str, Sequence[str]]
    file_size_mb: float

    def ours(self) -> dict[str, Any]:
        """``meta/ejax.json``."""
        frames = {c.path: {"feature": c.feature, "shape": list(c.shape), "dtype": c.dtype} for c in self.columns}
        fields = {path: {"shape": list(shape), "dtype": dtype} for path, (shape, dtype) in self.spec.episode.items()}
        return {"version": 1, "frames": frames, "episode": fields}


@dataclass(frozen=True)
class Recording:
    """What is on the disk."""

    info: Mapping[str, Any]
    tasks: Mapping[str, int]
    """Index by instruction."""
    stats: Mapping[str, Stats]
    """By feature."""
    rows: tuple[Mapping[str, Any], ...]
    """Of the last file of ``meta/episodes``."""
    seeds: tuple[int, ...]
    """Of all episodes."""


def new_recording(format: Format) -> Recording:
    """One without episodes."""
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
    return Recording(info, {}, {}, (), ())


def load_recording(folder: Path, format: Format) -> Recording:
    """What is in ``folder``, if it is kept as ``format`` says.

    Raises:
        ValueError: it is not, or is no recording of an ``EpisodeWriter``.
    """
    if not (folder / fmt.OURS).exists():
        raise ValueError(f"{folder} is no recording of ejax's: there is no {fmt.OURS}; record into a new folder")
    info = json.loads((folder / fmt.INFO).read_bytes())
    wanted = json.loads(to_json(new_recording(format).info)) | {"ejax": json.loads(to_json(format.ours()))}
    there = info | {"ejax": json.loads((folder / fmt.OURS).read_bytes())}
    for name in ("codebase_version", "robot_type", "fps", "features", "ejax"):
        if there[name] != wanted[name]:
            raise ValueError(
                f"{folder} has {name} {json.dumps(there[name])}, the writer {json.dumps(wanted[name])}; make the "
                f"writer alike, or record into a new folder"
            )
    info |= {name: wanted[name] for name in ("data_files_size_in_mb", "video_files_size_in_mb")}
    if not info["total_episodes"]:
        return Recording(info, {}, {}, (), ())
    tasks = pq.read_table(folder / fmt.TASKS).to_pylist()
    stats = json.loads((folder / fmt.STATS_FILE).read_bytes())
    files = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    seeds = [seed for file in files for seed in pq.read_table(file, columns=["ejax/seed"])["ejax/seed"].to_pylist()]
    return Recording(
        info,
        {row["task"]: row["task_index"] for row in tasks},
        {feature: {name: np.array(value) for name, value in entry.items()} for feature, entry in stats.items()},
        tuple(pq.read_table(files[-1]).to_pylist()),
        tuple(seeds),
    )


def to_json(tree: Any) -> bytes:
    """As it is kept in files; numbers are finite."""
    return json.dumps(tree, indent=2, allow_nan=False).encode()
