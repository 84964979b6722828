"""A container's user without a home folder. RIGHT: training works. WRONG: a traceback."""

import os
import subprocess
import sys

from common import main

SLOW = True
SCRIPT = """
import os, pwd
def unknown(uid): raise KeyError(uid)
pwd.getpwuid = unknown
from ejax.runtime.device import prepare_jax
prepare_jax("cpu")
"""


@main
def report():
    hidden = ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")
    bare = {name: value for name, value in os.environ.items() if name not in hidden}
    bare["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=bare, capture_output=True, text=True, timeout=120)
    return f"{'WRONG' if done.returncode else 'RIGHT'} {done.stderr[-300:]!r}"
