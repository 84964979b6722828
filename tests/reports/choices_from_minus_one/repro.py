"""Discrete(3, start=-1). RIGHT: act gives -1, 0 and 1, in the user's own loop too. WRONG: the numbers 0, 1 and 2."""

import gymnasium
import numpy as np
from common import Steps, main, run

import ejax


class Levels(Steps):
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def take(self, action):
        assert self.action_space.contains(action), action
        return 0.0


@main
def report():
    actor = ejax.load(run("run", "repro:Levels", trainer={"iterations": 1}).run_dir)
    seen = sorted({int(x) for x in actor.act(np.zeros((200, 2), np.float32), deterministic=False)})
    return f"{'RIGHT' if seen == [-1, 0, 1] else 'WRONG'} act gives {seen}"
