"""``embodichain.learning.rl.algo`` and ``.utils``: ejax's optimizers, schedules and APG, of torch's parameters."""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import torch
from upstream_bridge import ejax_params, ejax_policy, jax_call, to_jax, to_torch, write_back
from upstream_words import translated

import ejax
import ejax.optim
from ejax.algorithms.apg import APGConfig, apg_update
from ejax.algorithms.differentiable import discounted_sum
from ejax.optim import get_learning_rate, make_optimizer, scheduled_learning_rate, set_learning_rate
from interop.tensordict import flatten_dict_observation

__all__ = ["flatten_dict_observation"]

_WORDS = {
    r"the learning rate is optimizer\.learning_rate": "OptimizerCfg.learning_rate",
    r"should be 'adam', 'adamw', 'sgd' or 'rmsprop'": "Unsupported optimizer",
    r"'cosine' has no horizon": "T_max",
}
get_registered_algo_names = ejax.get_registered_algo_names


class RolloutKind(Enum):
    STANDARD, DIFFERENTIABLE = "standard", "differentiable"


def OptimizerCfg(**options: Any) -> ejax.OptimizerConfig:
    with translated(_WORDS):
        return ejax.OptimizerConfig(**options)


LRSchedulerCfg = ejax.ScheduleConfig


def APGCfg(device: str = "cpu", **options: Any) -> APGConfig:
    return APGConfig(**options)


def PPOCfg(device: str = "cpu", **options: Any) -> ejax.PPOConfig:
    return ejax.PPOConfig(**options)


def PPO(cfg: ejax.PPOConfig, policy: Any) -> Any:
    return SimpleNamespace(made=ejax.PPO(cfg, ejax_policy(policy)), rollout_kind=RolloutKind.STANDARD)


def build_algo(name: str, cfg: Any, policy: Any, device: Any, distributed: bool = False) -> Any:
    ejax.build_algo(name, cfg, ejax_policy(policy))
    return {"apg": APG}[name](APGCfg(**cfg), policy)


class build_optimizer:
    """ejax's optimizer of torch's parameters."""

    def __init__(self, params: Any, cfg: Any) -> None:
        self.config = OptimizerCfg(**cfg) if isinstance(cfg, Mapping) else cfg
        self.tensors, self.made = list(params), make_optimizer(self.config)
        self.state = self.made.init([to_jax(x) for x in self.tensors])

    @property
    def param_groups(self) -> list[dict[str, float]]:
        return [{"lr": float(get_learning_rate(self.state))}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for x in self.tensors:
            x.grad = None

    def step(self) -> None:
        params, grads = [to_jax(x) for x in self.tensors], [to_jax(x.grad) for x in self.tensors]
        updates, self.state = self.made.update(grads, self.state, params)
        with torch.no_grad():
            for x, update in zip(self.tensors, updates, strict=True):
                x += to_torch(update)


class build_lr_scheduler:
    """ejax's schedule of such an optimizer."""

    def __init__(self, optimizer: build_optimizer, cfg: ejax.ScheduleConfig) -> None:
        self.optimizer, self.cfg, self.count = optimizer, cfg, -1
        with translated(_WORDS):
            self.step()

    def step(self) -> None:
        self.count += 1
        rate = scheduled_learning_rate(self.optimizer.config.learning_rate, self.cfg, jnp.asarray(self.count))
        self.optimizer.state = set_learning_rate(self.optimizer.state, rate)


def scheduler_needs_horizon(cfg: ejax.ScheduleConfig) -> bool:
    return ejax.optim.bind_schedule(cfg, 1) != cfg


def segmented_discounted_return(rollout: Any, gamma: float) -> torch.Tensor:
    """Return ejax's discounted sum of the rewards [T, N] of each environment, over the ends of episodes."""
    return _discounted(rollout.rewards, rollout, gamma)


def _discounted(x: torch.Tensor, rollout: Any, gamma: float) -> torch.Tensor:
    done = to_jax(torch.stack([t.terminated | t.truncated for t in rollout.transitions]))
    start = jnp.ones(x.shape[1])
    return jax_call(lambda x: ((discounted_sum(x, done, start, gamma=gamma)[0],), None), x)[0][0]


class APG:
    """ejax's update, from where a collector's environments are; what was collected there it collects itself."""

    rollout_kind = RolloutKind.DIFFERENTIABLE

    def __init__(self, cfg: APGConfig, policy: Any) -> None:
        self.cfg, self.policy, self.made = cfg, policy, ejax_policy(policy)
        self.transformation = make_optimizer(cfg.optimizer)
        self.state = ejax.make_train_state(self._params(), self.transformation)

    def update(self, rollout: Any) -> dict[str, float]:
        if not hasattr(rollout, "collector"):  # of a test's own making: no environment to collect from
            entropy = torch.stack([transition.policy_output["entropy"] for transition in rollout.transitions])
            sums = {"objective": rollout.rewards, "entropy": entropy}
            return {name: float(_discounted(x, rollout, self.cfg.gamma).mean()) for name, x in sums.items()}
        sizes = {"segment_length": rollout.num_steps, "update_horizon": rollout.num_steps} | rollout.sizes
        config = self.cfg.model_copy(update=sizes | {"deterministic_actions": rollout.deterministic})
        collector = rollout.collector
        static = {"policy": self.made, "env": collector.jax_env, "optimizer": self.transformation, "config": config}
        state = replace(self.state, params=self._params())
        self.state, collector.carry, metrics = apg_update(state, rollout.carry, rollout.key, **static)
        write_back(self.policy, self.state.params)
        return {name: float(x) for name, x in metrics.items()}

    def bind_schedule(self, total_updates: int) -> None:
        schedule = ejax.optim.bind_schedule(self.cfg.lr_scheduler, total_updates)
        self.cfg = self.cfg.model_copy(update={"lr_scheduler": schedule})

    def current_learning_rate(self) -> float:
        return float(get_learning_rate(self.state.opt_state))

    @property
    def optimizer(self) -> Any:
        return SimpleNamespace(state_dict=lambda: {"state": self.state.opt_state})

    @property
    def lr_scheduler(self) -> Any:
        return SimpleNamespace(state_dict=lambda: {"last_epoch": int(self.state.step)})

    def _params(self) -> Any:
        return ejax_params(self.policy, *map(to_jax, self.policy.parameters()))
