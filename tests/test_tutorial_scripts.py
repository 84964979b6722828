"""The tutorials that are scripts run as they are written, each in a folder of its own."""

import importlib.util
import os
import runpy
import shutil
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NEEDS = {"07_export": ("torch", "onnxruntime", "onnxscript")}
"""Extras, without which a tutorial is left to ``tests/check.sh --torch``."""


NOTEBOOKS = TUTORIALS.parents[1] / "examples" / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_the_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for module in NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name} needs {module}")
    examples = shutil.copytree(NOTEBOOKS.parent, tmp_path / "examples")
    monkeypatch.setenv("PYTHONPATH", f"{examples}{os.pathsep}{NOTEBOOKS.parents[1]}")
    book = nbformat.read(examples / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(examples / "notebooks")}}).execute()


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
