"""A bound on the draws of each episode, kept by all consumers of an engine together. R rows, B draws.

The counts lie in shared memory, written under the kernel's lock on a file of the run's folder, which ends with its
process. The worker never waits for it. Each chunk costs its episode one.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Charge: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows [B] that were charged, and the indices [R] of the episodes that all rows had then."""


@contextmanager
def counting(path: Path) -> Iterator[None]:
    """Hold the lock of the counts; ConnectionError if the run has ended."""
    try:
        file = os.open(path, os.O_RDONLY)  # each time: threads must exclude each other, and a fork would share the lock
    except FileNotFoundError as error:
        raise ConnectionError(f"{path} is gone, and the run with it") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # held for microseconds
        yield
    finally:
        os.close(file)


class Quota:
    """One process's access to the draws that are left, under the lock of the file ``path``. ``charged`` [R, 2] int64 is
    shared: the index of an episode of each row, and the chunks drawn of it."""

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
