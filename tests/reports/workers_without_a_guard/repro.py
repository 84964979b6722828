"""A script without a main guard that asks for workers. RIGHT: it trains, or one line names the guard."""

import os
import subprocess
import sys

from common import main, out

SLOW = True
SCRIPT = """
from common import run
run("run", "gymnasium:Pendulum-v1", {"vectorization": "async"}, trainer={"num_envs": 2, "iterations": 1})
"""


@main
def report():
    (file := out() / "script.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, file], env=environ, capture_output=True, text=True, timeout=120)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"{'RIGHT' if not done.returncode else 'REFUSED' if '__main__' in last else 'WRONG'} {last[:300]}"
