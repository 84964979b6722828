"""EmbodiChain's tests against ejax: the counting, and the stand-in for its package, on a test file of our own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensordict", reason="needs torch and tensordict: pip install -e '.[torch]'")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "upstream_tests.py"
THEIRS = '''
"""A file as EmbodiChain's."""
import pytest

pytest.importorskip("tensordict", reason="needs torch and tensordict: pip install -e '.[torch]'")
from embodichain.data_pipeline.datasets import UniformChunkSampler
from embodichain.lab.sim.cfg import RenderCfg as SimulationManager


class TestSampler:
    @pytest.mark.parametrize("size", [3, 4])
    def test_a_size_is_drawn(self, size):
        assert UniformChunkSampler(low=size, high=size)() == size


def test_the_simulator_is_needed():
    SimulationManager()


def test_monitor_target_does_not_retain_engine():
    assert False


@pytest.mark.skipif(True, reason="no GPU")
def test_skipped():
    pass
'''


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    path = tmp_path / "clone" / "tests" / "data_pipeline" / "test_online_data.py"
    path.parent.mkdir(parents=True)
    path.write_text(THEIRS)
    return path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, path.parents[2]], capture_output=True, text=True)


def test_each_test_counts_once_with_its_reason(clone: Path) -> None:
    lines = run(clone).stdout.splitlines()
    assert "| tests/data_pipeline/test_online_data.py | 2 | 0 | 3 | 0 |" in lines
    assert "  1 in test_online_data: it needs EmbodiChain's simulator" in lines
    assert "  1 in test_online_data: EmbodiChain skips it: no GPU" in lines


def test_a_test_without_a_reason_fails(clone: Path) -> None:
    clone.write_text("def test_of_something():\n    assert 1 == 2, 'two'\n")
    done = run(clone)
    assert done.returncode == 1
    assert "| all | 0 | 0 | 0 | 1 |" in done.stdout
    assert "test_of_something: AssertionError: two" in done.stdout


def test_a_file_that_cannot_be_read_fails(clone: Path) -> None:
    clone.write_text("import embodichain.no.such.thing as x\nx.Name.of.nothing\n")
    done = run(clone)
    assert done.returncode == 1
    assert "| all | 0 | 0 | 0 | 1 |" in done.stdout
