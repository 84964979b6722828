"""A run with its own code, opened from another folder. RIGHT: the trusted name is imported from where it lies."""

import os
import sys

from common import main, out, refused, run

import ejax
from ejax.schema.trust import trust

SLOW = True

TASK = "from ejax.envs.tasks.point_mass import PointMassRL\nclass Far(PointMassRL): pass\n"


@main
def report():
    (own := out() / "own").mkdir()
    (own / "far_task.py").write_text(TASK)
    sys.path.insert(0, str(own))
    folder = run("run", "far_task:Far", {"max_episode_steps": 11}, trainer={"iterations": 1}).run_dir
    sys.path.remove(str(own))
    del sys.modules["far_task"]
    before = os.getcwd()
    os.chdir(out())
    trust("far_task:Far")
    text = refused(ejax.load, folder)
    os.chdir(before)
    return f"WRONG {text[:300]}" if text else "RIGHT"
