"""The dataset over an engine: items and batches, chunk sizes, seeds, and its batches on the device."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.data import ChunkSizeSampler, OnlineDataEngine, OnlineDataEngineCfg, OnlineDataset, UniformChunkSampler
from ejax.data.prefetch import prefetch_to_device


class Fixed(ChunkSizeSampler):
    """3, 4, 5, ..."""

    def __init__(self) -> None:
        self.next = 2

    def __call__(self) -> int:
        self.next += 1
        return self.next


def take(iterable: Iterable[Any], count: int) -> list[Any]:
    return list(itertools.islice(iterable, count))


def shapes(iterable: Iterable[Any], count: int) -> list[Any]:
    return [each["rewards"].shape for each in take(iterable, count)]


@pytest.fixture(scope="module")
def ready() -> Iterator[OnlineDataEngine]:
    """One engine for all tests: they only draw."""
    options = {"refill_threshold": 10**6, "buffer_size": 8, "max_episode_steps": 50}
    with OnlineDataEngine(OnlineDataEngineCfg("data_tasks:Toy", {"segments": 4, "lengths": [40]}, **options)) as engine:
        yield engine


def test_items_and_batches_have_their_shapes_and_a_transform_comes_last(ready: OnlineDataEngine) -> None:
    (item,) = take(OnlineDataset(ready, 8), 1)
    assert item["actions"].shape == (8, 4) and item["episode"]["mark"].shape == ()
    (batch,) = take(OnlineDataset(ready, 8, batch_size=4), 1)
    assert batch["actions"].shape == (4, 8, 4) and batch["episode"]["mark"].shape == (4,)
    seen: list[Any] = []
    dataset = OnlineDataset(ready, 8, transform=lambda chunks: seen.append(chunks["rewards"].shape) or "mine")
    assert take(dataset, 2) == ["mine", "mine"] and seen == [(8,), (8,)]


def test_the_mode_is_passed_on(ready: OnlineDataEngine) -> None:
    ids = {mode: take(OnlineDataset(ready, 6, 100, sampling_mode=mode), 1)[0]["segment_id"] for mode in MODES}
    assert (ids["boundary"].min(axis=1) < ids["boundary"].max(axis=1)).all()
    assert (ids["segment"] == ids["segment"][:, :1]).all()


MODES = ("boundary", "segment")


def test_chunk_sizes_are_drawn_for_each_batch_item_or_as_many_items_as_share_one(ready: OnlineDataEngine) -> None:
    assert shapes(OnlineDataset(ready, Fixed(), batch_size=2), 3) == [(2, 3), (2, 4), (2, 5)]
    assert shapes(OnlineDataset(ready, Fixed()), 3) == [(3,), (4,), (5,)]
    assert shapes(OnlineDataset(ready, Fixed(), chunk_size_every=2), 5) == [(3,), (3,), (4,), (4,), (5,)]
    # an option of items
    assert shapes(OnlineDataset(ready, Fixed(), batch_size=2, chunk_size_every=2), 2) == [(2, 3), (2, 4)]
    dataset = OnlineDataset(ready, Fixed(), chunk_size_every=None)
    assert [shapes(dataset, 3) for _ in range(2)] == [[(3,)] * 3, [(4,)] * 3]
    assert set(shapes(OnlineDataset(ready, UniformChunkSampler(2, 9), batch_size=1), 200)) == {
        (1, size) for size in range(2, 10)
    }


def test_the_same_seed_draws_the_same_chunks_and_iterators_and_shards_differ(ready: OnlineDataEngine) -> None:
    def steps(iterator: Iterable[Any]) -> list[Any]:
        return [item["episode_step"][0] for item in take(iterator, 30)]

    dataset, again = (OnlineDataset(ready, 5, seed=1) for _ in range(2))
    first, second = steps(dataset), steps(dataset)
    assert first == steps(again) and second == steps(again)
    others = [first, second, steps(OnlineDataset(ready, 5, seed=2))]
    others += [steps(OnlineDataset(ready, 5, seed=1).iterate(shard)) for shard in range(2)]
    assert len(set(map(tuple, others))) == 5


@cases(
    "arguments error message",
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    ({"chunk_size": 2.5}, TypeError, "chunk_size must be an int or a ChunkSizeSampler, got float"),
    ({"chunk_size": True}, TypeError, "got bool"),
    ({"chunk_size": 2, "batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ({"chunk_size": 2, "chunk_size_every": 0}, ValueError, "chunk_size_every must be at least 1, got 0"),
    ({"chunk_size": 2, "sampling_mode": "row"}, ValueError, "no sampling_mode 'row'"),
)
def test_wrong_datasets_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OnlineDataset(None, **arguments)


def test_batches_are_on_the_device_ahead_of_their_use(ready: OnlineDataEngine) -> None:
    drawn: list[int] = []
    dataset = OnlineDataset(ready, 8, 4, transform=lambda chunks: drawn.append(1) or {"actions": chunks["actions"]})
    batches = prefetch_to_device(dataset, size=2)
    first = next(batches)
    assert isinstance(first["actions"], jax.Array) and first["actions"].shape == (4, 8, 4)
    next(batches)
    batches.close()  # which waits for what is under way
    assert 2 <= len(drawn) <= 4
    assert [int(x) for x in prefetch_to_device(np.arange(5), size=3)] == [0, 1, 2, 3, 4]
    refused(prefetch_to_device, dataset, size=0, match="size must be at least 1")
