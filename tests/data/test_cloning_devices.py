"""Cloning on several devices and in several processes: one's numbers, from windows that each reads a part of."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pretrain_tasks
import pytest
from several_processes import train_in_processes

from ejax.config import ConfigError, parse_config
from ejax.data.chunks import WindowDraw
from ejax.data.lerobot.write import EpisodeWriter
from ejax.run import train
from ejax.runtime.sharding import make_mesh, own_rows
from ejax.store.arrays import read_arrays
from ejax.training.build import build
from ejax.training.cloning import Demonstrations
from ejax.training.start import rescale_for_devices

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [128, 128]}}
DISTRIBUTED = "trainer.distributed=true"
TOGETHER = ["algorithm.cfg.batch_size=32", "algorithm.cfg.minibatch_strata=4"]
"""One device with the minibatches of four."""


def tree(data: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    return {
        "env": {"id": "PointMassRL"},
        "trainer": {"exp_name": "tiny", "console": False, "iterations": 4, "save_frequency_updates": 1, **trainer},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK, "actor_obs_normalization": True},
        "algorithm": {"name": "bc", "cfg": {"batch_size": 8, "updates_per_step": 2}},
        "data": data,
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, task = tmp_path_factory.mktemp("kept") / "reach", pretrain_tasks.Reach()
    with EpisodeWriter(folder, task.spec(), fps=60) as writer:
        for seed in range(8):
            writer.append(task.generate(seed), "reach the goal", seed=seed)
    return {"source": "recorded", "folder": str(folder), "chunk_size": 2}


def updates(raw: dict[str, Any], overrides: list[str], count: int = 2) -> tuple[Any, list[dict[str, Any]]]:
    parts = build(parse_config(raw, overrides))
    metrics = []
    with parts.stepper as stepper:
        state = stepper.start(parts.state)
        for _ in range(count):
            state, made = stepper.advance(state, 1, lambda: False)
            metrics.append(made)
    return state, metrics


def check_close(arrays: Any, expected: Any) -> None:
    for x, other in zip(jax.tree.leaves(arrays), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, other, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("share", ["false", "2"])
def test_four_devices_clone_as_one_does(recorded: dict[str, Any], share: str) -> None:
    state, metrics = updates(tree(recorded), [DISTRIBUTED, f"trainer.shard_parameters={share}"])
    expected, others = updates(tree(recorded), TOGETHER)
    check_close(state.train, expected.train)
    for made, other in zip(metrics, others, strict=True):
        np.testing.assert_allclose(made["train/loss"], other["train/loss"], rtol=1e-4)
    kernel = state.train.params["params"]["actor"]["linear_1"]["kernel"]
    assert {shard.data.size for shard in kernel.addressable_shards} == {128 * 128 // (2 if share == "2" else 1)}


@pytest.mark.parametrize("history", [None, 1])
def test_processes_read_disjoint_parts_of_each_batch_that_make_it_whole_also_after_a_resume(
    recorded: dict[str, Any], history: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(tree({**recorded, "history_length": history})).data
    obs, mesh, read = np.zeros((1, 14), np.float32), make_mesh(jax.devices()), WindowDraw.nested
    num_read: list[int] = []
    devices = [SimpleNamespace(process_index=i // 2) for i in range(4)]
    monkeypatch.setattr("ejax.training.cloning.join_rows", lambda batch, mesh, num_rows: batch)

    def counted(draw: WindowDraw, frames: dict[str, Any], fields: dict[str, Any]) -> Any:
        num_read.append(len(next(iter(frames.values()))))
        return read(draw, frames, fields)

    def batches(process: int, first: int, count: int) -> list[Any]:
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr("ejax.training.cloning.own_rows", lambda _, num_rows: own_rows(devices, num_rows))
        with Demonstrations(config, 16, obs, mesh=mesh) as demonstrations:
            demonstrations.start(first, demonstrations.state())
            return [demonstrations.next(lambda: False)[0] for _ in range(count)]

    with Demonstrations(config, 16, obs) as alone:
        alone.start(0, alone.state())
        whole = [alone.next(lambda: False)[0] for _ in range(5)]
    monkeypatch.setattr(WindowDraw, "nested", counted)
    parts = [batches(process, 0, 5) for process in range(2)]
    assert set(num_read) == {8}
    for k in range(5):
        joined = jax.tree.map(lambda a, b: np.concatenate([a, b]), parts[0][k], parts[1][k])
        for x, expected in zip(jax.tree.leaves(joined), jax.tree.leaves(whole[k]), strict=True):
            np.testing.assert_array_equal(x, expected)
    for process in range(2):
        resumed = batches(process, 3, 2)
        for x, expected in zip(jax.tree.leaves(resumed), jax.tree.leaves(parts[process][3:]), strict=True):
            np.testing.assert_array_equal(x, expected)


def test_each_process_has_an_engine_with_a_seed_of_its_own_and_draws_its_devices_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config(tree({"source": "engine", "task": "pretrain_tasks:Reach"})).data
    devices = [SimpleNamespace(process_index=i // 2) for i in range(4)]
    monkeypatch.setattr("ejax.training.cloning.process_count", lambda: 2)
    monkeypatch.setattr("ejax.training.cloning.own_rows", lambda _, num_rows: own_rows(devices, num_rows))
    seeds = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda number=process: number)
        demonstrations = Demonstrations(config, 16, np.zeros((1, 14)), mesh=make_mesh(jax.devices()))
        assert demonstrations.part == slice(8 * process, 8 * process + 8)
        seeds.append(demonstrations.engine.cfg.seed)
    assert len({config.seed, *seeds}) == 3


def meta(folder: Path, num_devices: int, config: Any) -> Path:
    facts = {"schema_version": 2, "versions": {}, "global_step": 0, "num_devices": num_devices}
    (folder / "meta.json").write_text(json.dumps(facts | {"config": config.to_dict()}))
    return folder


@pytest.mark.slow
def test_another_number_of_devices_has_the_same_minibatches(recorded: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(tree(recorded))
    alone, notes = rescale_for_devices(config, meta(tmp_path, 4, config), 1)
    assert (alone.algorithm.cfg.batch_size, alone.algorithm.cfg.minibatch_strata) == (32, 4)
    assert alone.trainer.buffer_size == 4 * config.trainer.buffer_size and alone.trainer.num_envs == 1
    assert notes == ("1 devices share each batch; the checkpoint was made on 4",)
    # a checkpoint made on one, by a config that is for each of four
    again, _ = rescale_for_devices(config, meta(tmp_path, 1, alone), 1)
    assert again == alone
    back, _ = rescale_for_devices(config, meta(tmp_path, 1, alone), 4)
    assert (back.algorithm.cfg.batch_size, back.trainer.buffer_size) == (8, config.trainer.buffer_size)
    with pytest.raises(ConfigError, match=r"batch_size: minibatches have 4 x 8 rows, which 3 devices cannot share"):
        rescale_for_devices(config, meta(tmp_path, 4, config), 3)
    with pytest.raises(
        ConfigError, match=r"minibatch_strata .*got 3, which does not divide algorithm.cfg.batch_size 8"
    ):
        parse_config(tree(recorded), ["algorithm.cfg.minibatch_strata=3"])


def params_of(run: Path, update: int) -> dict[str, np.ndarray]:
    (path,) = run.glob(f"checkpoints/tiny_step_{update * 4 * 32}")
    return {name: np.asarray(x) for name, x in read_arrays(path, read_arrays(path, None)).items()}


@pytest.mark.slow
def test_processes_clone_and_go_on_as_one_with_their_devices_does(recorded: dict[str, Any], tmp_path: Path) -> None:
    raw = tree(recorded, shard_parameters=2, enable_eval=True, num_eval_episodes=2)
    train(parse_config(raw, [DISTRIBUTED]), run_dir=tmp_path / "one")
    expected = params_of(tmp_path / "one", 4)
    for num_processes in (2, 4):
        run = tmp_path / str(num_processes)
        start = ["--run", str(run)]
        for more in ([*start, "trainer.iterations=2"], [*start, "--resume", "latest", "trainer.iterations=4"]):
            train_in_processes(num_processes, 4 // num_processes, tmp_path, raw, *more)
        found = params_of(run, 4)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=2e-4, atol=2e-5, err_msg=name)
    # and on one device
    alone = train(
        parse_config(raw, ["trainer.shard_parameters=false", "trainer.iterations=5"]), resume="latest", run_dir=run
    )
    assert (alone.num_updates, alone.global_step) == (5, 5 * 4 * 32)


@pytest.mark.slow
def test_two_processes_learn_from_engines_of_their_own(tmp_path: Path) -> None:
    engine = {"source": "engine", "task": "pretrain_tasks:Reach", "buffer_size": 16, "max_episode_steps": 40}
    run = ["--run", str(tmp_path / "run"), "--trust", "pretrain_tasks:Reach"]
    texts = train_in_processes(2, 1, tmp_path, tree({**engine, "chunk_size": 2}, console=True), *run)
    assert "2 devices share each batch" in texts[0]
    assert list((tmp_path / "run/checkpoints").glob("tiny_step_*"))
