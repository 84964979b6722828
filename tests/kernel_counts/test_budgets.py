"""No committed count of a shipped config gets worse: kernels, host trips, collectives, bytes of the rollout.

After a change that is meant to cost more, or one that costs less:

    python -m benchmarks.kernel_counts --rewrite-budgets tests/preflight_budgets.json [--config FILE]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from case_tables import cases, refused

from benchmarks.kernel_counts import budgets
from benchmarks.kernel_counts.__main__ import main
from benchmarks.kernel_counts.budgets import budget_of, check, rewrite, worse
from ejax.preflight.run import compiler_problem

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/preflight_budgets.json"
BUDGETS = json.loads(FILE.read_text())
SLOW = ("cart_pole/ppo", "push_cube", "pick_place")
"""MJX takes a minute to compile."""
RELEASES = {release for entry in BUDGETS["entries"] for release in entry["counts"]}
NOT_HERE = compiler_problem() or (
    None if jax.__version__ in RELEASES else f"the budgets are those of jax {', '.join(sorted(RELEASES))}"
)
ENTRY = {"config": "a.yaml", "overrides": [], "target": "h100", "gpus": 1, "hosts": 1}


def budget_file(tmp_path: Path, **counts: int) -> Path:
    (path := tmp_path / "budgets.json").write_text(
        json.dumps({"entries": [ENTRY | {"counts": {jax.__version__: counts}}, ENTRY | {"config": "b.yaml"}]})
    )
    return path


@cases(
    "counted budget exceeded",
    (
        {"train/update/kernels": 1200},
        {"train/update/kernels": 1100},
        ["train/update/kernels: 1,200, the budget is 1,100"],
    ),
    ({"train/update/kernels": 1100}, {"train/update/kernels": 1100, "train/minibatch/kernels": 3}, []),
    ({"train/env step/callbacks": 1}, {}, ["train/env step/callbacks: 1, the budget is 0"]),
)
def test_a_count_above_its_budget_is_named_with_both_numbers(counted: dict, budget: dict, exceeded: list) -> None:
    assert worse(counted, budget) == exceeded


def test_units_loops_and_bytes_become_counts() -> None:
    counted = {"kernels": 7, "launches": None, "library_calls": 3, "host_trips": 0, "callbacks": 0}
    counted |= {"collectives": 2, "collective_bytes": 16}
    units = {"update": counted, "epoch": counted}
    loops = [{"trips": None}, {"trips": 3}]
    found = {"programs": {"train": {"launches": 4, "units": units, "loops": loops, "stored_bytes_per_env_step": 10.4}}}
    assert budget_of(found) == {
        "train/update/kernels": 7,
        "train/update/library_calls": 3,
        "train/update/collectives": 2,
        "train/update/collective_bytes": 16,
        "train/launches": 4,
        "train/loops of unknown length": 1,
        "train/stored bytes per env step": 10,
    }


def test_a_check_names_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "measure", lambda entry: {"train/update/kernels": 9})
    path = budget_file(tmp_path, **{"train/update/kernels": 8})
    assert check(path, "a.yaml") == ["a.yaml on 1 x 1 h100: train/update/kernels: 9, the budget is 8"]


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"entries": 1}', '{"entries": [{}]}', "\xff", None])
def test_what_is_no_file_of_budgets_is_refused_in_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):  # which main sets
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else "2")
    file = tmp_path / "budgets.json"
    os.mkfifo(file) if text is None else file.write_bytes(text.encode("latin-1"))
    for option in ("--budgets", "--rewrite-budgets"):
        assert main([option, str(file)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"kernel_counts: {file} ") and error.count("\n") == 1


def test_counts_of_another_jax_and_configs_without_budgets_are_refused(tmp_path: Path) -> None:
    old = ENTRY | {"counts": {"0.1": {}, "0.2": {}}}
    (path := tmp_path / "old.json").write_text(json.dumps({"entries": [old]}))
    refused(check, path, match=r"counts for jax 0.1, 0.2, but here is .*--rewrite-budgets")
    refused(lambda: check(budget_file(tmp_path), "c.yaml"), match=r"got 'c.yaml'; there are budgets for a.yaml, b.yaml")


def test_entries_for_an_engine_that_is_not_installed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budgets, "how_to_install", {"warp": "pip install -e '.[warp]'", "mjx": None}.get)
    monkeypatch.setattr(budgets, "measure", lambda entry: {"train/update/kernels": 9})
    entries = [
        ENTRY | {"overrides": [f"env.cfg.physics={engine}"], "counts": {jax.__version__: {}}}
        for engine in ("warp", "mjx")
    ]
    (path := tmp_path / "budgets.json").write_text(json.dumps({"entries": entries}))
    (exceeded,) = check(path)
    assert exceeded.startswith("a.yaml env.cfg.physics=mjx on")
    assert "env.cfg.physics=warp on" in (found := capsys.readouterr().err) and "mjx" not in found


def test_rewriting_measures_what_is_asked_for_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "measure", lambda entry: {"train/update/kernels": 5})
    path = budget_file(tmp_path, **{"train/update/kernels": 8})
    raw = json.loads(path.read_text())
    raw["entries"][0]["counts"]["0.1"] = {"train/update/kernels": 8}  # of another release
    path.write_text(json.dumps(raw))
    rewrite(path, "a.yaml")
    first, second = json.loads(path.read_text())["entries"]
    assert first["counts"][jax.__version__] == {"train/update/kernels": 5} and "0.1" in first["counts"]
    assert "counts" not in second


def test_every_budget_is_of_a_shipped_config() -> None:
    assert [entry["config"] for entry in BUDGETS["entries"] if not (ROOT / entry["config"]).is_file()] == []


@pytest.mark.skipif(NOT_HERE is not None, reason=NOT_HERE or "")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=[pytest.mark.slow] if any(part in config for part in SLOW) else [])
        for config in dict.fromkeys(each["config"] for each in BUDGETS["entries"] if jax.__version__ in each["counts"])
    ],
)
def test_a_shipped_config_stays_within_its_budget(config: str) -> None:
    """In a separate process: the options that the tests give XLA may change what it compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.kernel_counts", "--budgets", str(FILE), "--config", config]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
