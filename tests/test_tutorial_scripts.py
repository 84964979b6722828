"""The tutorials that are scripts run as they are written, each in a folder of its own."""

import importlib.util
import runpy
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NEEDS = {"07_export": ("torch", "onnxruntime", "onnxscript")}
"""Extras, without which a tutorial is left to ``tests/check.sh --torch``."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in TUTORIALS.glob("*.py")))
def test_the_tutorial_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name} needs {module}")
    monkeypatch.chdir(tmp_path)
    ran = runpy.run_path(str(TUTORIALS / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 3  # it shows what it does
    assert list((tmp_path / "outputs").iterdir())  # and leaves nothing elsewhere
    if name == "03_own_algorithm":  # whose update is its own
        returns = [row["charts/episode_reward_avg_100"] for row in ran["result"].train_history[9:]]
        assert returns[-1] > returns[0] + 10.0
    if name == "09_ppo_plus_a_term":  # which changes what is learned
        assert ran["change"][0.3] < 0.5 * ran["change"][0.0]
