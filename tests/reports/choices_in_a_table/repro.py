"""MultiDiscrete([[2, 3], [4, 5]]).

RIGHT: the environment and the caller of act get arrays of that shape; or refused.
"""

import gymnasium
import numpy as np
from common import Steps, main, out, refused, run

import ejax


class Table(Steps):
    action_space = gymnasium.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))

    def take(self, action):
        assert self.action_space.contains(action), np.shape(action)
        return 0.0


@main
def report():
    if text := refused(run, "run", "repro:Table"):
        return f"{'REFUSED' if 'action' in text.lower() and 'broadcast' not in text else 'WRONG'} {text[:200]}"
    shape = np.shape(ejax.load(out() / "run").act(np.zeros(2, np.float32)))
    return f"{'RIGHT' if shape == (2, 2) else 'WRONG'} act gives {shape}"
