"""Drawing whole chunks from a buffer that is being written to.

The runs of each row are found once per version of the row. A draw takes windows from the rows that are whole, copies
them, and looks at the versions again; what changed meanwhile is drawn anew. The copy is therefore always of one
episode, and the choice is uniform over what was whole at the last look.
"""

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.data.buffer import TrajectoryBuffer, fence
from ejax.data.chunks import Runs, SamplingMode, draw_windows, find_runs, window_mask
from ejax.data.task import nest

_WAIT_S = 1.0
"""How long a draw waits for a row to become whole, in s; a row is being written for well under a millisecond."""


class ChunkReader:
    """Draws from one buffer; holds what it knows of the rows. Threads of one process may share it."""

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        shape = buffer.frames["valid"].shape
        self.redrawn = 0
        """Chunks thrown away because their row was written to meanwhile."""
        self._buffer = buffer
        self._version = np.zeros(shape[0], np.int64)
        """Of the rows when their runs were found; 0: no runs."""
        self._runs = Runs(*(np.zeros(shape, np.int64) for _ in Runs._fields))
        self._lock = threading.Lock()

    def draw(self, batch_size: int, chunk_size: int, mode: SamplingMode, rng: np.random.Generator) -> dict[str, Any]:
        """A nested dict: frame fields [B, C, ...], and under ``episode`` the episode fields [B, ...]; all copies.

        Raises:
            RuntimeError: no row that is whole has such a window.
        """
        frames: dict[str, NDArray[Any]] = {}
        fields: dict[str, NDArray[Any]] = {}
        torn = np.arange(batch_size)
        deadline = time.monotonic() + _WAIT_S
        while torn.size:
            version, mask = self._windows(chunk_size, mode)
            if not mask.any():
                self._wait_or_raise(deadline, chunk_size, mode)
                continue
            rows, starts = draw_windows(mask, len(torn), rng)
            copies = self._buffer.gather(rows, starts, chunk_size)
            fence()
            whole = self._buffer.version[rows] == version[rows]
            if frames:
                for kept, copy in zip((frames, fields), copies, strict=True):
                    for path, array in copy.items():
                        kept[path][torn] = array
            else:
                frames, fields = copies
            torn = torn[~whole]
            self.redrawn += len(torn)
        return nest(frames) | {"episode": nest(fields)}

    def _windows(self, chunk_size: int, mode: SamplingMode) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Versions [R] and where windows start [R, T], of the rows that are whole now."""
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
