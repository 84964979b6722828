"""Warp in the program that XLA makes for a GPU: one call per control step, and no array copied for it.

A call with in-out arrays, as MJX's, XLA since 0.11 may make twice, the readings lost: benchmarks/notes.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "warp_calls.py"
NEWEST = os.environ.get("EJAX_NEWEST_PYTHON", str(ROOT / ".venv-newest" / "bin" / "python"))
"""Python of the newest jax with XLA's GPU compiler and Warp: ``EJAX_NEWEST_PYTHON``, else that of check.sh --newest."""
ROWS = ("8", "16", "4096")


def compiled(python: str, *arguments: str) -> dict[str, Any]:
    if not Path(python).is_file():
        pytest.skip(f"{python} is not there; EJAX_NEWEST_PYTHON names one with the newest jax (docs/gpu.md)")
    # without the tests' own options of XLA, which change what it compiles
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [python, str(SCRIPT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    if result.returncode == 3:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("python", [sys.executable, NEWEST], ids=["installed", "newest"])
def test_a_control_step_is_one_call_of_warp_and_copies_nothing(python: str) -> None:
    assert compiled(python, *ROWS)["rows"] == {rows: {"calls": 1, "copies": 0} for rows in ROWS}


@pytest.mark.parametrize(("found", "force", "code"), [(1.0, 131.0, 0), (0.0, 0.0, 1), (1.0, 90.0, 1), (0.5, 131.0, 1)])
def test_the_probe_fails_where_a_sensor_or_a_force_is_wrong(
    found: float, force: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("contact_probe", ROOT / "benchmarks" / "contact_probe.py")
    assert spec and spec.loader
    spec.loader.exec_module(probe := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(probe, "how_to_install", lambda engine: None)
    monkeypatch.setattr(probe, "version", lambda name: "1.0")
    monkeypatch.setattr(probe, "stand", lambda engine, rows: (1.0, 131.2) if engine == "mujoco" else (found, force))
    monkeypatch.setattr(sys, "argv", ["contact_probe.py", "--device", "cpu", "--rows", "8"])
    assert probe.main() == code
    assert ("passed" in capsys.readouterr().out) == (code == 0)
