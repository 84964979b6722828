"""The episodes of a LeRobot v3.0 dataset, whole or windows of them, in any order.

Folders of an ``EpisodeWriter`` return the fields that were put in. In others feature ``observation.state`` becomes
field ``observation/state``; data other than numbers and images is left out, and named by ``EpisodeReader.skipped``.
"""

import math
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import open_inside
from ejax.data.lerobot.format import Column
from ejax.data.lerobot.metadata import load_columns, load_info, load_ours
from ejax.data.lerobot.parquet import EPISODES, load_episode_rows, naming_errors
from ejax.data.lerobot.pictures import decode_image, decode_video
from ejax.data.lerobot.recording import STAGING, file_of
from ejax.data.task import Episode, Origin, frame_numbers, nest_fields

FLAGS = ("next.terminated", "is_terminal", "next.done", "next.truncated", "next.success")
"""Features of LeRobot and RLDS that say how an episode ends."""


def terminates(flags: Mapping[str, bool]) -> bool:
    """Return whether an episode ended its task, by those of ``FLAGS`` that its last frame has; without any, it did."""
    for name in FLAGS[:2]:
        if name in flags:
            return flags[name]
    success = flags.get("next.success")
    if not flags.keys() & {"next.done", "next.truncated"}:
        return success is not False
    return flags.get("next.done", True) and (not flags.get("next.truncated") or bool(success))


