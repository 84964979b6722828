"""Runs of environments that misbehave, in this process and in workers."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from gymnasium.vector import AsyncVectorEnv
from rude_tasks import Rude
from tiny import tiny

from ejax.config import RunConfig, parse_config
from ejax.envs.adapters.gymnasium import GymnasiumVector, make_in_worker


def config(folder: Path, *overrides: str, name: str = "rude_tasks:Rude", **cfg: Any) -> RunConfig:
    trainer = {"num_envs": 2, "buffer_size": 4, "iterations": 4, "num_eval_episodes": 2, "num_eval_envs": 1}
    return parse_config(tiny(folder, name, env_cfg=cfg, ppo={"batch_size": 8, "n_epochs": 1}, **trainer), overrides)


def in_workers(num_envs: int, **cfg: Any) -> Any:
    make = partial(make_in_worker, partial(Rude, **cfg), os.getpid())
    return GymnasiumVector(AsyncVectorEnv([make] * num_envs, autoreset_mode="Disabled", context="forkserver"))
