"""An episode as the arrays of a row: checked against the task's spec, its frames numbered."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.data.task import Episode, EpisodeSpec, Field, flatten


class EpisodeTooLongError(ValueError):
    """An episode that no row can hold."""


def check_episode(
    episode: Episode, spec: EpisodeSpec, num_frames: int
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Frame fields [length, ...] and episode fields of an episode, flat.

    Raises:
        ValueError: fields missing or unknown, a wrong shape, a dtype that would lose its kind, unequal lengths, no
            frame.
        EpisodeTooLongError: more frames than a row holds.
    """
    frames = _checked("frame", flatten(episode.frames), spec.frames, lead=1)
    fields = _checked("episode", flatten(episode.fields), spec.episode, lead=0)
    lengths = {path: len(array) for path, array in frames.items()}
    if episode.segment_id is not None:
        segment_id = np.asarray(episode.segment_id)
        lengths["segment_id"] = len(segment_id)
        if segment_id.ndim != 1 or segment_id.dtype.kind not in "iu" or (segment_id < 0).any():
            raise ValueError(
                f"segment_id must be whole numbers ≥ 0, [length], got {segment_id.dtype}{segment_id.shape}"
            )
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the frame fields of an episode differ in length: {lengths}")
    length = next(iter(lengths.values()))
    if length < 1:
        raise ValueError("an episode has at least 1 frame, got 0; return a Failure for an attempt that made none")
    if length > num_frames:
        raise EpisodeTooLongError(f"an episode of {length} frames; max_episode_steps is {num_frames}")
    return frames, fields


def frame_numbers(episode: Episode, length: int) -> dict[str, NDArray[Any]]:
    """The buffer's own fields for the frames of an episode, each [length]."""
    segment_id = np.zeros(length, np.int64) if episode.segment_id is None else np.asarray(episode.segment_id)
    step = np.arange(length)
    start = np.ones(length, bool)
    start[1:] = segment_id[1:] != segment_id[:-1]
    last = step == length - 1
    return {
        "valid": np.ones(length, bool),
        "episode_step": step,
        "segment_id": segment_id,
        "segment_step": step - np.maximum.accumulate(np.where(start, step, 0)),
        "segment_start": start,
        "segment_end": np.append(start[1:], True),
        "terminated": last & episode.terminated,
        "truncated": last & (not episode.terminated),
    }


def _checked(kind: str, given: dict[str, Any], spec: Mapping[str, Field], lead: int) -> dict[str, NDArray[Any]]:
    if given.keys() != spec.keys():
        missing, unknown = sorted(set(spec) - set(given)), sorted(set(given) - set(spec))
        raise ValueError(f"{kind} fields are not those of the spec: missing {missing}, unknown {unknown}")
    arrays = {path: np.asarray(value) for path, value in given.items()}
    for path, array in arrays.items():
        shape, dtype = spec[path]
        if array.shape[lead:] != shape or array.ndim < lead or not _fits(array.dtype, np.dtype(dtype)):
            raise ValueError(
                f"{kind} field '{path}' is {array.dtype}{list(array.shape)}; the spec has {np.dtype(dtype)} "
                f"{['length'] * lead + list(shape)}"
            )
    return arrays


def _fits(given: np.dtype[Any], expected: np.dtype[Any]) -> bool:
    cut = given.kind in "SU" and given.itemsize > expected.itemsize  # NumPy would silently cut the text
    return np.can_cast(given, expected, "same_kind") and not cut
