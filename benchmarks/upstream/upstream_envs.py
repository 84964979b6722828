"""``embodichain.learning.rl.env`` and its tasks: ejax's environments as torch vector environments, with gradients.

The fields of an environment's state are attributes, tensors [N, ...], as of EmbodiChain's; tests write into them.
"""

from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import jax
import torch
from upstream_bridge import jax_call, to_jax, to_torch

from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.rollout import EnvCarry, reset, step
from interop.envs import TorchVectorEnv


@runtime_checkable
class DifferentiableVecEnv(TorchVectorEnv, Protocol):
    def detach_state(self) -> Any: ...


class VectorEnv:
    """An environment of ejax's, as a torch vector environment."""

    def __init__(self, env: Any, num_envs: int) -> None:
        self.jax_env, self.num_envs, self.device = env, num_envs, torch.device("cpu")
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.reset(seed=0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        key = jax.random.key(seed) if seed is not None else self._next_key()
        self.key, first = jax.random.split(key)
        self._adopt(reset(self.jax_env, first, self.num_envs))
        return self.obs, {}

    def step(self, action: torch.Tensor) -> Any:
        names, key = [name for name, x in self.leaves.items() if x.is_floating_point()], self._next_key()

        def advance(action: Any, obs: Any, *arrays: Any) -> Any:
            carry = self.carry(obs, dict(zip(names, arrays, strict=True)))
            after, made = step(self.jax_env, carry, action, key)
            values = {each.name: getattr(after.state, each.name) for each in fields(after.state)}
            rest = {name: x for name, x in values.items() if name not in names}
            return (after.obs, made.reward, *(values[name] for name in names)), (rest, made)

        floats, (rest, made) = jax_call(advance, action, self.obs, *(self.leaves[name] for name in names))
        self.obs, reward, *arrays = floats
        self.leaves = dict(zip(names, arrays, strict=True)) | {name: to_torch(x) for name, x in rest.items()}
        terminated, truncated = to_torch(made.terminated), to_torch(made.truncated)
        return self.obs, reward, terminated, truncated, jax.tree.map(to_torch, jax.lax.stop_gradient(made.info))

    def detach_state(self) -> torch.Tensor:
        self.leaves = {name: x.detach() for name, x in self.leaves.items()}
        self.obs = self.obs.detach()
        return self.obs

    def close(self) -> None: ...

    def carry(self, obs: Any = None, arrays: Any = None) -> EnvCarry:
        """Return the environments between two steps, with these arrays in place of the tensors'."""
        arrays = {name: to_jax(x) for name, x in self.leaves.items()} | (arrays or {})
        return EnvCarry(state=self.kind(**arrays), obs=to_jax(self.obs) if obs is None else obs)

    def _adopt(self, carry: EnvCarry) -> None:
        self.kind = type(carry.state)
        self.leaves = {each.name: to_torch(getattr(carry.state, each.name)) for each in fields(carry.state)}
        self.obs = to_torch(carry.obs)

    def _next_key(self) -> Any:
        self.key, key = jax.random.split(self.key)
        return key

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("leaves", {}):
            return self.leaves[name]
        if name.startswith("_") or "jax_env" not in vars(self):
            raise AttributeError(name)
        return getattr(self.jax_env, name)


class PointMassEnv(VectorEnv):
    def __init__(self, num_envs: int = 64, device: str = "cpu", **cfg: Any) -> None:
        super().__init__(PointMassRL(**cfg), num_envs)


@dataclass
class NewtonPlanarReachEnvCfg:
    num_envs: int = 64
    device: str = "cpu"
    max_episode_steps: int = 32
    success_threshold: float = 0.05
    first_link_length: float = 1.0
    second_link_length: float = 0.8


class NewtonPlanarReachEnv(VectorEnv):
    """EmbodiChain's needs Newton, a simulator; ejax's arm none."""

    def __init__(self, cfg: NewtonPlanarReachEnvCfg) -> None:
        self.cfg, links = cfg, (cfg.first_link_length, cfg.second_link_length)
        limits = {"max_episode_steps": cfg.max_episode_steps, "success_threshold": cfg.success_threshold}
        super().__init__(PlanarReachRL(link_length=links, **limits), cfg.num_envs)


def build_learning_env(name: str, *, num_envs: int, device: str, **cfg: Any) -> VectorEnv:
    return {"PointMassRL": PointMassEnv}[name](num_envs, device, **cfg)
