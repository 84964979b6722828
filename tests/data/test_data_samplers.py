"""Chunk-size samplers: ranges, shares, streams, state."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ejax.data import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler


def draws(sampler: ChunkSizeSampler, count: int) -> list[Any]:
    return [sampler() for _ in range(count)]


def test_uniform_sizes_are_whole_numbers_of_the_closed_interval() -> None:
    sizes = draws(UniformChunkSampler(16, 64), 2000)
    assert all(type(size) is int for size in sizes)
    assert min(sizes) == 16 and max(sizes) == 64


def test_uniform_covers_a_small_interval_evenly() -> None:
    counts = np.bincount(draws(UniformChunkSampler(1, 4), 4000))[1:]
    assert counts.min() > 850 and counts.max() < 1150  # 1000 ± 5.5 σ


def test_an_interval_of_one_number_gives_it() -> None:
    assert set(draws(UniformChunkSampler(7, 7), 50)) == {7}


@pytest.mark.parametrize(
    ("low", "high", "error", "message"),
    [
        (0, 4, ValueError, "low must be at least 1, got 0"),
        (5, 4, ValueError, "high must be at least low, got low=5, high=4"),
        (1.5, 4, TypeError, "low must be an int, got float"),
        (True, 4, TypeError, "low must be an int, got bool"),
    ],
)
def test_wrong_intervals_are_refused(low: bool | float, high: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        UniformChunkSampler(low, high)


def test_a_single_component_has_its_mean_and_deviation() -> None:
    sizes = draws(GMMChunkSampler([30.0], [3.0]), 2000)
    assert all(type(size) is int for size in sizes)
    assert abs(np.mean(sizes) - 30.0) < 0.35  # 5 σ of the mean
    assert abs(np.std(sizes) - 3.0) < 0.3


def test_components_weigh_alike_unless_weights_are_given() -> None:
    alike = np.array(draws(GMMChunkSampler([10.0, 100.0], [1.0, 1.0]), 2000)) < 50
    assert 0.44 < alike.mean() < 0.56
    biased = np.array(draws(GMMChunkSampler([10.0, 100.0], [1.0, 1.0], [9.0, 1.0]), 2000)) < 50
    assert 0.86 < biased.mean() < 0.94
    never = np.array(draws(GMMChunkSampler([10.0, 100.0], [1.0, 1.0], [1.0, 0.0]), 500)) < 50
    assert never.all()


def test_sizes_are_clamped() -> None:
    sizes = draws(GMMChunkSampler([10.0], [20.0], low=8, high=12), 500)
    assert set(sizes) >= {8, 12} and min(sizes) == 8 and max(sizes) == 12
    assert min(draws(GMMChunkSampler([0.0], [5.0]), 500)) == 1
    assert max(draws(GMMChunkSampler([10.0], [20.0], high=11), 500)) == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"means": [], "stds": []}, "at least one; got means"),
        ({"means": [1.0], "stds": [1.0, 2.0]}, r"as many of each.* stds \[1.0, 2.0\]"),
        ({"means": [1.0], "stds": [1.0], "weights": [1.0, 2.0]}, "as many of each"),
        ({"means": [1.0], "stds": [0.0]}, "every std must be above 0"),
        ({"means": [1.0, 2.0], "stds": [1.0, 1.0], "weights": [2.0, -1.0]}, "weights at least 0"),
        ({"means": [1.0], "stds": [1.0], "weights": [0.0]}, "not all 0"),
        ({"means": [float("nan")], "stds": [1.0]}, r"must be finite.*means \[nan\]"),
        ({"means": [1.0], "stds": [float("inf")]}, r"must be finite.*stds \[inf\]"),
        ({"means": [1.0], "stds": [1.0], "low": 0}, "low must be at least 1, got 0"),
        ({"means": [1.0], "stds": [1.0], "high": 0}, "high must be at least 1, got 0"),
        ({"means": [1.0], "stds": [1.0], "low": 5, "high": 4}, "high must be at least low"),
    ],
)
def test_wrong_mixtures_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GMMChunkSampler(**arguments)


SAMPLERS = {
    "uniform": lambda seed=0: UniformChunkSampler(1, 1000, seed=seed),
    "gmm": lambda seed=0: GMMChunkSampler([100.0, 500.0], [30.0, 90.0], [2.0, 1.0], low=8, seed=seed),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_the_same_seed_gives_the_same_sizes_and_another_seed_others(make: Callable[..., Any]) -> None:
    assert draws(make(), 50) == draws(make(), 50)
    assert draws(make(), 50) != draws(make(seed=1), 50)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_nothing_global_is_read_or_moved(make: Callable[..., Any]) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    draws(make(), 10)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_goes_on_where_its_state_was_taken(make: Callable[..., Any]) -> None:
    sampler, other = make(), make()
    draws(sampler, 17)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = draws(sampler, 30)
    other.load_state_dict(state)
    assert draws(other, 30) == expected


def test_a_state_of_another_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the state is that of UniformChunkSampler\(low=1, high=1000, seed=0\), this"):
        UniformChunkSampler(1, 999).load_state_dict(SAMPLERS["uniform"]().state_dict())


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_streams_are_reproducible_and_differ(make: Callable[..., Any]) -> None:
    first, second = make().stream(0), make().stream(1)
    assert draws(first, 50) == draws(make().stream(0), 50)
    assert len({tuple(draws(sampler, 50)) for sampler in (make(), make().stream(0), second)}) == 3


def test_a_sampler_of_ones_own_needs_a_call_only() -> None:
    class Always(ChunkSizeSampler):
        def __call__(self) -> int:
            return 5

    sampler = Always()
    assert sampler.stream(3) is sampler and sampler() == 5


def test_the_representation_makes_the_sampler_again() -> None:
    for made in (UniformChunkSampler(2, 9, seed=4), GMMChunkSampler([3.0], [1.0], [2.0], high=5)):
        assert repr(eval(repr(made))) == repr(made)


def test_a_wrong_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed must be an int of at least 0, got -1"):
        UniformChunkSampler(1, 2, seed=-1)
