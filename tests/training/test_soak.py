"""The soak test of asynchronous collection: it finds the bugs that are planted, and none where none is."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from case_tables import refused

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # where dataclasses look for their module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["soak"]


WRONG = {
    "repeat": "rollout 2 has steps 4-7, not 8-11",
    "loss": "rollout 2 has steps 12-15, not 8-11",
    "swap": "rollout 2 has steps 12-15, not 8-11",
    "alias": r"has steps|was written over after it was delivered|has (values|rewards)",
    "version": r"rollout 2 is labelled version 1, was made by \[0\]",
    "env": "rollout 2 has environments in wrong places",
    "torn": "rollout 2 has steps 4-11, not 8-11",
    "staleness": "rollout 2 is by version 0, allowed from 1 on",
}


@pytest.mark.parametrize("plant", WRONG)
def test_every_planted_bug_is_found_for_what_it_is(soak: Any, plant: str, tmp_path: Path) -> None:
    assert set(soak.PLANTS) == set(WRONG)
    refused(soak.one_round, 0, tmp_path, soak.SOUND, plant, match=WRONG[plant], error=AssertionError)


def test_a_plant_that_is_not_found_is_an_error(soak: Any, tmp_path: Path) -> None:
    refused(soak.find, "", tmp_path, match="the planted bug '' was not found", error=AssertionError)


def test_without_a_bug_nothing_is_found_though_environments_fail(soak: Any, tmp_path: Path) -> None:
    faults = {"raise": 0.02, "nan": 0.02, "slow": 0.05}
    allowed = {"max_quarantined": 1000, "max_restarts": 1000}
    seen = sum(
        (soak.one_round(s, tmp_path, replace(soak.SOUND, faults=faults, allowed=allowed)) for s in range(4)),
        soak.Counter(),
    )
    assert seen["finished"] == 4 and seen["env restarts"] > 0 and seen["quarantined"] > 0
    assert seen["transitions audited"] == 4 * 12 * 4 * 4
