"""A bound on the draws of each episode, kept by all consumers together.

Each chunk costs the episode that it is of one. The counts lie in shared memory, and are written under a lock of the
kernel's on a file of the run's folder: the kernel takes it from a process that ends, however it ends, and the worker
never waits for it. A count belongs to the index of an episode, so that a new one in the same row begins at 0.

R rows, B draws.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

QUOTA = "quota"
"""The file in a run's folder that is locked."""


class Quota:
    """One process's access to the counts.

    Args:
        charged: [R, 2] int64, shared: the index of an episode of each row, and the chunks that were drawn of it.
        budget: chunks that may be drawn of each.
    """

    def __init__(self, charged: NDArray[np.int64], path: Path, budget: int) -> None:
        self._charged, self._budget, self._path = charged, budget, path

    def left(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Chunks that may still be drawn of the episodes with ``index`` [R], one in each row; 0 of those replaced."""
        of, count = self._charged.T
        return np.where(of == index, self._budget - count, np.where(of < index, self._budget, 0))

    def reserve(
        self, able: NDArray[np.bool_], index: NDArray[np.int64], count: int, rng: np.random.Generator
    ) -> NDArray[np.int64] | None:
        """Draw ``count`` rows [B] of ``able`` [R], and charge their episodes; None: they have not enough left.

        Raises:
            ConnectionError: the run has ended.
        """
        with self._held():
            left = np.where(able, self.left(index), 0)
            if left.sum() < count:
                return None
            rows = draw_rows(left, count, rng)
            self._charge(rows, index, 1)
        return rows

    def refund(self, charged: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> None:
        """Take back what ``reserve`` charged, its rows and ``index`` each time, where a batch was not delivered."""
        with self._held():
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

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            file = self._path.open("rb")  # each time: threads must exclude each other, and a fork would share the lock
        except FileNotFoundError as error:
            raise ConnectionError(f"{self._path} is gone, and the run with it") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held for microseconds; whose holder is killed, the kernel gives back
            yield


def draw_rows(left: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` rows one after the other, each uniformly among those of which something is left.

    Args:
        left: [R], with a sum of at least ``count``.
    """
    # draws of as many as are missing, of which those beyond a row's rest are drawn again, from the rows that are left:
    # the same law as one by one, in as many rounds as rows run out
    left, chosen = left.copy(), np.zeros(0, np.int64)
    while len(chosen) < count:
        active = np.flatnonzero(left)
        rows = active[rng.integers(len(active), size=count - len(chosen))]
        kept = rows[_nth_of_its_kind(rows) < left[rows]]
        np.subtract.at(left, kept, 1)
        chosen = np.concatenate([chosen, kept])
    return chosen


def _nth_of_its_kind(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of equal values before each."""
    order = values.argsort(kind="stable")
    ranked = values[order]
    place = np.arange(len(values))
    first = np.maximum.accumulate(np.where(np.diff(ranked, prepend=ranked[:1] - 1) != 0, place, 0))
    nth = np.empty_like(place)
    nth[order] = place - first
    return nth
