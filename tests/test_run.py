"""The loop: resumed runs, signals, damaged checkpoints, what a run leaves behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from ejax.build import build
from ejax.checkpoint import CheckpointError, load_checkpoint
from ejax.config import RunConfig, parse_config
from ejax.run import RunResult, train
from ejax.run_dir import RunDirectory, create_run_directory

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}


def config(output_dir: Path, env: str = "PointMassRL", updates: int = 12, **trainer: object) -> dict:
    return {
        "trainer": {
            "exp_name": "tiny",
            "learning_env": env,
            "num_envs": 4,
            "buffer_size": 8,
            "iterations": updates,
            "enable_eval": True,
            "eval_freq": 4 * 8 * 4,
            "num_eval_envs": 2,
            "num_eval_episodes": 2,
            "save_frequency_updates": 3,
            "updates_per_dispatch": 4,
            "output_dir": str(output_dir),
            "console": False,
            **trainer,
        },
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK, "actor_obs_normalization": True},
        "algorithm": {
            "name": "ppo",
            "cfg": {"batch_size": 16, "n_epochs": 2, "lr_scheduler": {"name": "linear"}, "optimizer": {"name": "adam"}},
        },
    }


def final_state(result: RunResult, run_config: RunConfig) -> dict[str, np.ndarray]:
    assert result.latest_checkpoint_path is not None
    state, meta = load_checkpoint(result.latest_checkpoint_path, build(run_config).state)
    assert meta["num_updates"] == run_config.trainer.num_updates
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def start_process(raw: dict, folder: Path) -> subprocess.Popen[bytes]:
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    command = [sys.executable, "-m", "ejax.train", "--config", str(file), "--run", str(folder / "run")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ))


def wait_for_checkpoint(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not list((folder / "run" / "checkpoints").glob("tiny_step_*")):
        assert process.poll() is None, process.stdout and process.stdout.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("env", ["PointMassRL", "CartPoleRL", "PushCubeRL"])
def test_a_killed_run_resumes_to_the_same_bits(env: str, tmp_path: Path) -> None:
    raw = config(tmp_path, env, updates=60, keep_checkpoints=100)
    whole = train(parse_config(raw), run_dir=tmp_path / "whole")

    process = start_process(raw, tmp_path)
    wait_for_checkpoint(process, tmp_path)
    time.sleep(random.random())  # any moment will do, saving included
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")

    assert resumed.finished
    assert_same_bits(final_state(whole, parse_config(raw)), final_state(resumed, parse_config(raw)))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line)["step"] for line in (tmp_path / "whole/logs/metrics.jsonl").read_text().splitlines()]
    assert steps == expected  # nothing is missing in the log, nothing is in it twice


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    raw = config(tmp_path, updates=100_000, save_frequency_updates=50)
    process = start_process(raw, tmp_path)
    wait_for_checkpoint(process, tmp_path)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    newest = RunDirectory(tmp_path / "run", "tiny").periodic()[0]
    assert newest.name == f"tiny_step_{steps[-1]}"  # the very last update is saved


def test_results_do_not_depend_on_how_updates_are_dispatched(tmp_path: Path) -> None:
    one = train(parse_config(config(tmp_path)), run_dir=tmp_path / "one")
    raw = config(tmp_path, updates_per_dispatch=7, save_frequency_updates=5, eval_freq=0, enable_eval=False)
    other = train(parse_config(raw), run_dir=tmp_path / "other")
    run_config = parse_config(raw)
    assert_same_bits(final_state(one, run_config), final_state(other, run_config))


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = config(tmp_path, console=True)
    train(parse_config(raw), run_dir=tmp_path / "run")
    newest, before, *_ = RunDirectory(tmp_path / "run", "tiny").periodic()
    damaged = max((newest / "state").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    result = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    text = capsys.readouterr().out
    assert f"{newest} is damaged" in text
    assert f"resumed from {before}" in text
    assert result.finished


def test_resume_refuses_another_config(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=3)
    train(parse_config(raw), run_dir=tmp_path / "run")
    raw["algorithm"]["cfg"]["batch_size"] = 32
    with pytest.raises(CheckpointError, match=r"algorithm\.cfg\.batch_size is 16 in the run and 32 now"):
        train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")


def test_a_finished_run_can_be_extended_and_keeps_its_schedule(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=6)
    train(parse_config(raw), run_dir=tmp_path / "run")
    raw["trainer"]["iterations"] = 9
    result = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert [entry["train/learning_rate"] for entry in result.train_history] == [0.0] * 3  # linear to 0 over 6 updates


def test_a_run_leaves_what_is_needed_to_repeat_it(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=3)
    result = train(parse_config(raw))
    assert result.run_dir.parent == tmp_path
    assert result.run_dir.name.startswith("tiny_")
    saved = json.loads((result.run_dir / "configs/resolved.json").read_text())
    assert parse_config(saved) == parse_config(raw)
    versions = json.loads((result.run_dir / "configs/versions.json").read_text())
    assert {"python", "jax", "ejax", "device"} <= versions.keys()
    assert list((result.run_dir / "logs" / "tiny").glob("events.out.tfevents.*"))
    assert result.best_checkpoint_path is not None and result.best_checkpoint_path.exists()


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=1)
    train(parse_config(raw), run_dir=tmp_path / "run")
    with pytest.raises(FileExistsError, match="--resume latest"):
        train(parse_config(raw), run_dir=tmp_path / "run")


def test_a_run_that_goes_on_from_an_older_checkpoint_keeps_what_it_saves(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=12, keep_checkpoints=2)
    train(parse_config(raw), run_dir=tmp_path / "run")
    directory = RunDirectory(tmp_path / "run", "tiny")
    newest, older = directory.periodic()
    result = train(parse_config({**raw, "trainer": {**raw["trainer"], "iterations": 10}}), resume=str(older))
    assert result.latest_checkpoint_path == directory.periodic()[0]  # not cleared away, and the one to go on from
    assert result.latest_checkpoint_path.name == f"tiny_step_{10 * 8 * 4}"
    assert list(directory.checkpoints.glob(f"superseded_*_{newest.name}"))  # nothing is lost


def test_runs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of two processes, neither of which has seen the other's folder."""
    monkeypatch.setattr(time, "strftime", lambda _format: "20260101_000000")
    monkeypatch.setattr(Path, "exists", lambda _path: False)
    run_config = parse_config(config(tmp_path / "outputs"))
    paths = [create_run_directory(run_config).path for _ in range(3)]
    assert paths[0].name == "tiny_20260101_000000" and len(set(paths)) == 3
    assert all(path.name.startswith(paths[0].name) and (path / "configs").is_dir() for path in paths)
