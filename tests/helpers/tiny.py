"""The one shape of a tiny training. Tests that train with it compile its programs once between all of them."""

import copy
from pathlib import Path
from typing import Any

NUM_ENVS = 4
NUM_STEPS = 8
"""Steps of each environment in an update."""
STEPS = NUM_ENVS * NUM_STEPS
"""Steps of all environments in an update."""
EPISODE = 11
"""Steps after which an episode is cut off: in the middle of a rollout."""
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
EVALUATED = {"enable_eval": True, "eval_freq": STEPS, "num_eval_envs": 2, "num_eval_episodes": 2}
"""Part of ``trainer``: every update is evaluated."""
PPO = {
    "batch_size": 16,
    "n_epochs": 2,
    # not the default, the run's updates: those are part of the program
    "lr_scheduler": {"name": "linear", "kwargs": {"total_iters": 60}},
}
GRPO = {"name": "grpo", "cfg": {"batch_size": STEPS, "n_epochs": 1, "group_size": 2, "kl_coef": 0.5}}
"""In place of ``algorithm``."""
_CUT_OFF = {
    "PointMassRL": {"max_episode_steps": EPISODE},
    "CartPoleRL": {"max_episode_steps": EPISODE},
    "PushCube": {"episode_length": EPISODE},
    "PushCubeRL": {"episode_length": EPISODE},
    "gymnasium:Pendulum-v1": {"max_episode_steps": EPISODE},
}


def tiny(
    output_dir: Path | None = None,
    env: str = "PointMassRL",
    *,
    env_cfg: dict[str, Any] | None = None,
    ppo: dict[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """Make the config of a PPO run named ``tiny`` of two updates.

    Free of charge are changes of seed, names, folders, frequencies and the number of updates: they are no part of a
    program. Every other change compiles one more.

    Args:
        env_cfg: in place of what cuts its episodes off after ``EPISODE`` steps.
        ppo: changes of ``algorithm.cfg``.
        trainer: changes of ``trainer``.
    """
    config = {
        "trainer": {
            "exp_name": "tiny",
            "num_envs": NUM_ENVS,
            "buffer_size": NUM_STEPS,
            "iterations": 2,
            "updates_per_dispatch": 4,
            "console": False,
            **({"output_dir": str(output_dir)} if output_dir else {}),
            **trainer,
        },
        "env": {"id": env, "cfg": _CUT_OFF.get(env, {}) if env_cfg is None else env_cfg},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK, "actor_obs_normalization": True},
        "algorithm": {"name": "ppo", "cfg": {**PPO, **(ppo or {})}},
    }
    return copy.deepcopy(config)  # tests change theirs


def tiny_sac(
    output_dir: Path | None = None, env: str = "PointMassRL", *, sac: dict[str, Any] | None = None, **trainer: Any
) -> dict[str, Any]:
    """Make ``tiny`` with SAC, whose replay buffer goes round in the third update and is learned from in the second."""
    config = tiny(output_dir, env, **trainer)
    networks = {
        name: {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "relu"}}
        for name in ("actor", "critic")
    }
    config["policy"] = {"name": "actor_q", "squash_actions": True, **networks}
    options = {"batch_size": 8, "gradient_steps": 2, "learning_starts": 40, "replay": {"capacity": 80}}
    return config | {"algorithm": {"name": "sac", "cfg": options | copy.deepcopy(sac or {})}}
