"""The metadata of a LeRobot v3.0 dataset, ``meta/info.json``, and ours, ``meta/ejax.json``, checked before use."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import inside, path_problem, read_meta
from ejax.data.lerobot.format import Column
from ejax.data.task import FRAME_FIELDS, LOSS_MASK, EpisodeSpec, check_paths
from ejax.schema.messages import short_repr

MAX_COUNT = 2**31
"""Bound of counts and sides: no dataset has more."""
_NUMBER = r"(chunk_index|file_index)(:0?[1-9]?d?)?"
_PLACES = {"data_path": rf"\{{{_NUMBER}\}}", "video_path": rf"\{{({_NUMBER}|video_key)\}}"}
_IMAGES = ("image", "video")


def _whole(shape: Any) -> Any:
    if not (
        isinstance(shape, list)
        and len(shape) <= 8
        and all(type(size) is int and 0 <= size < MAX_COUNT for size in shape)
        and math.prod(shape) < MAX_COUNT
    ):
        raise ValueError(f"shape {short_repr(shape)} must be a few whole numbers")
    return shape


_Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
_Shape = Annotated[Any, AfterValidator(_whole)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True)


class _Feature(_Checked):
    dtype: str
    shape: Any = None

    @model_validator(mode="after")
    def _has_shape(self) -> "_Feature":
        if self.dtype in (*fmt.NUMBERS, *_IMAGES):  # others are skipped
            _whole(self.shape)
        return self


class _Info(_Checked):
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    total_episodes: _Count
    total_frames: _Count = 0
    features: dict[str, _Feature]


class _OwnField(_Checked):
    shape: _Shape
    dtype: Annotated[str, Field(pattern=r"^[<>|=]?[A-Za-z]+\d{0,9}(\[\w+\])?$")]


class _OwnFrames(_OwnField):
    feature: str


class _Own(_Checked):
    version: Literal[1]
    frames: dict[str, _OwnFrames]
    episode: dict[str, _OwnField]


def load_columns(folder: Path, info: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[list[Column], dict[str, str]]:
    """Find the columns that can be read, and the other features with the reason; ``ours``: ``frames`` of our metadata.
    Raises ValueError if no column can be read, or two have one path."""
    given = {entry["feature"]: path for path, entry in ours.items()}
    kinds: dict[str, Any] = {"image": "png", "video": "video", "string": "text"}
    columns, skipped = [], {}
    for feature, entry in info["features"].items():
        if feature in given:
            own, kind = ours[given[feature]], kinds.get(entry["dtype"], "number")
            columns.append(Column(given[feature], feature, tuple(own["shape"]), own["dtype"], kind))
        # numbers of frames, which the reader makes itself
        elif feature in fmt.DEFAULT_FEATURES or (ours and feature == "segment_id"):
            continue
        elif isinstance(made := _foreign_column(feature, entry), Column):
            columns.append(made)
        else:
            skipped[feature] = made
    if not columns:
        raise ValueError(f"{folder} has no feature that can be read; skipped: {short_repr(skipped)}")
    paths = {column.path for column in columns}
    columns = [column if column.feature in given else _beside(column, paths) for column in columns]
    try:
        check_paths([column.path for column in columns])
    except ValueError as error:
        raise ValueError(f"{folder / fmt.INFO} has features that cannot be fields: {error}") from error
    return columns, skipped


def load_info(folder: Path) -> dict[str, Any]:
    """Load ``meta/info.json`` of a LeRobot v3.0 dataset.

    Raises FileNotFoundError if the folder has none; ValueError for another version, missing or other entries, and paths
    that leave the folder, or depend on anything other than chunk, file and video.
    """
    where = folder / fmt.INFO
    if not inside(folder, fmt.INFO).exists():
        raise FileNotFoundError(f"{folder} is not a LeRobot dataset: {fmt.INFO} is missing")
    info = read_meta(folder, fmt.INFO)
    version = info.get("codebase_version") if isinstance(info, dict) else info
    remedy = "Convert it to that with a lerobot that knows both"
    if version == "v2.1":
        remedy = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=... converts it"
    if not isinstance(version, str) or version.split(".")[0] != "v3":
        there = f"{folder} is LeRobot {short_repr(version).strip(chr(39))}"
        raise ValueError(f"{there}; {fmt.VERSION} can be read. {remedy}")
    _check(_Info, info, where)
    videos = [name for name, entry in info["features"].items() if entry["dtype"] == "video"]
    for name in videos:
        if "/" in name or path_problem(fmt.VIDEO_FOLDER.format(video_key=name)):
            text = f"{where} has a video {short_repr(name)}; a feature's name must have no slash and not be a path"
            raise ValueError(text)
    for key in _PLACES if videos else ("data_path",):
        _check_place(key, info.get(key), where)
    return dict(info)


def load_ours(folder: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """Load ``meta/ejax.json``, without fields if the folder lacks it.

    Raises ValueError for another version, fields that no ``EpisodeSpec`` can have, or features that ``info`` lacks.
    """
    where = folder / fmt.OURS
    if not inside(folder, fmt.OURS).exists():
        return {"version": 1, "frames": {}, "episode": {}}
    ours = read_meta(folder, fmt.OURS)
    _check(_Own, ours, where)
    fields = [{path: (e["shape"], e["dtype"]) for path, e in ours[kind].items()} for kind in ("frames", "episode")]
    try:
        EpisodeSpec(*fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{where} has fields that no episode can have: {short_repr(str(error))}") from error
    taken: set[str] = set()
    for path, entry in ours["frames"].items():
        name, shape = entry["feature"], entry["shape"]
        there = info["features"].get(name)
        image = there is not None and there["dtype"] in _IMAGES
        fits = not image or (entry["dtype"] == "uint8" and len(shape) == 3)
        if name in taken or there is None or there.get("shape") != (shape or [1]) or not fits:
            known = "which is another field's, too" if name in taken else f"{entry['dtype']}{shape}"
            raise ValueError(
                f"{where} keeps field '{path}' as {short_repr(name)}, {known}; in info.json it is {short_repr(there)}"
            )
        taken.add(name)
    return dict(ours)


def _beside(column: Column, paths: Collection[str]) -> Column:
    """Let the dots of a feature be dots behind the path of another: ``action.original`` is not part of ``action``."""
    heads = accumulate(column.path.split("/")[:-1], "{}/{}".format)
    whole = len(next((head for head in heads if head in paths), column.path))
    return replace(column, path=column.path[:whole] + column.path[whole:].replace("/", "."))


def _foreign_column(feature: str, entry: Mapping[str, Any]) -> Column | str:
    path = feature.replace(".", "/")
    if path.split("/")[0] in {"episode", LOSS_MASK, *FRAME_FIELDS}:
        path = f"feature/{path}"  # a consumer finds the engine's own fields under the other name
    dtype = entry["dtype"]
    if dtype not in (*fmt.NUMBERS, *_IMAGES):
        return f"dtype {dtype}"
    shape = tuple(entry["shape"])
    if dtype not in _IMAGES:
        return Column(path, feature, shape, dtype, "number")
    about: dict[str, Any] = {}
    for notes in (entry.get("video_info"), entry.get("info")):
        about |= notes if isinstance(notes, dict) else {}
    if about.get("is_depth_map") or about.get("video.is_depth_map"):
        return "a depth video"
    names = entry.get("names")  # LeRobot allows channels first in the metadata; decoded frames are [H, W, 3]
    if isinstance(names, list) and names and names[0] in ("channel", "channels"):
        shape = (*shape[1:], shape[0])
    if len(shape) != 3 or shape[2] != 3:
        return f"images of shape {list(shape)}"
    return Column(path, feature, shape, "uint8", "png" if dtype == "image" else "video")


def _check(model: type[BaseModel], value: Any, where: Path) -> None:
    try:
        model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]  # one is enough: a damaged file has hundreds
        entry = ".".join(map(str, first["loc"])) or "content"
        raise ValueError(f"{where} has {short_repr(entry)} {short_repr(first['input'])}: {first['msg']}") from error


def _check_place(key: str, template: Any, where: Path) -> None:
    """Refuse all but a template of paths below the folder, with known fields, formatted as numbers."""
    problem = path_problem(template)
    if problem is None:
        # the rest goes through ``str.format``: attributes, and widths of a billion characters, must not get there
        unknown = re.search(r"\{[^}]*\}?|\}", re.sub(_PLACES[key], "0", template))
        problem = f"has the field {short_repr(unknown[0])}" if unknown else None
    if problem:
        example = fmt.DATA if key == "data_path" else fmt.VIDEO
        raise ValueError(
            f"{where} has {key} {short_repr(template)}, which {problem}; it must be the path of a file below the data "
            f"set's folder, as '{example}'. Do not use this folder unless you know who made it"
        )
