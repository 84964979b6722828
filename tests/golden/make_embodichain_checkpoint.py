"""Write embodichain_0_3_point_mass.{pt,npz}: a training of EmbodiChain 0.3.2 under torch 2.13.0, and its next update.

Usage: python make_embodichain_checkpoint.py STUB.py
    In an environment as for ``make_embodichain_ppo.py``.

The .pt file is the checkpoint after two updates (schema 2). The .npz has what follows: ``rollout/*`` [N, T + 1] of the
next collection, ``action`` [N, T + 1, A] (deterministic, on its observations), the update on it with one minibatch per
epoch, ``metric/*`` and ``final/*`` (state dict); ``config``: JSON.
"""

import importlib.util
import json
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [16, 8], "activation": "tanh", "use_layernorm": True}}
CONFIG = {
    "trainer": {
        "exp_name": "point_mass",
        "learning_env": {"name": "PointMassRL", "cfg": {"max_episode_steps": 6, "success_bonus": 5.0}},
        "seed": 3,
        "num_envs": 8,
        "buffer_size": 8,
        "iterations": 4,
    },
    "policy": {
        "name": "actor_critic",
        "actor": NETWORK,
        "critic": NETWORK,
        "actor_obs_normalization": True,
        "critic_obs_normalization": True,
    },
    "algorithm": {
        "name": "ppo",
        "cfg": {
            "optimizer": {"name": "adam", "learning_rate": 0.01, "kwargs": {"betas": [0.9, 0.99]}},
            "lr_scheduler": {"name": "linear", "kwargs": {"end_factor": 0.25}},
            "n_epochs": 3,
            "batch_size": 64,
            "gamma": 0.97,
        },
    },
}


def main(stub: str) -> None:
    runpy.run_path(stub)
    out = Path(__file__).with_name("embodichain_0_3_point_mass.pt")
    rows = CONFIG["trainer"]["num_envs"] * CONFIG["trainer"]["buffer_size"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        trainer.algorithm.bind_schedule(total_updates=CONFIG["trainer"]["iterations"])
        trainer.train(2 * rows)
        shutil.move(trainer.save_checkpoint(), out)
    trainer._collect_rollout()
    rollout = trainer.buffer.get(flatten=False).clone()
    arrays = {f"rollout/{name}": x.numpy() for name, x in rollout.items()}
    flat = rollout["obs"].reshape(-1, rollout["obs"].shape[-1])
    with torch.no_grad():
        mean = trainer.policy.actor(trainer.policy.actor_obs_normalizer(flat))
    arrays["action"] = mean.reshape(*rollout.batch_size, -1).numpy()
    metrics = trainer.algorithm.update(rollout)
    arrays |= {f"metric/{name}": np.array(value) for name, value in metrics.items()}
    arrays |= {f"final/{name}": x.numpy() for name, x in trainer.policy.state_dict().items()}
    arrays["config"] = np.array(json.dumps(CONFIG))
    np.savez_compressed(out.with_suffix(".npz"), **arrays)


def make_trainer(folder: str, config: dict = CONFIG) -> Any:
    """EmbodiChain's trainer of a PPO or GRPO config on PointMassRL; it saves under ``folder``."""
    load_point_mass()
    from embodichain.learning.rl.algo import build_algo
    from embodichain.learning.rl.runtime import build_learning_policy_runtime
    from embodichain.learning.rl.utils.trainer import Trainer

    trainer, algorithm_cfg = config["trainer"], config["algorithm"]
    torch.manual_seed(trainer["seed"])
    device = torch.device("cpu")
    runtime = build_learning_policy_runtime(config, num_envs=trainer["num_envs"], device=device)
    return Trainer(
        policy=runtime.policy,
        env=runtime.env,
        algorithm=build_algo(algorithm_cfg["name"], dict(algorithm_cfg["cfg"]), runtime.policy, device),
        buffer_size=trainer["buffer_size"],
        batch_size=algorithm_cfg["cfg"]["batch_size"],
        writer=None,
        eval_freq=0,
        save_freq=0,
        checkpoint_dir=folder,
        exp_name=trainer["exp_name"],
        use_wandb=False,
    )


def load_point_mass() -> None:
    """Register PointMassRL from its file: the task package's ``__init__`` imports the simulator."""
    import embodichain

    name = "embodichain_tasks.classic_control.point_mass"
    if name in sys.modules:
        return
    file = Path(embodichain.__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if __name__ == "__main__":
    main(sys.argv[1])
