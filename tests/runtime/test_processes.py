"""Several processes: who joins whom, and when one is missing. ``benchmarks/processes.py`` trains in them."""

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from several_processes import two_processes
from tiny import tiny

from ejax.config import ConfigError, parse_config
from ejax.run import train
from ejax.runtime import processes
from ejax.runtime.processes import Group, ProcessesError, RescueCall, failing_together, join_group, unjoined
from ejax.runtime.sharding import exchange, is_main_process, process_count
from ejax.store.arrays import read_arrays
from ejax.train import main
from ejax.training.build import build
from ejax.training.host_steppers import HostStepper, combine_metrics

TINY = tiny(num_envs=2, buffer_size=4, num_eval_episodes=2, console=True, ppo={"batch_size": 8, "n_epochs": 1})


def test_a_process_alone_leads_and_has_nobody_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    join_group(None, None, None)
    assert (process_count(), is_main_process(), unjoined()) == (1, True, None)


@cases("variable scheduler", ("SLURM_NTASKS", "SLURM"), ("OMPI_COMM_WORLD_SIZE", "OpenMPI"), ("WORLD_SIZE", "torchrun"))
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
        join_group("localhost:1", None, None)


@pytest.mark.parametrize("coordinator", ["nonsense", "127.0.0.1:99999", "127.0.0.1:0", ":12345", "host:", "host:1e3"])
def test_a_coordinator_that_is_no_address_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], coordinator: str
) -> None:
    (config := tmp_path / "tiny.json").write_text(json.dumps(TINY))
    words = ["--config", str(config), "--distributed", "--coordinator", coordinator]
    assert main([*words, "--num-processes", "2", "--process-id", "1"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"ejax train: got the coordinator '{coordinator}', which is not a HOST:PORT")
    assert told.err.count("\n") == 1 and not told.out


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_whose_others_do_not_come_says_so_and_waits_for_a_limited_time(process: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    code = f"from ejax.runtime.processes import join_group; join_group('{where}', 2, {process}, timeout_s=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stdout == f"[processes] waiting for the others at {where}, process {process}, for at most 1 s\n"
    assert f"ProcessesError: the others did not all come to {where}, process {process} within 1 s" in done.stderr


@cases(
    "variables",
    {"SLURM_NTASKS": "2"},
    {"OMPI_COMM_WORLD_SIZE": "2"},
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
    {"JAX_COORDINATOR_ADDRESS": "host:1"},
    ids=lambda variables: next(iter(variables)),
)
def test_jax_is_asked_for_processes_that_a_scheduler_started(monkeypatch: pytest.MonkeyPatch, variables: dict) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *address, **options: asked.append(address))
    join_group(None, None, None)
    assert not asked
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    join_group(None, None, None)
    assert asked == [(None, None, None)]


def test_an_address_without_distributed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config := tmp_path / "tiny.json").write_text(json.dumps(TINY))
    assert main(["--config", str(config), "--coordinator", "localhost:1"]) == 2
    assert re.search(r"trainer\.distributed: got false, but .* add --distributed", capsys.readouterr().err)


