"""LeRobot's dataset format v3.0: its files, and the mapping of episode fields to their columns.

    meta/info.json                              features, counts, frames per second, templates of the paths below
    meta/stats.json                             statistics per feature
    meta/tasks.parquet                          instruction -> task_index
    meta/episodes/chunk-000/file-000.parquet    a row per episode: where its frames lie, instruction, statistics
    data/chunk-000/file-000.parquet             a row per frame, many episodes a file
    videos/<feature>/chunk-000/file-000.mp4     many episodes a file, from_timestamp to to_timestamp in s
    meta/ejax.json                              ours: path, shape and NumPy dtype of each field

Source: "LeRobotDataset v3.0", https://huggingface.co/docs/lerobot/lerobot-dataset-v3. A feature of LeRobot's has no
rank 0 and no slash in its name: a scalar has shape [1], and field ``obs/robot/qpos`` is feature ``obs.robot.qpos``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ejax.data.lerobot.files import path_problem
from ejax.data.task import EpisodeSpec, Origin

Stats: TypeAlias = dict[str, NDArray[Any]]
STATS = ("min", "max", "mean", "std", "count")
VERSION = "v3.0"
INFO, STATS_FILE, TASKS, OURS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/ejax.json"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_FOLDER = "videos/{video_key}"
VIDEO = VIDEO_FOLDER + "/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILES_PER_CHUNK = 1000

Images = Literal["video", "png"]
"""Format of RGB image fields: H.264, which loses a little, or PNG, which loses nothing."""

DEFAULT_FEATURES = {
    "timestamp": "float32",
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
}
"""LeRobot's own columns per frame. Ours are these and ``segment_id``."""
NUMBERS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
ORIGINS = tuple(f"ejax/{name}" for name in Origin._fields[1:])
"""Columns that a recording may lack, which was begun when only the seed of an ``Origin`` was kept."""
PNG_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_OWN = {**DEFAULT_FEATURES, "segment_id": "int64"}
_STATES = ("obs/state", "obs/robot/qpos", "obs/qpos")
"""Fields that may be the robot's state, the first vector of which is."""
_MAX_STATS = 4096
"""Features with more entries get no statistics, which would outweigh the frames."""


@dataclass(frozen=True)
class Column:
    """A field and the feature that it is stored as."""

    path: str
    feature: str
    shape: tuple[int, ...]
    """Shape per frame, as a consumer gets it."""
    dtype: str
    """NumPy's and LeRobot's name, ``"float32"``; NumPy's for text, ``"|S8"``."""
    kind: Literal["number", "text", "png", "video"]

    @property
    def is_image(self) -> bool:
        return self.kind in ("png", "video")

    @property
    def has_stats(self) -> bool:
        return self.is_image or (self.kind == "number" and int(np.prod(self.shape)) <= _MAX_STATS)


def policy_names(spec: EpisodeSpec, given: Mapping[str, str]) -> dict[str, str]:
    """Name the fields that LeRobot's policies look for as they do, where ``given``, which wins, leaves it free."""
    state = next((path for path in _STATES if len(spec.frames.get(path, ((), ""))[0]) == 1), "")
    wanted = {"actions": "action", state: "observation.state"}
    for path, (shape, dtype) in spec.frames.items():
        if np.dtype(dtype) == np.uint8 and len(shape) == 3 and shape[-1] == 3 and path.startswith("obs/"):
            wanted[path] = f"observation.images.{path.removeprefix('obs/').replace('/', '.')}"
    taken = {*given.values(), *(path.replace("/", ".") for path in spec.frames)}
    named = {path: name for path, name in wanted.items() if path in spec.frames and name not in taken}
    return {**named, **given}


def make_columns(spec: EpisodeSpec, names: Mapping[str, str], images: Images) -> list[Column]:
    """Make the columns of a task's frame fields; ``names`` has features by path, e.g. ``{"actions": "action"}``. Raises
    ValueError for a name that is unknown, given twice or LeRobot's own, or a field that the format cannot hold."""
    if images not in get_args(Images):
        raise ValueError(f"images is {images!r}; use one of {', '.join(get_args(Images))}")
    if unknown := sorted(set(names) - set(spec.frames)):
        raise ValueError(f"names has {unknown}, which are not frame fields; there is {', '.join(spec.frames)}")
    columns = [
        _column(path, names.get(path, path.replace("/", ".")), *field, images) for path, field in spec.frames.items()
    ]
    taken = {*_OWN, "task"}
    for column in columns:
        # LeRobot joins names by slashes into those of statistics and files
        taken_or_slash = column.feature in taken or "/" in column.feature
        if taken_or_slash or (column.kind == "video" and path_problem(VIDEO_FOLDER.format(video_key=column.feature))):
            raise ValueError(
                f"field '{column.path}' cannot be feature '{column.feature}': the name is taken, has a slash or is "
                f"not a file name; rename it by names={{'{column.path}': ...}}"
            )
        taken.add(column.feature)
    return columns


