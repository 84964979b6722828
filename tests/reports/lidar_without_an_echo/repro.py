"""Beams without an echo give inf. RIGHT: the text names the numbers of the observation and the remedy."""

import gymnasium
import numpy as np
from common import Steps, main, refused, run


class Lidar(Steps):
    observation_space = gymnasium.spaces.Box(0.0, np.inf, (4,), np.float32)

    def see(self):
        return np.array([1, 2, np.inf, 3], np.float32)


@main
def report():
    text = refused(run, "run", "repro:Lidar")
    return f"{'REFUSED' if text and 'inf' in text and '2' in text and 'obs' in text else 'WRONG'} {(text or '')[:400]}"
