"""Compiled programs that are kept for the process."""

import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EVALUATED, tiny

from ejax.config import parse_config
from ejax.run import train
from ejax.training import programs
from ejax.training.programs import kept, key_of


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_kept", OrderedDict())


def compiled(what: Any, given: Any, lower: "Counter") -> Any:
    return kept(key_of(what, given), lambda: lower().compile())


START = """
import sys
import jax
from ejax.train import main
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **about: name.endswith("backend_compile_duration") and compiled.append(about.get("fun_name"))
)
jax.monitoring.register_event_listener(lambda name, **_: name.endswith("cache_hits") and hits.append(name))
hits = []
assert main(sys.argv[1:]) == 0
print(len(compiled) - len(hits), compiled)
"""


class Counter:
    """Lowers a program, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> jax.stages.Lowered:
        self.count += 1
        return jax.jit(lambda x: x + 1).lower(jnp.zeros(3))


def test_an_equal_program_is_compiled_once() -> None:
    lower = Counter()
    first, again = (compiled(("a", 1), jnp.zeros(3), lower) for _ in range(2))
    assert first is again and lower.count == 1


@pytest.mark.parametrize("other", [(("a", 2), jnp.zeros(3)), (("a", 1), jnp.zeros(4)), (("a", 1), {"x": jnp.zeros(3)})])
def test_other_options_shapes_and_structures_are_other_programs(other: tuple[Any, Any]) -> None:
    lower = Counter()
    compiled(("a", 1), jnp.zeros(3), lower)
    compiled(*other, lower)
    assert lower.count == 2


@pytest.mark.parametrize("what", [None, (["no hash"],)])
def test_what_cannot_be_compared_is_compiled_each_time(what: Any) -> None:
    lower = Counter()
    for _ in range(2):
        compiled(what, jnp.zeros(3), lower)
    assert lower.count == 2


def test_another_precision_is_another_program() -> None:
    lower = Counter()
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            compiled("a", jnp.zeros(3), lower)
    assert lower.count == 2


def test_the_one_that_was_asked_for_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST", 2)
    lower = Counter()
    for what in ("a", "b", "a", "c", "a", "b"):
        compiled(what, jnp.zeros(3), lower)
    assert lower.count == 4


@pytest.mark.slow
def test_a_run_of_another_seed_compiles_nothing_and_has_its_own_bits(tmp_path: Path) -> None:
    def run(folder: str, seed: int) -> Any:
        return train(parse_config(tiny(tmp_path, seed=seed, **EVALUATED)), run_dir=tmp_path / folder)

    alone = run("alone", 2)
    run("first", 1)
    number = len(programs._kept)
    after = run("after", 2)
    assert number == len(programs._kept) == 2
    assert jax.tree.all(jax.tree.map(np.array_equal, alone.params, after.params))
    assert alone.last_eval_metrics == after.last_eval_metrics


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "async"])
def test_a_host_run_of_another_seed_traces_no_update(tmp_path: Path, mode: str) -> None:
    def run(folder: str, seed: int) -> Any:
        config = tiny(tmp_path, seed=seed, collector={"mode": mode})
        return train(parse_config(config), run_dir=tmp_path / folder)

    alone = run("alone", 2)
    ((_, update),) = programs._kept.items()
    run("first", 1)
    after = run("after", 2)
    assert list(programs._kept.values()) == [update] and update._cache_size() == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, alone.params, after.params))


@pytest.mark.slow
@pytest.mark.parametrize("env", ["PointMassRL", "PushCubeRL"])
def test_the_next_process_compiles_nothing(env: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(tiny(tmp_path, env, **EVALUATED)))
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)}
    del environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]  # as for users
    command = [sys.executable, "-c", START, "--config", str(tmp_path / "tiny.json")]
    printed = [subprocess.run(command, env=environment, capture_output=True, text=True).stdout for _ in range(2)]
    first, second = (each.splitlines()[-1].split(maxsplit=1) for each in printed)
    assert int(first[0]) > 4
    assert second[0] == "0", f"compiled again, among {second[1]}"
