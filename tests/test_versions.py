"""Bounds of the packages: what is known to break is outside, what is installed is inside, and each extra resolves."""

import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from case_tables import cases
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ALL = [Requirement(text) for texts in [*EXTRAS.values(), PROJECT["dependencies"]] for text in texts]
OWN = [requirement for requirement in ALL if requirement.name != "ejax"]


def bounds(package: str) -> list[SpecifierSet]:
    found = [requirement.specifier for requirement in OWN if requirement.name == package]
    assert found, package
    return found


@cases(
    "package inside outside",
    ("playground", ["0.2.0", "0.3"], ["0.1.0", "1.0.0", "1.1"]),  # 1.0 left JAX
    ("mujoco", ["3.5.0", "3.17.0", "4.0.1", "4.1"], ["4.0.0", "5.0"]),  # 4.0.0: a wrong factor of the Hessian
    ("mujoco-mjx", ["3.17.0"], ["4.0.0"]),
    ("mujoco-warp", ["3.17.0", "4.0.0"], ["3.16.0", "5.0"]),  # for MuJoCo 3 and 4 alike
    ("gymnax", ["1.0.1"], ["0.0.9", "2.0"]),
)
def test_releases_that_break_are_outside(package: str, inside: list[str], outside: list[str]) -> None:
    for each in bounds(package):
        assert all(each.contains(release) for release in inside), each
        assert not any(each.contains(release) for release in outside), each


def test_what_is_installed_is_within_the_bounds() -> None:
    """A release that is left out by itself may still be installed: pip changes it with the next installation."""
    for requirement in OWN:
        ends = SpecifierSet(",".join(str(each) for each in requirement.specifier if each.operator in (">=", "<")))
        try:
            assert ends.contains(version(requirement.name), prereleases=True), requirement
        except PackageNotFoundError:
            continue


def test_one_package_has_one_upper_bound() -> None:
    ends: dict[str, set[str]] = {}
    for requirement in OWN:
        ends.setdefault(requirement.name, set()).update(str(x) for x in requirement.specifier if x.operator == "<")
    assert not {name: found for name, found in ends.items() if len(found) > 1}


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_resolves(extra: str) -> None:
    if (uv := shutil.which("uv")) is None:
        pytest.skip("uv is not installed")
    words = [uv, "pip", "compile", "--quiet", "--no-header", "--python-version", "3.11", "--extra", extra]
    done = subprocess.run([*words, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line and line[0] not in " #")
    assert found["mujoco"] != "4.0.0" and found.get("playground", "0.").startswith("0.")
