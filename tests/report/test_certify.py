"""``benchmarks/certify.py``: the pages' tables are what ``certified.json`` gives."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "certify.py"


@pytest.fixture(scope="module")
def certify() -> ModuleType:
    spec = importlib.util.spec_from_file_location("certify", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_pages_are_made_from_what_was_measured(certify: ModuleType) -> None:
    for page in certify.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == certify.with_tables(page, text, certify.read(certify.CERTIFIED)), "run: certify.py --table"


def test_every_run_that_counts_was_evaluated_in_enough_fresh_episodes(certify: ModuleType) -> None:
    for row in certify.read(certify.CERTIFIED):
        for run in row.get("runs", ()):
            assert min(run[which]["episodes"] for which in ("best", "last")) >= certify.EPISODES
        assert "runs" in row or row["how"]
