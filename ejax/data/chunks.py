"""The windows of the buffer that may be drawn, and draws of them: pure functions of NumPy arrays.

A window is C frames of one row, all of them valid. Modes:

    episode    any such window
    segment    all frames have one and the same ``segment_id`` ≥ 0
    boundary   ``segment_id`` changes at least once inside

A draw takes a row uniformly among the rows that have a window, then a window of that row uniformly: long episodes are
not favoured over short ones. Source: the rule of EmbodiChain 0.2.4. Windows that may reach beyond an episode are those
of ``ejax.data.context``.

R rows, T frames a row, C frames a chunk, B draws.
"""

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

SamplingMode = Literal["episode", "segment", "boundary"]
MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)


class DataUnavailableError(RuntimeError):
    """No window of the requested kind in the present episodes."""


class DataBudgetExhaustedError(RuntimeError):
    """Too few draws left of the present episodes for a whole batch; see ``ejax.data.quota``."""


class Runs(NamedTuple):
    """Lengths, in frames, of the runs that begin at each frame; [R, T] int64."""

    valid: NDArray[np.int64]
    """Frames that are valid without a gap; 0 at an invalid frame."""
    same: NDArray[np.int64]
    """Those of them that share this frame's ``segment_id``."""
    segment: NDArray[np.int64]
    """As ``same``, and 0 where the id is negative."""


class Windows(NamedTuple):
    """Frames [start, start + C) of rows, of which those of [begin, end) are drawn, and the others padded; each [B]."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]


def find_runs(valid: NDArray[np.bool_], segment_id: NDArray[np.integer]) -> Runs:
    """The lengths of the runs of equal frames from each frame [R, T] on."""
    changes = segment_id[:, 1:] != segment_id[:, :-1]
    last = np.ones((len(valid), 1), bool)
    valid_run = _distance(~valid)
    same = np.where(valid, np.minimum(valid_run, _distance(np.concatenate([changes, last], axis=1)) + 1), 0)
    return Runs(valid_run, same, np.where(segment_id >= 0, same, 0))


def window_mask(runs: Runs, chunk_size: int, mode: SamplingMode) -> NDArray[np.bool_]:
    """[R, T]: a window may start here."""
    if mode == "segment":
        return runs.segment >= chunk_size
    mask = runs.valid >= chunk_size
    return mask & (runs.same < chunk_size) if mode == "boundary" else mask


def draw_windows(
    mask: NDArray[np.bool_], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and first frames of ``count`` windows, each [B], drawn with replacement.

    Args:
        mask: [R, T] from ``window_mask``, with at least one True.
    """
    rows = np.flatnonzero(mask.any(axis=1))
    chosen = rows[rng.integers(len(rows), size=count)]
    return chosen, draw_starts(mask, chosen, rng)


def draw_starts(mask: NDArray[np.bool_], rows: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """The first frame [B] of a window of each of ``rows`` [B], each of which has one."""
    counts = mask.sum(axis=1)
    nth = rng.integers(counts[rows])
    before = np.cumsum(counts) - counts
    return np.flatnonzero(mask)[before[rows] + nth] % mask.shape[1]


def check_request(batch_size: Any, chunk_size: Any, mode: Any, num_frames: int) -> None:
    """Raise ValueError where rows of ``num_frames`` cannot serve this, TypeError for a size that is not an int."""
    check_mode(mode)
    for name, value in (("batch_size", batch_size), ("chunk_size", chunk_size)):
        check_count(name, value)
    if chunk_size > num_frames:
        raise ValueError(f"chunk_size {chunk_size} is more than max_episode_steps, {num_frames}; give at most that")
    if mode == "boundary" and chunk_size < 2:
        raise ValueError("a chunk of 1 frame crosses no boundary; sampling_mode 'boundary' needs chunk_size ≥ 2")


def check_mode(mode: Any) -> None:
    """Raise ValueError for an unknown sampling mode."""
    if mode not in MODES:
        raise ValueError(f"no sampling_mode {mode!r}; there is {', '.join(MODES)}")


def check_count(name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _distance(stop: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Frames from each frame [R, T] to the next where ``stop`` holds, itself included, or else to T."""
    num_frames = stop.shape[1]
    at = np.where(stop, np.arange(num_frames), num_frames)
    nearest = np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1]
    return nearest - np.arange(num_frames)
