"""The metadata of a LeRobot v3.0 dataset: strict about what is needed, tolerant of anything more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.format import Column
from ejax.data.lerobot.inside import shown
from ejax.data.lerobot.kept_files import KeptFiles, parse_json
from ejax.data.lerobot.schema import check_info, check_ours
from ejax.data.task import FRAME_FIELDS, LOSS_MASK, check_paths


def load_info(files: KeptFiles) -> dict[str, Any]:
    """``meta/info.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: as ``check_info``.
    """
    if not files.has(fmt.INFO):
        raise FileNotFoundError(f"{files.folder} is not a LeRobot dataset: there is no {fmt.INFO}")
    where = files.folder / fmt.INFO
    return check_info(parse_json(files.read(fmt.INFO), where), where)


def load_ours(files: KeptFiles, info: Mapping[str, Any]) -> dict[str, Any]:
    """``meta/ejax.json``, without fields where there is none.

    Raises:
        ValueError: as ``check_ours``.
    """
    if not files.has(fmt.OURS):
        return {"version": 1, "frames": {}, "episode": {}}
    where = files.folder / fmt.OURS
    return check_ours(parse_json(files.read(fmt.OURS), where), info, where)


def load_columns(folder: Path, info: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[list[Column], dict[str, str]]:
    """The columns that can be read; the features of the others, with the reason.

    Args:
        ours: ``frames`` of ``meta/ejax.json``.

    Raises:
        ValueError: there is none, or two have one path.
    """
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
        raise ValueError(f"{folder} has no feature that can be read; skipped: {shown(skipped, 200)}")
    try:
        check_paths([column.path for column in columns])
    except ValueError as error:
        raise ValueError(f"{folder / fmt.INFO} has features that cannot be fields: {error}") from error
    return columns, skipped


def _own_column(path: str, ours: Mapping[str, Any], entry: Mapping[str, Any]) -> Column:
    kinds: dict[str, Any] = {"image": "png", "video": "video", "string": "text"}
    return Column(path, ours["feature"], tuple(ours["shape"]), ours["dtype"], kinds.get(entry["dtype"], "number"))


def _foreign_column(feature: str, entry: Mapping[str, Any]) -> Column | str:
    path = feature.replace(".", "/")
    if path.split("/")[0] in {"episode", LOSS_MASK, *FRAME_FIELDS}:
        path = f"feature/{path}"  # a consumer finds the engine's own fields under the other name
    dtype = entry["dtype"]
    if dtype not in (*fmt.NUMBERS, "image", "video"):
        return f"dtype {dtype}"
    shape = tuple(entry["shape"])
    if dtype in ("image", "video"):
        about: dict[str, Any] = {}
        for notes in (entry.get("video_info"), entry.get("info")):
            about |= notes if isinstance(notes, dict) else {}
        if about.get("is_depth_map") or about.get("video.is_depth_map"):
            return "a depth video"
        names = entry.get("names")
        first = names[0] if isinstance(names, list) and names else "height"
        if first in ("channel", "channels"):
            shape = (*shape[1:], shape[0])
        if len(shape) != 3 or shape[2] != 3:
            return f"images of shape {list(shape)}"
        return Column(path, feature, shape, "uint8", "png" if dtype == "image" else "video")
    return Column(path, feature, shape, dtype, "number")
