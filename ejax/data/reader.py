"""Draws of whole chunks, and of windows around a frame, from a buffer that is being written to.

The runs of each row are found once per version of the row. A draw takes windows from the rows that are whole, copies
them, and looks at the versions again; what changed meanwhile is drawn again. The copy is therefore always of one
episode, and the choice is uniform over what was whole at the last look.
"""

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.data.buffer import TrajectoryBuffer, fence
from ejax.data.chunks import (
    DataBudgetExhaustedError,
    DataUnavailableError,
    Runs,
    Windows,
    draw_starts,
    draw_windows,
    find_runs,
    window_mask,
)
from ejax.data.context import Draw, run_bounds, windows_around
from ejax.data.quota import Quota

Copies: TypeAlias = tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]
"""Frame fields [B, C, ...] and episode fields [B, ...], by path."""

_LARGE = 2**18
"""Chunks of at least so many bytes are drawn singly: copying one takes longer than choosing it."""
_MAX_TRIES = 1000
"""Copies of a chunk, all torn, after which a draw gives up."""
_WAIT_S = 1.0
"""Time that a draw waits for a complete row, in s; writing a row takes well under a millisecond."""


@dataclass(frozen=True)
class _Job:
    """A draw under way."""

    draw: Draw
    rng: np.random.Generator
    charged: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)
    """Rows, and the indices of the episodes that all rows had then."""


