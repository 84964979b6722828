"""``examples/ray_train.py`` and ``sweep.py``: a killed worker of Ray's leaves the numbers of an undisturbed run."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import STEPS, tiny

from ejax.config import parse_config
from ejax.run import train
from ejax.store.arrays import read_arrays

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]
ROOT = Path(__file__).parents[1]
UPDATES = 4


def mortal(run: Path, killed: Path, **trainer: Any) -> dict[str, Any]:
    """Make the config of a run whose environments kill one process after the first checkpoint."""
    collector = {"mode": "host", "num_groups": 2}
    config = tiny(iterations=UPDATES, save_frequency_updates=1, collector=collector, console=True, **trainer)
    config["env"] = {"id": "mortal_env:mortal", "cfg": {"run": str(run), "killed": str(killed)}}
    return config


def on_ray(folder: Path, config: dict[str, Any], *words: str, script: str = "ray_train.py", to: str = "--run") -> str:
    (file := folder / "tiny.json").write_text(json.dumps(config))
    env = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1"),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}",
        "RAY_AUTH_MODE": "disabled",  # its token would be left in the home of whoever runs the tests
    }
    command = [sys.executable, str(ROOT / "examples" / script), str(file), "--device", "cpu"]
    command += [to, str(folder / "run"), "--trust", "mortal_env:mortal", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def arrays(run: Path, step: int) -> dict[str, bytes]:
    (path,) = run.glob(f"checkpoints/tiny_step_{step}")
    return {name: np.asarray(x).tobytes() for name, x in read_arrays(path, read_arrays(path, None)).items()}


def test_a_run_goes_on_from_its_checkpoint_when_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    text = on_ray(tmp_path, mortal(tmp_path / "run", killed))
    assert killed.exists() and "ray_train: a worker is lost" in text and "resumed from" in text
    monkeypatch.setattr("ejax.training.build.all_devices", lambda config: jax.devices()[:2])
    alone = parse_config(mortal(tmp_path / "run", killed), ["trainer.distributed=true"])
    whole, step = train(alone, run_dir=tmp_path / "alone").run_dir, 2 * UPDATES * STEPS  # of two devices
    assert arrays(tmp_path / "run", step) == arrays(whole, step)


def test_a_run_of_a_sweep_goes_on_when_its_worker_is_killed(tmp_path: Path) -> None:
    second, killed = tmp_path / "run" / "seed_2", tmp_path / "killed"
    text = on_ray(tmp_path, mortal(second, killed), "--seeds", "2", "--ray", script="sweep.py", to="--to")
    assert killed.exists() and text.count("resumed from") == 1
    for seed in (1, 2):
        config = parse_config(mortal(second, killed), [f"trainer.seed={seed}"])
        alone = train(config, run_dir=tmp_path / f"alone_{seed}").run_dir
        assert arrays(tmp_path / "run" / f"seed_{seed}", UPDATES * STEPS) == arrays(alone, UPDATES * STEPS)
