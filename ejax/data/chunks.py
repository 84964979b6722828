"""The windows of episodes that may be drawn, and draws of them: pure functions of NumPy arrays.

A chunk is C valid frames of one row. Modes:

    episode    any such window
    segment    all frames have one and the same ``segment_id`` ≥ 0
    boundary   ``segment_id`` changes at least once inside

A window around a frame (``SequenceSpecCfg``) is padded beyond its episode (in mode "segment", its segment): ``valid``
is false, numbers are 0, and the buffer's own numbers -1. ``loss_mask`` is true for valid frames from the drawn one on.

A draw takes a row uniformly among those that have a window, then a window of that row uniformly.
Source: EmbodiChain 0.2.4, and ``SequenceSpecCfg`` of 0.3.2. R rows, T frames a row, C frames a window, B draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ejax.data.checks import check_choice, check_count
from ejax.data.task import LOSS_MASK, nest_fields

SamplingMode = Literal["episode", "segment", "boundary"]
MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)
_NUMBERED = ("episode_step", "segment_id", "segment_step")


class DataUnavailableError(RuntimeError):
    """No window of the requested kind in the present episodes."""


class DataBudgetExhaustedError(RuntimeError):
    """Too few draws left of the present episodes for a whole batch; see ``episode_sample_budget``."""


@dataclass(frozen=True)
class SequenceSpecCfg:
    """The windows around a frame that a draw returns: H + F − 1 frames, of which the drawn one is number H − 1. Raises
    ValueError or TypeError for a value outside its range."""

    history_length: int = 2
    """H: frames up to the present one, inclusive."""
    prediction_horizon: int = 64
    """F: frames from the present one on, inclusive."""
    sampling_mode: Literal["episode", "segment"] = "episode"
    generations: Sequence[int] | None = None
    """Fillings of the buffer to draw from. None: all."""

    def __post_init__(self) -> None:
        for name in ("history_length", "prediction_horizon"):
            check_count(name, getattr(self, name))
        check_choice("sampling_mode", self.sampling_mode, ("episode", "segment"), " for windows around a frame")
        if self.generations is not None:
            object.__setattr__(self, "generations", tuple(self.generations))
            if not self.generations:
                raise ValueError("generations is empty; name at least one, or pass None for all")
            for generation in self.generations:
                check_count("generations", generation)

    @property
    def length(self) -> int:
        return self.history_length + self.prediction_horizon - 1

    @property
    def draw(self) -> "WindowDraw":
        return WindowDraw(self.sampling_mode, self.length, self.history_length, self.generations)


class Runs(NamedTuple):
    """Lengths, in frames, of the runs that begin at each frame; [R, T] int64."""

    valid: NDArray[np.int64]
    """Valid frames without a gap."""
    same: NDArray[np.int64]
    """Those of them that share this frame's ``segment_id``."""
    segment: NDArray[np.int64]
    """As ``same``, and 0 for a negative id."""


class Windows(NamedTuple):
    """Frames [start, start + C) of rows; those outside [begin, end) are padding; each [B]."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]


@dataclass(frozen=True)
class WindowDraw:
    mode: SamplingMode
    size: int
    """C, frames of a window."""
    history_length: int | None = None
    """H of windows around the drawn frame. None: that frame is the first, and no frame is padding."""
    generations: Sequence[int] | None = None

    @property
    def needed(self) -> int:
        """Frames that must follow the drawn one, itself included."""
        return self.size if self.history_length is None else 1

    @property
    def before(self) -> int:
        """Frames of the window before the drawn one."""
        return 0 if self.history_length is None else self.history_length - 1

    def nested(self, frames: Mapping[str, NDArray[Any]], fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Nest copies: frame fields [B, C, ...], and episode fields [B, ...] under ``episode``."""
        chunks = nest_fields(frames) | {"episode": nest_fields(fields)}
        if self.history_length is not None:
            chunks[LOSS_MASK] = frames["valid"].copy()  # a copy: who writes to one must not change the other
            chunks[LOSS_MASK][:, : self.before] = False
        return chunks


def find_runs(valid: NDArray[np.bool_], segment_id: NDArray[np.integer]) -> Runs:
    """Measure the runs of equal frames from each frame [R, T] on."""
    changes = segment_id[:, 1:] != segment_id[:, :-1]
    last = np.ones((len(valid), 1), bool)
    # a run ends where frames end to be valid, or before the next change of the id
    valid_run = _distance(~valid)
    same = np.where(valid, np.minimum(valid_run, _distance(np.concatenate([changes, last], axis=1)) + 1), 0)
    return Runs(valid_run, same, np.where(segment_id >= 0, same, 0))


def run_bounds(runs: Runs, mode: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first frame of the run that each frame [R, T] is in, and the first behind it."""
    length = runs.valid if mode == "episode" else runs.same
    step = np.arange(length.shape[1])
    end = step + length
    starts = np.ones(end.shape, bool)
    # frames of one run have its end in common
    starts[:, 1:] = end[:, 1:] != end[:, :-1]
    return np.maximum.accumulate(np.where(starts, step, 0), axis=1), end


def window_mask(runs: Runs, chunk_size: int, mode: SamplingMode) -> NDArray[np.bool_]:
    """Mark in [R, T] the frames that a window may start at."""
    if mode == "segment":
        return runs.segment >= chunk_size
    mask = runs.valid >= chunk_size
    # the id changes inside where its run is shorter than the chunk
    return mask & (runs.same < chunk_size) if mode == "boundary" else mask


def draw_windows(
    mask: NDArray[np.bool_], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw rows and first frames, each [B], of ``mask`` [R, T] with at least one True, with replacement."""
    rows = np.flatnonzero(mask.any(axis=1))
    # rows first: a long episode is not drawn more often than a short one
    chosen = rows[rng.integers(len(rows), size=count)]
    return chosen, draw_starts(mask, chosen, rng)


def draw_starts(mask: NDArray[np.bool_], rows: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the first frame [B] of a window of each of ``rows`` [B]."""
    counts = mask.sum(axis=1)
    # the nth True of a row is entry before + nth of all of them, in row order
    nth = rng.integers(counts[rows])
    before = np.cumsum(counts) - counts
    return np.flatnonzero(mask)[before[rows] + nth] % mask.shape[1]


def padding(path: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the entry of a frame field beyond an episode."""
    return np.full((), -1, dtype) if path in _NUMBERED else np.zeros((), dtype)


def _distance(stop: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count frames from each [R, T] to the next where ``stop`` holds, or else to T."""
    num_frames = stop.shape[1]
    at = np.where(stop, np.arange(num_frames), num_frames)
    nearest = np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1]  # from the right: each frame's next stop
    return nearest - np.arange(num_frames)
