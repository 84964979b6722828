"""EmbodiChain's page of data sets and engine: its examples, with NumPy and, where torch is there, in a DataLoader."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case_tables import refused

from ejax.data import GMMChunkSampler, OnlineDataEngine, OnlineDataEngineCfg, OnlineDataset, UniformChunkSampler

ROOT = Path(__file__).parents[2]
STEPS, B = 100, 4
MEANS: dict[str, Any] = {"means": [16.0, 64.0], "stds": [4.0, 8.0], "weights": [0.6, 0.4], "low": 8, "high": 96}


@pytest.fixture(scope="module")
def engine() -> Iterator[OnlineDataEngine]:
    cfg = OnlineDataEngineCfg("data_tasks:Toy", {"lengths": [STEPS]}, buffer_size=8, max_episode_steps=STEPS)
    engine = OnlineDataEngine(cfg)
    assert not engine.is_init
    engine.start()
    while not engine.is_init:  # at once: start() returns when the buffer is full
        time.sleep(0.5)
    yield engine
    engine.stop()
    engine.stop()  # a second call does nothing
    assert not engine.is_init


def take(iterable: Any, count: int = 3) -> list[Any]:
    iterator = iter(iterable)
    return [next(iterator) for _ in range(count)]


def sizes(batches: list[Any], axis: int = 1) -> list[int]:
    return [batch["actions"].shape[axis] for batch in batches]


def test_the_engine_has_its_attributes(engine: OnlineDataEngine) -> None:
    assert (engine.buffer_size, engine.device) == (8, "cpu")
    assert engine.shared_buffer["obs"]["robot"]["qpos"].shape == (8, STEPS, 10)
    assert engine.sample_batch(B, 16)["actions"].shape == (B, 16, 4)
    refused(engine.sample_batch, B, STEPS + 1, match=f"chunk_size.*{STEPS}")


def test_fixed_chunks_in_item_and_batch_mode(engine: OnlineDataEngine) -> None:
    assert sizes(take(OnlineDataset(engine, chunk_size=64)), axis=0) == [64] * 3
    batches = take(OnlineDataset(engine, chunk_size=64, batch_size=B, transform=lambda chunk: chunk))
    assert sizes(batches) == [64] * 3 and len(batches[0]["actions"]) == B
    assert not hasattr(OnlineDataset, "__len__")


def test_dynamic_chunks_by_both_samplers(engine: OnlineDataEngine) -> None:
    uniform = UniformChunkSampler(low=16, high=64)
    assert 16 <= uniform() <= 64 and 8 <= GMMChunkSampler(**MEANS)() <= 96
    assert len({*sizes(take(OnlineDataset(engine, chunk_size=uniform), 8), axis=0)}) > 1
    assert len({*sizes(take(OnlineDataset(engine, chunk_size=GMMChunkSampler(**MEANS), batch_size=B), 8))}) > 1


def gym_options(**changes: Any) -> OnlineDataEngineCfg:
    gym_config = json.loads((ROOT / "tests/gym_configs/push_cube.json").read_text())
    fields: dict[str, Any] = {"buffer_size": 4, "max_episode_steps": 100, "state_dim": 8, "refill_threshold": 100}
    fields |= {"gym_config": gym_config, "action_config": {}, "buffer_device": "cpu", **changes}
    return OnlineDataEngineCfg(**fields)


def test_options_of_the_document_make_an_engine() -> None:
    cfg = gym_options()
    assert OnlineDataEngine(cfg).buffer_size == 4 and cfg.task is None and cfg.gym_config["id"] == "PushCubeRL"
    refused(gym_options, buffer_device="cuda:0", match="buffer_device is 'cuda:0'")


@pytest.mark.slow
def test_an_unchanged_gym_config_feeds_the_engine() -> None:
    with OnlineDataEngine(gym_options()) as engine:
        batch = next(iter(OnlineDataset(engine, chunk_size=16, batch_size=B)))
    assert batch["obs"]["robot"]["qpos"].shape == batch["actions"].shape == (B, 16, 8)


def loader(dataset: Any, **options: Any) -> Any:
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
    return torch.utils.data.DataLoader(dataset, **options)


def test_the_four_examples_of_a_loader(engine: OnlineDataEngine) -> None:
    Dataset = pytest.importorskip("interop.dataset", reason="needs torch and tensordict").OnlineDataset
    collate, passthrough = Dataset.collate_fn, Dataset.passthrough_collate_fn
    fixed = take(loader(Dataset(engine, chunk_size=64), batch_size=32, collate_fn=collate))
    assert [batch.batch_size for batch in fixed] == [(32, 64)] * 3
    batched = Dataset(engine, chunk_size=64, batch_size=32)
    assert take(loader(batched, batch_size=None, collate_fn=passthrough))[0].batch_size == (32, 64)
    uniform = Dataset(engine, chunk_size=UniformChunkSampler(low=16, high=64), chunk_size_every=32)
    varied = take(loader(uniform, batch_size=32, collate_fn=collate), 4)
    assert len({batch.batch_size[1] for batch in varied}) > 1 and varied[0].batch_size[0] == 32
    mixed = Dataset(engine, chunk_size=GMMChunkSampler(**MEANS), batch_size=32)
    assert len({batch.batch_size[1] for batch in take(loader(mixed, batch_size=None, collate_fn=passthrough), 4)}) > 1
