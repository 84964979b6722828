"""``embodichain.learning.rl`` with ``.train`` and the trainers: ejax's runs, its ``Trainer``, and a loop of APG."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from upstream_algo import APG
from upstream_bridge import write_back
from upstream_envs import DifferentiableVecEnv
from upstream_rollouts import DifferentiableCollector
from upstream_words import translated

import ejax
from ejax import run
from ejax.algorithms.apg import APGConfig
from ejax.config import load_config
from ejax.store.arrays import load_arrays, save_arrays

__all__ = ["DifferentiableTrainer", "DifferentiableTrainerCfg", "DifferentiableVecEnv", "Trainer", "train_from_config"]

_WORDS = {"must be a multiple of segment_length": "must be divisible"}


def train_from_config(path: str) -> dict[str, Any]:
    return asdict_of(run.train(load_config(Path(path))))


def asdict_of(result: Any) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__dataclass_fields__}


class Trainer:
    """ejax's, of the environments and networks behind torch's; it begins with parameters of its own."""

    def __init__(self, policy: Any, env: Any, algorithm: Any, eval_env: Any, checkpoint_dir: str, **keys: Any) -> None:
        folder = Path(checkpoint_dir) / keys["exp_name"] / "checkpoints"
        self.made = ejax.Trainer(
            env.jax_env,
            algorithm.made.policy,
            algorithm.made,
            eval_env=eval_env.jax_env,
            num_envs=env.num_envs,
            num_eval_envs=eval_env.num_envs,
            checkpoint_dir=folder,
            **keys,
        )

    def train(self, total_timesteps: int) -> dict[str, Any]:
        summary = asdict_of(self.made.train(total_timesteps))
        # a checkpoint of ejax's is a folder
        return summary | {"best_checkpoint_path": summary["best_checkpoint_path"] / "meta.json"}


@dataclass
class DifferentiableTrainerCfg:
    segment_length: int = 16
    update_horizon: int | None = None
    deterministic_actions: bool = False


class DifferentiableTrainer:
    """A loop of ejax's updates: a run of ejax's has no parameters in torch to begin with, or to compare."""

    def __init__(self, cfg: DifferentiableTrainerCfg, env: Any, policy: Any, algorithm: APG) -> None:
        with translated(_WORDS):
            self.horizon = APGConfig(**asdict(cfg)).horizon
        self.cfg, self.env, self.policy, self.algorithm = cfg, env, policy, algorithm
        self.collector = DifferentiableCollector(env, policy, env.device)
        self.global_step = self.num_updates = 0

    def train(self, total_timesteps: int) -> dict[str, Any]:
        self.policy.train()  # torch's mode, which ejax's policies do not have
        steps, history = self.horizon * self.env.num_envs, []
        self.algorithm.bind_schedule(math.ceil(total_timesteps / steps))
        while self.global_step < total_timesteps:
            rollout = self.collector.collect(self.horizon, self.cfg.deterministic_actions)
            rollout.sizes = {"segment_length": self.cfg.segment_length}
            metrics = self.algorithm.update(rollout)
            self.global_step, self.num_updates = self.global_step + steps, self.num_updates + 1
            history.append({f"train/{name}": x for name, x in metrics.items()})
        counts = {"global_step": self.global_step, "num_updates": self.num_updates}
        return counts | {"last_train_metrics": history[-1], "train_history": history}

    def save_checkpoint(self, path: Path) -> Path:
        path.mkdir()
        save_arrays(path / "state", self._state())
        return path

    def load_checkpoint(self, path: Path) -> None:
        state = load_arrays(path, self._state(), "", "")
        self.algorithm.state, (self.global_step, self.num_updates) = state[0], map(int, state[1])
        write_back(self.policy, self.algorithm.state.params)

    def _state(self) -> Any:
        return self.algorithm.state, jnp.array([self.global_step, self.num_updates])
