"""Write embodichain_0_3_updates.npz: updates of PPO and GRPO by EmbodiChain 0.3.2 under torch 2.13.0, on a CPU.

Usage: python make_embodichain_updates.py STUB.py
    In an environment as for ``make_embodichain_ppo.py``.

Each case is a config of its own; EmbodiChain collects one rollout of PointMassRL with it and updates on that rollout
again and again, with one minibatch per epoch, so that no shuffle matters. Keys: ``cases``: JSON {case: {"config": ..,
"updates": ..}}; for each case ``<case>/rollout/*`` [N, T + 1], ``<case>/init/*`` and ``<case>/final/*`` (state dicts),
``<case>/metric/*`` [updates].
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import embodichain
import numpy as np
import torch

NUM_ENVS, NUM_STEPS = 8, 6
GELU = {"hidden_sizes": [16, 8], "activation": "gelu", "use_layernorm": True}
ADAMW = {
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "kwargs": {"weight_decay": 0.1, "betas": [0.8, 0.99]}},
    "lr_scheduler": {"name": "linear", "kwargs": {"end_factor": 0.25}},
}
ADAM = {"optimizer": {"name": "adam", "learning_rate": 0.01}}
CASES = {
    "ppo_layernorm": {"network": GELU, "algorithm": "ppo", "cfg": {**ADAM, "n_epochs": 4}, "updates": 1},
    "ppo_adamw_linear": {
        "network": {"hidden_sizes": [16, 8], "activation": "relu", "last_activation": "tanh"},
        "algorithm": "ppo",
        "cfg": {**ADAMW, "n_epochs": 2},
        "updates": 4,
    },
    "grpo_kl": {
        "network": {"hidden_sizes": [16, 8], "activation": "silu"},
        "algorithm": "grpo",
        "cfg": {**ADAM, "n_epochs": 3, "kl_coef": 0.05, "group_size": 4, "ent_coef": 0.01},
        "updates": 2,
    },
    "grpo_adamw_linear": {
        "network": GELU,
        "algorithm": "grpo",
        "cfg": {**ADAMW, "n_epochs": 2, "kl_coef": 0.05, "group_size": 4, "truncate_at_first_done": False},
        "updates": 4,
    },
}


def main(stub: str) -> None:
    runpy.run_path(stub)
    out = {}
    for case, spec in CASES.items():
        config, updates = make_config(spec), spec["updates"]
        out |= {f"{case}/{name}": x for name, x in run(config, updates).items()}
        CASES[case] = {"config": config, "updates": updates}
    out["cases"] = np.array(json.dumps(CASES))
    out["versions"] = np.array(f"embodichain {embodichain.__version__}, torch {torch.__version__}")
    np.savez_compressed(Path(__file__).with_name("embodichain_0_3_updates.npz"), **out)


def make_config(spec: dict) -> dict:
    network = {"type": "mlp", "network_cfg": spec["network"]}
    critic = {"critic": network} if spec["algorithm"] == "ppo" else {}
    return {
        "trainer": {
            "exp_name": "golden",
            "learning_env": {"name": "PointMassRL", "cfg": {"max_episode_steps": 4}},
            "seed": 5,
            "num_envs": NUM_ENVS,
            "buffer_size": NUM_STEPS,
            "iterations": spec["updates"],
        },
        "policy": {"name": "actor_critic" if critic else "actor_only", "actor": network, **critic},
        "algorithm": {
            "name": spec["algorithm"],
            "cfg": {"batch_size": NUM_ENVS * NUM_STEPS, "gamma": 0.97, **spec["cfg"]},
        },
    }


def run(config: dict, updates: int) -> dict[str, np.ndarray]:
    from make_embodichain_checkpoint import make_trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, config)
    policy, algorithm = trainer.policy, trainer.algorithm
    algorithm.bind_schedule(total_updates=updates)
    trainer._collect_rollout()
    rollout = trainer.buffer.get(flatten=False).clone()
    # PointMass hardly ever terminates that early
    rollout["terminated"] |= torch.rand(rollout.batch_size, generator=torch.Generator().manual_seed(0)) < 0.15
    rollout["done"] = rollout["terminated"] | rollout["truncated"]
    out = {f"rollout/{name}": x.numpy().copy() for name, x in rollout.items()}
    out |= {f"init/{name}": x.numpy().copy() for name, x in policy.state_dict().items()}
    history = [algorithm.update(rollout.clone()) for _ in range(updates)]
    out |= {f"final/{name}": x.numpy() for name, x in policy.state_dict().items()}
    return out | {f"metric/{name}": np.array([metrics[name] for metrics in history]) for name in history[0]}


if __name__ == "__main__":
    main(sys.argv[1])
