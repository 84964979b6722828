"""Drawing whole chunks from a buffer that is being written to.

The runs of each row are found once per version of the row. A draw takes windows from the rows that are whole, copies
them, and looks at the versions again; what changed meanwhile is drawn again. The copy is therefore always of one
episode, and the choice is uniform over what was whole at the last look.
"""

import itertools
import threading
import time
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.data.buffer import TrajectoryBuffer, fence
from ejax.data.chunks import Runs, SamplingMode, draw_windows, find_runs, window_mask
from ejax.data.task import nest

Copies: TypeAlias = tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]
"""Frame fields [B, C, ...] and episode fields [B, ...], by path."""

_LARGE = 2**18
"""Chunks of at least so many bytes are drawn singly: copying one takes longer than choosing it."""
_MOST_TRIES = 1000
"""Copies of a chunk, all torn, after which a draw gives up."""
_WAIT_S = 1.0
"""Time that a draw waits for a complete row, in s; writing a row takes well under a millisecond."""


class ChunkReader:
    """Draws from one buffer; caches its knowledge of the rows. Threads of one process may share it."""

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        shape = buffer.frames["valid"].shape
        self.redrawn = 0
        """Chunks thrown away because their row was written to meanwhile."""
        self._buffer = buffer
        self._version = np.zeros(shape[0], np.int64)
        """Versions of the rows when their runs were found; 0: no runs."""
        self._runs = Runs(*(np.zeros(shape, np.int64) for _ in Runs._fields))
        self._lock = threading.Lock()

    def draw(self, batch_size: int, chunk_size: int, mode: SamplingMode, rng: np.random.Generator) -> dict[str, Any]:
        """A nested dict: frame fields [B, C, ...], and under ``episode`` the episode fields [B, ...]; all copies.

        Raises:
            RuntimeError: no row that is whole has such a window.
        """
        copy = self._draw_singly if self._buffer.chunk_bytes(chunk_size) >= _LARGE else self._draw_together
        frames, fields = copy(batch_size, chunk_size, mode, rng)
        return nest(frames) | {"episode": nest(fields)}

    def _draw_together(self, count: int, chunk_size: int, mode: SamplingMode, rng: np.random.Generator) -> Copies:
        """One gather for all: the fewest calls. Torn chunks are drawn again, together."""
        frames, fields, torn = self._gather(count, chunk_size, mode, rng)
        for tries in itertools.count(1):
            if not torn.size:
                break
            self._count(torn.size, tries)
            again = self._gather(torn.size, chunk_size, mode, rng)
            for kept, copies in zip((frames, fields), again[:2], strict=True):
                for path, array in copies.items():
                    kept[path][torn] = array
            torn = torn[again[2]]
        return frames, fields

    def _draw_singly(self, count: int, chunk_size: int, mode: SamplingMode, rng: np.random.Generator) -> Copies:
        """Each chunk is looked at as soon as it is copied: few large ones are torn, and few copies are wasted."""
        frames, fields = self._buffer.empty(count, chunk_size)
        for i in range(count):
            for tries in itertools.count(1):
                rows, starts, version = self._choose(1, chunk_size, mode, rng)
                row, start = int(rows[0]), int(starts[0])
                self._buffer.copy_window(row, start, (frames, fields), i)
                fence()
                if self._buffer.version[row] == version[row]:
                    break
                self._count(1, tries)
        return frames, fields

    def _gather(
        self, count: int, chunk_size: int, mode: SamplingMode, rng: np.random.Generator
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], NDArray[np.intp]]:
        """Copies, and which of them are torn."""
        rows, starts, version = self._choose(count, chunk_size, mode, rng)
        copies = self._buffer.gather(rows, starts, chunk_size)
        fence()
        return *copies, (self._buffer.version[rows] != version[rows]).nonzero()[0]

    def _choose(
        self, count: int, chunk_size: int, mode: SamplingMode, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Rows and first frames of windows [count], and the versions [R] that they are windows of."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            version, mask = self._windows(chunk_size, mode)
            if mask.any():
                return *draw_windows(mask, count, rng), version
            self._wait_or_raise(deadline, chunk_size, mode)

    def _count(self, torn: int, tries: int) -> None:
        self.redrawn += torn
        if tries == _MOST_TRIES:
            raise RuntimeError(
                f"No unlocked valid chunk: {tries} copies in a row were torn, the rows are rewritten faster than they "
                f"are copied; give a smaller chunk_size, or a larger buffer_size or refill_threshold"
            )

    def _windows(self, chunk_size: int, mode: SamplingMode) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Versions [R] and window starts [R, T] of the rows that are whole now."""
        with self._lock:
            self._refresh()
            version, mask = self._version.copy(), window_mask(self._runs, chunk_size, mode)
        mask[self._buffer.version != version] = False
        return version, mask

    def _refresh(self) -> None:
        """Find the runs of rows that were written since, where they are whole before and after."""
        version = self._buffer.version.copy()
        (changed,) = ((version != self._version) & (version % 2 == 0)).nonzero()
        if not changed.size:
            return
        fence()
        runs = find_runs(self._buffer.frames["valid"][changed], self._buffer.frames["segment_id"][changed])
        fence()
        whole = self._buffer.version[changed] == version[changed]
        for known, found in zip(self._runs, runs, strict=True):
            known[changed[whole]] = found[whole]
        self._version[changed[whole]] = version[changed[whole]]

    def _wait_or_raise(self, deadline: float, chunk_size: int, mode: SamplingMode) -> None:
        unsettled = (self._buffer.version != self._version) | (self._buffer.version % 2 == 1)
        if time.monotonic() > deadline or not unsettled.any():
            longest = int(self._runs.valid.max(initial=0))
            raise RuntimeError(
                f"No unlocked valid chunk of {chunk_size} frames in mode '{mode}': of {len(self._version)} rows "
                f"{int((self._buffer.version % 2 == 1).sum())} are being written, and the longest episode has "
                f"{longest} frames; give a smaller chunk_size or another sampling_mode"
            )
        time.sleep(1e-4)
