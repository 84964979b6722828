"""Runs of policies with memory, as exports read them."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from exports import save_run
from tiny import NETWORK, tiny

from ejax.config import parse_config
from ejax.training.build import build

ENCODER = {"hidden_sizes": [6], "activation": "tanh", "use_layernorm": True}
MEMORIES = {
    "gru": ({"type": "gru", "hidden_size": 5, "num_layers": 2, "encoder": ENCODER}, None),
    "lstm": ({"type": "lstm", "hidden_size": 5}, {"type": "actor"}),
    "history": ({"type": "history", "length": 4}, None),
}


def make_run(folder: Path, kind: str) -> Path:
    """Make a run as if after one update, with weights and statistics that are not those of a start."""
    raw = tiny(folder)
    memory, of_critic = MEMORIES[kind]
    raw["policy"]["actor"] = {**NETWORK, "memory": memory}
    raw["policy"]["critic"] = {**NETWORK, "memory": of_critic}
    config = parse_config(raw)
    state = build(config).state
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-0.7, 0.7, x.shape), x.dtype), state.train.params)
    params["normalizer"]["actor_obs_normalizer"]["variance"] += 0.8
    return save_run(config, folder / "run", replace(state, train=replace(state.train, params=params)))
