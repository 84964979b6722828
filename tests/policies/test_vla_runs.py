"""Runs of a ``vla`` policy: every algorithm and collector keeps a flow's decisions whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ejax.config import ConfigError, parse_config
from ejax.run import train
from ejax.schema.trust import trust
from ejax.store.checkpoint import load_checkpoint
from ejax.training.build import build
from tests.helpers.picture_task import CHUNK, MODEL

TASK = "tests.helpers.picture_task:PictureTask"
BRITTLE = "tests.helpers.picture_task:BrittlePictures"
PPO = {"name": "ppo", "cfg": {"batch_size": 8, "n_epochs": 1, "kl_coef": 0.1}}
GRPO = {"name": "grpo", "cfg": {"batch_size": 8, "n_epochs": 1, "group_size": 2, "kl_coef": 0.1}}


def config(folder: Path, algorithm: dict[str, Any], model: dict[str, Any] | None = None, **trainer: Any) -> Any:
    trust(TASK)
    return parse_config(
        {
            "env": {"id": TASK},
            "trainer": {
                "exp_name": "vla",
                "num_envs": 4,
                "buffer_size": 4,
                "iterations": 2,
                "updates_per_dispatch": 2,
                "console": False,
                "output_dir": str(folder),
                **trainer,
            },
            "policy": {
                "name": "vla",
                "vla_config": {"inference_horizon": CHUNK, "model_config": {**MODEL, **(model or {})}},
            },
            "algorithm": algorithm,
        }
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]


def trained(folder: Path, run_config: Any) -> Any:
    result = train(run_config, run_dir=folder)
    assert result.finished and result.latest_checkpoint_path is not None
    state = load_checkpoint(result.latest_checkpoint_path, build(run_config).state)[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.train.params))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_a_flow_trains_on_the_device(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    run_config = config(tmp_path, algorithm)
    before = build(run_config).state.train.params
    after = trained(tmp_path / "run", run_config).train.params
    assert not np.array_equal(before["params"]["action_out"]["kernel"], after["params"]["action_out"]["kernel"])


@pytest.mark.slow
def test_a_flow_trains_beside_a_background_collector_that_lags(tmp_path: Path) -> None:
    corrected = {"name": "ppo", "cfg": {**PPO["cfg"], "staleness_correction": "vtrace"}}
    collector = {"mode": "async", "max_staleness": 1}
    trained(tmp_path / "run", config(tmp_path, corrected, collector=collector, iterations=3))
    lags = [line["train/behave_approx_kl"] for line in metrics(tmp_path / "run") if "train/behave_approx_kl" in line]
    assert len(lags) == 3 and all(np.isfinite(lags)) and lags[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_host_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    options = {"collector": {"mode": "host"}, "save_frequency_updates": 1, "keep_checkpoints": 9}
    run_config = config(tmp_path, GRPO, **options)
    whole = trained(tmp_path / "whole", run_config)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "vla_step_32")
    resumed = train(run_config, resume="latest", run_dir=tmp_path / "cut")
    assert resumed.finished
    again = load_checkpoint(resumed.latest_checkpoint_path, build(run_config).state)[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, whole.train.params, again.train.params))


@pytest.mark.slow
def test_a_run_goes_on_through_values_that_are_not_finite(tmp_path: Path) -> None:
    trust(BRITTLE)
    raw = config(tmp_path, GRPO, collector={"mode": "host"}, iterations=3).to_dict()
    trained(tmp_path / "run", parse_config({**raw, "env": {"id": BRITTLE}}))
    assert metrics(tmp_path / "run")[-1]["collector/quarantined"] == 2.0
    assert len(list((tmp_path / "run" / "quarantine").glob("*.npz"))) == 2


@pytest.mark.slow
def test_adapters_start_from_a_policy_without_them(tmp_path: Path) -> None:
    base = train(config(tmp_path, GRPO, iterations=1), run_dir=tmp_path / "base")
    raw = config(tmp_path, GRPO, {"lora": {"rank": 2}}, iterations=1).to_dict()
    raw["policy"]["init_from"] = str(base.latest_checkpoint_path)
    state = trained(tmp_path / "adapted", parse_config(raw))
    frozen = state.train.params["frozen"]["blocks_0"]["qkv"]["kernel"]
    like = build(config(tmp_path, GRPO)).state
    there = load_checkpoint(base.latest_checkpoint_path, like)[0].train.params["params"]
    assert np.array_equal(frozen, there["blocks_0"]["qkv"]["kernel"])


@pytest.mark.slow
def test_an_adaptive_rate_is_refused_for_a_flow(tmp_path: Path) -> None:
    adaptive = {"name": "ppo", "cfg": {**PPO["cfg"], "schedule": "adaptive", "desired_kl": 0.01}}
    with pytest.raises((ConfigError, ValueError), match="leave out schedule: adaptive"):
        train(config(tmp_path, adaptive), run_dir=tmp_path / "run")


@pytest.mark.slow
def test_weights_of_a_file_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"strange.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    raw = config(tmp_path, GRPO).to_dict()
    raw["policy"]["vla_config"]["model_path"] = str(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"policy\.vla_config.*strange\.weight"):
        train(parse_config(raw), run_dir=tmp_path / "run")
