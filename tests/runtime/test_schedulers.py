"""The batch script of ``examples/`` gives each process what JAX's detection of SLURM expects."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import slurm
from jax._src.clusters.cluster import ClusterEnv
from tiny import tiny

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"


def tasks(script: Path, folder: Path, **options: str) -> list[dict[str, Any]]:
    """Submit the script; give the words and the variables of each task, which ends without training."""
    (python := folder / "python").write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys\n"
        f"pathlib.Path({str(folder)!r}, 'task_' + os.environ['SLURM_PROCID'] + '.json').write_text("
        "json.dumps({'words': sys.argv[1:], 'env': dict(os.environ)}))\n"
    )
    python.chmod(0o755)
    run = folder / "run"
    os.environ["EJAX_RUN"] = str(run)
    try:
        done = slurm.sbatch(script, "config.yaml", "trainer.seed=3", folder=folder, job=4711, **options)
    finally:
        del os.environ["EJAX_RUN"]
    assert done.returncode == 0, done.stderr
    files = sorted(folder.glob("task_*.json"), key=lambda path: int(path.stem.partition("_")[2]))
    return [json.loads(file.read_text()) for file in files]


def gpus_by_jax(task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int, int, str]:
    """Ask JAX's own detection. Returns the coordinator, how many processes, which this is, and its GPU.

    ``jax.distributed.initialize`` makes ``local_device_ids`` XLA's visible devices: places in CUDA's list of them.
    """
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, value in task["env"].items():
        if name.startswith(("SLURM_", "CUDA_")):
            monkeypatch.setenv(name, value)
    where, count, number, ids = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, None)
    assert where is not None and count is not None and number is not None and ids is not None
    [place] = ids
    return where, count, number, task["env"]["CUDA_VISIBLE_DEVICES"].split(",")[place]


def test_slurm_gives_each_process_the_gpu_that_jax_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tasks(SCRIPT, tmp_path)
    found = [gpus_by_jax(task, monkeypatch) for task in started]
    assert {where for where, *_ in found} == {f"node01:{4711 % 2**12 + 61440}"}
    assert [(count, number) for _, count, number, _ in found] == [(16, number) for number in range(16)]
    assert [gpu for *_, gpu in found] == 2 * [str(gpu) for gpu in range(8)]
    assert all(task["words"] == started[0]["words"] for task in started)
    assert started[0]["words"][:4] == ["-m", "ejax.train", "--config", "config.yaml"]
    assert started[0]["words"][4:] == [
        "--run",
        str(tmp_path / "run"),
        "--device",
        "cuda",
        "--distributed",
        "trainer.seed=3",
    ]


@pytest.mark.parametrize("wrong", ["--gpus-per-task=1", "--gpus-per-node=8"])
def test_processes_that_see_one_gpu_each_are_not_what_jax_expects(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "#SBATCH --gpus-per-node=8\n#SBATCH --gpu-bind=none\n"
    assert right in SCRIPT.read_text()
    (script := tmp_path / "wrong.sh").write_text(SCRIPT.read_text().replace(right, f"#SBATCH {wrong}\n"))
    last = tasks(script, tmp_path)[-1]
    with pytest.raises(IndexError):
        gpus_by_jax(last, monkeypatch)


def test_a_requeued_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    words = tasks(SCRIPT, tmp_path, nodes="1", ntasks_per_node="1")[0]["words"]
    assert words[words.index("--run") :][:4] == ["--run", str(tmp_path / "run"), "--resume", "latest"]


def free_job() -> int:
    """Find a job whose port, which JAX derives from its number, is free here."""
    for job in range(100, 4096):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 61440 + job)):
                return job
    raise AssertionError("all ports are taken")


@pytest.mark.slow
def test_the_batch_script_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config := tmp_path / "tiny.json").write_text(json.dumps(tiny(console=True)))
    monkeypatch.setenv("EJAX_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1"))
    for updates in (1, 3):
        words = [str(config), "--device", "cpu", f"trainer.iterations={updates}"]
        options = {"nodes": "1", "ntasks_per_node": "2"}
        done = slurm.sbatch(SCRIPT, *words, folder=tmp_path, job=free_job(), **options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 devices, 4 environments on each" in done.stdout
        assert ("resumed from" in done.stdout) == (updates == 3)
        assert [*(tmp_path / "run" / "checkpoints").glob(f"tiny_step_{updates * 64}")]
