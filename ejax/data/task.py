"""The interface of makers of demonstrations, their episodes, and the fields of those.

A field has a path, ``"obs/robot/qpos"``; its parts are the keys of the nested dict that a consumer gets.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ejax.schema.paths import leaves, unique
from ejax.schema.paths import nest as nest_parts

FieldForm: TypeAlias = tuple[tuple[int, ...], str]
"""Shape of one entry and name of its NumPy dtype: ``((14,), "float32")``."""

FRAME_FIELDS: dict[str, FieldForm] = {
    "valid": ((), "bool"),
    **dict.fromkeys(("episode_step", "segment_id", "segment_step"), ((), "int64")),
    **dict.fromkeys(("segment_start", "segment_end", "terminated", "truncated"), ((), "bool")),
}
"""The buffer's own fields per frame. Beyond an episode's end ``valid`` is false, and the others mean nothing."""
EPISODE_FIELDS: dict[str, FieldForm] = {
    **dict.fromkeys(("length", "index", "seed"), ((), "int64")),
    "written_at": ((), "float64"),
    **dict.fromkeys(("attempt", "generation", "run_id"), ((), "int64")),
}
"""The buffer's own fields per episode: number of frames and of the episode, seed, Unix time in s; and ``Origin``'s."""
LOSS_MASK = "loss_mask"
"""The additional frame field of windows around a frame."""


class Origin(NamedTuple):
    """The origin of an episode; -1: unknown."""

    seed: int = -1
    attempt: int = -1
    """Number of the attempt of its worker or recorder, from 0."""
    generation: int = -1
    """Number of the filling of the buffer, from 1."""
    run_id: int = -1
    """Number of the engine, drawn at random."""


@dataclass(frozen=True)
class EpisodeSpec:
    """The fields of a task's episodes.

    Raises ValueError without a frame field, for a path that is empty, taken or inside another, an object dtype, or a
    negative size.
    """

    frames: Mapping[str, FieldForm]
    """Entries per control step: observations, actions, rewards."""
    episode: Mapping[str, FieldForm] = field(default_factory=dict)
    """Entries per episode, e.g. ``{"instruction": ((), "S64")}``; consumers find them under ``episode``."""

    def __post_init__(self) -> None:
        if not self.frames:
            raise ValueError("an EpisodeSpec needs at least one frame field, got none")
        check_paths(["episode", LOSS_MASK, *FRAME_FIELDS, *self.frames])  # the buffer's own names are taken
        check_paths([*EPISODE_FIELDS, *self.episode])
        for name in ("frames", "episode"):
            fields = {path: _checked(path, *entry) for path, entry in getattr(self, name).items()}
            object.__setattr__(self, name, fields)


@dataclass(frozen=True)
class Episode:
    """A demonstration. Only one that is complete and successful becomes a sample; another is a failed attempt."""

    frames: Mapping[str, Any]
    """Arrays [length, ...] by path, or nested as the paths are."""
    segment_id: NDArray[np.integer] | None = None
    """[length], ≥ 0: a frame's part of the plan. None: all frames are segment 0."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``EpisodeSpec.episode``."""
    terminated: bool = True
    """The last frame ended the task; False: only the episode, by a limit."""
    complete: bool = True
    success: bool = True


@dataclass(frozen=True)
class Failure:
    """An attempt without an episode, and the reason: an empty plan, an unreachable goal."""

    reason: str


AttemptOutcome: TypeAlias = Episode | Failure


@runtime_checkable
class TimedTask(Protocol):
    """A task that knows its time: recordings get their frames per second from it."""

    @property
    def control_period(self) -> float | None:
        """s, between two frames. None: not known."""
        ...


class DemonstrationTask(Protocol):
    """A task in the worker process. One that has something to close is also a context manager."""

    def spec(self) -> EpisodeSpec: ...

    def generate(self, seed: int) -> AttemptOutcome | Sequence[AttemptOutcome]:
        """Make one attempt with ``seed`` in [0, 2³¹); several outcomes if several environments run side by side."""


def judge(made: Any) -> list[AttemptOutcome]:
    """List the outcomes of ``generate``; one that is not a sample, or none at all, becomes a Failure. Raises TypeError
    for a result of another type."""
    outcomes: list[AttemptOutcome] = []
    for outcome in made if isinstance(made, Sequence) else [made]:
        if not isinstance(outcome, Episode | Failure):
            raise TypeError(f"generate must return Episode, Failure or a list of them, got {type(outcome).__name__}")
        if isinstance(outcome, Episode) and not (outcome.complete and outcome.success):
            outcome = Failure(f"the episode is {'not a success' if outcome.complete else 'not complete'}")
        outcomes.append(outcome)
    return outcomes or [Failure("generate returned no outcome")]  # else a task that makes nothing would be run forever


