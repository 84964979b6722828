"""A state {"a.b": (), "a": {"b": (3,)}}. RIGHT: a resumed run has the bits of one that never stopped; or refused."""

from dataclasses import dataclass

import jax
import numpy as np
from common import config, main, out, refused, run

from ejax.envs.tasks.point_mass import PointMassRL
from ejax.run import train


@dataclass(frozen=True)
class Nested(PointMassRL):
    def reset(self, key):
        state, obs = super().reset(key)
        return {"a.b": jax.numpy.zeros(()), "a": {"b": jax.numpy.ones(3)}, "own": state}, obs

    def step(self, state, action, key):
        own, timestep = super().step(state["own"], action, key)
        return {"a.b": state["a.b"] + 1, "a": {"b": state["a"]["b"] * 1.5}, "own": own}, timestep


@main
def report():
    cfg = {"max_episode_steps": 11}
    if text := refused(run, "parts", "repro:Nested", cfg, trainer={"iterations": 1}):
        return f"{'REFUSED' if 'a.b' in text else 'WRONG'} {text[:200]}"
    whole = run("whole", "repro:Nested", cfg)
    try:
        parts = train(config("repro:Nested", cfg), run_dir=out() / "parts", resume="latest")
    except Exception as error:
        return f"WRONG {type(error).__name__}: {error}"
    same = jax.tree.map(np.array_equal, whole.params, parts.params)
    return "RIGHT" if all(jax.tree.leaves(same)) else "WRONG other bits than the run that was not stopped"
