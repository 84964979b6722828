"""A live engine, or a folder of kept episodes, as an endless stream of chunks or of windows around a frame.

    item mode    ``batch_size=None``: single chunks, leaves [C, ...]; the chunk size is drawn once per iterator, so that
                 items of one iterator can be stacked
    batch mode   ``batch_size=B``: batches, leaves [B, C, ...]; the chunk size is drawn for every batch

``interop.dataset`` is the same for torch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ejax.data.chunks import SamplingMode, check_count, check_mode
from ejax.data.context import SequenceSpecCfg
from ejax.data.samplers import ChunkSizeSampler, check_seed, make_rng

Chunks: TypeAlias = dict[str, Any]
Transform: TypeAlias = Callable[[Chunks], Any]


class ChunkSource(Protocol):
    """The source of an ``OnlineDataset``: an ``OnlineDataEngine``, or ``RecordedEpisodes``."""

    def sample_batch(
        self,
        batch_size: int,
        chunk_size: int,
        sampling_mode: SamplingMode = "episode",
        *,
        rng: np.random.Generator | None = None,
    ) -> Chunks: ...

    def sample_batch_with_context(
        self,
        batch_size: int,
        history_length: int,
        prediction_horizon: int,
        sampling_mode: Literal["episode", "segment"] = "episode",
        *,
        generations: Sequence[int] | None = None,
        rng: np.random.Generator | None = None,
    ) -> Chunks: ...


class OnlineDataset:
    """Iterating draws from ``engine`` without end; each iterator has a random stream of its own.

    Args:
        engine: started, or a copy of one that is.
        chunk_size: frames, or a sampler of them; see above when it draws. None: with ``sequence``.
        batch_size: None: item mode.
        transform: called last with each item or batch; its result is yielded.
        sampling_mode: "episode", "segment" or "boundary".
        sequence: windows around a frame in place of chunks; it has a mode of its own.
        seed: for the windows drawn. The n-th iterator of shard s draws from the stream (seed, s, n).

    Raises:
        ValueError, TypeError: a value outside its range.
    """

    def __init__(
        self,
        engine: ChunkSource,
        chunk_size: int | ChunkSizeSampler | None = None,
        batch_size: int | None = None,
        transform: Transform | None = None,
        sampling_mode: SamplingMode = "episode",
        *,
        sequence: SequenceSpecCfg | None = None,
        seed: int = 0,
    ) -> None:
        if sequence is not None:
            if chunk_size is not None or sampling_mode != "episode":
                raise ValueError("sequence says how long windows are, and in what mode; leave out the other two")
        elif not isinstance(chunk_size, ChunkSizeSampler):
            if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer):
                raise TypeError(f"chunk_size must be an int or a ChunkSizeSampler, got {type(chunk_size).__name__}")
            check_count("chunk_size", chunk_size)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        check_mode(sampling_mode)
        self.engine, self.chunk_size, self.batch_size, self.sequence = engine, chunk_size, batch_size, sequence
        self.transform, self.sampling_mode, self.seed = transform, sampling_mode, check_seed(seed)
        self._iterators = 0

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, shard: int | None = None) -> Iterator[Any]:
        """Iterate as consumer ``shard`` ≥ 0 of several, with windows and chunk sizes independent of the others'."""
        rng = make_rng(self.seed, *(() if shard is None else (shard,)), self._iterators)
        self._iterators += 1
        size = 1 if self.sequence is not None or self.chunk_size is None else self.chunk_size
        if shard is not None and isinstance(size, ChunkSizeSampler):
            size = size.stream(shard)
        return self._draw(rng, size if isinstance(size, ChunkSizeSampler) else lambda: size)

    def _draw(self, rng: np.random.Generator, next_size: Callable[[], int]) -> Iterator[Any]:
        size = next_size() if self.batch_size is None else 0
        while True:
            if self.batch_size is None:
                chunks = _first(self._sample(1, size, rng))
            else:
                chunks = self._sample(self.batch_size, next_size(), rng)
            yield chunks if self.transform is None else self.transform(chunks)

    def _sample(self, count: int, chunk_size: int, rng: np.random.Generator) -> Chunks:
        if self.sequence is None:
            return self.engine.sample_batch(count, chunk_size, self.sampling_mode, rng=rng)
        history, horizon = self.sequence.history_length, self.sequence.prediction_horizon
        mode, generations = self.sequence.sampling_mode, self.sequence.generations
        return self.engine.sample_batch_with_context(count, history, horizon, mode, generations=generations, rng=rng)


def _first(tree: Any) -> Any:
    """A batch of one without its leading axis."""
    return {name: _first(item) for name, item in tree.items()} if isinstance(tree, dict) else tree[0]
