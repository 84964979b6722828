"""What the metadata of a LeRobot v3.0 dataset say: strict about what is needed, tolerant of anything more."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ejax.data.lerobot_format as fmt
from ejax.data.extra import pq
from ejax.data.lerobot_format import Column
from ejax.data.task import FRAME_FIELDS, check_paths

_NEEDED = ("episode_index", "tasks", "length", "data/chunk_index", "data/file_index")


def load_info(folder: Path) -> dict[str, Any]:
    """``meta/info.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: another version of the format, or entries that are missing.
    """
    path = folder / fmt.INFO
    if not path.exists():
        raise FileNotFoundError(f"{folder} is no LeRobot dataset: there is no {fmt.INFO}")
    info = json.loads(path.read_bytes())
    version = str(info.get("codebase_version"))
    if version.split(".")[0] != "v3":
        remedy = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=... converts it"
        raise ValueError(
            f"{folder} is LeRobot {version}; {fmt.VERSION} can be read. "
            f"{remedy if version == 'v2.1' else 'Convert it to that with a lerobot that knows both'}"
        )
    if missing := [name for name in ("features", "fps", "total_episodes", "data_path") if info.get(name) is None]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return info


def load_columns(folder: Path, info: Mapping[str, Any]) -> tuple[list[Column], dict[str, str]]:
    """The columns that can be read; of the others, feature and why not.

    Raises:
        ValueError: there is none.
    """
    ours = _load_ours(folder)["frames"]
    given = {entry["feature"]: path for path, entry in ours.items()}
    columns, skipped = [], {}
    for feature, entry in info["features"].items():
        if feature in given:
            path = given[feature]
            columns.append(_own_column(path, ours[path], entry))
        elif feature in fmt.DEFAULT_FEATURES or (ours and feature == "segment_id"):
            continue
        elif isinstance(made := _foreign_column(feature, entry), Column):
            columns.append(made)
        else:
            skipped[feature] = made
    if not columns:
        raise ValueError(f"{folder} has no feature that can be read; skipped: {skipped}")
    check_paths([column.path for column in columns])
    return columns, skipped


def _own_column(path: str, ours: Mapping[str, Any], entry: Mapping[str, Any]) -> Column:
    kinds: dict[str, Any] = {"image": "png", "video": "video", "string": "text"}
    return Column(path, ours["feature"], tuple(ours["shape"]), ours["dtype"], kinds.get(entry["dtype"], "number"))


def _foreign_column(feature: str, entry: Mapping[str, Any]) -> Column | str:
    path = feature.replace(".", "/")
    if path.split("/")[0] in {"episode", *FRAME_FIELDS}:
        path = f"feature/{path}"  # a consumer finds the engine's own fields under the other name
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype in ("image", "video"):
        about = {**(entry.get("video_info") or {}), **(entry.get("info") or {})}
        if about.get("is_depth_map") or about.get("video.is_depth_map"):
            return "a depth video"
        first = (entry.get("names") or ["height"])[0]
        if first in ("channel", "channels"):
            shape = (*shape[1:], shape[0])
        if len(shape) != 3 or shape[2] != 3:
            return f"images of shape {list(shape)}"
        return Column(path, feature, shape, "uint8", "png" if dtype == "image" else "video")
    if dtype == "bool" or dtype.startswith(("int", "uint", "float")):
        return Column(path, feature, shape, dtype, "number")
    return f"dtype {dtype}"


def _load_ours(folder: Path) -> dict[str, Any]:
    path = folder / fmt.OURS
    return json.loads(path.read_bytes()) if path.exists() else {"frames": {}, "episode": {}}


def load_fields(folder: Path) -> dict[str, str]:
    """NumPy dtypes of the episode's own fields, by path."""
    return {path: entry["dtype"] for path, entry in _load_ours(folder)["episode"].items()}


def load_rows(folder: Path, count: int, columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Rows of ``meta/episodes`` without statistics, in order.

    Raises:
        ValueError: columns or episodes are missing.
    """
    needed = [
        *_NEEDED,
        *(
            f"videos/{c.feature}/{n}"
            for c in columns
            if c.kind == "video"
            for n in ("chunk_index", "file_index", "from_timestamp")
        ),
    ]
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "meta/episodes").glob("*/*.parquet")):
        names = pq.read_schema(path).names
        if missing := [name for name in needed if name not in names]:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        rows += pq.read_table(
            path, columns=[n for n in names if n in needed or n.startswith("ejax/")], use_threads=False
        ).to_pylist()
    rows = sorted(rows, key=lambda row: row["episode_index"])[:count]
    if [row["episode_index"] for row in rows] != list(range(count)):
        raise ValueError(
            f"{folder} has {len(rows)} episodes in meta/episodes, its info.json tells of {count}; they must be 0 to "
            f"{count - 1}, each once. Part of the files is missing"
        )
    return rows
