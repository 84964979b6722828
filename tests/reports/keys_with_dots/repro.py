"""An observation with the key "observation.state". RIGHT: obs_groups can name it, and act takes the dict."""

import gymnasium
import numpy as np
from common import Steps, main, out, refused, run

import ejax

BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


class Dotted(Steps):
    observation_space = gymnasium.spaces.Dict({"observation.state": BOX, "observation.goal": BOX})

    def see(self):
        return {name: np.zeros(2, np.float32) for name in self.observation_space}


@main
def report():
    groups = {"actor": ["observation.state"], "critic": ["observation.state", "observation.goal"]}
    sections = {"policy": {"obs_groups": groups}, "trainer": {"iterations": 1}}
    if text := refused(run, "run", "repro:Dotted", **sections):
        return f"WRONG {text[:300]}"
    text = refused(ejax.load(out() / "run").act, Dotted().reset()[0])
    return f"WRONG {text[:300]}" if text else "RIGHT"
