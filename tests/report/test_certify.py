"""``benchmarks/certify.py``: the pages' tables are what ``certified.json`` gives, and a measurement goes on."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "certify.py"


@pytest.fixture(scope="module")
def certify() -> ModuleType:
    spec = importlib.util.spec_from_file_location("certify", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(seed: int) -> dict[str, Any]:
    of = {
        which: {"eval/success_rate": (seed + more) / 10, "checkpoint": "c", "seeds": [seed], "step": 64, "episodes": 8}
        for which, more in (("best", 1), ("last", 0))
    }
    return {"best": 0.9, "fresh": of, "steps": 2_000_000, "cpu_s": 90.0, "wall_s": 100.0}


def test_the_tables_of_the_pages_are_made_from_what_was_measured(certify: ModuleType) -> None:
    for page in certify.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == certify.with_tables(page, text, certify.read(certify.CERTIFIED)), "run: certify.py --table"


def test_every_run_that_counts_was_evaluated_in_enough_fresh_episodes(certify: ModuleType) -> None:
    for row in certify.read(certify.CERTIFIED):
        for run in row.get("runs", ()):
            assert min(run[which]["episodes"] for which in ("best", "last")) >= certify.EPISODES
        assert "runs" in row or row["how"]


@pytest.mark.slow
def test_seeds_that_are_there_are_not_trained_again_unless_the_config_changed(
    certify: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def train_ours(path: Path, seed: int, episodes: int, runs: Path) -> dict[str, Any]:
        trained.append(seed)
        return facts(seed)

    monkeypatch.setattr(certify, "train_ours", train_ours)
    monkeypatch.setattr(certify, "ROOT", tmp_path)
    config, file = tmp_path / "one.yaml", tmp_path / "certified.json"
    config.write_text("trainer: {seed: 1}")
    for seed in (2, 1, 3, 1, 2):
        certify.certify(file, config, seed, tmp_path, "One")
    (row,) = json.loads(file.read_text())
    assert trained == [2, 1, 3] and [run["seed"] for run in row["runs"]] == [1, 2, 3]
    assert [line[1:] for line in certify.cells(row)] == [
        ["best checkpoint", "success", "0.300", "0.200", "0.400"],
        ["last checkpoint", "success", "0.200", "0.100", "0.300"],
        ["best periodic evaluation", "success", "0.900", "0.900", "0.900"],
    ]
    assert certify.cost_cells(row)[1:] == ["3", "2.0", "1.5"]

    config.write_text("trainer: {seed: 1}  # a comment changes nothing")
    certify.certify(file, config, 1, tmp_path, "One")
    assert len(trained) == 3
    config.write_text("trainer: {seed: 2}")
    assert all(line[0].endswith("of an earlier config") for line in certify.cells(row))
    certify.certify(file, config, 1, tmp_path, "One")
    assert len(trained) == 4 and len(certify.read(file)[0]["runs"]) == 1