class EpisodeReader:
    """The episodes of a folder as they were when it was opened. May be pickled; threads may share it.

    An episode that exceeds ``cache_mb`` MiB of decoded frames is read by windows.

    Raises:
        FileNotFoundError: the folder, or a file that its metadata names, does not exist.
        ValueError: another version of the format, metadata that do not agree, a damaged file; files of frames are
            opened when first read.
    """

    def __init__(self, folder: Path | str, *, cache_mb: float = 512.0) -> None:
        self.folder = Path(folder)
        self.info = load_info(self.folder)
        ours = load_ours(self.folder, self.info)
        self.columns, self.skipped = load_columns(self.folder, self.info, ours["frames"])
        self._fields: dict[str, Any] = ours["episode"]
        self._rows = load_episode_rows(self.folder, self.info["total_episodes"], self.columns, list(self._fields))
        self._cache = _Cache(int(cache_mb * 2**20))
        if (self.folder / STAGING).exists():
            warnings.warn(
                f"{self.folder}: an episode is being written, or was when the recording was cut off; it is not read. "
                f"In the latter case the next append removes it",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the frames of each episode."""
        return np.array([row["length"] for row in self._rows], np.int64)

    @property
    def training(self) -> range:
        """Return the episodes of the set's split ``train``; all where it has none."""
        splits = self.info.get("splits")
        named = re.fullmatch(r"(\d{1,9}):(\d{1,9})", str(splits.get("train"))) if isinstance(splits, dict) else None
        return (range(len(self))[int(named[1]) : int(named[2])] if named else range(0)) or range(len(self))

    def instruction(self, index: int) -> str:
        """Return the episode's first "task"."""
        tasks = self._rows[index]["tasks"]
        return tasks[0] if tasks else ""

    def segments(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ``segment_id`` and length, in frames, of each run of frames with the same one."""
        row = self._rows[index]
        if "ejax/segment_ids" not in row:
            return np.zeros(1, np.int64), np.array([row["length"]], np.int64)
        return np.array(row["ejax/segment_ids"], np.int64), np.array(row["ejax/segment_lengths"], np.int64)

    def fields(self, index: int) -> dict[str, Any]:
        """Return ``length``, ``index``, ``written_at`` (Unix time in s), ``Origin`` and ``instruction``, by path. The
        task's own fields take precedence. Unknown: NaN for a time, -1 for others."""
        row = self._rows[index]
        made: dict[str, Any] = {
            "length": np.int64(row["length"]),
            "index": np.int64(index),
            "written_at": np.float64(row.get("ejax/written_at", np.nan)),
        }
        made |= {name: np.int64(row.get(f"ejax/{name}", -1)) for name in Origin._fields}
        if not any(path.startswith("instruction/") for path in self._fields):
            made["instruction"] = np.str_(self.instruction(index))
        with naming_errors(self.folder / EPISODES):
            made |= {path: _field(row[f"ejax/episode/{path}"], entry) for path, entry in self._fields.items()}
        return made

    def __getitem__(self, index: int) -> Episode:
        """Read the whole episode ``index``; negative ones count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"no episode {index}; {self.folder} has {len(self)}")
        index %= len(self)
        frames = self._own_frames(index, 0, self._rows[index]["length"])
        fields = {path: value for path, value in self.fields(index).items() if path in self._fields}
        return self._episode(index, nest_fields(frames), nest_fields(fields))

    def window(self, index: int, start: int, count: int) -> dict[str, NDArray[Any]]:
        """Read frames [start, start + count) by path, with the frame fields of the engine's buffer. Do not write to the
        arrays: other callers may share them."""
        numbers = frame_numbers(self._episode(index, {}, {}), self._rows[index]["length"])
        part = {path: values[start : start + count] for path, values in numbers.items()}
        return part | self._own_frames(index, start, count)

    def _episode(self, index: int, frames: dict[str, Any], fields: dict[str, Any]) -> Episode:
        flags = [column for column in self.columns if column.feature in FLAGS and column.kind == "number"]
        kept = self._cache.get((index, ""), lambda: self._read(index)) if flags else {}
        ends = {column.feature: bool(np.any(kept[column.path][-1])) for column in flags}  # of the last frame
        terminated = self._rows[index].get("ejax/terminated")
        return Episode(
            frames,
            segment_id=np.repeat(*self.segments(index)),
            fields=fields,
            terminated=terminates(ends) if terminated is None else bool(terminated),
            success=ends.get("next.success", True),
        )

    def _own_frames(self, index: int, start: int, count: int) -> dict[str, NDArray[Any]]:
        kept = self._cache.get((index, ""), lambda: self._read(index))
        made, length = {}, self._rows[index]["length"]
        for column in self.columns:
            if not column.is_image:
                made[column.path] = kept[column.path][start : start + count]
            elif length * math.prod(column.shape) > self._cache.capacity:
                # decoded by windows: whole, it would push out all others each time
                made[column.path] = self._images(index, kept, column, start, count)
            else:
                decode = partial(self._images, index, kept, column, 0, length)
                made[column.path] = self._cache.get((index, column.path), decode)[start : start + count]
        return made

    def _read(self, index: int) -> dict[str, Any]:
        """Read an episode's data file: arrays [length, ...] by path; images still encoded."""
        row, columns = self._rows[index], [column for column in self.columns if column.kind != "video"]
        name = file_of(row, "data", self.info["data_path"])
        names = [*(column.feature for column in columns), "episode_index"]
        options: Any = {"use_threads": False, "page_checksum_verification": True}
        with open_inside(self.folder, name) as file, naming_errors(self.folder / name):
            table = pq.read_table(file, columns=names, filters=[("episode_index", "==", index)], **options)
            if len(table) != row["length"]:  # fewer: cut off; more: two episodes of one number
                raise ValueError(f"{len(table)} frames of episode {index}; in {EPISODES} it has {row['length']}")
            made: dict[str, Any] = {}
            for column in columns:
                array = table[column.feature].combine_chunks()
                made[column.path] = (
                    array.field("bytes").to_pylist() if column.is_image else fmt.from_arrow(array, column)
                )
        return made

    def _images(self, index: int, kept: Mapping[str, Any], column: Column, start: int, count: int) -> NDArray[np.uint8]:
        height, width, channels = column.shape
        shape, where = (height, width, channels), f"{self.folder}: episode {index}, '{column.feature}'"
        if column.kind == "png":
            encoded = kept[column.path][start : start + count]
            if None in encoded:
                raise ValueError(f"{where} has images outside its data file")
            return np.stack([decode_image(data, shape, where) for data in encoded])
        row, key = self._rows[index], f"videos/{column.feature}"
        name = file_of(row, key, self.info["video_path"], video_key=column.feature)
        with open_inside(self.folder, name):  # before ffmpeg does: a regular file below the folder
            path = self.folder / name
        return decode_video(path, row[f"{key}/from_timestamp"] + start / self.fps, self.fps, shape, count)


class _Cache:
    """The episodes decoded last, up to ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.size = capacity, 0
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)  # the least recently used goes first
                return self._kept[key]
        made = make()  # without the lock: decoding takes long, and twice does no harm
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self.size += _num_bytes(made)
            while self.size > self.capacity and len(self._kept) > 1:  # the newest stays, however large
                self.size -= _num_bytes(self._kept.popitem(last=False)[1])
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"])  # type: ignore[misc]


def _num_bytes(made: Any) -> int:
    if isinstance(made, dict):
        return sum(map(_num_bytes, made.values()))
    return sum(map(len, made)) if isinstance(made, list) else made.nbytes


def _field(value: Any, entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(entry["dtype"])
    made = np.char.encode(value, "utf-8").astype(dtype) if dtype.kind == "S" else np.array(value, dtype)
    return made.reshape(entry["shape"])
