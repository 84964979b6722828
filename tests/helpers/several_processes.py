"""Trainings in several processes of this machine, over loopback."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.envs.tasks.point_mass import PointMassRL, PointMassState
from ejax.types import CameraView


@dataclass(frozen=True)
class Shown(PointMassRL):
    """PointMass with pictures, trained by PointMass's programs: CartPole's are compiled each time, as they call out."""

    control_period = 0.1

    def render(
        self, state: PointMassState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        del state, camera
        return np.zeros((height, width, 3), np.uint8)


def train_in_processes(
    num_processes: int, num_devices: int, tmp_path: Path, config: dict[str, Any], *arguments: str
) -> list[str]:
    """Return the output of processes of ``num_devices`` CPU devices each, of a training that ends well."""
    (file := tmp_path / "tiny.json").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "ejax.train", "--config", str(file), "--distributed"]
    command += ["--trust", "several_processes:Shown", *arguments]
    command += ["--num-processes", str(num_processes), "--coordinator", address, "--process-id"]
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={num_devices}")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    all_of_them = [subprocess.Popen([*command, str(i)], **options) for i in range(num_processes)]
    texts = [process.communicate(timeout=300)[0] for process in all_of_them]
    assert [process.returncode for process in all_of_them] == [0] * num_processes, "\n".join(texts)
    return texts


two_processes = partial(train_in_processes, 2, 1)