def attempts(
    generate: Callable[[int], Any], seeds: Iterable[tuple[int, int]], most: int, option: str = ""
) -> Iterator[tuple[Origin, list[Episode], int]]:
    """Let a task ``generate`` with numbered ``seeds``: the origin, the episodes and the count of failures of each
    attempt. Raises NoSuccessError after ``most`` attempts in a row without a success, ``option`` being the name of that
    limit, and the task's own error."""
    failed = 0
    for attempt, seed in seeds:
        outcomes = judge(generate(seed))
        episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
        failed = 0 if episodes else failed + 1
        yield Origin(seed, attempt), episodes, len(outcomes) - len(episodes)
        if failed == most:
            reason = next(outcome.reason for outcome in reversed(outcomes) if isinstance(outcome, Failure))
            raise NoSuccessError(
                f"no successful demonstration in {most} attempts in a row{option and f' ({option})'}; the last one, "
                f"with seed {seed}: {reason}"
            )


class NoSuccessError(RuntimeError):
    """A task that only fails."""


class EpisodeTooLongError(ValueError):
    """An episode that no row can hold."""


def check_episode(
    episode: Episode, spec: EpisodeSpec, num_frames: int
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the frame fields [length, ...] and episode fields of an episode, flat.

    Raises ValueError for missing or unknown fields, a wrong shape, a dtype that would lose its kind, unequal lengths,
    or no frame; EpisodeTooLongError for more frames than a row holds.
    """
    frames = _check_arrays("frame", flatten(episode.frames), spec.frames, lead=1)
    fields = _check_arrays("episode", flatten(episode.fields), spec.episode, lead=0)
    lengths = {path: len(array) for path, array in frames.items()}
    if episode.segment_id is not None:
        segment_id = np.asarray(episode.segment_id)
        lengths["segment_id"] = len(segment_id)
        if segment_id.ndim != 1 or segment_id.dtype.kind not in "iu" or (segment_id < 0).any():
            text = f"segment_id must be whole numbers ≥ 0, [length], got {segment_id.dtype}{segment_id.shape}"
            raise ValueError(text)
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the frame fields of an episode differ in length: {lengths}")
    length = next(iter(lengths.values()))
    if length < 1:
        raise ValueError("an episode has at least 1 frame, got 0; return a Failure for an attempt that made none")
    if length > num_frames:
        raise EpisodeTooLongError(f"an episode of {length} frames; max_episode_steps is {num_frames}")
    return frames, fields


def frame_numbers(episode: Episode, length: int) -> dict[str, NDArray[Any]]:
    """Make the buffer's own fields for the frames of an episode, each [length]."""
    segment_id = np.zeros(length, np.int64) if episode.segment_id is None else np.asarray(episode.segment_id)
    step = np.arange(length)
    start = np.ones(length, bool)
    start[1:] = segment_id[1:] != segment_id[:-1]  # the first frame starts one anyway
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


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"a": {"b": x}}`` into ``{"a/b": x}``; paths stay as they are. ValueError: two of one path."""
    parts = ((path, item) for path, item in leaves(tree) if not isinstance(item, Mapping))
    return unique((("/".join(map(str, path)), item) for path, item in parts), "fields")


def nest_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert ``flatten``."""
    return nest_parts((path.split("/"), item) for path, item in flat.items())


def check_paths(paths: Sequence[str]) -> None:
    """Raise ValueError if two paths are equal, one lies inside another, or a part is empty."""
    counts = Counter(paths)
    for path, count in counts.items():
        parts = path.split("/")
        if not all(parts):
            raise ValueError(f"field path '{path}' has an empty part; write it like 'obs/robot/qpos'")
        if count > 1:
            raise ValueError(f"field path '{path}' is given twice, or is a name that the buffer reserves")
        outers = ["/".join(parts[:depth]) for depth in range(1, len(parts))]  # of a/b/c: a, a/b
        if outer := next((outer for outer in outers if outer in counts), None):
            raise ValueError(f"field path '{path}' lies inside field '{outer}'; rename one")


def _checked(path: str, shape: Sequence[int], dtype: Any) -> FieldForm:
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0:
        raise ValueError(f"field '{path}' has shape {sizes}; sizes are at least 0")
    kind = np.dtype(dtype)  # fixed size: it lies in shared memory
    if kind.hasobject or kind.itemsize == 0:
        raise ValueError(f"field '{path}' has dtype '{dtype}', which has no fixed size; use e.g. 'float32' or 'S64'")
    return sizes, kind.str


def _check_arrays(
    kind: str, given: dict[str, Any], spec: Mapping[str, FieldForm], lead: int
) -> dict[str, NDArray[Any]]:
    if given.keys() != spec.keys():
        missing, unknown = sorted(set(spec) - set(given)), sorted(set(given) - set(spec))
        raise ValueError(f"{kind} fields are not those of the spec: missing {missing}, unknown {unknown}")
    arrays = {path: np.asarray(value) for path, value in given.items()}
    for path, array in arrays.items():
        shape, dtype = spec[path][0], np.dtype(spec[path][1])
        cut = array.dtype.kind in "SU" and array.dtype.itemsize > dtype.itemsize  # NumPy would silently cut the text
        fits = np.can_cast(array.dtype, dtype, "same_kind") and not cut
        if array.shape[lead:] != shape or array.ndim < lead or not fits:
            raise ValueError(
                f"{kind} field '{path}' is {array.dtype}{list(array.shape)}; the spec has {dtype} "
                f"{['length'] * lead + list(shape)}"
            )
    return arrays
