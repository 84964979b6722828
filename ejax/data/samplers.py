"""Samplers of chunk lengths, each with its own generator, whose ``state_dict`` JSON can carry."""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ejax.data.checks import check_count, check_seed


class ChunkSizeSampler(ABC):
    """A source of chunk sizes. A subclass needs ``__call__`` only."""

    @abstractmethod
    def __call__(self) -> int:
        """Draw a chunk size, in frames, at least 1."""

    def stream(self, number: int) -> "ChunkSizeSampler":
        """Return the sampler for consumer ``number`` ≥ 0; built-in ones have a random stream for each. Here: itself."""
        del number
        return self


class _Seeded(ChunkSizeSampler):
    def __init__(self, low: int | None, high: int | None, seed: int) -> None:
        for name, bound in (("low", low), ("high", high)):
            if bound is not None:
                check_count(name, bound)
        if low is not None and high is not None and high < low:
            raise ValueError(f"high must be at least low, got low={low}, high={high}")
        self.seed = check_seed(seed)
        self._rng = make_rng(self.seed)

    def stream(self, number: int) -> Self:
        twin = copy.copy(self)
        twin._rng = make_rng(self.seed, number)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state. A sampler made with the same arguments continues from there."""
        # its arguments, so that a state of another one is refused
        return {"sampler": repr(self), "generator": dict(self._rng.bit_generator.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; ValueError for one of a sampler with other arguments."""
        if state["sampler"] != repr(self):
            raise ValueError(f"the state is that of {state['sampler']}, this is {self!r}; make an equal one first")
        self._rng.bit_generator.state = state["generator"]


class UniformChunkSampler(_Seeded):
    """Lengths drawn uniformly from the integers of [low, high]; ValueError for low < 1 or high < low."""

    def __init__(self, low: int, high: int, *, seed: int = 0) -> None:
        check_count("low", low)  # neither may be None, as GMMChunkSampler's may
        check_count("high", high)
        super().__init__(low, high, seed)
        self.low, self.high = int(low), int(high)

    def __call__(self) -> int:
        return int(self._rng.integers(self.low, self.high, endpoint=True))

    def __repr__(self) -> str:
        return f"UniformChunkSampler(low={self.low}, high={self.high}, seed={self.seed})"


class GMMChunkSampler(_Seeded):
    """Lengths drawn from a mixture of normals, clamped to [max(1, low), high].

    Component k has probability w_k / Σw, and gives round(𝒩(μ_k, σ_k)).

    ``means`` μ and ``stds`` σ > 0 are in frames; weights w ≥ 0, not all 0, are equal by default; bounds are inclusive.
    Raises ValueError for lengths that differ, or a value outside its range.
    """

    def __init__(
        self,
        means: Sequence[float],
        stds: Sequence[float],
        weights: Sequence[float] | None = None,
        low: int | None = None,
        high: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        weights = [1.0] * len(means) if weights is None else weights
        given = f"got means {list(means)}, stds {list(stds)}, weights {list(weights)}"
        if not (means and len(means) == len(stds) == len(weights) and np.isfinite([*means, *stds, *weights]).all()):
            raise ValueError(f"means, stds and weights must be finite, equally many, and at least one; {given}")
        if min(stds) <= 0 or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"every std must be above 0, and weights at least 0 and not all 0; {given}")
        super().__init__(low, high, seed)
        self.means, self.stds, self.weights = (tuple(map(float, each)) for each in (means, stds, weights))
        self.low, self.high = low, high

    def __call__(self) -> int:
        component = self._rng.choice(len(self.means), p=np.array(self.weights) / sum(self.weights))
        size = max(self.low or 1, round(self._rng.normal(self.means[component], self.stds[component])))
        return size if self.high is None else min(self.high, size)

    def __repr__(self) -> str:
        return (
            f"GMMChunkSampler(means={list(self.means)}, stds={list(self.stds)}, weights={list(self.weights)}, "
            f"low={self.low}, high={self.high}, seed={self.seed})"
        )


def make_rng(seed: int, *stream: int) -> np.random.Generator:
    """Make the generator of one stream of random numbers under ``seed``, independent of other streams."""
    # named, not default_rng: NumPy may change its default, and recorded seeds must not
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream)))


def attempt_seeds(seed: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of a task's attempts, 0, 1, ..., each with its seed in [0, 2³¹)."""
    first = int(make_rng(seed).integers(2**31))
    for attempt in itertools.count():
        yield attempt, (first + attempt) % 2**31  # consecutive: no two attempts of a run share a seed
