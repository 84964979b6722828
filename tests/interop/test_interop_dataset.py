"""The data engine behind torch's DataLoader."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ejax.data import OnlineDataEngine, OnlineDataEngineCfg, SequenceSpecCfg, UniformChunkSampler

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
tensordict = pytest.importorskip("tensordict")
dataset_module = pytest.importorskip("interop.dataset")
DataLoader, OnlineDataset = torch.utils.data.DataLoader, dataset_module.OnlineDataset

assert str(Path(__file__).parents[1] / "helpers") in sys.path  # where the worker finds data_tasks


@pytest.fixture(scope="module")
def engine() -> Iterator[OnlineDataEngine]:
    cfg = OnlineDataEngineCfg(
        "data_tasks:Toy", {"lengths": [40], "segments": 4}, buffer_size=8, max_episode_steps=50, refill_threshold=10**6
    )
    with OnlineDataEngine(cfg) as engine:
        yield engine


def take(iterable: Iterable[Any], count: int) -> list[Any]:
    iterator = iter(iterable)
    return [next(iterator) for _ in range(count)]


def test_items_are_stacked_by_a_loader(engine: OnlineDataEngine) -> None:
    loader = DataLoader(OnlineDataset(engine, 8), batch_size=4, collate_fn=OnlineDataset.collate_fn)
    for batch in take(loader, 2):
        assert isinstance(batch, tensordict.TensorDict) and batch.batch_size == (4, 8)
        assert batch["obs", "robot", "qpos"].shape == (4, 8, 10)
        assert batch["actions"].dtype == torch.float32


def test_batches_pass_through_a_loader(engine: OnlineDataEngine) -> None:
    dataset = OnlineDataset(engine, 8, batch_size=4)
    loader = DataLoader(dataset, batch_size=None, collate_fn=OnlineDataset.passthrough_collate_fn)
    (batch,) = take(loader, 1)
    assert batch.batch_size == (4, 8) and batch["rewards"].shape == (4, 8)


def test_a_tensordict_holds_what_was_drawn(engine: OnlineDataEngine) -> None:
    chunks = engine.sample_batch(3, 5)
    batch = dataset_module.chunks_to_tensordict(chunks)
    assert batch["actions"].data_ptr() == chunks["actions"].ctypes.data  # no second copy
    np.testing.assert_array_equal(batch["episode_step"].numpy(), chunks["episode_step"])
    mark = batch["episode", "mark"]
    assert mark.shape == (3, 5)
    np.testing.assert_array_equal(mark.numpy(), np.repeat(chunks["episode"]["mark"][:, None], 5, axis=1))
    assert bytes(batch["episode", "instruction"][2, 4].tolist()).rstrip(b"\0") == b"push the cube"


def test_text_becomes_its_utf8_bytes() -> None:
    chunks = {"valid": np.ones((2, 3), bool), "episode": {"text": np.array(["grün", "rot"])}}
    text = dataset_module.chunks_to_tensordict(chunks)["episode", "text"]
    assert text.dtype == torch.uint8 and text.shape == (2, 3, 5)
    assert bytes(text[0, 1].tolist()).decode() == "grün" and bytes(text[1, 2].tolist()) == b"rot\0\0"


def test_a_transform_comes_last(engine: OnlineDataEngine) -> None:
    dataset = OnlineDataset(engine, 8, batch_size=2, transform=lambda td: td["actions"] * 0 + 7)
    (batch,) = take(DataLoader(dataset, batch_size=None, collate_fn=OnlineDataset.passthrough_collate_fn), 1)
    assert torch.equal(batch, torch.full((2, 8, 4), 7.0))


def test_the_mode_is_passed_on(engine: OnlineDataEngine) -> None:
    (batch,) = take(OnlineDataset(engine, 6, 50, sampling_mode="boundary"), 1)
    ids = batch["segment_id"]
    assert (ids.amin(dim=1) < ids.amax(dim=1)).all()


def test_windows_around_a_frame_have_their_mask(engine: OnlineDataEngine) -> None:
    (batch,) = take(OnlineDataset(engine, batch_size=40, sequence=SequenceSpecCfg(3, 4)), 1)
    assert batch.batch_size == (40, 6) and batch["loss_mask"].dtype == torch.bool
    assert not batch["loss_mask"][:, :2].any() and batch["loss_mask"][:, 2].all()
    assert (batch["actions"][~batch["valid"]] == 0).all()


def test_chunk_sizes_vary_by_batch(engine: OnlineDataEngine) -> None:
    sampler = UniformChunkSampler(2, 9)
    sizes = {batch.batch_size[1] for batch in take(OnlineDataset(engine, sampler, batch_size=2), 100)}
    assert sizes == set(range(2, 10))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_loader_of_items_gets_a_chunk_size_per_batch_or_per_iterator(
    engine: OnlineDataEngine, num_workers: int
) -> None:
    def sizes(count: int, **options: Any) -> list[int]:
        dataset = OnlineDataset(engine, UniformChunkSampler(2, 9), **options)
        loader = DataLoader(dataset, batch_size=3, num_workers=num_workers, collate_fn=OnlineDataset.collate_fn)
        batches = take(loader, count)
        assert all(batch.batch_size == (3, batch["rewards"].shape[1]) for batch in batches)
        return [batch.batch_size[1] for batch in batches]

    assert len(set(sizes(12, chunk_size_every=3))) > max(num_workers, 1)
    assert len(set(sizes(12, chunk_size_every=None))) <= max(num_workers, 1)


def test_items_of_several_sizes_are_not_stacked(engine: OnlineDataEngine) -> None:
    items = take(OnlineDataset(engine, UniformChunkSampler(2, 9)), 20)
    assert {len(item) for item in items} > {2, 9}
    with pytest.raises(ValueError, match=r"items of 2, .* frames cannot be stacked: .* chunk_size_every=20, the DataL"):
        OnlineDataset.collate_fn(items)


@pytest.mark.slow_cases("spawn")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_workers_of_a_loader_draw_from_streams_of_their_own(engine: OnlineDataEngine, method: Any) -> None:
    sampler = UniformChunkSampler(2, 40)
    dataset = OnlineDataset(engine, sampler, batch_size=16, seed=5)

    def steps(count: int) -> list[Any]:
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            multiprocessing_context=method,
            collate_fn=OnlineDataset.passthrough_collate_fn,
        )
        return [(batch.batch_size, batch["episode_step"][:, 0].tolist()) for batch in take(loader, count)]

    first = steps(6)
    assert len({str(batch) for batch in first}) == 6  # batches of both workers alternate, none drawn twice
    assert steps(6) == first  # and by the seed: new workers draw the same
