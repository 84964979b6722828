"""``embodichain.learning.rl`` ``.models``, ``.collector``, ``.buffer`` and ``.evaluation``, by ejax's of each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import struct
from tensordict import TensorDict
from torch import nn
from upstream_bridge import TorchEnv, ejax_params, ejax_policy, jax_call, to_jax, to_torch
from upstream_envs import VectorEnv
from upstream_words import translated

from ejax.algorithms.apg import APGConfig
from ejax.algorithms.differentiable import play
from ejax.collectors.host import HostCollector
from ejax.evaluation import evaluate_host, summarize
from ejax.policies.observations import flatten_observation
from ejax.rollout import reset
from ejax.types import Distribution
from interop.envs import TorchVector
from interop.tensordict import rollout_to_tensordict

_WORDS = {r"segment_length\n.*greater than 0": "num_steps must be positive"}


class ActorOnly(nn.Module):
    """torch's parameters, and ejax's distribution of actions."""

    def __init__(self, obs_dim: int, action_dim: int, device: Any, actor: nn.Module, **critic: nn.Module) -> None:
        super().__init__()
        self.obs_dim, self.action_dim = obs_dim, action_dim
        self.log_std, self.actor = nn.Parameter(torch.zeros(action_dim)), actor
        for name, module in critic.items():
            self.add_module(name, module)

    def get_action(self, td: Any, deterministic: bool = False) -> Any:
        params = ejax_params(self, *map(to_jax, self.parameters()))
        distribution, value = ejax_policy(self).apply(params, to_jax(td["obs"]))
        key = jax.random.key(int(torch.randint(2**31, ())))
        action = distribution.mode() if deterministic else distribution.sample(key)
        for name, x in {"action": action, "sample_log_prob": distribution.log_prob(action), "value": value}.items():
            td[name] = to_torch(x)
        return td


ActorCritic = ActorOnly


@dataclass
class DifferentiableTransition:
    observation: Any
    policy_output: Any
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    next_observation: Any
    info: dict[str, Any]

    @property
    def action(self) -> torch.Tensor:
        return self.policy_output["action"]


@dataclass
class DifferentiableRollout:
    initial_observation: Any
    transitions: tuple[DifferentiableTransition, ...]

    @property
    def rewards(self) -> torch.Tensor:
        return torch.stack([transition.reward for transition in self.transitions])


class DifferentiableCollector:
    """ejax's steps with gradients, in an environment of ejax's or of torch's."""

    def __init__(self, env: Any, policy: Any, device: Any) -> None:
        self.env, self.policy, self.made = env, policy, ejax_policy(policy)
        self.jax_env = env.jax_env if isinstance(env, VectorEnv) else TorchEnv(env)
        self.reset(seed=0)

    def reset(self, seed: int) -> None:
        self.key = jax.random.key(seed)
        if isinstance(self.env, VectorEnv):
            self.env.reset(seed=seed)
            self.carry = self.env.carry()
        else:
            self.carry = reset(self.jax_env, self.key, self.env.num_envs)

    def collect(self, num_steps: int, deterministic: bool = False) -> "_Collected":
        with translated(_WORDS):
            APGConfig(segment_length=num_steps)
        self.key, key = jax.random.split(self.key)
        return _Collected(self, self.carry, key, num_steps, deterministic)


class _Collected:
    """A rollout that is collected when it is looked at: ``APG.update``, which does not, collects it itself."""

    def __init__(self, collector: DifferentiableCollector, carry: Any, key: Any, num_steps: int, deterministic: bool):
        self.collector, self.carry, self.key = collector, carry, key
        self.num_steps, self.deterministic, self.sizes = num_steps, deterministic, {}

    @cached_property
    def transitions(self) -> list[DifferentiableTransition]:
        collector, policy = self.collector, self.collector.policy
        options = APGConfig(segment_length=self.num_steps, deterministic_actions=self.deterministic)

        def steps(*arrays: Any) -> Any:
            params, taps = ejax_params(policy, *arrays), jnp.zeros((self.num_steps, 4))
            after, made, _ = _play(
                params, taps, self.carry, self.key, policy=collector.made, env=collector.jax_env, options=options
            )
            distribution, _ = collector.made.apply(params, made.obs)
            # again, by the keys that ``play`` makes of this one: it does not return its actions
            keys = jax.vmap(lambda key: jax.random.split(key)[0])(jax.random.split(self.key, self.num_steps))
            sampled = jax.vmap(lambda each, key: each.sample(key))(distribution, keys)
            action = distribution.mode() if self.deterministic else sampled
            return (made.reward, action), (after, made)

        (reward, action), (after, made) = jax_call(steps, *policy.parameters())
        collector.carry = after
        rows = zip(reward, action, *map(to_torch, (made.obs, made.terminated, made.truncated)), strict=True)
        return [
            DifferentiableTransition(obs, {"action": a}, r, terminated, truncated, None, {})
            for r, a, obs, terminated, truncated in rows
        ]

    @property
    def rewards(self) -> torch.Tensor:
        return torch.stack([transition.reward for transition in self.transitions])


