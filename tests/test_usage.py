"""The account of a run's seconds and bytes: the log's ``time/`` and ``memory/``, and ``trainer.profile``."""

import gzip
import json
import time
from collections import OrderedDict
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from case_tables import refused
from tiny import EVALUATED, tiny

import ejax
from ejax.config import parse_config
from ejax.envs.host import pure_host
from ejax.envs.host.pure_host import PureHostEnv
from ejax.run import RunResult, train
from ejax.runtime.stopwatch import Stopwatch
from ejax.training.reporter import breakdown, memory_in_use
from ejax.training.trace_shares import Operation, named_scopes, time_shares

PROGRAM = """
ENTRY %main {
  %dot.1 = f32[8]{0} dot(%a, %b), metadata={op_name="jit(repeated)/updates/while/body/jit(ppo_update)/dot_general"}
  copy.2 = f32[8]{0} copy(%dot.1)
  ROOT %while.3 = f32[8]{0} while(%c), metadata={op_name="jit(repeated)/jit(unroll)/env_steps/while"}
  %tanh.4 = f32[8]{0} tanh(%c), metadata={op_name="jit(repeated)/jit(unroll)/env_steps/while/body/jit(_act)/tanh"}
  %add.5 = f32[8]{0} add(%c), metadata={op_name="jit(repeated)/jit(unroll)/while/body/jit(_step_all)/add"}
}
"""


def rows(result: RunResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]


def test_seconds_are_added_up_until_they_are_taken() -> None:
    watch = Stopwatch()
    watch.add("save", 1.0)
    with watch.of("save"):
        pass
    taken = watch.take()
    assert 1.0 < taken["save"] < 2.0
    assert watch.take() == {}


def test_what_raises_took_its_time_too() -> None:
    watch = Stopwatch()
    with pytest.raises(KeyError), watch.of("log"):
        raise KeyError
    assert watch.take()["log"] >= 0.0


def test_an_operation_belongs_to_the_function_that_it_was_traced_in() -> None:
    parts = named_scopes(PROGRAM)
    assert parts == {
        "dot.1": "update",
        "while.3": "the rest of collecting",
        "tanh.4": "policy",
        "add.5": "environments",
    }


def test_a_loop_has_only_what_its_operations_leave_of_it() -> None:
    threads = [
        [
            Operation(0.0, 100.0, "while.3"),
            Operation(10.0, 30.0, "tanh.4"),
            Operation(40.0, 20.0, "add.5"),
            Operation(45.0, 5.0, "copy.2"),  # the compiler's own, inside an operation of the environments
            Operation(100.0, 50.0, "dot.1"),
        ],
        [Operation(0.0, 7.0, "copy.2")],
    ]
    taken = time_shares(threads, named_scopes(PROGRAM))
    assert taken == {"the rest of collecting": 50.0, "policy": 30.0, "environments": 20.0, "update": 50.0, "other": 7.0}


def test_the_physics_is_part_of_the_training_in_a_breakdown() -> None:
    text = breakdown({"train": 99.0, "physics": 40.0, "save": 2.0, "log": 0.1})
    assert text == "train 99.0 s, physics 40.0 s, save 2.0 s"


def test_the_host_says_how_much_memory_it_had() -> None:
    assert 10.0 < memory_in_use(jax.devices("cpu")[0])["memory/host_peak_mib"] < 1e6


@pytest.mark.slow
def test_a_run_on_the_device_logs_where_its_seconds_went(tmp_path: Path) -> None:
    raw = tiny(tmp_path, "CartPoleRL", **EVALUATED, save_frequency_updates=1, updates_per_dispatch=1)
    result = train(parse_config(raw))
    logged = [row for row in rows(result) if "charts/SPS" in row]
    assert logged[0]["time/compile_s"] > 0.0 and "time/compile_s" not in logged[1]
    assert all(row["time/train_s"] > 0.0 for row in logged)
    assert logged[1]["time/save_s"] > 0.0 and logged[1]["time/log_s"] > 0.0
    assert all(row["memory/host_peak_mib"] > 0.0 for row in logged)
    parts = result.seconds
    assert parts["evaluate"] >= 0.0 and 0.0 < parts["physics"] < result.elapsed_time_sec
    assert sum(parts.values()) - parts["physics"] <= result.elapsed_time_sec


