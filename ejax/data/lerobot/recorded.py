"""Chunks of kept episodes, and windows around a frame, drawn by the rules of ``ejax.data.chunks``.

Instead of masks per frame, the runs of one ``segment_id`` are counted: a folder has many more episodes than a buffer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.data.checks import check_seed
from ejax.data.chunks import DataUnavailableError, SamplingMode, WindowDraw, padding
from ejax.data.dataset import Chunks, ChunkSource
from ejax.data.lerobot.read import EpisodeReader
from ejax.data.samplers import make_rng


class RecordedEpisodes(ChunkSource):
    """A folder of episodes in place of an ``OnlineDataEngine``: ``OnlineDataset(RecordedEpisodes(folder), ...)``.

    May be pickled; threads may share it, and draw then in no fixed order.

    Args:
        episodes: to draw from, e.g. the training part; None: the set's split ``train``, or all where it has none.
        seed: for draws without an ``rng``.
        cache_mb: size of the cache of decoded episodes, in MiB.
        part: which windows of each draw are read and returned. Several processes draw alike, and read a part each.

    Raises:
        IndexError, ValueError: an episode that is not there, given twice, or none at all.
        FileNotFoundError, ValueError: as ``EpisodeReader``.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        episodes: Sequence[int] | None = None,
        seed: int = 0,
        cache_mb: float = 512.0,
        part: slice = slice(None),
    ) -> None:
        self.reader = EpisodeReader(folder, cache_mb=cache_mb)
        self.seed, self._part = check_seed(seed), part
        count = len(self.reader)
        chosen = np.array(self.reader.training if episodes is None else episodes).reshape(-1)
        if not chosen.size:
            raise ValueError(f"no episode to draw from; {folder} has {count}, of which {episodes} were chosen")
        if chosen.dtype.kind not in "iu":
            raise ValueError(f"episodes are whole numbers, got {chosen.dtype}; of a mask, pass np.flatnonzero(mask)")
        if chosen.min() < 0 or chosen.max() >= count:
            raise IndexError(f"episodes are 0 to {count - 1} in {folder}, got {chosen.min()} to {chosen.max()}")
        if len(set(chosen.tolist())) < len(chosen):
            raise ValueError(f"episodes names some twice: {list(chosen)}; name each once")
        self._episodes = chosen.astype(np.int64)
        self._rng = make_rng(self.seed)
        # runs of all episodes one behind the other: one search finds the run of a window, in any number of episodes
        runs = [self.reader.segments(int(index))[1] for index in self._episodes]
        self._lengths = np.array([lengths.sum() for lengths in runs], np.int64)
        self._row = np.repeat(np.arange(len(runs)), [len(lengths) for lengths in runs])
        self._run = np.concatenate(runs)
        ends = np.cumsum(self._run) - np.repeat(np.cumsum(self._lengths) - self._lengths, [len(r) for r in runs])
        self._start = ends - self._run

    def __len__(self) -> int:
        """Return the number of episodes drawn from."""
        return len(self._episodes)

    @property
    def max_episode_steps(self) -> int:
        """Frames of the longest episode that is drawn from."""
        return int(self._lengths.max())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws without an ``rng``, as JSON can carry it."""
        return {"seed": self.seed, "episodes": len(self), "generator": dict(self._rng.bit_generator.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; ValueError for another seed or number of episodes."""
        for name, here in (("seed", self.seed), ("episodes", len(self))):
            if state[name] != here:
                raise ValueError(f"the state was taken with {name} {state[name]}, here it is {here}")
        self._rng.bit_generator.state = state["generator"]

    def _draw(self, count: int, draw: WindowDraw, rng: np.random.Generator | None) -> Chunks:
        allowed = self._lengths > 0
        if draw.generations is not None:
            made = [self.reader.fields(int(index))["generation"] for index in self._episodes]
            allowed = np.isin(made, draw.generations)
        chosen = self._choose(count, draw.needed, draw.mode, allowed, self._rng if rng is None else rng)
        rows, drawn, run = (each[self._part] for each in chosen)
        begin, end = np.zeros_like(rows), self._lengths[rows]
        if draw.mode == "segment":
            begin, end = self._start[run], self._start[run] + self._run[run]
        starts = drawn - draw.before
        firsts, behinds = np.maximum(starts, begin), np.minimum(starts + draw.size, end)
        frames: dict[str, NDArray[Any]] = {}
        for i, (row, start, first, behind) in enumerate(zip(rows, starts, firsts, behinds, strict=True)):
            window = self.reader.window(int(self._episodes[row]), int(first), int(behind - first))
            for path, values in window.items():
                if not i:
                    frames[path] = np.full((len(rows), draw.size, *values.shape[1:]), padding(path, values.dtype))
                frames[path][i, first - start : behind - start] = values
        fields = [self.reader.fields(int(index)) for index in self._episodes[rows]]
        return draw.nested(frames, {path: np.stack([each[path] for each in fields]) for path in fields[0]})

    def _choose(
        self, count: int, chunk_size: int, mode: SamplingMode, allowed: NDArray[np.bool_], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return rows of ``allowed`` [R], first frames and runs of windows, each [count], just as ``draw_windows``."""
        first = self._start  # of each run, the first frame that a window may start at
        windows = np.maximum(self._run - chunk_size + 1, 0)  # and how many in a row may: those that do not leave it
        if mode != "segment":
            # a boundary lies in the windows that leave their run, and have room in the episode
            first = self._start + (windows if mode == "boundary" else 0)
            last = self._lengths[self._row] - chunk_size + 1
            windows = np.maximum(np.minimum(self._start + self._run, last) - first, 0)
        windows = np.where(allowed[self._row], windows, 0)
        counts = np.zeros(len(self), np.int64)
        np.add.at(counts, self._row, windows)
        (rows,) = counts.nonzero()
        if not rows.size:
            raise DataUnavailableError(
                f"No valid chunk of {chunk_size} frames in mode '{mode}' in {allowed.sum()} episodes of up to "
                f"{self._lengths.max()} frames; use a smaller chunk_size or another sampling_mode"
            )
        # the same two calls of the generator as ``draw_windows``: a folder and a buffer of its episodes draw alike
        chosen = rows[rng.integers(len(rows), size=count)]
        nth = rng.integers(counts[chosen]) + (np.cumsum(counts) - counts)[chosen]
        ends = np.cumsum(windows)
        run = np.searchsorted(ends, nth, side="right")
        return chosen, first[run] + nth - (ends - windows)[run], run