_play = jax.jit(play, static_argnames=("policy", "env", "options"))


@struct.dataclass
class _Acted(Distribution):
    """Actions and log-probabilities that a torch policy gave."""

    action: Any
    logged: Any

    def sample(self, key: Any) -> Any:
        return self.action

    def mode(self) -> Any:
        return self.action

    def log_prob(self, action: Any) -> Any:
        return self.logged


class _TorchPolicy:
    """A policy of torch's, called from ejax's program."""

    def __init__(self, policy: Any, action_dim: int, deterministic: bool) -> None:
        self.policy, self.action_dim, self.deterministic = policy, action_dim, deterministic

    def apply(self, params: Any, obs: Any) -> Any:
        rows = flatten_observation(obs)
        shapes = [jax.ShapeDtypeStruct(rows.shape[:-1] + end, jnp.float32) for end in ((self.action_dim,), (), ())]
        action, log_prob, value = jax.pure_callback(self._act, shapes, rows)
        return _Acted(action, log_prob), value

    def _act(self, rows: Any) -> Any:
        flat = to_torch(rows).reshape(-1, rows.shape[-1])
        td = self.policy.get_action(TensorDict({"obs": flat}, [len(flat)]), deterministic=self.deterministic)
        names = [name if name in td else None for name in ("action", "sample_log_prob", "value")]
        made = [torch.zeros(len(flat)) if name is None else td[name] for name in names]
        return [x.numpy().astype(np.float32).reshape(rows.shape[:-1] + tuple(x.shape[1:])) for x in made]


class _Spaced:
    """A torch environment with the spaces that it has not."""

    def __init__(self, env: Any, action_dim: int, seed: int | None = None) -> None:
        self.env, self.num_envs, self.seed = env, env.num_envs, seed
        obs = env.reset()[0]
        self.single_observation_space = _space(obs)
        self.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (action_dim,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        # EmbodiChain's environments are given the number itself, ejax's the seeds of their rows
        return self.env.reset(seed=self.seed)

    def step(self, action: Any) -> Any:
        return self.env.step(action)

    def close(self) -> None: ...


def _space(obs: Any) -> Any:
    if isinstance(obs, Mapping):
        return gymnasium.spaces.Dict({name: _space(obs[name]) for name in obs.keys()})  # noqa: SIM118  # a TensorDict
    return gymnasium.spaces.Box(-np.inf, np.inf, tuple(obs.shape[1:]))


class SyncCollector:
    """ejax's collector of environments outside JAX."""

    def __init__(self, env: Any, policy: Any, device: Any) -> None:
        self.env, self.vector = env, TorchVector(_Spaced(env, policy.action_dim))
        if isinstance(policy, nn.Module):
            self.policy, self.params = ejax_policy(policy), ejax_params(policy, *map(to_jax, policy.parameters()))
        else:
            self.policy, self.params = _TorchPolicy(policy, policy.action_dim, False), {"params": {}}

    def collect(self, num_steps: int, rollout: Any) -> TensorDict:
        if hasattr(self.env, "set_rollout_buffer"):  # it writes there too, which ejax does not read
            fields = dict.fromkeys(("reward", "done", "terminated", "truncated"))
            self.env.set_rollout_buffer({name: torch.zeros(self.env.num_envs, num_steps) for name in fields})
        collector = HostCollector(self.policy, [self.vector], num_steps=num_steps, seed=0)
        made = collector.collect(self.params, jax.random.key(0), index=0).rollout
        flat = replace(made, obs=flatten_observation(made.obs))
        return rollout_to_tensordict(flat, "head", last_obs=flatten_observation(collector.workers[0].obs))


class RolloutBuffer:
    """The last rollout: a value, which ejax's collector makes (benchmarks/notes/defects.md, D3)."""

    def __init__(self, **sizes: Any) -> None:
        self.sizes = sizes

    def start_rollout(self) -> None: ...

    def add(self, rollout: TensorDict) -> None:
        self.rollout = rollout

    def get(self, flatten: bool) -> TensorDict:
        return self.rollout


def evaluate_episodes(policy: Any, env: Any, num_episodes: int, device: str, seed: int) -> dict[str, float]:
    """Evaluate by EmbodiChain's choice of episodes, ``first_finished`` in ejax (benchmarks/notes/defects.md, H7)."""
    action_dim = env.single_action_space.shape[0]
    vector, made = TorchVector(_Spaced(env, action_dim, seed)), _TorchPolicy(policy, action_dim, True)
    episodes = evaluate_host(made, vector, {}, seed, num_episodes=num_episodes, choice="first_finished")
    return {name: float(x) for name, x in summarize(episodes).items()}
