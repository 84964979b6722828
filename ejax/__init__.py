"""ejax: reinforcement learning for embodied AI on JAX. README.md has the map of the package.

Research code imports names from here; each is resolved at its first use. ``__init__.pyi`` has them for type checkers.
"""

import warnings
from typing import Any

from ejax.schema.lazy_names import lazy_names

__version__ = "0.1.0rc1"

_PLACES = {
    "ejax.algorithms.apg": ("APGConfig", "apg_update"),
    "ejax.algorithms.bc": ("BCConfig", "bc_update"),
    "ejax.algorithms.grpo": ("GRPOConfig", "grpo_update"),
    "ejax.algorithms.options": ("GradientOptions", "MinibatchOptions"),
    "ejax.algorithms.ppo": ("PPOConfig", "ppo_update"),
    "ejax.algorithms.model_shac": ("ModelSHACConfig", "model_shac_update"),
    "ejax.algorithms.record": ("Algorithm",),
    "ejax.algorithms.flash_sac": ("FlashSACConfig", "flash_sac_update"),
    "ejax.algorithms.reppo": ("REPPOConfig", "reppo_update"),
    "ejax.algorithms.sac": ("SACConfig", "sac_update"),
    "ejax.algorithms.sgd": ("MinibatchConfig", "sgd_epochs"),
    "ejax.algorithms.shac": ("SHACConfig", "shac_update"),
    "ejax.collectors.buffer": ("RolloutBuffer", "RolloutQueue"),
    "ejax.collectors.collect": ("collect_rollout",),
    "ejax.collectors.stateful": ("BaseAlgorithm", "build_algo"),
    "ejax.config": ("RunConfig", "load_config", "parse_config"),
    "ejax.envs.check": ("check_env",),
    "ejax.envs.task.world": ("World",),
    "ejax.envs.tasks.mujoco_task": ("MuJoCoTask",),
    "ejax.envs.wrappers.wrapper": ("ObservationWrapper",),
    "ejax.evaluation": ("summarize",),
    "ejax.learner": ("GRPO", "PPO", "SAC", "Learner"),
    "ejax.optim": ("OptimizerConfig", "ScheduleConfig", "make_optimizer"),
    "ejax.policies.calls": ("evaluate_actions", "get_action", "get_value"),
    "ejax.schema.registry": (
        *("register_algorithm", "register_env", "register_policy"),
        *("get_registered_algo_names", "get_registered_policy_names"),
    ),
    "ejax.returns": ("gae", "group_advantages", "vtrace"),
    "ejax.rollout": ("make_rollout", "reset", "unroll"),
    "ejax.play.acting": ("load",),
    "ejax.trainer": ("Trainer",),
    "ejax.runtime.tree_text": ("describe_tree", "print_tree"),
    "ejax.training.callbacks": ("Callback",),
    "ejax.training.policies": ("build_policy",),
    "ejax.types": ("Policy", "Rollout", "Timestep", "TrainState", "init_train_state", "make_train_state"),
}
_EMBODICHAINS = {
    "AlgorithmCfg": "GradientOptions",
    "GRPOCfg": "GRPOConfig",
    "PPOCfg": "PPOConfig",
    "register_algo": "register_algorithm",
}
"""EmbodiChain's name -> ours."""
_DEPRECATED: dict[str, tuple[str, str]] = {}
"""Former name -> its successor here, and the release that ends it: one minor release later (docs/stability.md)."""
_named = lazy_names("ejax", _PLACES)

__all__ = sorted([*(name for names in _PLACES.values() for name in names), *_EMBODICHAINS])


def __getattr__(name: str) -> Any:
    name = _EMBODICHAINS.get(name, name)
    if name in _DEPRECATED:
        former, (name, end) = name, _DEPRECATED[name]
        warnings.warn(f"ejax.{former} is now ejax.{name}, and is removed with {end}", DeprecationWarning, stacklevel=2)
    return _named(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
