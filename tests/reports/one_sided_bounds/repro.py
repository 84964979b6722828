"""Box([0, -1], [inf, 1]). RIGHT: the export clips each bound by itself, as ejax.load does. WRONG: negative thrust."""

import gymnasium
import numpy as np
from common import Steps, main, out, run

import ejax


class Thrust(Steps):
    action_space = gymnasium.spaces.Box(np.array([0, -1], np.float32), np.array([np.inf, 1], np.float32))


@main
def report():
    try:
        from interop.export import export_run
        from interop.policy import load_policy
    except ImportError as error:
        return f"INFO needs {error.name}"
    folder = run("run", "repro:Thrust", trainer={"iterations": 1}).run_dir
    export_run(folder, out() / "exported", ["pt"])
    obs = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    ours, exported = ejax.load(folder).act(obs), np.asarray(load_policy(out() / "exported").act(obs))
    wrong = int((np.abs(ours - exported).max(axis=1) > 1e-5).sum() + (exported[:, 0] < 0).sum())
    return f"{'WRONG' if wrong else 'RIGHT'} {wrong} of 64 rows differ"
