"""Episodes in shared memory: one block, one row an episode, each with a version that makes torn reads visible.

A row's version is even while the row is whole, odd while it is being written, 0 before it was ever written. Only the
worker writes. A consumer notes the version, copies, and looks again: a copy whose version changed is thrown away. So
no lock can outlive its holder; neither a slow consumer nor a killed one ever stops the worker.
Source: sequence locks (Lameter, "Effective synchronization on Linux/NUMA systems", 2005).

R rows, T frames a row, C frames a chunk, B chunks.
"""

import _posixshmem
import errno
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.data.chunks import Windows
from ejax.data.context import padding
from ejax.data.leftovers import block_name
from ejax.data.task import (
    EPISODE_FIELDS,
    FRAME_FIELDS,
    Episode,
    EpisodeSpec,
    Field,
    Origin,
    check_episode,
    frame_numbers,
)

_ALIGNMENT = 64
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class Layout:
    """The offsets of everything in the block: all that a process needs, with its name, to attach to it."""

    num_rows: int
    num_frames: int
    """T: capacity of a row, in frames."""
    spec: EpisodeSpec
    control: tuple[tuple[str, Field], ...] = ()
    """Further arrays, not per row, by name: the engine's words."""

    @property
    def frames(self) -> dict[str, Field]:
        return {**FRAME_FIELDS, **self.spec.frames}

    @property
    def episode(self) -> dict[str, Field]:
        return {**EPISODE_FIELDS, **self.spec.episode}

    def arrays(self) -> tuple[dict[str, tuple[int, tuple[int, ...], str]], int]:
        """``{key: (offset, shape, dtype)}`` and the size of the block in bytes."""
        shapes = {f"control:{name}": entry for name, entry in self.control}
        shapes |= {"version": ((self.num_rows,), "int64")}
        shapes |= {f"episode:{k}": ((self.num_rows, *s), d) for k, (s, d) in self.episode.items()}
        shapes |= {f"frame:{k}": ((self.num_rows, self.num_frames, *s), d) for k, (s, d) in self.frames.items()}
        placed, end = {}, 0
        for key, (shape, dtype) in shapes.items():
            placed[key] = (end, shape, dtype)
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return placed, end


