"""Episodes in shared memory: R rows, one per episode, of T frames; B chunks of C frames are copied out of them.

A row's version is even while the row is whole, odd while it is being written, and 0 before its first writing. Only the
worker writes. Consumers throw a copy away if the version changed meanwhile, so there are no locks.
Source: sequence locks (Lameter, "Effective synchronization on Linux/NUMA systems", 2005).
"""

import errno
import math
import mmap
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.data.chunks import Windows, padding
from ejax.data.task import (
    EPISODE_FIELDS,
    FRAME_FIELDS,
    Episode,
    EpisodeSpec,
    FieldForm,
    Origin,
    check_episode,
    frame_numbers,
)

Copies: TypeAlias = tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]
"""Frame fields [B, C, ...] and episode fields [B, ...], by path."""
_ALIGNMENT = 64  # bytes of a cache line: two processes' words do not share one
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class BufferLayout:
    """The arrays of a buffer."""

    num_rows: int
    num_frames: int
    """T: capacity of a row, in frames."""
    spec: EpisodeSpec

    @property
    def frames(self) -> dict[str, FieldForm]:
        return {**FRAME_FIELDS, **self.spec.frames}

    @property
    def episode(self) -> dict[str, FieldForm]:
        return {**EPISODE_FIELDS, **self.spec.episode}

    def arrays(self) -> dict[str, FieldForm]:
        return {
            "version": ((self.num_rows,), "int64"),
            **{f"episode:{path}": ((self.num_rows, *shape), dtype) for path, (shape, dtype) in self.episode.items()},
            **{
                f"frame:{path}": ((self.num_rows, self.num_frames, *shape), dtype)
                for path, (shape, dtype) in self.frames.items()
            },
        }


class TrajectoryBuffer:
    """The arrays in the file that ``create`` made. The memory lives as long as one of them."""

    def __init__(self, path: Path, layout: BufferLayout) -> None:
        arrays = attach(path, layout.arrays())
        self.layout = layout
        self.version: NDArray[np.int64] = arrays["version"]
        self.frames: dict[str, NDArray[Any]] = {name: arrays[f"frame:{name}"] for name in layout.frames}
        """[R, T, ...] by path."""
        self.episode: dict[str, NDArray[Any]] = {name: arrays[f"episode:{name}"] for name in layout.episode}
        """[R, ...] by path."""

    def write(self, row: int, episode: Episode, origin: Origin, *, index: int, written_at: float) -> None:
        """Put an episode into a row; one that ``check_episode`` refuses (ValueError) leaves the row unchanged."""
        arrays, fields = check_episode(episode, self.layout.spec, self.layout.num_frames)
        length = len(next(iter(arrays.values())))
        arrays |= frame_numbers(episode, length)
        numbers: dict[str, Any] = {"length": length, "index": index, "written_at": written_at, **origin._asdict()}
        # all checks and conversions are done: the row is odd for the copies alone, and no error leaves it so
        self.version[row] |= 1
        fence()
        # all frames first: beyond the end the other fields keep an earlier episode's values, which nobody reads
        self.frames["valid"][row] = False
        for path, values in arrays.items():
            self.frames[path][row, :length] = values
        for path, value in (fields | numbers).items():
            self.episode[path][row] = value
        fence()
        self.version[row] += 1

    def gather(self, rows: NDArray[np.int64], starts: NDArray[np.int64], size: int) -> Copies:
        """Copy windows of ``size`` valid frames; they may be torn."""
        frames = {}
        for path, array in self.frames.items():
            num_rows, num_frames, *shape = array.shape
            row_stride, step, *inner = array.strides
            windows = np.ndarray(  # windows[r, s] is array[r, s : s + C]; one gather copies runs of C frames
                (num_rows, num_frames - size + 1, size, *shape), array.dtype, array, 0, (row_stride, step, step, *inner)
            )
            frames[path] = windows[rows, starts]
        return frames, {path: array[rows] for path, array in self.episode.items()}

    def empty(self, count: int, size: int) -> Copies:
        """Make uninitialized arrays for ``count`` windows, as ``gather`` returns them."""
        frames = {path: np.empty((count, size, *a.shape[2:]), a.dtype) for path, a in self.frames.items()}
        return frames, {path: np.empty((count, *a.shape[1:]), a.dtype) for path, a in self.episode.items()}

    def copy_window(self, windows: Windows, which: int, into: Copies, place: int) -> None:
        """Copy window number ``which``, which may be padded, to ``place`` in the arrays of ``empty``."""
        frames, fields = into
        row, start, begin, end = (int(each[which]) for each in windows)
        for path, target in frames.items():
            size, source = target.shape[1], self.frames[path]
            first, behind = np.clip([begin - start, end - start], 0, size)
            # what lies beyond the episode may be an earlier one's, so it is not copied
            target[place, :first] = target[place, behind:] = padding(path, source.dtype)
            target[place, first:behind] = source[row, start + first : start + behind]
        for path, target in fields.items():
            target[place] = self.episode[path][row]


def create(path: Path, arrays: Mapping[str, FieldForm]) -> None:
    """Make a file of arrays, zeros, which lasts until its last process ends; MemoryError if shared memory is short."""
    _, size = _offsets(arrays)
    # of its owner alone, like the folder: consumers unpickle failures
    path.touch(0o600, exist_ok=False)
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # else a later write beyond the free memory would be a bus error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG):
                raise
            raise MemoryError(
                f"the buffer needs {size / 2**20:.0f} MiB of shared memory, which {path.parent.parent} does not have; "
                f"lower buffer_size or max_episode_steps, or enlarge it (docker: --shm-size)"
            ) from error


def attach(path: Path, arrays: Mapping[str, FieldForm]) -> dict[str, NDArray[Any]]:
    """Map the arrays of a file; FileNotFoundError if it no longer exists."""
    offsets, size = _offsets(arrays)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    return {name: np.ndarray(shape, dtype, memory, offsets[name]) for name, (shape, dtype) in arrays.items()}


def fence() -> None:
    """Order this process's reads and writes in shared memory before and after this call. x86-64 keeps the order by
    itself. Elsewhere a system call through Linux' scheduler is a full memory barrier."""
    if not _KEEPS_ORDER:
        os.sched_yield()


def _offsets(arrays: Mapping[str, FieldForm]) -> tuple[dict[str, int], int]:
    """Place arrays one behind the other, aligned to a cache line; return offsets and size in bytes."""
    offsets, end = {}, 0
    for name, (shape, dtype) in arrays.items():
        offsets[name] = end
        size = math.prod(shape) * np.dtype(dtype).itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT  # rounded up
    return offsets, end
