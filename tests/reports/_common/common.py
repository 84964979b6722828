"""A tiny run, an environment outside JAX that can be bent to any shape, refusals, the verdict."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from ejax.config import RunConfig, parse_config
from ejax.run import train
from ejax.training.callbacks import RunResult

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
REFUSALS = (ValueError, TypeError, RuntimeError, OSError, ImportError)


def out() -> Path:
    """Return the folder that this report may write to."""
    return Path(os.environ.setdefault("OUT", tempfile.mkdtemp()))


def config(env: str = "PointMassRL", cfg: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """Make the config of two tiny updates; ``trainer`` and ``policy`` are merged into it, ``algorithm`` replaces."""
    trainer = {"exp_name": "report", "num_envs": 4, "buffer_size": 8, "iterations": 2, "console": False}
    cfg = {"max_episode_steps": 11} if cfg is None and env == "PointMassRL" else cfg or {}
    tree = {
        "env": {"id": env, "cfg": cfg},
        "trainer": {**trainer, "output_dir": str(out()), **sections.pop("trainer", {})},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK, **sections.pop("policy", {})},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 1}},
    }
    return parse_config({**tree, **sections})


def run(name: str = "run", *args: Any, **sections: Any) -> RunResult:
    """Train ``config(*args, **sections)`` in a folder of that name."""
    return train(config(*args, **sections), run_dir=out() / name)


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Return the text of the error by which a call is refused. None: it is not."""
    try:
        function(*args, **kwargs)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


class Steps(gymnasium.Env):
    """Episodes of five steps in which nothing happens; a report gives it a space, or what it sees or does."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.see(), float(self.take(action)), False, self.t >= 5, {}

    def see(self) -> Any:
        return np.zeros(2, np.float32)

    def take(self, action: Any) -> float:
        """Act, and return the reward."""
        return 0.0


def main(report: Callable[[], str]) -> Callable[[], str]:
    """Print what ``report`` finds where its file, which ends with it, is run: RIGHT, WRONG, REFUSED or INFO; why."""
    if report.__module__ == "__main__":
        print(f"VERDICT: {report()}", flush=True)
    return report
