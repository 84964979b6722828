"""A live engine, or a folder of kept episodes, as an endless stream of chunks or windows.

    item mode    ``batch_size=None``: single chunks, leaves [C, ...]; the chunk size is drawn for every chunk, or for
                 every ``chunk_size_every`` chunks
    batch mode   ``batch_size=B``: batches, leaves [B, C, ...]; the chunk size is drawn for every batch

``interop.dataset`` is the same for torch.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ejax.data.checks import check_choice, check_count, check_seed
from ejax.data.chunks import MODES, SamplingMode, SequenceSpecCfg, WindowDraw
from ejax.data.samplers import ChunkSizeSampler, make_rng
from ejax.data.task import flatten, nest_fields

Chunks: TypeAlias = dict[str, Any]
Transform: TypeAlias = Callable[[Chunks], Any]


class ChunkSource(ABC):
    """Episodes to draw from: an ``OnlineDataEngine``, or ``RecordedEpisodes``."""

    @property
    @abstractmethod
    def max_episode_steps(self) -> int:
        """Frames of its longest possible episode."""

    def sample_batch(
        self,
        batch_size: int,
        chunk_size: int,
        sampling_mode: SamplingMode = "episode",
        *,
        rng: np.random.Generator | None = None,
    ) -> Chunks:
        """Draw ``batch_size`` chunks of ``chunk_size`` frames; see ``ejax.data.chunks`` for the modes.

        Without ``rng``, an engine draws with this process's generator, seeded by the operating system; kept episodes
        with one that is made from their ``seed`` and saved by ``state_dict``.

        Returns:
            A nested dict of copies: frame fields [B, C, ...], and under ``episode`` the episode fields [B, ...].

        Raises:
            DataUnavailableError: no episode has such a window.
            ValueError, TypeError: sizes or mode that no episode of ``max_episode_steps`` can serve.
            RuntimeError, Exception: an engine that is not READY, no ``episode_sample_budget`` left
                (DataBudgetExhaustedError; nothing is charged), the task's own error, a worker that died or hangs
                (OnlineDataWorkerError).
        """
        check_choice("sampling_mode", sampling_mode, MODES)
        for name, value in (("batch_size", batch_size), ("chunk_size", chunk_size)):
            check_count(name, value)
        if chunk_size > self.max_episode_steps:
            text = f"chunk_size {chunk_size} is more than max_episode_steps, {self.max_episode_steps}; use at most that"
            raise ValueError(text)
        if sampling_mode == "boundary" and chunk_size < 2:
            raise ValueError("a chunk of 1 frame crosses no boundary; sampling_mode 'boundary' needs chunk_size ≥ 2")
        return self._draw(batch_size, WindowDraw(sampling_mode, chunk_size), rng)

    def sample_batch_with_context(
        self,
        batch_size: int,
        history_length: int,
        prediction_horizon: int,
        sampling_mode: Literal["episode", "segment"] = "episode",
        *,
        generations: Sequence[int] | None = None,
        rng: np.random.Generator | None = None,
    ) -> Chunks:
        """Draw ``batch_size`` windows (``SequenceSpecCfg``), as ``sample_batch``, with ``loss_mask`` [B, C]."""
        spec = SequenceSpecCfg(history_length, prediction_horizon, sampling_mode, generations)
        check_count("batch_size", batch_size)
        return self._draw(batch_size, spec.draw, rng)

    @abstractmethod
    def _draw(self, count: int, draw: WindowDraw, rng: np.random.Generator | None) -> Chunks:
        """Draw ``count`` windows for checked arguments."""


class OnlineDataset:
    """Endless draws from ``engine``, started or a copy of one that is; each iterator has its own random stream.

    Args:
        chunk_size: frames, or a sampler of them. None: with ``sequence``.
        batch_size: None: item mode.
        transform: called last with each item or batch; its result is yielded.
        chunk_size_every: item mode: successive chunks of one size, after which a sampler is asked again. The batch size
            of a loader that stacks them: batches differ in size. None: one size per iterator.
        sequence: windows around a frame in place of chunks, with their own sampling mode.
        seed: the n-th iterator of shard s draws windows from the stream (seed, s, n).

    Values outside their ranges raise ValueError or TypeError.
    """

    def __init__(
        self,
        engine: ChunkSource,
        chunk_size: int | ChunkSizeSampler | None = None,
        batch_size: int | None = None,
        transform: Transform | None = None,
        sampling_mode: SamplingMode = "episode",
        *,
        chunk_size_every: int | None = 1,
        sequence: SequenceSpecCfg | None = None,
        seed: int = 0,
    ) -> None:
        if sequence is not None:
            if chunk_size is not None or sampling_mode != "episode":
                raise ValueError("sequence gives the windows' length and mode; leave out the other two")
        elif not isinstance(chunk_size, ChunkSizeSampler):
            check_count("chunk_size", chunk_size, "an int or a ChunkSizeSampler")
        for name, value in (("batch_size", batch_size), ("chunk_size_every", chunk_size_every)):
            if value is not None:
                check_count(name, value, "an int, or None")
        check_choice("sampling_mode", sampling_mode, MODES)
        self.engine, self.chunk_size, self.batch_size, self.sequence = engine, chunk_size, batch_size, sequence
        self.chunk_size_every = chunk_size_every
        self.transform, self.sampling_mode, self.seed = transform, sampling_mode, check_seed(seed)
        self._iterators = 0

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, shard: int | None = None) -> Iterator[Any]:
        """Iterate as consumer ``shard`` ≥ 0 of several, each with independent windows and chunk sizes."""
        # the number of the iterator is part of the stream: a second epoch draws other windows
        size, stream = self.chunk_size, [self._iterators]
        if shard is not None:
            size, stream = size.stream(shard) if isinstance(size, ChunkSizeSampler) else size, [shard, *stream]
        self._iterators += 1
        return self._draws(make_rng(self.seed, *stream), size)

    def _draws(self, rng: np.random.Generator, size: int | ChunkSizeSampler | None) -> Iterator[Any]:
        every = 1 if self.batch_size else self.chunk_size_every
        for number in itertools.count():
            if self.sequence is not None:
                chunks = self.engine._draw(self.batch_size or 1, self.sequence.draw, rng)
            else:
                if number == 0 or (every and number % every == 0):
                    now = size() if isinstance(size, ChunkSizeSampler) else size or 1
                chunks = self.engine.sample_batch(self.batch_size or 1, now, self.sampling_mode, rng=rng)
            if self.batch_size is None:
                chunks = nest_fields({path: array[0] for path, array in flatten(chunks).items()})
            yield chunks if self.transform is None else self.transform(chunks)
