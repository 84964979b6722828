"""The metadata of a LeRobot v3.0 dataset, ``meta/info.json``, and ours, ``meta/ejax.json``, checked before use."""

import math
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import DIGESTS, KeptFiles, path_problem, shown
from ejax.data.lerobot.format import Column
from ejax.data.task import FRAME_FIELDS, LOSS_MASK, EpisodeSpec, check_paths

_FILE = r"chunk-\d{3,9}/file-\d{3,9}"
_MAY_HAVE = re.compile(
    "|".join(
        (
            *(re.escape(name) for name in (fmt.INFO, fmt.STATS_FILE, fmt.TASKS, fmt.OURS, DIGESTS)),
            rf"(meta/episodes|data)/{_FILE}\.parquet",
            rf"videos/[^/]+/{_FILE}\.mp4",
        )
    )
)
_PLACES = {"data_path": ("chunk_index", "file_index"), "video_path": ("chunk_index", "file_index", "video_key")}
_NUMBER_FORMAT = re.compile(r"(0?[1-9])?d?")
_DTYPE = re.compile(r"[<>|=]?[A-Za-z]+\d{0,9}(\[\w+\])?")
MAX_COUNT = 2**31
"""Bound of counts and sides: no dataset has more."""


def load_info(files: KeptFiles) -> dict[str, Any]:
    """Load ``meta/info.json``; FileNotFoundError if the folder has none, ValueError as of ``check_info``."""
    if not files.has(fmt.INFO):
        raise FileNotFoundError(f"{files.folder} is not a LeRobot dataset: there is no {fmt.INFO}")
    return check_info(files.read_json(fmt.INFO), files.folder / fmt.INFO)


def load_ours(files: KeptFiles, info: Mapping[str, Any]) -> dict[str, Any]:
    """Load ``meta/ejax.json``, without fields if the folder lacks it; ValueError as of ``check_ours``."""
    if not files.has(fmt.OURS):
        return {"version": 1, "frames": {}, "episode": {}}
    return check_ours(files.read_json(fmt.OURS), info, files.folder / fmt.OURS)


