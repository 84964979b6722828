"""Training a plain task imports none of the wings, and none of the libraries that only they use."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
import ejax.run, ejax.train
from ejax.config import load_config
from ejax.training.build import build
build(load_config("configs/point_mass/ppo.yaml"))
print(*sys.modules)
"""
WINGS = {
    "data": ("ejax.data",),
    "lerobot": ("ejax.data.lerobot", "pyarrow", "PIL", "imageio_ffmpeg"),
    "vla": ("ejax.policies.vla", "ejax.policies.pretrained", "safetensors"),
    "report": ("ejax.report", "matplotlib"),
    "preflight": ("ejax.preflight",),
    "population": ("ejax.population",),
    "play": ("ejax.play", "mujoco"),
    "interop": ("interop", "torch", "onnx", "onnxruntime"),
    "checkpoints": ("orbax", "tensorstore"),
}
OF_THE_CONFIG = {"ejax.policies.vla", "ejax.policies.vla.config"}
"""The section ``policy.vla_config``, which every config's schema has."""


@pytest.fixture(scope="module")
def imported() -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split()) - OF_THE_CONFIG


@pytest.mark.parametrize("wing", WINGS)
def test_a_plain_task_imports_no_wing(wing: str, imported: set[str]) -> None:
    roots = WINGS[wing]
    assert not [name for name in imported if name in roots or name.startswith(tuple(f"{root}." for root in roots))]