@pytest.mark.slow
def test_a_run_with_a_collector_tells_collecting_from_updating(tmp_path: Path) -> None:
    result = train(parse_config(tiny(tmp_path, collector={"mode": "host"})))
    first = rows(result)[0]
    assert first["time/collect_s"] >= first["collector/policy_s"] > 0.0
    assert first["time/update_s"] > 0.0 and "time/train_s" not in first


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "async"])
def test_what_a_collector_compiles_is_neither_collecting_nor_updating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """By a clock on which nothing takes time but a trace, 10 s, and a step of the environment, 1 s."""
    clock = SimpleNamespace(now=1000.0, traces=set())

    def slow(name: str, seconds: float, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            clock.now += seconds
            clock.traces.add(name)
            return function(*args, **kwargs)

        return called

    jax.clear_caches()
    monkeypatch.setattr("ejax.training.programs._kept", OrderedDict())
    for place in ("collectors.group_worker.apply_policy", "collectors.host.make_rollout", "algorithms.step.finish"):
        monkeypatch.setattr(f"ejax.{place}", slow(place, 10.0, attrgetter(place)(ejax)))
    monkeypatch.setattr("ejax.envs.host.pure_host.begin", slow("begin", 10.0, pure_host.begin))
    monkeypatch.setattr(PureHostEnv, "step", slow("step", 1.0, PureHostEnv.step))
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    raw = tiny(tmp_path, collector={"mode": mode, "max_staleness": 0})
    steps = raw["trainer"]["buffer_size"]
    logged = [row for row in rows(train(parse_config(raw))) if "charts/SPS" in row]
    assert len(clock.traces) == 5
    assert logged[0]["time/compile_s"] >= 50.0 and "time/compile_s" not in logged[1]
    for number, row in enumerate(logged, 1):
        assert row["time/collect_s"] + row["time/update_s"] < steps + 10.0
        # at most two rollouts more are under way when an update's numbers are read
        assert row["charts/SPS"] >= raw["trainer"]["num_envs"] * number / (number + 2)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    raw = tiny(tmp_path_factory.mktemp("profiled"), iterations=6, profile={"start": 2, "updates": 2})
    return train(parse_config(raw))


def test_a_profile_has_the_updates_that_were_asked_for_and_says_what_they_took(profiled: RunResult) -> None:
    folder = profiled.run_dir / "profile"
    facts = json.loads((folder / "parts.json").read_text())
    assert facts["updates"] == 2
    assert {"policy", "environments", "update"} <= facts["busy_s"].keys()
    assert all(seconds >= 0.0 for seconds in facts["busy_s"].values())
    (trace,) = folder.rglob("perfetto_trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_a_profile_changes_no_number(profiled: RunResult, tmp_path: Path) -> None:
    plain = train(parse_config(tiny(tmp_path, iterations=6)))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), plain.params, profiled.params))


@pytest.mark.slow
def test_a_run_that_stops_within_its_profile_ends_the_trace(tmp_path: Path) -> None:
    train(parse_config(tiny(tmp_path, profile={"start": 1, "updates": 100})))
    with jax.profiler.trace(str(tmp_path / "another")):  # would be refused while one is under way
        pass


def test_a_population_is_not_profiled() -> None:
    raw = tiny(profile={"start": 1}) | {"population": {"seeds": 2}}
    refused(parse_config, raw, match=r"trainer\.profile: traces a single run")


def test_a_profile_that_would_begin_after_the_run_is_refused() -> None:
    refused(lambda: parse_config(tiny(profile={})), match=r"trainer\.profile\.start: got 5, but the run has 2 updates")


@pytest.mark.slow
def test_a_resumed_run_that_is_past_its_profile_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(parse_config(tiny(tmp_path, iterations=2))).run_dir
    train(parse_config(tiny(tmp_path, iterations=3, profile={"start": 1})), resume="latest", run_dir=run)
    assert "no profile: trainer.profile.start is 1, and the run continues at 2" in capsys.readouterr().err
