"""EmbodiChain's tests against ejax: the counting, and the stand-in for its package, on a test file of our own."""

import subprocess
import sys
from pathlib import Path

import pytest
from case_tables import cases

pytest.importorskip("tensordict", reason="needs torch and tensordict: pip install -e '.[torch]'")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "upstream_tests.py"
THEIRS = '''
"""A file as EmbodiChain's."""
import multiprocessing as mp
from unittest.mock import MagicMock

import pytest
import torch
from tensordict import TensorDict

from embodichain.data_pipeline.engine import data as engine_module
from embodichain.data_pipeline.datasets import UniformChunkSampler
from embodichain.lab.sim.cfg import RenderCfg as SimulationManager


def test_an_engine_draws_what_is_not_locked():
    context = mp.get_context()
    engine = object.__new__(engine_module.OnlineDataEngine)
    engine.cfg = engine_module.OnlineDataEngineCfg(buffer_size=2, max_episode_steps=4, gym_config={"num_envs": 1})
    fields = {"obs": torch.arange(8.0).reshape(2, 4, 1), "valid": torch.ones(2, 4, dtype=torch.bool)}
    engine.shared_buffer = TensorDict({**fields, "segment_id": torch.zeros(2, 4, dtype=torch.long)}, [2, 4])
    engine._lock_index = context.Array("i", [0, 1])
    for name in ("fill_signal", "init_signal", "close_signal", "worker_failed_signal"):
        setattr(engine, f"_{name}", context.Event())
    engine._worker_error_buffer = context.Array("B", engine_module._ERROR_BUFFER_SIZE)
    engine._worker_error_length = context.Value("i", 0)
    engine._state_value = context.Value("i", 0)
    engine._init_signal.set()
    engine._sim_process = MagicMock()
    engine._sim_process.is_alive.side_effect = lambda: not engine._close_signal.is_set()
    drawn = engine.sample_batch(batch_size=50, chunk_size=2)
    assert set(drawn["obs"].flatten().tolist()) == {4.0, 5.0, 6.0, 7.0}
    engine.stop()
    assert engine.state is engine_module.OnlineDataEngineState.STOPPED


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
GRADIENT = """
import torch

from embodichain.learning.rl.algo import segmented_discounted_return
from embodichain.learning.rl.collector import DifferentiableRollout, DifferentiableTransition


def test_torch_has_the_gradient_of_a_discounted_sum():
    reward = torch.ones(1, requires_grad=True)
    done = torch.zeros(1, dtype=torch.bool)
    steps = [DifferentiableTransition(None, {}, reward * k, done, done, None, {}) for k in (1.0, 2.0)]
    segmented_discounted_return(DifferentiableRollout(None, tuple(steps)), gamma=0.5).sum().backward()
    assert reward.grad.tolist() == [2.0]
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    path = tmp_path / "clone" / "tests" / "data_pipeline" / "test_online_data.py"
    path.parent.mkdir(parents=True)
    path.write_text(THEIRS)
    return path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, path.parents[2]], capture_output=True, text=True)


@pytest.mark.slow
def test_each_test_counts_once_with_its_reason(clone: Path) -> None:
    lines = run(clone).stdout.splitlines()
    assert "| tests/data_pipeline/test_online_data.py | 3 | 0 | 3 | 0 |" in lines
    assert "  1 in test_online_data: it needs EmbodiChain's simulator" in lines
    assert "  1 in test_online_data: EmbodiChain skips it: no GPU" in lines


@pytest.mark.slow
def test_torch_differentiates_through_jax(clone: Path) -> None:
    clone.write_text(GRADIENT)
    assert "| all | 1 | 0 | 0 | 0 |" in run(clone).stdout


@cases(
    "content told",
    ("def test_of_something():\n    assert 1 == 2, 'two'\n", "test_of_something: AssertionError: two"),
    ("import embodichain.no.such.thing as x\nx.Name.of.nothing\n", ""),
    ids=["a test without a reason", "a file that cannot be read"],
)
def test_what_fails_is_counted_and_fails(content: str, told: str, clone: Path) -> None:
    clone.write_text(content)
    done = run(clone)
    assert done.returncode == 1
    assert "| all | 0 | 0 | 0 | 1 |" in done.stdout and told in done.stdout
