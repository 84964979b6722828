"""Chunk-size samplers: ranges, shares, streams, state."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from case_tables import cases, refused

from ejax.data import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler


def draws(sampler: ChunkSizeSampler, count: int) -> list[Any]:
    return [sampler() for _ in range(count)]


def test_uniform_sizes_are_whole_numbers_of_the_closed_interval_drawn_evenly() -> None:
    sizes = draws(UniformChunkSampler(16, 64), 2000)
    assert all(type(size) is int for size in sizes) and min(sizes) == 16 and max(sizes) == 64
    counts = np.bincount(draws(UniformChunkSampler(1, 4), 4000))[1:]
    assert counts.min() > 850 and counts.max() < 1150  # 1000 ± 5.5 σ
    assert set(draws(UniformChunkSampler(7, 7), 50)) == {7}


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


ONE = {"means": [1.0], "stds": [1.0]}


@cases(
    "make arguments error message",
    (UniformChunkSampler, {"low": 0, "high": 4}, ValueError, "low must be at least 1, got 0"),
    (UniformChunkSampler, {"low": 5, "high": 4}, ValueError, "at least low, got low=5, high=4"),
    (UniformChunkSampler, {"low": 1.5, "high": 4}, TypeError, "low must be an int, got float"),
    (UniformChunkSampler, {"low": None, "high": 4}, TypeError, "low must be an int, got NoneType"),
    (UniformChunkSampler, {"low": 1, "high": None}, TypeError, "high must be an int, got NoneType"),
    (UniformChunkSampler, {"low": True, "high": 4}, TypeError, "low must be an int, got bool"),
    (UniformChunkSampler, {"low": 1, "high": 2, "seed": -1}, ValueError, "seed must be an int of at least 0"),
    (GMMChunkSampler, {"means": [], "stds": []}, ValueError, "at least one; got means"),
    (GMMChunkSampler, {"means": [1.0], "stds": [1.0, 2.0]}, ValueError, r"equally many.* stds \[1.0, 2.0\]"),
    (GMMChunkSampler, {**ONE, "weights": [1.0, 2.0]}, ValueError, "equally many"),
    (GMMChunkSampler, {**ONE, "stds": [0.0]}, ValueError, "every std must be above 0"),
    (GMMChunkSampler, {"means": [1, 2], "stds": [1, 1], "weights": [2, -1]}, ValueError, "weights at least 0"),
    (GMMChunkSampler, {**ONE, "weights": [0.0]}, ValueError, "not all 0"),
    (GMMChunkSampler, {**ONE, "means": [float("nan")]}, ValueError, r"must be finite.*means \[nan\]"),
    (GMMChunkSampler, {**ONE, "stds": [float("inf")]}, ValueError, r"must be finite.*stds \[inf\]"),
    (GMMChunkSampler, {**ONE, "low": 0}, ValueError, "low must be at least 1, got 0"),
    (GMMChunkSampler, {**ONE, "high": 0}, ValueError, "high must be at least 1, got 0"),
    (GMMChunkSampler, {**ONE, "low": 5, "high": 4}, ValueError, "high must be at least low"),
)
def test_wrong_samplers_are_refused(make: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**arguments)


SAMPLERS = {
    "uniform": lambda seed=0: UniformChunkSampler(1, 1000, seed=seed),
    "gmm": lambda seed=0: GMMChunkSampler([100.0, 500.0], [30.0, 90.0], [2.0, 1.0], low=8, seed=seed),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_seeds_and_streams_are_reproducible_and_differ_and_nothing_global_is_moved(make: Callable[..., Any]) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    many = [lambda: make(), lambda: make(seed=1), lambda: make().stream(0), lambda: make().stream(1)]
    drawn = [draws(each(), 50) for each in many]
    assert drawn == [draws(each(), 50) for each in many] and len(set(map(tuple, drawn))) == 4
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_continues_where_its_state_was_taken(make: Callable[..., Any]) -> None:
    sampler, other = make(), make()
    draws(sampler, 17)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = draws(sampler, 30)
    other.load_state_dict(state)
    assert draws(other, 30) == expected
    refused(lambda: make(seed=1).load_state_dict(state), match=r"the state is that of \w+\(.*seed=0\), this")
    assert repr(eval(repr(sampler))) == repr(sampler)


def test_a_sampler_of_ones_own_needs_a_call_only() -> None:
    class Always(ChunkSizeSampler):
        def __call__(self) -> int:
            return 5

    sampler = Always()
    assert sampler.stream(3) is sampler and sampler() == 5