class Board:
    """The coordination service's keys and values, for one process that plays several."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if key not in self.values:
            time.sleep(timeout_ms / 1000)
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(prefix)]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Board]:
    """``play(i)``: from here on this is process i of two, at its first exchange."""
    board = Board()
    monkeypatch.setattr(processes, "_client", lambda: board)
    monkeypatch.setattr(processes, "_POLL_MS", 10)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def as_process(number: int) -> Board:
        monkeypatch.setattr(jax, "process_index", lambda: number)
        monkeypatch.setattr(processes, "_rounds", itertools.count(1))
        return board

    return as_process


def word(round_: int, process: int, board: Board, text: Any) -> None:
    board.key_value_set(f"ejax/word/{round_}/{process}", json.dumps(text))


def test_each_process_gets_the_words_of_all_in_their_order(play: Callable[[int], Board]) -> None:
    board = play(0)
    for number in (1, 2):
        word(number, 1, board, {"stops": True})
    group = Group(60.0)
    assert is_main_process() and process_count() == 2
    assert group.gather({"stops": False}, "begin an update") == [{"stops": False}, {"stops": True}]
    assert group.gather(None, "evaluate") == [None, {"stops": True}]
    assert "ejax/word/1/0" not in board.values and "ejax/word/2/0" in board.values  # what all have read goes


def test_a_process_that_hangs_is_named(play: Callable[[int], Board]) -> None:
    play(0)
    with pytest.raises(
        ProcessesError,
        match=r"process 1 has not come to begin an update for 0 s \(trainer.process_timeout_s\): it hangs; .*--resume",
    ):
        Group(0.1).gather({}, "begin an update")


def test_a_process_that_waits_for_long_says_once_for_what(
    play: Callable[[int], Board], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_LATE_S", 0.05)
    board = play(0)
    later = threading.Timer(0.5, lambda: word(1, 1, board, "here"))
    later.start()
    assert Group(60.0).gather("me", "evaluate") == ["me", "here"]
    assert capsys.readouterr().out == "[processes] process 0 waits for process 1 to evaluate, for 0.05 s\n"
    later.join()


def test_a_process_that_fails_says_why_before_it_ends(play: Callable[[int], Board]) -> None:
    play(1)
    with pytest.raises(OSError), failing_together():
        raise OSError("a cable came loose")
    play(0)
    named = r"process 1 on \S+ failed: OSError: a cable came loose; start all of them again"
    with pytest.raises(ProcessesError, match=named), failing_together():
        Group(60.0).gather({}, "begin an update")
    with pytest.raises(ProcessesError, match=named), failing_together():  # its end broke the devices' messages
        raise jax.errors.JaxRuntimeError("connection reset")


def test_no_process_waits_where_the_coordination_service_is_gone(
    play: Callable[[int], Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Board, key: str, timeout_ms: int) -> str:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset by peer\nmore")

    play(0)
    monkeypatch.setattr(Board, "blocking_key_value_get", refuse)
    with pytest.raises(ProcessesError, match=r"do not arrive: UNAVAILABLE: connection reset by peer; start all"):
        Group(60.0).gather(None, "evaluate", timeout_s=float("inf"))


def test_a_process_that_hangs_in_an_environment_calls_the_others_to_save(play: Callable[[int], Board]) -> None:
    play(0)
    Group(60.0).call_for_rescue()
    play(1)
    with pytest.raises(RescueCall, match="process 0 hangs in an environment"):
        Group(60.0).gather({"facts": {}}, "have its part of the rollout")


def facts_of_all(group: Group, facts: dict[str, float] | None) -> tuple[dict[str, float] | None, list[str]]:
    """Return a stepper's metrics, made of this process's own, and its notes."""
    stepper = SimpleNamespace(_group=group, notes=[], reports=lambda: ["quarantined row 0"])
    collected = None if facts is None else SimpleNamespace(facts=facts, policy_s=0.0, env_s=0.0)
    return HostStepper._metrics_of_all(stepper, collected), stepper.notes  # type: ignore[arg-type]


def test_all_learn_once_each_has_its_part_of_the_rollout(play: Callable[[int], Board]) -> None:
    board = play(0)
    word(1, 1, board, {"facts": {"own": 1.0, "collector/policy_s": 0.5, "collector/env_s": 1.0}, "reports": ["row 0"]})
    combined, notes = facts_of_all(Group(60.0), {"own": 2.0})
    assert combined == {"own": 3.0, "collector/policy_s": 0.5, "collector/env_s": 1.0}
    assert notes == ["process 1: row 0"]


@pytest.mark.parametrize("process", [0, 1])
def test_a_rollout_that_one_process_gives_up_is_given_up_by_all(process: int, play: Callable[[int], Board]) -> None:
    board = play(process)
    word(1, 1 - process, board, None)
    combined, notes = facts_of_all(Group(60.0), {"own": 2.0})
    assert combined is None and notes == [f"process {1 - process} gave up its rollout: it was to stop"]
    word(2, 1 - process, board, {"facts": {"own": 2.0}, "reports": []})
    assert facts_of_all(Group(60.0), None) == (None, [])


def test_what_processes_exchange_keeps_its_bits() -> None:
    """Alone: what it gives itself."""
    given = {
        "time": np.array([[1.0 + 1e-12]]),
        "rng": np.array([2**63 + 5], np.uint64),
        "ended": np.array([True, False, True]),
        "obs": jnp.arange(3.0),
    }
    (got,) = exchange({**given, "key": jax.random.key(7)})
    assert jax.random.key_data(got.pop("key")).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    for name, x in given.items():
        assert (got[name].dtype, got[name].shape, got[name].tobytes()) == (x.dtype, x.shape, np.asarray(x).tobytes())


@pytest.mark.slow
def test_two_processes_train_save_and_end_together(tmp_path: Path) -> None:
    texts = two_processes(tmp_path, TINY, f"trainer.output_dir={tmp_path / 'runs'}")
    assert "2 devices, 2 environments on each" in texts[0] and "[train]" not in texts[1]
    (run,) = (tmp_path / "runs").iterdir()  # one folder, of process 0
    assert [path.name.rsplit("_", 1)[1] for path in run.glob("checkpoints/*_step_32")]  # 2 updates · 4 steps · 4 envs


def hosted(mode: str, iterations: int) -> dict[str, Any]:
    """Environments outside the program, in two groups, one for each process or both for one."""
    collector = {"mode": mode, "num_groups": 2}
    trainer = {"exp_name": "hosted", "iterations": iterations, "save_frequency_updates": 1, "collector": collector}
    return {**TINY, "trainer": {**TINY["trainer"], **trainer}}


def arrays(run: Path, step: int) -> dict[str, Any]:
    (path,) = run.glob(f"checkpoints/hosted_step_{step}")
    return {name: np.asarray(x).tobytes() for name, x in read_arrays(path, read_arrays(path, None)).items()}


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("build", "start"):
        monkeypatch.setattr(f"ejax.training.{module}.all_devices", lambda config: jax.devices()[:2])


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_two_processes_collect_and_go_on_as_one_with_their_devices_does(tmp_path: Path) -> None:
    one = parse_config(hosted("host", 2), ["trainer.distributed=true"])
    whole, both = train(one, run_dir=tmp_path / "whole").run_dir, tmp_path / "both"
    two_processes(tmp_path, hosted("host", 1), "--run", str(both))
    assert arrays(both, 16) == arrays(whole, 16)
    train(one, resume="latest", run_dir=both)
    assert arrays(both, 32) == arrays(whole, 32)
    # and back
    shutil.rmtree(next(whole.glob("checkpoints/hosted_step_32")))
    texts = two_processes(tmp_path, hosted("host", 2), "--run", str(whole), "--resume", "latest")
    assert arrays(both, 32) == arrays(whole, 32)
    assert "not exact" not in texts[0]


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_two_processes_collect_beside_the_updates_what_one_does(tmp_path: Path) -> None:
    two_processes(tmp_path, hosted("async", 3), "--run", str(tmp_path / "both"))
    train(parse_config(hosted("async", 3), ["trainer.distributed=true"]), run_dir=tmp_path / "whole")
    assert arrays(tmp_path / "both", 48) == arrays(tmp_path / "whole", 48)
    rows = [json.loads(line) for line in (tmp_path / "both/logs/metrics.jsonl").read_text().splitlines()]
    assert [row["collector/staleness"] for row in rows if "collector/staleness" in row] == [0.0, 1.0, 1.0]


@cases(
    "processes_of_devices collector text",
    ([0, 1], {"mode": "host"}, r"num_groups: got 1, but each of 2 processes .* a multiple of 2: \S+num_groups=2"),
    ([0, 1, 1], {"mode": "host", "num_groups": 2}, r"distributed: got true for processes of \[1, 2\] devices"),
    ([0, 1], {"mode": "async", "num_groups": 2, "schedule": "free"}, r"schedule: got 'free' in several processes"),
    ids=["groups", "devices", "schedule"],
)
def test_what_processes_cannot_share_is_refused(
    processes_of_devices: list[int], collector: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [SimpleNamespace(process_index=process) for process in processes_of_devices]
    monkeypatch.setattr("ejax.training.build.all_devices", lambda config: devices)
    monkeypatch.setattr("ejax.training.host_parts.process_count", lambda: 2)
    given = {**TINY, "trainer": {**TINY["trainer"], "collector": collector, "distributed": "schedule" not in collector}}
    refused(lambda: build(parse_config(given)), match=text)


def test_metrics_of_several_collections_add_up_and_the_longest_wait_counts() -> None:
    facts = [
        {"collector/env_s": 1.0, "collector/quarantined": 2.0, "collector/learner_wait_s": 0.5},
        {"collector/env_s": 3.0, "collector/quarantined": 0.0, "collector/learner_wait_s": 0.1},
    ]
    expected = {"collector/env_s": 4.0, "collector/quarantined": 2.0, "collector/learner_wait_s": 0.5}
    assert combine_metrics(facts) == expected


@pytest.mark.parametrize("size", ["abc", "-2", "1.5"])
def test_a_schedulers_variable_that_is_no_number_is_refused_in_one_line(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "tiny.json").write_text(json.dumps(hosted("host", 2)))
    monkeypatch.setenv("SLURM_NTASKS", size)
    assert main(["--config", str(file), "--distributed"]) == 2
    assert f"SLURM_NTASKS='{size}'; unset it" in capsys.readouterr().err
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setenv("WORLD_SIZE", size)
    refused(unjoined, match="the environment has WORLD_SIZE=")