class TrajectoryBuffer:
    """NumPy views of the block. The memory lives as long as one of them; the name belongs to the creator."""

    def __init__(self, memory: mmap.mmap, layout: Layout) -> None:
        placed, _ = layout.arrays()
        views = {key: np.ndarray(shape, dtype, memory, offset) for key, (offset, shape, dtype) in placed.items()}
        self.layout = layout
        self.version: NDArray[np.int64] = views["version"]
        self.frames: dict[str, NDArray[Any]] = _below("frame:", views)
        """[R, T, ...] by path."""
        self.episode: dict[str, NDArray[Any]] = _below("episode:", views)
        """[R, ...] by path."""
        self.control: dict[str, NDArray[Any]] = _below("control:", views)
        self._memory = memory

    def write(self, row: int, episode: Episode, origin: Origin, *, index: int, written_at: float) -> None:
        """Put an episode into a row. Until it is complete, the row cannot be drawn from.

        Raises:
            ValueError: as ``check_episode``; the row is then unchanged.
        """
        arrays, fields = check_episode(episode, self.layout.spec, self.layout.num_frames)
        length = len(next(iter(arrays.values())))
        arrays |= frame_numbers(episode, length)
        numbers: dict[str, Any] = {"length": length, "index": index, "written_at": written_at, **origin._asdict()}
        # all checks and conversions are done: the row is odd for the copies alone, and no error leaves it so
        with self.writing(row):
            self.frames["valid"][row] = False
            for path, values in arrays.items():
                self.frames[path][row, :length] = values
            for name in ("episode_step", "segment_id", "segment_step"):
                self.frames[name][row, length:] = -1
            for name in ("segment_start", "segment_end", "terminated", "truncated"):
                self.frames[name][row, length:] = False
            for path, value in (fields | numbers).items():
                self.episode[path][row] = value

    @contextmanager
    def writing(self, row: int) -> Iterator[None]:
        """Lock a row: its version is odd inside. It stays odd after an exception: the content is incomplete."""
        self.version[row] |= 1
        fence()
        yield
        fence()
        self.version[row] += 1

    def gather(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], chunk_size: int
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Copies of windows: frame fields [B, C, ...] and episode fields [B, ...], by path; maybe torn, see above."""
        frames = {}
        for path, array in self.frames.items():
            num_rows, num_frames, *shape = array.shape
            row_stride, step, *inner = array.strides
            windows = np.ndarray(  # windows[r, s] is array[r, s : s + C]; one gather copies runs of C frames
                (num_rows, num_frames - chunk_size + 1, chunk_size, *shape),
                array.dtype,
                array,
                strides=(row_stride, step, step, *inner),
            )
            frames[path] = windows[rows, starts]
        return frames, {path: array[rows] for path, array in self.episode.items()}

    def chunk_bytes(self, chunk_size: int) -> int:
        """Size of the frame fields of one chunk."""
        return chunk_size * sum(array[0, 0].nbytes for array in self.frames.values())

    def empty(self, count: int, chunk_size: int) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Uninitialized arrays for ``count`` chunks, as ``gather`` returns them."""
        frames = {path: np.empty((count, chunk_size, *a.shape[2:]), a.dtype) for path, a in self.frames.items()}
        return frames, {path: np.empty((count, *a.shape[1:]), a.dtype) for path, a in self.episode.items()}

    def gather_around(self, windows: Windows, size: int) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """As ``gather``, of windows of ``size`` frames that may reach beyond what is to be drawn of their rows."""
        step = windows.start[:, None] + np.arange(size)
        outside = (step < windows.begin[:, None]) | (step >= windows.end[:, None])
        step = np.clip(step, 0, self.layout.num_frames - 1)
        frames = {}
        for path, array in self.frames.items():
            frames[path] = array[windows.row[:, None], step]
            frames[path][outside] = padding(path, array.dtype)
        return frames, {path: array[windows.row] for path, array in self.episode.items()}

    def copy_window(
        self,
        windows: Windows,
        which: int,
        into: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]],
        place: int,
    ) -> None:
        """Copy window number ``which`` to ``place`` in the arrays of ``empty``."""
        frames, fields = into
        row, start, begin, end = (int(each[which]) for each in windows)
        for path, target in frames.items():
            size, source = target.shape[1], self.frames[path]
            first, behind = np.clip([begin - start, end - start], 0, size)
            target[place, :first] = target[place, behind:] = padding(path, source.dtype)
            target[place, first:behind] = source[row, start + first : start + behind]
        for path, target in fields.items():
            target[place] = self.episode[path][row]


def create_block(layout: Layout) -> SharedMemory:
    """Make the shared memory for ``layout``. Its creator calls ``unlink()``, once; the memory itself goes with the last
    process that is attached.

    The resource tracker of this process knows of the block: should the process be killed, the tracker removes it.
    Should that be killed too, the next engine does (``ejax.data.leftovers``).

    Raises:
        MemoryError: there is not enough shared memory.
    """
    _, size = layout.arrays()
    block = SharedMemory(block_name(), create=True, size=size)
    try:
        with _opened(block.name) as descriptor:
            os.posix_fallocate(descriptor, 0, size)  # else a later write beyond the free memory would be a bus error
    except OSError as error:
        block.unlink()
        if error.errno != errno.ENOSPC:
            raise
        raise MemoryError(
            f"the buffer needs {size / 2**20:.0f} MiB of shared memory, which /dev/shm does not have; lower "
            f"buffer_size or max_episode_steps, or enlarge it (docker: --shm-size)"
        ) from error
    finally:
        block.close()
    return block


def attach(name: str, layout: Layout) -> TrajectoryBuffer:
    """The buffer that another process made.

    ``SharedMemory(name)`` is not used here: up to Python 3.12 it registers the block with the resource tracker of
    each process that attaches, and that tracker removes the block when its process ends.

    Raises:
        FileNotFoundError: the block no longer exists.
    """
    with _opened(name) as descriptor:
        return TrajectoryBuffer(mmap.mmap(descriptor, layout.arrays()[1]), layout)


def fence() -> None:
    """A memory barrier: order this process's reads and writes in shared memory before and after it.

    x86-64 keeps the order of stores and of loads by itself, and Python's calls keep the compiler from changing it.
    Elsewhere a system call that goes through Linux' scheduler is a full memory barrier; Python has no other.
    """
    if not _KEEPS_ORDER:
        os.sched_yield()


@contextmanager
def _opened(name: str) -> Iterator[int]:
    descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _below(prefix: str, views: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {key.removeprefix(prefix): view for key, view in views.items() if key.startswith(prefix)}