def feature_entries(columns: Iterable[Column], axes: Mapping[str, Sequence[str]], fps: int) -> dict[str, Any]:
    """Make ``features`` of ``info.json``."""
    entries = {}
    kinds = {"text": "string", "png": "image", "video": "video"}
    for column in columns:
        names = list(axes[column.path]) if column.path in axes else None
        entry: dict[str, Any] = {"dtype": kinds.get(column.kind, column.dtype), "shape": list(column.shape or (1,))}
        entry["names"] = ["height", "width", "channels"] if column.is_image else names
        if column.kind == "video":
            about: dict[str, Any] = dict(zip(("height", "width", "channels"), column.shape, strict=True))
            about |= {"fps": fps, "codec": "h264", "pix_fmt": "yuv420p"}
            entry["info"] = {f"video.{name}": value for name, value in about.items()}
            entry["info"] |= {"is_depth_map": False, "has_audio": False}
        entries[column.feature] = entry
    return entries | {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _OWN.items()}


def data_schema(columns: Iterable[Column]) -> pa.Schema:
    fields = [(column.feature, _arrow_type(column)) for column in columns if column.kind != "video"]
    return pa.schema(fields + [(name, pa.type_for_alias(dtype)) for name, dtype in _OWN.items()])


def episodes_schema(columns: Sequence[Column], spec: EpisodeSpec) -> pa.Schema:
    """Make the schema of the files of episodes. Columns that are not LeRobot's begin with ``ejax/``."""
    whole, real, text = pa.int64(), pa.float64(), pa.string()
    names = ("data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index")
    fields = [
        ("episode_index", whole),
        ("tasks", pa.list_(text)),
        ("length", whole),
        *((name, whole) for name in names),
    ]
    for column in columns:
        if column.kind == "video":
            fields += [(f"videos/{column.feature}/{name}", whole) for name in ("chunk_index", "file_index")]
            fields += [(f"videos/{column.feature}/{name}", real) for name in ("from_timestamp", "to_timestamp")]
    for feature, rank in stats_ranks(columns).items():
        fields += [(f"stats/{feature}/{name}", _nested(real, rank)) for name in STATS if name != "count"]
        fields += [(f"stats/{feature}/count", pa.list_(whole))]
    fields += [("meta/episodes/chunk_index", whole), ("meta/episodes/file_index", whole)]
    fields += [("ejax/seed", whole), ("ejax/written_at", real), ("ejax/terminated", pa.bool_())]
    fields += [(name, whole) for name in ORIGINS]
    fields += [(f"ejax/segment_{name}", pa.list_(whole)) for name in ("ids", "lengths")]
    for path, (shape, dtype) in spec.episode.items():
        value = text if np.dtype(dtype).kind in "SU" else pa.from_numpy_dtype(dtype)
        fields.append((f"ejax/episode/{path}", _nested(value, len(shape))))
    return pa.schema(fields)


def stats_ranks(columns: Iterable[Column]) -> dict[str, int]:
    """Find the features that have statistics, and the rank of the latter."""
    ranks = {column.feature: len(column.shape) or 1 for column in columns if column.has_stats}
    return ranks | dict.fromkeys(_OWN, 1)


def feature_stats(values: NDArray[Any], *, image: bool = False) -> Stats:
    """Summarize the frames [T, ...] of one episode, T ≥ 1, per entry; images are uint8 [T, H, W, 3].

    As in LeRobot a scalar has shape [1], images are per channel in [0, 1], shape [3, 1, 1], std is the population's.

    >>> {name: value.tolist() for name, value in feature_stats(np.array([1.0, 3.0])).items()}
    {'min': [1.0], 'max': [3.0], 'mean': [2.0], 'std': [1.0], 'count': [2]}
    """
    axes = (0, 1, 2) if image else (0,)
    shape = (3, 1, 1) if image else values.shape[1:] or (1,)
    scale = 255.0 if image else 1.0  # LeRobot's images are in [0, 1]
    made = {name: getattr(np, name)(values, axis=axes) for name in ("min", "max")}
    # float32 sums of a million frames lose digits
    made |= {name: getattr(np, name)(values, axis=axes, dtype=np.float64) for name in ("mean", "std")}
    stats = {name: np.asarray(value, np.float64).reshape(shape) / scale for name, value in made.items()}
    return stats | {"count": np.array([len(values)])}


