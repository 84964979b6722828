"""Several processes: who joins whom, and when one is missing. ``benchmarks/processes.py`` trains in them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ejax import processes
from ejax.config import ConfigError, parse_config
from ejax.processes import Address, Channel, ProcessesError, count, join, leads, unjoined
from ejax.train import main
from ejax.training.build import build

TINY = {
    "trainer": {
        "learning_env": "PointMassRL",
        "num_envs": 2,
        "buffer_size": 4,
        "iterations": 2,
        "num_eval_episodes": 2,
    },
    "policy": {
        "name": "actor_critic",
        "actor": {"type": "mlp", "hidden_sizes": [4]},
        "critic": {"type": "mlp", "hidden_sizes": [4]},
    },
    "algorithm": {"name": "ppo", "cfg": {"batch_size": 8, "n_epochs": 1}},
}


def test_a_process_alone_leads_and_has_nobody_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    join(Address())
    assert (count(), leads(), unjoined()) == (1, True, None)


@pytest.mark.parametrize(
    ("variable", "scheduler"),
    [("SLURM_NTASKS", "SLURM"), ("OMPI_COMM_WORLD_SIZE", "OpenMPI"), ("WORLD_SIZE", "torchrun")],
)
def test_processes_that_do_not_know_each_other_do_not_each_train_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, scheduler: str
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(
        ConfigError,
        match=rf"processes of {scheduler}.*that do not know each other; start each with .* --coordinator HOST:PORT",
    ):
        build(parse_config(TINY, ["trainer.distributed=true"]))


def test_an_address_that_is_not_complete_is_refused() -> None:
    with pytest.raises(
        ProcessesError,
        match=r"cannot join .*localhost:1.*; start each with .* --coordinator HOST:PORT --num-processes N",
    ):
        join(Address(coordinator="localhost:1"))


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
        {"JAX_COORDINATOR_ADDRESS": "host:1"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_jax_is_asked_for_processes_that_a_scheduler_started(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *address, **options: asked.append(address))
    join(Address())
    assert not asked
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    join(Address())
    assert asked == [(None, None, None)]


def test_an_address_without_distributed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config := tmp_path / "tiny.json").write_text(json.dumps(TINY))
    assert main(["--config", str(config), "--coordinator", "localhost:1"]) == 2
    assert re.search(
        r"trainer\.distributed: got false beside the address .* add --distributed", capsys.readouterr().err
    )


class Service:
    """The coordination service, with a process 1 that tells as often as ``alive`` and has begun number ``begun``."""

    def __init__(self, *, alive: bool, begun: int) -> None:
        self.alive, self.begun, self.serial = alive, begun, 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        del key, value, allow_overwrite

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        self.serial += self.alive
        beat = {"serial": self.serial, "number": self.begun, "host": "node7"}
        return [(f"{prefix}1", json.dumps(beat))]


@pytest.mark.parametrize(
    ("alive", "begun", "said"),
    [
        (False, 3, r"process 1 on node7 has given no sign of life for 0 s"),
        (True, 2, r"process 1 on node7 has not followed for 0 s .*: it hangs"),
        (True, 3, None),
    ],
)
def test_a_process_that_is_gone_or_hangs_is_named(
    monkeypatch: pytest.MonkeyPatch, alive: bool, begun: int, said: str | None
) -> None:
    service = Service(alive=alive, begun=begun)
    monkeypatch.setattr(processes, "_client", lambda: service)
    monkeypatch.setattr(processes, "_BEAT_S", 0.01)
    monkeypatch.setattr(processes, "_GONE_S", 0.2)
    texts: list[str] = []
    codes: list[int] = []
    channel = Channel(timeout_s=0.1, leave=codes.append, say=texts.append)
    channel.tell("start")
    channel.tell("advance", count=1)
    channel.tell("advance", count=1)
    with channel.watching():
        time.sleep(0.5)
    assert codes == ([] if said is None else [1])
    assert not texts if said is None else re.search(said, texts[0])


def test_two_processes_train_save_and_end_together(tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "ejax.train", "--config", str(config), "--distributed", "--num-processes", "2"]
    command += ["--coordinator", address, "--process-id"]
    one_device = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": one_device}
    both = [
        subprocess.Popen([*command, str(i), f"trainer.output_dir={tmp_path / 'runs'}"], **options) for i in range(2)
    ]
    texts = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(texts)
    assert "2 devices, 2 environments on each" in texts[0] and "[train]" not in texts[1]
    (run,) = (tmp_path / "runs").iterdir()  # one folder, of process 0
    assert [path.name.rsplit("_", 1)[1] for path in run.glob("checkpoints/*_step_32")]  # 2 updates · 4 steps · 4 envs
