"""Policies whose parameters lie across processes: one's numbers, evaluation, videos and export."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from several_processes import train_in_processes, two_processes
from tiny import tiny

from ejax.config import parse_config
from ejax.run import train
from ejax.store.arrays import read_arrays

NETWORK = {"type": "mlp", "hidden_sizes": [128, 128]}
CAMERA = {"video": {"func": "record_camera_data_async", "params": {"resolution": [32, 32], "max_env_num": 1}}}


def changed(**trainer: Any) -> dict[str, Any]:
    small = {"num_envs": 2, "buffer_size": 4, "iterations": 3, "save_frequency_updates": 1, "shard_parameters": True}
    given = tiny(
        env="several_processes:Shown",
        env_cfg={"max_episode_steps": 8},
        ppo={"batch_size": 8, "n_epochs": 1},
        **{"exp_name": "large", **small, **trainer},
    )
    return given | {"policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}}


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    (path,) = run.glob(f"checkpoints/large_step_{step}")
    return {name: np.asarray(x) for name, x in read_arrays(path, read_arrays(path, None)).items()}


def check_close(run: Path, other: Path, step: int) -> None:
    expected = arrays(other, step)
    for name, x in arrays(run, step).items():
        if x.dtype.kind == "f":
            np.testing.assert_allclose(x, expected[name], rtol=2e-4, atol=2e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(x, expected[name], err_msg=name)


def metrics_of(run: Path, tag: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    return [row[tag] for row in rows if tag in row]


@pytest.mark.slow
def test_parameters_across_two_processes_are_trained_evaluated_filmed_and_resumed_as_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ejax.training.build.all_devices", lambda config: jax.devices()[:2])
    evaluated = {"enable_eval": True, "eval_freq": 16, "num_eval_episodes": 2, "events": {"eval": CAMERA}}
    one, both = tmp_path / "one", tmp_path / "both"
    train(parse_config(changed(**evaluated), ["trainer.distributed=true"]), run_dir=one)
    two_processes(tmp_path, changed(**evaluated, iterations=2), "--run", str(both))
    check_close(both, one, 32)
    two_processes(tmp_path, changed(**evaluated), "--run", str(both), "--resume", "latest")
    check_close(both, one, 48)
    np.testing.assert_allclose(*(metrics_of(run, "eval/avg_reward") for run in (both, one)), rtol=1e-3)
    assert len(metrics_of(both, "eval/avg_reward")) == 3
    assert list((both / "videos").rglob("*.mp4"))


@pytest.mark.slow
def test_four_processes_share_two_copies_and_film_at_checkpoints(tmp_path: Path) -> None:
    config = changed(shard_parameters=2, events={"train": CAMERA}, iterations=2)
    train(parse_config(config, ["trainer.distributed=true"]), run_dir=tmp_path / "one")
    for num_processes in (4, 2):
        run = tmp_path / f"{num_processes}"
        train_in_processes(num_processes, 4 // num_processes, tmp_path, config, "--run", str(run))
        check_close(run, tmp_path / "one", 64)
        assert list((run / "videos").rglob("*.mp4"))
