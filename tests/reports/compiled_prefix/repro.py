"""Weights of a compiled module, "_orig_mod." before each name. RIGHT: read, or refused by the prefix and the remedy."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import gymnasium
from common import main, out, refused, run

import ejax
from ejax.envs.tasks.point_mass import PointMassRL

SLOW = True

GOLDEN = Path(ejax.__file__).parents[1] / "tests/golden/seed_actor_critic_step_1234.pt"


@dataclass(frozen=True)
class Five(PointMassRL):
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (5,))

    def reset(self, key):
        state, obs = super().reset(key)
        return state, obs[:5]

    def step(self, state, action, key):
        state, timestep = super().step(state, action, key)
        return state, timestep.replace(obs=timestep.obs[:5])


@main
def report():
    if find_spec("torch") is None:
        return "INFO needs torch"
    import torch

    clean = torch.load(GOLDEN, weights_only=True)
    weights = {f"_orig_mod.{name}": x for name, x in clean["policy"].items()}
    torch.save({**clean, "policy": weights}, out() / "x.pt")
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [16, 8], "activation": "tanh"}}
    policy = {"actor": network, "critic": network, "init_from": str(out() / "x.pt")}
    text = refused(run, "run", "repro:Five", {"max_episode_steps": 11}, policy=policy)
    return f"{'REFUSED' if '_orig_mod' in text and 'issing' not in text else 'WRONG'} {text[:300]}" if text else "RIGHT"
