"""The examples run, and do what they say."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.mark.slow
def test_the_own_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load("own_loop", monkeypatch).main(num_updates=3)
    assert -120.0 < reward < 0.0  # an untrained point mass: about −0.7 a step for 100 steps


@pytest.mark.slow
def test_the_own_environment_and_policy_learn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load("own_env", monkeypatch).main(str(tmp_path)) < 0.1


@pytest.mark.slow
def test_stable_baselines3_trains_on_a_task_of_ejax(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    assert 0.0 <= load("sb3_on_ejax", monkeypatch).main(num_updates=1) <= 1.0