class ChunkReader:
    """The draws from one buffer, with a cache of the runs of its rows. Threads of one process may share it.

    Args:
        quota: of the episodes. None: they may be drawn from without end.
    """

    def __init__(self, buffer: TrajectoryBuffer, quota: Quota | None = None) -> None:
        shape = buffer.frames["valid"].shape
        self.redrawn = 0
        """Chunks thrown away because their row was written to meanwhile."""
        self._buffer, self.quota = buffer, quota
        self._version = np.zeros(shape[0], np.int64)
        """Versions of the rows when their runs were found; 0: no runs."""
        self._index, self._generation = np.zeros((2, shape[0]), np.int64)
        """Of their episodes."""
        self._runs = Runs(*(np.zeros(shape, np.int64) for _ in Runs._fields))
        self._lock = threading.Lock()

    def draw(self, count: int, draw: Draw, rng: np.random.Generator) -> dict[str, Any]:
        """Draw ``count`` windows: a nested dict of copies, as ``Draw.nested`` makes it.

        Raises:
            DataUnavailableError: no row that is whole has such a window.
            DataBudgetExhaustedError: those that have one may not be drawn from so often. Nothing is charged.
        """
        job = _Job(draw, rng)
        copy = self._draw_singly if self._buffer.chunk_bytes(draw.size) >= _LARGE else self._draw_together
        try:
            return draw.nested(*copy(count, job))
        except BaseException:
            # a batch is delivered whole or not at all, and what is not delivered costs nothing
            if self.quota is not None and job.charged:
                self.quota.refund(job.charged)
            raise

    def chunks_left(self) -> int:
        """Chunks that the episodes which are whole may still be drawn for. Only with a quota."""
        with self._lock:
            self._refresh()
            whole = (self._version > 0) & (self._buffer.version == self._version)
            return 0 if self.quota is None else int(self.quota.left(self._index)[whole].sum())

    def _draw_together(self, count: int, job: _Job) -> Copies:
        """Draw all by one gather: the fewest calls. Torn chunks are drawn again, together."""
        frames, fields, torn = self._gather(count, job)
        for tries in itertools.count(1):
            if not torn.size:
                break
            self._count(torn.size, tries)
            again = self._gather(torn.size, job)
            for kept, copies in zip((frames, fields), again[:2], strict=True):
                for path, array in copies.items():
                    kept[path][torn] = array
            torn = torn[again[2]]
        return frames, fields

    def _draw_singly(self, count: int, job: _Job) -> Copies:
        """Draw and check one chunk at a time: few large ones are torn, and few copies are wasted."""
        frames, fields = self._buffer.empty(count, job.draw.size)
        for i in range(count):
            for tries in itertools.count(1):
                windows, version = self._choose(1, job)
                self._buffer.copy_window(windows, 0, (frames, fields), i)
                fence()
                row = int(windows.row[0])
                if self._buffer.version[row] == version[row]:
                    break
                self._count(1, tries)
        return frames, fields

    def _gather(
        self, count: int, job: _Job
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], NDArray[np.intp]]:
        """Return copies, and which of them are torn."""
        windows, version = self._choose(count, job)
        if job.draw.history_length is None:
            copies = self._buffer.gather(windows.row, windows.start, job.draw.size)
        else:
            copies = self._buffer.gather_around(windows, job.draw.size)
        fence()
        return *copies, (self._buffer.version[windows.row] != version[windows.row]).nonzero()[0]

    def _choose(self, count: int, job: _Job) -> tuple[Windows, NDArray[np.int64]]:
        """Return ``count`` windows, and the versions [R] of the rows that they are windows of."""
        draw, rng = job.draw, job.rng
        deadline = time.monotonic() + _WAIT_S
        while True:
            version, index, mask = self._masked(draw)
            if not mask.any():
                self._wait_or_raise(deadline, draw)
                continue
            if self.quota is None:
                rows, frames = draw_windows(mask, count, rng)
            else:
                reserved = self.quota.reserve(np.asarray(mask.any(axis=1)), index, count, rng)
                if reserved is None:
                    self._await_new_or_raise(deadline, version, count)
                    continue
                job.charged.append((reserved, index))
                rows, frames = reserved, draw_starts(mask, reserved, rng)
            return self._windows(rows, frames, draw), version

    def _windows(self, rows: NDArray[np.int64], frames: NDArray[np.int64], draw: Draw) -> Windows:
        """The windows of ``frames`` of ``rows``; of a row that was written to since, nonsense that shows as torn."""
        if draw.history_length is None:
            return Windows(rows, frames, frames, frames + draw.size)
        with self._lock:
            begin, end = run_bounds(self._runs, draw.mode)
        return windows_around(rows, frames, begin[rows, frames], end[rows, frames], draw.history_length)

    def _count(self, torn: int, tries: int) -> None:
        self.redrawn += torn
        if tries == _MAX_TRIES:
            raise RuntimeError(
                f"No unlocked valid chunk: {tries} copies in a row were torn, the rows are rewritten faster than they "
                f"are copied; give a smaller chunk_size, or a larger buffer_size or refill_threshold"
            )

    def _masked(self, draw: Draw) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Versions [R], indices of episodes [R], and the frames [R, T] to draw of the rows that are whole now."""
        with self._lock:
            self._refresh()
            version, index = self._version.copy(), self._index.copy()
            mask = window_mask(self._runs, draw.needed, draw.mode)
            if draw.generations is not None:
                mask[~np.isin(self._generation, draw.generations)] = False
        mask[self._buffer.version != version] = False
        return version, index, mask

    def _refresh(self) -> None:
        """Find the runs of rows that were written since, where they are whole before and after."""
        # odd versions are left for later: their rows are being written, and a draw does not need all rows
        version = self._buffer.version.copy()
        (changed,) = ((version != self._version) & (version % 2 == 0)).nonzero()
        if not changed.size:
            return
        fence()
        runs = find_runs(self._buffer.frames["valid"][changed], self._buffer.frames["segment_id"][changed])
        index, generation = (self._buffer.episode[name][changed] for name in ("index", "generation"))
        fence()
        # a row that was written while its runs were found has another version by now, and keeps its old runs: its mask
        # is cleared by ``_masked``
        whole = self._buffer.version[changed] == version[changed]
        found = (*runs, index, generation)
        for known, new in zip((*self._runs, self._index, self._generation), found, strict=True):
            known[changed[whole]] = new[whole]
        self._version[changed[whole]] = version[changed[whole]]

    def _wait_or_raise(self, deadline: float, draw: Draw) -> None:
        unsettled = (self._buffer.version != self._version) | (self._buffer.version % 2 == 1)
        if time.monotonic() > deadline or not unsettled.any():
            longest = int(self._runs.valid.max(initial=0))
            of = "" if draw.generations is None else f" in generations {', '.join(map(str, draw.generations))}"
            raise DataUnavailableError(
                f"No unlocked valid chunk of {draw.needed} frames in mode '{draw.mode}'{of}: of {len(self._version)} "
                f"rows {int((self._buffer.version % 2 == 1).sum())} are being written, and the longest episode has "
                f"{longest} frames; give a smaller chunk_size or another sampling_mode"
            )
        time.sleep(1e-4)

    def _await_new_or_raise(self, deadline: float, version: NDArray[np.int64], count: int) -> None:
        """Return where other episodes have come since ``version``."""
        now = self._buffer.version
        if time.monotonic() > deadline or not ((now != version) & (now % 2 == 0)).any():
            raise DataBudgetExhaustedError(
                f"the episodes in the buffer may be drawn for {self.chunks_left()} more chunks "
                f"(episode_sample_budget), and {count} were requested; request fewer, or have the buffer refilled"
            )
