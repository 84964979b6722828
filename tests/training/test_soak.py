"""The soak test of asynchronous collection: it finds the bugs that are planted, and none where none is."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

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
    with pytest.raises(AssertionError, match=WRONG[plant]):
        soak.one_round(0, tmp_path, soak.SOUND, plant)


def test_a_plant_that_is_not_found_is_an_error(soak: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the planted bug '' was not found"):
        soak.find("", tmp_path)


def test_without_a_bug_nothing_is_found_though_environments_fail(soak: Any, tmp_path: Path) -> None:
    faults = {"raise": 0.02, "nan": 0.02, "slow": 0.05}
    allowed = {"max_quarantined": 1000, "max_restarts": 1000}
    seen = sum(
        (soak.one_round(s, tmp_path, replace(soak.SOUND, faults=faults, allowed=allowed)) for s in range(4)),
        soak.Counter(),
    )
    assert seen["finished"] == 4 and seen["env restarts"] > 0 and seen["quarantined"] > 0
    assert seen["transitions audited"] == 4 * 12 * 4 * 4


@pytest.fixture(scope="module")
def delivered(soak: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Collect the first rollout of a sound run, and the offsets of values."""
    kept: list[Any] = []

    class Keeps(soak.Auditor):  # type: ignore[misc]
        def check(self, rollout: Any) -> None:
            kept.append((jax.tree.map(np.array, rollout), list(self.values)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "Auditor", Keeps)
        with pytest.raises(AssertionError, match="CollectorStats"):  # this one counts no rollouts
            soak.one_round(0, tmp_path_factory.mktemp("soak"), soak.SOUND)
    return kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["obs", "action", "reward", "value", "next_value", "log_prob"])
def test_two_entries_of_any_array_that_change_places_are_found(soak: Any, delivered: Any, name: str, axis: int) -> None:
    rollout, values = delivered
    soak.Auditor(4, 1, values=values).check(rollout)
    changed = np.roll(getattr(rollout, name), 1, axis=axis)
    with pytest.raises(AssertionError, match="rollout 0 has "):
        soak.Auditor(4, 1, values=values).check(replace(rollout, **{name: changed}))
