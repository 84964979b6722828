"""Counts of a whole program, loop by loop, and XLA's own account of what it launches."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from case_tables import cases
from tiny import EVALUATED, NUM_ENVS, NUM_STEPS, PPO, STEPS, tiny

from benchmarks.kernel_counts.bounds import HOST_TRIP_S, LAUNCH_S, bounds
from benchmarks.kernel_counts.cost import Collective, Cost, instruction_cost
from benchmarks.kernel_counts.hlo import parse
from benchmarks.kernel_counts.programs import compile_program
from benchmarks.kernel_counts.report import Settings, describe
from ejax.config import parse_config
from ejax.preflight.run import compiler_problem, for_each_program
from ejax.preflight.targets import CARDS

ROOT = Path(__file__).parents[2]
H100 = CARDS["h100"]
SECONDS = {"wall": 1.0, "cpu": 2.0}
needs_compiler = pytest.mark.skipif(compiler_problem() is not None, reason=compiler_problem() or "")


def settings(**changes: Any) -> Settings:
    settings = Settings("tiny.yaml", (), "h100", gpus=1, hosts=1, num_envs=NUM_ENVS, num_steps=NUM_STEPS)
    return replace(settings, **changes)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Count a tiny run, compiled for the CPU: everything but the card is as for a GPU."""
    programs = for_each_program(compile_program, parse_config(tiny(**EVALUATED)), jax.devices()[:1])
    return describe(settings(), H100, programs, SECONDS)


def test_what_the_loops_cost_is_under_their_names(found: dict[str, Any]) -> None:
    units = found["programs"]["train"]["units"]
    assert {"update", "env step", "minibatch"} <= set(units)
    assert units["env step"]["trips"] == NUM_STEPS and units["update"]["trips"] is None
    assert units["update"]["kernels"] > NUM_STEPS * units["env step"]["kernels"] > 0
    assert units["env step"]["host_trips"] >= 1  # whether an episode ended
    # one loop: a loop over epochs around it would split a CUDA graph
    assert units["minibatch"]["trips"] == PPO["n_epochs"] * STEPS // PPO["batch_size"]


def test_a_rollout_keeps_what_it_is_made_of(found: dict[str, Any]) -> None:
    obs, final_obs, action, mean = 14, 14, 2, 2  # floats of a PointMass step; the rest is a few scalars
    kept = found["programs"]["train"]["stored_bytes_per_env_step"]
    assert 4 * (obs + final_obs + action + mean) < kept < 4 * (obs + final_obs + action + mean) + 64


@cases(
    "cost limiting seconds",
    (Cost(num_bytes=H100.bandwidth), "memory", 1.0),
    (Cost(element_ops=2.0 * H100.fp32), "arithmetic", 2.0),
    (Cost(kernels=1000.0, host_trips=10.0), "launches", 1000 * LAUNCH_S + 10 * HOST_TRIP_S),
)
def test_the_bound_is_that_of_the_scarcest_resource(cost: Cost, limiting: str, seconds: float) -> None:
    limits = bounds(cost, H100)
    assert limits.limiting == limiting and limits.seconds == pytest.approx(seconds)


def test_products_are_bound_by_the_rate_of_their_precision() -> None:
    tf32, exact = Cost(), Cost()
    tf32.dot_flops["f32"] = exact.dot_flops["f32 exact"] = 10**12
    assert bounds(tf32, H100).arithmetic == pytest.approx(1 / 494.7)
    assert bounds(exact, H100).arithmetic == pytest.approx(1e12 / H100.fp32)


def test_a_ring_of_eight_sends_seven_quarters_of_what_it_reduces() -> None:
    cost = Cost()
    cost.collectives[Collective("all-reduce", 8000, 8, "update")] = 2
    assert H100.link is not None
    assert bounds(cost, H100).links == pytest.approx(2 * 8000 * 7 / 4 / H100.link)


KEEPING_THE_DUMP = """
import contextlib, sys
from benchmarks.kernel_counts import __main__, programs
programs.TemporaryDirectory = lambda prefix: contextlib.nullcontext("dump")
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def for_two_cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with preflight's findings on a tiny run on two cards, and XLA's own account of its compilation.

    In a separate process: the options that the tests give XLA may change what it compiles.
    """
    folder = tmp_path_factory.mktemp("two_cards")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    (folder / "dump").mkdir()
    command = ["-c", KEEPING_THE_DUMP, "--config", "tiny.yaml", "--gpus", "2", "--json", "found.json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )
    assert result.returncode == 0, result.stderr
    return folder


@needs_compiler
@needs_compiler
def test_the_host_launches_a_whole_training_at_once(for_two_cards: Path) -> None:
    training = json.loads((for_two_cards / "found.json").read_text())["programs"]["train"]
    assert training["units"]["minibatch"]["collectives"] >= 1
    assert {each["devices"] for each in training["collectives"]} == {2}
    assert training["launches"] == 1
    assert {each["launches"] for each in training["units"].values()} == {0}


@needs_compiler
def test_as_many_kernels_are_counted_as_xla_says_that_it_launches(for_two_cards: Path) -> None:
    (hlo,) = (for_two_cards / "dump").glob("*jit_repeated*after_optimizations.txt")
    (launches,) = (for_two_cards / "dump").glob("*jit_repeated.thunk_sequence.txt")
    module = parse(hlo.read_text())
    instructions = [each for computation in module.computations.values() for each in computation.instructions]
    inside = {name for each in instructions for name in each.called("calls", "to_apply")}
    counted = sum(
        instruction_cost(module, computation, each, "").kernels
        for computation in module.computations.values()
        for each in computation.instructions
        if computation.name not in inside
    )
    kinds = Counter(re.findall(r"^ *\d+: k(\w+)", launches.read_text(), re.MULTILINE))
    assert counted == sum(kinds[kind] for kind in ("CustomKernel", "Copy", "AllReduce", "AllGather", "PartitionId"))
