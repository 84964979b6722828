"""Windows around a frame: the frames before it, for a policy that remembers, and those to be predicted from it on.

    history_length H, prediction_horizon F: a window has H + F − 1 frames; the frame that it is drawn by is number H − 1

Every valid frame can be drawn, those at the start and the end of an episode too. What lies beyond its episode (or, in
mode "segment", beyond its segment) is padded: ``valid`` is false there, numbers are 0, and the buffer's own numbers -1,
as beyond an episode's end. ``loss_mask`` is true for the valid frames that are to be predicted: not the H − 1 before.
Source: ``SequenceSpecCfg`` of EmbodiChain 0.3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ejax.data.chunks import Runs, SamplingMode, Windows, check_count
from ejax.data.task import LOSS_MASK, nest

_NUMBERED = ("episode_step", "segment_id", "segment_step")


@dataclass(frozen=True)
class SequenceSpecCfg:
    """The windows that a draw returns.

    Raises:
        ValueError, TypeError: a value outside its range.
    """

    history_length: int = 2
    """H: frames up to the present one, which is among them."""
    prediction_horizon: int = 64
    """F: frames from the present one on, which is among them."""
    sampling_mode: Literal["episode", "segment"] = "episode"
    generations: Sequence[int] | None = None
    """Draw from the episodes of these fillings of the buffer only. None: from all."""

    def __post_init__(self) -> None:
        for name in ("history_length", "prediction_horizon"):
            check_count(name, getattr(self, name))
        if self.sampling_mode not in ("episode", "segment"):
            raise ValueError(
                f"no sampling_mode {self.sampling_mode!r} for windows around a frame; there is episode, segment"
            )
        if self.generations is not None:
            object.__setattr__(self, "generations", tuple(self.generations))
            if not self.generations:
                raise ValueError("generations is empty; name at least one, or give None for all")
            for generation in self.generations:
                check_count("generations", generation)

    @property
    def length(self) -> int:
        """C, frames of a window."""
        return self.history_length + self.prediction_horizon - 1


@dataclass(frozen=True)
class Draw:
    """A request for windows: for chunks, or for windows around a frame."""

    mode: SamplingMode
    size: int
    """C, frames of a window."""
    history_length: int | None = None
    """Of a window around the frame that is drawn. None: that frame is the first, and none of the window is padding."""
    generations: Sequence[int] | None = None

    @classmethod
    def around(cls, spec: SequenceSpecCfg) -> Self:
        return cls(spec.sampling_mode, spec.length, spec.history_length, spec.generations)

    @property
    def needed(self) -> int:
        """Frames that must be there from the one on that is drawn."""
        return self.size if self.history_length is None else 1

    def nested(self, frames: Mapping[str, NDArray[Any]], fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Nest copies, by path: frame fields [B, C, ...], and episode fields [B, ...] under ``episode``."""
        mask = {} if self.history_length is None else loss_mask(frames["valid"], self.history_length)
        return nest(frames) | mask | {"episode": nest(fields)}


def windows_around(
    rows: NDArray[np.int64],
    frames: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    history_length: int,
) -> Windows:
    """The windows of ``frames`` [B] of ``rows`` [B], of which those of [begin, end) are drawn."""
    return Windows(rows, frames - (history_length - 1), begin, end)


def run_bounds(runs: Runs, mode: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first frame of the run that each frame [R, T] is in, and the first behind it."""
    length = runs.valid if mode == "episode" else runs.same
    step = np.arange(length.shape[1])
    end = step + length
    starts = np.ones(end.shape, bool)
    starts[:, 1:] = end[:, 1:] != end[:, :-1]
    return np.maximum.accumulate(np.where(starts, step, 0), axis=1), end


def padding(path: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The entry of a frame field where an episode has no frame."""
    return np.full((), -1, dtype) if path in _NUMBERED else np.zeros((), dtype)


def padded(frames: Mapping[str, NDArray[Any]], before: int, after: int) -> dict[str, NDArray[Any]]:
    """Frame fields [C, ...] by path, with padding around them."""

    def around(path: str, array: NDArray[Any]) -> NDArray[Any]:
        made = np.empty((before + len(array) + after, *array.shape[1:]), array.dtype)
        made[:before] = made[before + len(array) :] = padding(path, array.dtype)
        made[before : before + len(array)] = array
        return made

    return {path: around(path, array) for path, array in frames.items()}


def loss_mask(valid: NDArray[np.bool_], history_length: int) -> dict[str, NDArray[np.bool_]]:
    """``{"loss_mask": [B, C]}`` of windows."""
    mask = valid.copy()
    mask[:, : history_length - 1] = False
    return {LOSS_MASK: mask}