def load_columns(folder: Path, info: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[list[Column], dict[str, str]]:
    """Find the columns that can be read, and the other features with the reason; ``ours``: ``frames`` of our metadata.
    Raises ValueError if no column can be read, or two have one path."""
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


def may_have(name: str) -> bool:
    """Return True for the name of a file that an ``EpisodeWriter`` makes."""
    return _MAY_HAVE.fullmatch(name) is not None


def check_info(info: Any, where: Path) -> dict[str, Any]:
    """Return ``meta/info.json`` of a LeRobot v3.0 dataset.

    Raises ValueError for another version, missing or other entries, and paths that leave the folder, or depend on
    anything other than chunk, file and video.
    """
    _require(isinstance(info, dict), f"{where} must be a JSON object, got {shown(info)}")
    version = str(info.get("codebase_version"))
    remedy = "Convert it to that with a lerobot that knows both"
    if version == "v2.1":
        remedy = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=... converts it"
    there = f"{where.parent.parent} is LeRobot {shown(version, 20).strip(chr(39))}"
    _require(version.split(".")[0] == "v3", f"{there}; {fmt.VERSION} can be read. {remedy}")
    missing = [name for name in ("features", "fps", "total_episodes", "data_path") if info.get(name) is None]
    _require(not missing, f"{where} lacks {', '.join(missing)}")
    fps, features = info["fps"], info["features"]
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    _require(is_number and 0 < fps < math.inf, f"{where} has fps {shown(fps)}; it must be a number above 0")
    for name in ("total_episodes", "total_frames"):
        count = info.get(name, 0)
        _require(is_count(count), f"{where} has {name} {shown(count)}; it must be a whole number of at least 0")
    text = f"{where} has features {shown(features)}; it must name each feature with its dtype and shape"
    _require(_is_table(features), text)
    for name, entry in features.items():
        _check_feature(name, entry, where)
    has_videos = any(entry["dtype"] == "video" for entry in features.values())
    for key in _PLACES if has_videos else ("data_path",):
        _check_place(key, info.get(key), where)
    return dict(info)


def check_ours(ours: Any, info: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return ``meta/ejax.json``, if it matches ``info``.

    Raises ValueError for another version, fields that no ``EpisodeSpec`` can have, or features that are not in
    ``info``.
    """
    version = ours.get("version") if isinstance(ours, dict) else ours
    _require(version == 1, f"{where} has version {shown(version)}; 1 can be read. Use the ejax that wrote it")
    fields = [_fields(ours.get(kind), f"{where}, {kind}") for kind in ("frames", "episode")]
    try:
        EpisodeSpec(*fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{where} has fields that no episode can have: {shown(str(error), 200)}") from error
    taken: set[str] = set()
    for path, entry in ours["frames"].items():
        name, shape, dtype = (entry.get(key) for key in ("feature", "shape", "dtype"))
        feature = info["features"].get(name, {}) if isinstance(name, str) else {}
        _require(feature, f"{where} keeps field '{path}' as {shown(name)}, which info.json lacks")
        _require(name not in taken, f"{where} keeps two fields as '{name}'")
        taken.add(name)
        there = feature.get("shape")
        text = f"{where} has shape {shown(shape)} of field '{path}', info.json {shown(there)}"
        _require(there == (shape or [1]), text)
        is_image = dtype == "uint8" and len(shape) == 3
        text = f"{where} has field '{path}' as {dtype}{shape}, which is not an image"
        _require(is_image or feature["dtype"] not in ("image", "video"), text)
    return dict(ours)


def is_count(value: Any) -> bool:
    """Return True for a whole number from 0 on, below ``MAX_COUNT``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


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


def _check_feature(name: str, entry: Mapping[str, Any], where: Path) -> None:
    dtype, there = entry.get("dtype"), f"{where} has feature {shown(name)} of"
    _require(isinstance(dtype, str), f"{there} dtype {shown(dtype)}; it must be text")
    shape = entry.get("shape")
    has_shape = dtype not in (*fmt.NUMBERS, "image", "video") or _is_shape(shape)
    _require(has_shape, f"{there} shape {shown(shape)}; it must be whole numbers")
    is_place = "/" not in name and not path_problem(fmt.VIDEO_FOLDER.format(video_key=name))
    text = f"{where} has a video {shown(name)}; a feature's name must have no slash and not be a path"
    _require(dtype != "video" or is_place, text)


def _fields(fields: Any, where: str) -> dict[str, Any]:
    _require(_is_table(fields), f"{where} is {shown(fields)}; it must have shape and dtype of each field")
    for path, entry in fields.items():
        shape, dtype, there = entry.get("shape"), entry.get("dtype"), f"{where}: field {shown(path)}"
        is_whole = _is_shape(shape) and isinstance(dtype, str)
        _require(is_whole, f"{there} is {shown(entry)}; it must have a shape and a dtype")
        _require(_DTYPE.fullmatch(dtype), f"{there} has dtype {shown(dtype)}, which NumPy does not have")
    return {path: (entry["shape"], entry["dtype"]) for path, entry in fields.items()}


def _check_place(key: str, template: Any, where: Path) -> None:
    """Refuse all but a template of paths below the folder, with known fields, formatted as numbers."""
    problem, parts = path_problem(template), []
    if problem is None:
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            problem = f"is not a template ({error})"
    for _, name, spec, conversion in parts:
        number = re.compile("") if name == "video_key" else _NUMBER_FORMAT
        known = name in _PLACES[key] and conversion is None and number.fullmatch(spec or "")
        if name is not None and not known:
            problem = f"has the field {shown('{' + name + '}', 40)}"
    allowed = ", ".join(f"{{{name}}}" for name in _PLACES[key])
    text = (
        f"{where} has {key} {shown(template)}, which {problem}; it must be the path of a file below the data set's "
        f"folder, made of {allowed}, as '{fmt.DATA if key == 'data_path' else fmt.VIDEO}'. Do not use this folder "
        f"unless you know who made it"
    )
    _require(problem is None, text)


def _require(holds: Any, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= 8 and all(map(is_count, shape)) and math.prod(shape) < MAX_COUNT
