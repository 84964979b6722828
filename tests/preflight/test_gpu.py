"""``benchmarks/gpu.py`` where there is no GPU: how it reads a profiler's trace, and that its configs are valid."""

import importlib
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


def test_a_measurement_waits_for_its_turn_and_one_that_dies_leaves_the_others(gpu: Any) -> None:
    machine = gpu.Measurement("machine", "", "machine", {"device": "cpu"})
    broken = gpu.Measurement("machine", "", "machine", {"wrong": 1})
    found = gpu._run_batch([machine, broken, gpu.replace(machine, skipped="why")], "cpu", 60.0)
    assert found[0]["device"].startswith("CPU") and "TypeError" in found[1]["error"] and found[2] == {"skipped": "why"}
