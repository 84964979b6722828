"""``benchmarks/gpu.py`` where there is no GPU: how it reads a profiler's trace, and that its configs are valid."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ejax.config import load_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("gpu")
    finally:
        sys.path.remove(str(BENCHMARKS))


def name_of(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def event(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 1.0, "dur": 2.0}


NAMES = [
    name_of("process_name", 1, 0, "/device:GPU:0"),
    name_of("thread_name", 1, 7, "Stream #13(Compute,MemcpyD2D)"),
    name_of("thread_name", 1, 8, "XLA Ops"),
    name_of("process_name", 2, 0, "/host:CPU"),
    name_of("thread_name", 2, 7, "Stream executor"),
]


def test_kernels_and_copies_of_a_gpus_streams_count_once(gpu: Any) -> None:
    ran = [event(1, 7, "loop_add_fusion"), event(1, 7, "gemm"), event(1, 7, "MemcpyD2D"), event(1, 7, "Memset")]
    shown_again = [event(1, 8, "fusion.3"), event(1, 8, "copy.1")]
    on_the_host = [event(2, 7, "cuLaunchKernel")]
    trace = {"traceEvents": [*NAMES, *ran, *shown_again, *on_the_host]}
    assert gpu.gpu_measures.count_kernels(trace) == {"kernels": 2, "copies": 2}
    assert gpu.gpu_measures.count_kernels({"traceEvents": [*NAMES[3:], event(2, 7, "dot")]}) == {}


@pytest.mark.parametrize("size", ["FULL", "TINY"])
def test_every_config_that_it_would_train_is_valid(gpu: Any, size: str) -> None:
    planned = list(gpu.plan(list(gpu.PLANS), getattr(gpu, size), "cpu", "h100"))
    assert {each.part for each in planned} == set(gpu.PLANS)
    for each in planned:
        if "config" in each.arguments and "mjlab" not in (each.skipped or ""):
            config = load_config(gpu.CONFIGS / each.arguments["config"], each.arguments["overrides"])
            stem = Path(each.arguments["config"]).stem  # such as quadruped_flash_sac_h100
            named = [name for name in ("flash_sac", "reppo") if name in stem]
            assert config.algorithm.name == (named[0] if named else "grpo" if each.part == "vla" else "ppo")


def test_what_is_on_file_is_not_done_again_and_the_pages_tables_are_written(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(f"before\n{gpu.TABLES[0]}\nold\n{gpu.TABLES[1]}\nafter\n")
    done: list[str] = []

    def run(batch: list[Any], device: str, limit: float) -> list[dict[str, Any]]:
        done.extend(each.label for each in batch)
        result = {"steps_per_s": 1234.0, "compile_s": 5.0, "peak_bytes": 2**21}
        machine = {"device": "NVIDIA H100", "driver": "1.2, x"}
        # the first attempt of the second size fails
        return [
            machine if each.part == "machine" else {"error": "lost"} if "16" in each.label and len(done) < 4 else result
            for each in batch
        ]

    monkeypatch.setattr(gpu, "_run_batch", run)
    words = ["gpu.py", "--parts", "throughput", "--only", "PointMass, ", "--num-envs", "8", "16"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(kept), "--page", str(page)])
    assert gpu.main() == 1
    assert gpu.main() == 0
    assert done == ["", "PointMass, 8 envs", "PointMass, 16 envs", "", "PointMass, 16 envs"]
    assert [each["label"] for each in json.loads(kept.read_text())["measurements"]] == done[1:3]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| PointMass, 16 envs | 1,234 | 5 | 2 |" in text
    kept.write_text(kept.read_text().replace("H100", "H200"))
    assert gpu.main() == 2 and "another machine" in capsys.readouterr().err


def test_a_measurement_waits_for_its_turn_and_one_that_dies_leaves_the_others(gpu: Any) -> None:
    machine = gpu.Measurement("machine", "", "machine", {"device": "cpu"})
    broken = gpu.Measurement("machine", "", "machine", {"wrong": 1})
    found = gpu._run_batch([machine, broken, gpu.replace(machine, skipped="why")], "cpu", 60.0)
    assert found[0]["device"].startswith("CPU") and "TypeError" in found[1]["error"] and found[2] == {"skipped": "why"}
