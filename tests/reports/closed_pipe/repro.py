"""`ejax train … | head -3`.

RIGHT: the run goes on to its end, or is saved. WRONG: BrokenPipeError, and nothing kept.
"""

import os
import subprocess
import sys

import yaml
from common import config, main, out

SLOW = True


@main
def report():
    (out() / "x.yaml").write_text(yaml.safe_dump(config(trainer={"console": True, "iterations": 60}).to_dict()))
    command = f"{sys.executable} -m ejax.train --config {out()}/x.yaml --run {out()}/run | head -3"
    path = os.pathsep.join(filter(None, sys.path))
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    saved = list((out() / "run" / "checkpoints").glob("*"))
    return f"{'RIGHT' if saved and 'BrokenPipe' not in done.stderr else 'WRONG'} {done.stderr[-200:]!r}"
