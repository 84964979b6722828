"""Box(-10, 10, int64). RIGHT: the nearest integers arrive, so that 0 is about as frequent as 1 and -1; or refused."""

from collections import Counter

import gymnasium
import numpy as np
from common import Steps, main, refused, run

SEEN = Counter()


class Gears(Steps):
    action_space = gymnasium.spaces.Box(-10, 10, (3,), np.int64)

    def take(self, action):
        SEEN.update(int(x) for x in np.asarray(action))
        return 0.0


@main
def report():
    import repro  # the module that the environment is found in, which may be another than __main__

    sizes = {"trainer": {"buffer_size": 128, "iterations": 1}, "policy": {"initial_log_std": 1.1}}
    if text := refused(run, "run", "repro:Gears", **sizes):
        return f"REFUSED {text[:200]}"
    counts = repro.SEEN
    ratio = 2 * counts[0] / max(counts[1] + counts[-1], 1)
    return f"{'RIGHT' if 0.6 < ratio < 1.4 else 'WRONG'} 0 is drawn {ratio:.2f} times as often as 1 and -1"