def combine_stats(first: Mapping[str, Any], second: Mapping[str, Any]) -> Stats:
    """Summarize two parts together, n = n₁ + n₂ with δ = μ₂ - μ₁.

        μ  = μ₁ + δ·n₂/n        σ² = (n₁σ₁² + n₂σ₂²)/n + δ²·n₁n₂/n²

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    (n1,), (n2,) = first["count"], second["count"]
    delta, share = second["mean"] - first["mean"], n2 / (n1 + n2)
    # no difference of squares, which would cancel
    variance = (1 - share) * first["std"] ** 2 + share * second["std"] ** 2 + delta**2 * share * (1 - share)
    return {
        "min": np.minimum(first["min"], second["min"]),
        "max": np.maximum(first["max"], second["max"]),
        "mean": first["mean"] + delta * share,
        "std": np.sqrt(variance),
        "count": np.array([n1 + n2]),
    }


def to_arrow(values: NDArray[Any], column: Column) -> pa.Array:
    """Turn numbers or text [T, ...] into a column of T entries."""
    if column.kind == "text":
        decoded = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
        return pa.array(decoded.tolist(), pa.string())
    array = pa.array(np.ascontiguousarray(values, column.dtype).reshape(-1))
    if len(column.shape) == 1:
        # LeRobot stores [1] as a scalar
        return array if column.shape == (1,) else pa.FixedSizeListArray.from_arrays(array, column.shape[0])
    for size in reversed(column.shape):
        array = pa.ListArray.from_arrays(np.arange(0, len(array) + 1, size, dtype=np.int32), array)
    return array


def from_arrow(array: pa.Array, column: Column) -> NDArray[Any]:
    """Invert ``to_arrow``, for any type of list; ValueError for entries that are missing, or do not fit the shape."""
    num_frames = len(array)
    while isinstance(array.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType):  # one for each axis
        array = array.flatten()
    if array.null_count or len(array) != num_frames * int(np.prod(column.shape)):
        raise ValueError(
            f"feature '{column.feature}' has {len(array)} values in {num_frames} frames, {array.null_count} of them "
            f"null; its shape {list(column.shape)} needs {num_frames * int(np.prod(column.shape))}"
        )
    if column.kind == "text":
        is_bytes = np.dtype(column.dtype).kind == "S"
        values = np.array([text.encode() if is_bytes else text for text in array.to_pylist()], column.dtype)
    else:
        values = array.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    return values.reshape(num_frames, *column.shape)


def _column(path: str, feature: str, shape: tuple[int, ...], dtype: str, images: Images) -> Column:
    kind = np.dtype(dtype).kind
    if kind not in "SU":
        dtype = np.dtype(dtype).name
    if dtype == "uint8" and len(shape) == 3 and shape[2] == 3:
        if images == "video" and (shape[0] % 2 or shape[1] % 2):  # yuv420p halves both sides
            text = f"images '{path}' are {shape[0]} x {shape[1]}; a video needs even sides; use images='png'"
            raise ValueError(text)
        return Column(path, feature, shape, dtype, images)
    if kind in "SU" and shape == ():
        return Column(path, feature, shape, dtype, "text")
    if kind not in "fiub" or np.dtype(dtype).itemsize > 8 or len(shape) > 5 or 0 in shape:
        raise ValueError(
            f"field '{path}', {dtype}{list(shape)}, cannot be kept: a feature is numbers of rank 0 to 5 with no empty "
            f"side, or one text"
        )
    return Column(path, feature, shape, dtype, "number")


def _arrow_type(column: Column) -> pa.DataType:
    if column.kind == "text":
        return pa.string()
    if column.kind == "png":
        return PNG_TYPE
    value = pa.from_numpy_dtype(column.dtype)
    if column.shape in ((), (1,)):
        return value
    return pa.list_(value, column.shape[0]) if len(column.shape) == 1 else _nested(value, len(column.shape))


def _nested(value: pa.DataType, rank: int) -> pa.DataType:
    for _ in range(rank):
        value = pa.list_(value)
    return value
