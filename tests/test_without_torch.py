"""Without torch everything works but exports to torch, which name the package that they lack."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from ejax.config import parse_config
from ejax.run import train

PROGRAM = """
import importlib, sys
sys.modules |= {"torch": None, "tensordict": None}  # whose import then fails, wherever it is installed
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(parse_config(tiny(tmp_path_factory.mktemp("run"))), run_dir=None).run_dir


def python(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_run_trains_on(run: Path) -> None:
    result = python("ejax.train", "--fork", run, f"trainer.output_dir={run.parent}", "trainer.iterations=3")
    assert result.returncode == 0, result.stderr
    assert len(list(run.parent.iterdir())) == 2


@pytest.mark.slow
def test_it_is_exported_where_no_torch_is_needed(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    result = python("interop.export", run, "--to", tmp_path / "made", "--formats", "stablehlo")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "made" / "policy.stablehlo").exists()


@pytest.mark.slow
def test_an_export_to_torch_names_what_it_needs(run: Path, tmp_path: Path) -> None:
    result = python("interop.export", run, "--to", tmp_path / "made", "--formats", "pt")
    assert result.returncode == 2 and "needed for pt: pip install torch" in result.stderr
    assert not (tmp_path / "made").exists()
