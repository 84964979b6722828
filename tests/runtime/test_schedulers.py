"""Scripts of ``examples/`` for SLURM and Kubernetes give each process what JAX's detection of them expects."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slurm
import yaml
from case_tables import refused
from jax._src.clusters.cluster import ClusterEnv
from jax._src.clusters.k8s_cluster import K8sCluster
from tiny import tiny

from ejax.train import _parser

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"


def tasks(script: Path, folder: Path, **options: str) -> list[dict[str, Any]]:
    """Submit the script; return the words and the variables of each task, which ends without training."""
    (ejax := folder / "ejax").write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys\n"
        f"pathlib.Path({str(folder)!r}, 'task_' + os.environ['SLURM_PROCID'] + '.json').write_text("
        "json.dumps({'words': sys.argv[1:], 'env': dict(os.environ)}))\n"
    )
    ejax.chmod(0o755)
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
    assert started[0]["words"][:3] == ["train", "--config", "config.yaml"]
    assert started[0]["words"][3:] == [
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
    refused(gpus_by_jax, last, monkeypatch, error=IndexError)


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


MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes.yaml"


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    return service, job


def start_pod(index: int, folder: Path, *changes: tuple[str, str]) -> subprocess.Popen[str]:
    """Run the command of a pod on this machine, with the variables that Kubernetes gives it."""
    [container] = manifest()[1]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    variables |= {"RUN": str(folder / "run"), "CONFIG": str(folder / "tiny.json"), "JOB_COMPLETION_INDEX": str(index)}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **variables, "KUBERNETES_SERVICE_HOST": "192.0.2.1", "PATH": path}
    [script] = container["args"]
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    command = [*container["command"], script]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_kubernetes_gives_each_pod_what_jax_would_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = manifest()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    meta = SimpleNamespace(name=job["metadata"]["name"], labels={})
    facts = {
        "_controller": SimpleNamespace(kind="Job"),
        "_job": SimpleNamespace(metadata=meta, spec=SimpleNamespace(parallelism=spec["parallelism"])),
        "_pod": SimpleNamespace(spec=SimpleNamespace(subdomain=pod["subdomain"])),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(K8sCluster, name, lambda fact=fact: fact)
    (ejax := tmp_path / "ejax").write_text("#!/bin/sh\nshift 1\nprintf '%s\\n' \"$@\"\n")
    ejax.chmod(0o755)
    for index in range(spec["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        args = _parser("train").parse_args(start_pod(index, tmp_path).communicate()[0].splitlines())
        assert args.coordinator.partition(":")[0] == K8sCluster.get_coordinator_address(0, None).partition(":")[0]
        assert args.num_processes == K8sCluster.get_process_count()
        assert args.process_id == K8sCluster.get_process_id()
        assert args.distributed and args.resume is None
        # a job takes 0 for the end; and these codes for what another attempt does not change
        assert args.stopped_exit_code not in (0, *spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"])
    [container] = pod["containers"]
    gpus = next(each["value"] for each in container["env"] if each["name"] == "JAX_LOCAL_DEVICE_IDS")
    assert gpus.split(",") == [str(i) for i in range(container["resources"]["limits"]["nvidia.com/gpu"])]


@pytest.mark.slow
def test_the_pods_train_and_resume_without_asking_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1"))
    for updates in (1, 3):
        (tmp_path / "tiny.json").write_text(json.dumps(tiny(console=True, iterations=updates)))
        changes = [("ejax-0.ejax:12345", f"localhost:{61440 + free_job()}"), ("--device cuda", "--device cpu")]
        pods = [start_pod(index, tmp_path, *changes) for index in range(2)]
        texts = [pod.communicate(timeout=300)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], "".join(texts)
        assert "2 devices, 4 environments on each" in texts[0]
        assert ("resumed from" in texts[0]) == (updates == 3)
        assert not any("Kubernetes environment detected" in text for text in texts)
        assert [*(tmp_path / "run" / "checkpoints").glob(f"tiny_step_{updates * 64}")]


@pytest.mark.slow
@pytest.mark.parametrize("release", ["1.31", "1.37"])  # the first where all of it is stable or on by default
def test_the_manifest_has_the_schema_of_kubernetes(release: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate==1.37.0")
    service, job = manifest()
    assert [schemas.validate(each, release, strict=True) for each in (service, job)] == [release, release]
    job["spec"]["paralelism"] = job["spec"].pop("parallelism")
    refused(schemas.validate, job, release, strict=True, match="paralelism", error=schemas.ValidationError)
