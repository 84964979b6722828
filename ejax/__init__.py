"""ejax: reinforcement learning for embodied AI on JAX. See README.md for the map of the package.

What research code calls can be imported from here, ``from ejax import gae, ppo_update``; each name is looked up when it
is first asked for, so that ``import ejax`` itself costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejax.algorithms.apg import APGConfig, apg_update
    from ejax.algorithms.bc import BCConfig, bc_update
    from ejax.algorithms.grpo import GRPOConfig, grpo_update
    from ejax.algorithms.ppo import PPOConfig, ppo_update
    from ejax.algorithms.record import Algorithm
    from ejax.algorithms.sgd import MinibatchConfig, sgd_epochs
    from ejax.algorithms.shac import SHACConfig, shac_update
    from ejax.config import RunConfig, load_config, parse_config
    from ejax.envs.check import check_env
    from ejax.envs.mujoco.world import World
    from ejax.envs.mujoco_task import MuJoCoTask
    from ejax.evaluation import summarize
    from ejax.optim import OptimizerConfig, ScheduleConfig, make_optimizer
    from ejax.play.acting import load
    from ejax.policies import evaluate_actions, get_action, get_value
    from ejax.returns import gae, group_advantages, vtrace
    from ejax.rollout import make_rollout, reset, unroll
    from ejax.schema.registry import register_algorithm, register_env, register_policy
    from ejax.types import Rollout, Timestep, TrainState, init_train_state, make_train_state

__version__ = "0.1.0"

_PLACES = {
    "ejax.algorithms.apg": ("APGConfig", "apg_update"),
    "ejax.algorithms.bc": ("BCConfig", "bc_update"),
    "ejax.algorithms.grpo": ("GRPOConfig", "grpo_update"),
    "ejax.algorithms.ppo": ("PPOConfig", "ppo_update"),
    "ejax.algorithms.record": ("Algorithm",),
    "ejax.algorithms.sgd": ("MinibatchConfig", "sgd_epochs"),
    "ejax.algorithms.shac": ("SHACConfig", "shac_update"),
    "ejax.config": ("RunConfig", "load_config", "parse_config"),
    "ejax.envs.check": ("check_env",),
    "ejax.envs.mujoco.world": ("World",),
    "ejax.envs.mujoco_task": ("MuJoCoTask",),
    "ejax.evaluation": ("summarize",),
    "ejax.optim": ("OptimizerConfig", "ScheduleConfig", "make_optimizer"),
    "ejax.policies": ("evaluate_actions", "get_action", "get_value"),
    "ejax.schema.registry": ("register_algorithm", "register_env", "register_policy"),
    "ejax.returns": ("gae", "group_advantages", "vtrace"),
    "ejax.rollout": ("make_rollout", "reset", "unroll"),
    "ejax.play.acting": ("load",),
    "ejax.types": ("Rollout", "Timestep", "TrainState", "init_train_state", "make_train_state"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "APGConfig",
    "Algorithm",
    "BCConfig",
    "GRPOConfig",
    "MinibatchConfig",
    "MuJoCoTask",
    "OptimizerConfig",
    "PPOConfig",
    "Rollout",
    "RunConfig",
    "SHACConfig",
    "ScheduleConfig",
    "Timestep",
    "TrainState",
    "World",
    "apg_update",
    "bc_update",
    "check_env",
    "evaluate_actions",
    "gae",
    "get_action",
    "get_value",
    "group_advantages",
    "grpo_update",
    "init_train_state",
    "load",
    "load_config",
    "make_optimizer",
    "make_rollout",
    "make_train_state",
    "parse_config",
    "ppo_update",
    "register_algorithm",
    "register_env",
    "register_policy",
    "reset",
    "sgd_epochs",
    "shac_update",
    "summarize",
    "unroll",
    "vtrace",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ejax' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
