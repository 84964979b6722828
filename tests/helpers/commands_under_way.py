"""Trainings in another process of this machine, while they run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start_process(raw: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    """Start ``ejax train`` with this config and the run ``folder/run``."""
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    command = [sys.executable, "-m", "ejax.train", "--config", str(file), "--run", str(folder / "run")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ))


def wait_until(condition: Callable[[], Any], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_checkpoint(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    wait_until(lambda: list((folder / "run" / "checkpoints").glob("tiny_step_*")), process)
