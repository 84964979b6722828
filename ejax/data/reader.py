"""One process's access to an engine: chunks, windows around a frame and whole episodes of a buffer being written to.

Torn copies are drawn again: a copy is always of one episode, and the choice uniform over what was whole at the end.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.data.buffer import BufferLayout, Copies, TrajectoryBuffer, fence
from ejax.data.chunks import (
    DataBudgetExhaustedError,
    DataUnavailableError,
    Runs,
    WindowDraw,
    Windows,
    draw_starts,
    draw_windows,
    find_runs,
    run_bounds,
    window_mask,
)
from ejax.data.control import BUFFER, COUNTS, Control, counting
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.task import Episode, Origin, nest_fields

Charge: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows [B] that were charged, and the indices [R] of the episodes that all rows had then."""
LARGE_BYTES = 2**18
"""Bytes from which chunks are drawn singly: copying one takes longer than choosing it."""
_MAX_TRIES = 1000
WAIT_S = 1.0


class Quota:
    """A bound on the draws of each episode, kept by all consumers of an engine together. A chunk costs its episode one.

    The counts lie in shared memory, written under the lock of the file ``path``; the worker never waits for it. R rows,
    B draws. ``charged`` [R, 2] int64 is shared: the index of an episode of each row, and the chunks drawn of it.
    """

    def __init__(self, charged: NDArray[np.int64], path: Path, budget: int) -> None:
        self._charged, self._budget, self._path = charged, budget, path

    def left(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return chunks left of the episodes with ``index`` [R], one in each row; 0 of those replaced."""
        of, count = self._charged.T
        return np.where(of == index, self._budget - count, np.where(of < index, self._budget, 0))

    def reserve(
        self, able: NDArray[np.bool_], index: NDArray[np.int64], count: int, rng: np.random.Generator
    ) -> NDArray[np.int64] | None:
        """Draw ``count`` rows [B] of ``able`` [R], and charge their episodes; None: too few draws left. Raises
        ConnectionError if the run has ended."""
        with counting(self._path):
            left = np.where(able, self.left(index), 0)
            if left.sum() < count:
                return None
            rows = draw_rows(left, count, rng)
            self._charge(rows, index, 1)
        return rows

    def refund(self, charged: Sequence[Charge]) -> None:
        """Take back what ``reserve`` charged for a batch that was not delivered."""
        with counting(self._path):
            for rows, index in charged:
                self._charge(rows, index, -1)

    def _charge(self, rows: NDArray[np.int64], index: NDArray[np.int64], each: int) -> None:
        counts = each * np.bincount(rows, minlength=len(self._charged))
        for row in np.flatnonzero(counts):
            of, count = self._charged[row]
            if of < index[row]:
                of, count = index[row], 0
            if of == index[row]:
                self._charged[row] = of, count + counts[row]


class ChunkReader:
    """The draws from one buffer, unlimited without ``quota``. Threads of one process may share it."""

    def __init__(self, buffer: TrajectoryBuffer, quota: Quota | None = None) -> None:
        shape = buffer.frames["valid"].shape
        self.redrawn = 0
        """Chunks thrown away as torn."""
        self._buffer, self.quota = buffer, quota
        self._version = np.zeros(shape[0], np.int64)
        """Versions of the rows when their runs were found; 0: no runs."""
        self._index, self._generation = np.zeros((2, shape[0]), np.int64)
        self._runs = Runs(*(np.zeros(shape, np.int64) for _ in Runs._fields))
        self._lock = threading.Lock()

    def draw(self, count: int, draw: WindowDraw, rng: np.random.Generator) -> dict[str, Any]:
        """Draw ``count`` windows: a nested dict of copies, as ``WindowDraw.nested`` makes it.

        Raises DataUnavailableError without a whole row that has such a window, and DataBudgetExhaustedError, with
        nothing charged, if too few draws are left of them.
        """
        charged: list[Charge] = []
        try:
            return draw.nested(*self._copies(count, draw, rng, charged))
        except BaseException:
            # a batch is delivered whole or not at all, and what is not delivered costs nothing
            if self.quota is not None:
                self.quota.refund(charged)
            raise

    def chunks_left(self) -> int:
        """Count chunks left of the whole episodes. Only with a quota."""
        with self._lock:
            self._refresh()
            whole = (self._version > 0) & (self._buffer.version == self._version)
            return 0 if self.quota is None else int(self.quota.left(self._index)[whole].sum())

    def _copies(self, count: int, draw: WindowDraw, rng: np.random.Generator, charged: list[Charge]) -> Copies:
        is_large = draw.size * sum(array[0, 0].nbytes for array in self._buffer.frames.values()) >= LARGE_BYTES
        one_by_one = is_large or draw.history_length is not None
        made = self._buffer.empty(count if one_by_one else 0, draw.size)
        # small ones all at once: the fewest calls. Large ones one at a time: few are torn, and few copies are wasted
        for places in np.arange(count).reshape((-1, 1) if is_large else (1, -1)):
            tries = 0
            while places.size:
                windows, version = self._choose(places.size, draw, rng, charged)
                if one_by_one:
                    for i, place in enumerate(places):
                        self._buffer.copy_window(windows, i, made, place)
                elif places.size == count:
                    made = self._buffer.gather(windows.row, windows.start, draw.size)
                else:
                    copies = self._buffer.gather(windows.row, windows.start, draw.size)
                    for kept, new in zip(made, copies, strict=True):
                        for path, array in new.items():
                            kept[path][places] = array
                fence()
                # a version that changed while its row was copied: two episodes may be mixed, so it is drawn again
                places = places[self._buffer.version[windows.row] != version[windows.row]]
                self.redrawn += places.size
                if places.size and (tries := tries + 1) == _MAX_TRIES:
                    raise RuntimeError(
                        f"No unlocked valid chunk: {tries} copies in a row were torn, the rows are rewritten faster "
                        f"than they are copied; use a smaller chunk_size, or a larger buffer_size or refill_threshold"
                    )
        return made

    def _choose(
        self, count: int, draw: WindowDraw, rng: np.random.Generator, charged: list[Charge]
    ) -> tuple[Windows, NDArray[np.int64]]:
        """Return ``count`` windows, and the versions [R] of the rows at that time."""
        deadline = time.monotonic() + WAIT_S
        while True:
            version, index, mask = self._masked(draw)
            able = np.asarray(mask.any(axis=1))
            if able.any():
                if self.quota is None:
                    return self._windows(*draw_windows(mask, count, rng), draw), version
                if (rows := self.quota.reserve(able, index, count, rng)) is not None:
                    charged.append((rows, index))  # before the copy: any later failure is refunded
                    return self._windows(rows, draw_starts(mask, rows, rng), draw), version
            now = self._buffer.version  # rows that are being written, or were since, are worth a wait
            if time.monotonic() > deadline or not ((now != self._version) | (now % 2 == 1)).any():
                raise self._exhausted(count) if able.any() else self._unavailable(draw)
            time.sleep(1e-4)

    def _windows(self, rows: NDArray[np.int64], frames: NDArray[np.int64], draw: WindowDraw) -> Windows:
        """Return the windows of ``frames`` of ``rows``; of a row written to since, nonsense that shows as torn."""
        if draw.history_length is None:
            return Windows(rows, frames, frames, frames + draw.size)
        with self._lock:
            begin, end = run_bounds(self._runs, draw.mode)
        return Windows(rows, frames - draw.before, begin[rows, frames], end[rows, frames])

    def _masked(self, draw: WindowDraw) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return versions [R], episode indices [R], and the frames [R, T] to draw of the rows that are whole now."""
        with self._lock:
            self._refresh()
            version, index = self._version.copy(), self._index.copy()
            mask = window_mask(self._runs, draw.needed, draw.mode)
            if draw.generations is not None:
                mask[~np.isin(self._generation, draw.generations)] = False
        # rows that changed since are left out: their runs are those of an earlier episode
        mask[self._buffer.version != version] = False
        return version, index, mask

    def _refresh(self) -> None:
        """Find the runs of rows that were written since, if they are whole before and after."""
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

    def _unavailable(self, draw: WindowDraw) -> RuntimeError:
        longest = int(self._runs.valid.max(initial=0))
        of = "" if draw.generations is None else f" in generations {', '.join(map(str, draw.generations))}"
        return DataUnavailableError(
            f"No unlocked valid chunk of {draw.needed} frames in mode '{draw.mode}'{of}: of {len(self._version)} rows "
            f"{int((self._buffer.version % 2 == 1).sum())} are being written, and the longest episode has {longest} "
            f"frames; use a smaller chunk_size or another sampling_mode"
        )

    def _exhausted(self, count: int) -> RuntimeError:
        return DataBudgetExhaustedError(
            f"the episodes in the buffer may be drawn for {self.chunks_left()} more chunks (episode_sample_budget), "
            f"and {count} were requested; request fewer, or have the buffer refilled"
        )


@dataclass(frozen=True)
class Taken:
    """A copy of a worker's episode."""

    episode: Episode
    index: int
    """Its number, in the order of making."""
    origin: Origin


class Consumer:
    """One process's reader of a run; a fork needs a new one. FileNotFoundError if the owner has removed the buffer."""

    def __init__(self, folder: Path, layout: BufferLayout, cfg: OnlineDataEngineCfg) -> None:
        self.pid = os.getpid()
        self.control = Control(folder, cfg)
        self.buffer = TrajectoryBuffer(folder / BUFFER, layout)
        budget = cfg.episode_sample_budget
        quota = None if budget is None else Quota(self.control.charged, folder / COUNTS, budget)
        self.reader = ChunkReader(self.buffer, quota)
        self.rng = np.random.default_rng()  # by the system: processes must not draw alike

    def stats(self) -> dict[str, float]:
        """Return the state of the run as scalars.

        ``data/fill`` share of rows that hold an episode; ``data/episodes`` and ``data/failed_attempts`` so far;
        ``data/success_rate`` of the expert; ``data/episodes_per_s`` while it works; ``data/fills`` of the buffer;
        ``data/samples`` chunks drawn by all; ``data/samples_per_s`` since the engine was ready; ``data/age_s`` mean
        time since the rows were written; ``data/redrawn`` chunks that this process drew again; with an
        ``episode_sample_budget``, ``data/chunks_left`` that the present episodes may still be drawn for.
        """
        full = self.buffer.version > 1  # 1: a first episode is being written
        now, ready_at, busy = time.time(), self.control["ready_at"], self.control["generating_s"]
        episodes, failures, samples = self.control["episodes"], self.control["failures"], self.control.samples
        written_at = self.buffer.episode["written_at"][full]
        left = {} if self.reader.quota is None else {"data/chunks_left": float(self.reader.chunks_left())}
        return left | {
            "data/fill": float(full.mean()),
            "data/episodes": float(episodes),
            "data/failed_attempts": float(failures),
            "data/success_rate": episodes / max(episodes + failures, 1),
            "data/episodes_per_s": episodes / busy if busy else 0.0,
            "data/fills": float(self.control["fills"]),
            "data/samples": float(samples),
            "data/samples_per_s": samples / max(now - ready_at, 1e-9) if ready_at else 0.0,
            "data/age_s": float(now - written_at.mean()) if full.any() else 0.0,
            "data/redrawn": float(self.reader.redrawn),
        }


def take_episodes(buffer: TrajectoryBuffer, after: int) -> list[Taken]:
    """List the whole episodes with an index above ``after``, in order."""
    version, index = buffer.version.copy(), buffer.episode["index"].copy()
    fence()
    (rows,) = ((version > 0) & (version % 2 == 0) & (index > after)).nonzero()
    taken = []
    for row in rows[index[rows].argsort()]:  # rows are a ring: the oldest need not be the first
        length = int(buffer.episode["length"][row])
        origin = Origin(*(int(buffer.episode[name][row]) for name in Origin._fields))
        frames = {path: buffer.frames[path][row, :length].copy() for path in buffer.layout.spec.frames}
        fields = {path: buffer.episode[path][row].copy() for path in buffer.layout.spec.episode}
        segment_id = buffer.frames["segment_id"][row, :length].copy()
        terminated = bool(buffer.frames["terminated"][row, :length].any())
        fence()
        if buffer.version[row] == version[row]:
            episode = Episode(
                nest_fields(frames), segment_id=segment_id, fields=nest_fields(fields), terminated=terminated
            )
            taken.append(Taken(episode, int(index[row]), origin))
    return taken


def draw_rows(left: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw ``count`` rows one by one, uniformly among those with something left of ``left`` [R] (sum ≥ count)."""
    # draws of as many as are missing, of which those beyond a row's rest are drawn again, from the rows that are left:
    # the same law as one by one, in as many rounds as rows run out
    left, chosen = left.copy(), np.zeros(0, np.int64)
    while len(chosen) < count:
        active = np.flatnonzero(left)
        rows = active[rng.integers(len(active), size=count - len(chosen))]
        equal_before = np.tril(rows[:, None] == rows, -1).sum(axis=1)
        kept = rows[equal_before < left[rows]]
        np.subtract.at(left, kept, 1)
        chosen = np.concatenate([chosen, kept])
    return chosen
