"""Algorithms that hold the state of their pure functions, in EmbodiChain's form, for your own training loops:

    algorithm = PPO(PPOConfig(learning_rate=3e-4), policy)
    algorithm.initialize_buffer(num_steps=128, num_envs=64)
    for _ in range(100):
        algorithm.collect_rollout(env, policy, None, 128)
        losses = algorithm.update()

The numbers are those of ``ejax.unroll`` and of the record's ``update``, which are compiled once for all loops.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejax.algorithms.record import Algorithm, RunShape, find_algorithm
from ejax.algorithms.step import init_host_run_state, step_metrics
from ejax.collectors.collect import StepCallback, collect_rollout
from ejax.policies.heads import acting_problems, uses_dropout
from ejax.rollout import EnvCarry, reset, restart
from ejax.schema.problems import ConfigError
from ejax.schema.registry import resolve
from ejax.types import Array, Env, HostEnv, Key, Metrics, Policy, PyTree, Rollout, TrainState


class BaseAlgorithm:
    """An algorithm of rollouts with its parameters, its environments under way and the last rollout.

    A subclass names its ``record``: ``Trainer`` takes such an object, and ``register_algo`` the class. One that
    overrides ``collect_rollout`` and ``update`` instead serves your own loops alone.

    Args:
        cfg: the record's ``Config``, or a mapping that makes one. None: the defaults.
        record: in place of the class's.
        seed: decides all random numbers, as ``trainer.seed`` does.
    """

    record: Algorithm | None = None

    def __init__(self, cfg: Any, policy: Policy, *, record: Algorithm | None = None, seed: int = 0) -> None:
        self.record = record or self.record
        if self.record is not None and (cfg is None or isinstance(cfg, Mapping)):
            cfg = self.record.Config(**(cfg or {}))
        self.cfg, self.policy, self.num_updates = cfg, policy, 0
        self.state: TrainState | None = None
        self.envs: EnvCarry | None = None
        """The environments between two rollouts."""
        self.rollout: Rollout | None = None
        """The last one, which ``update`` learns from and takes away; leaves [T, N, ...]."""
        self._key, self._seed, self._dropout = jax.random.key(seed), seed, uses_dropout(policy)
        self._shape: tuple[int, int] | None = None

    @property
    def device(self) -> jax.Device:
        """The one that the parameters are on; before there are any, JAX's default."""
        (device,) = (self._key if self.state is None else self.state.step).devices()
        return device

    def bind_schedule(self, total_updates: int) -> None:
        """Set the horizon of a learning-rate schedule that has none."""
        self.cfg = self._record().bind(self.cfg, total_updates)

    def initialize_buffer(self, num_steps: int, num_envs: int, obs_dim: Any = None, action_dim: Any = None) -> None:
        """Fix the sizes of all rollouts, T and N. Raises ConfigError: options that do not fit them.

        ``obs_dim`` and ``action_dim`` are for buffers of a subclass; the rollouts here follow environment and policy.
        """
        shape = RunShape(num_envs=num_envs, buffer_size=num_steps, policy=type(self.policy).__name__)
        if problems := list(self._record().problems(self.cfg, shape)):
            raise ConfigError(problems)
        self._shape = num_steps, num_envs

    def collect_rollout(
        self,
        env: Env | HostEnv,
        policy: Policy,
        obs: EnvCarry | PyTree | None,
        num_steps: int,
        on_step_callback: StepCallback | None = None,
    ) -> dict[str, float]:
        """Make T steps of N environments. Returns means over the steps: ``reward``, and what ``info`` has of each.

        Args:
            obs: the environments' start, as ``ejax.collect_rollout`` takes it: from ``ejax.reset``, or of a ``HostEnv``
                from its ``reset``. None: they continue, at first with new episodes.
            on_step_callback: see ``ejax.collect_rollout``.

        Raises:
            ConfigError: the algorithm cannot learn in this environment, or with this policy.
            ValueError: another policy, or other sizes than ``initialize_buffer`` was given.
        """
        record, begins = self._record(), self.state is None
        if policy != self.policy:
            raise ValueError(f"got another policy, {type(policy).__name__}; pass the one that the algorithm trains")
        if begins:
            of_env = list(record.action_problems(env.action_space)) or list(acting_problems(policy, env.action_space))
            of_env += record.env_problems(self.cfg, env)
            if problems := [*of_env, *record.policy_problems(self.cfg, policy)]:
                raise ConfigError(problems)
        key_collect, _, key_reset = self._keys()
        envs = self._begin(env, self.envs if obs is None else obs, key_reset)
        size = num_steps, len(jax.tree.leaves(envs)[0])
        if self._shape is None:
            self.initialize_buffer(*size)
        if self._shape != size:
            raise ValueError(f"rollouts are {self._shape} steps and environments, got {size}")
        if self.state is None:
            keeps = {"reference": record.keeps_reference(self.cfg), "target": record.keeps_target}
            optimizer, seen = record.make_optimizer(self.cfg), envs.obs if isinstance(envs, EnvCarry) else envs
            self.state = init_host_run_state(policy, optimizer, self._key, seen, **keeps).train
        self.rollout, self.envs = collect_rollout(
            env, policy, self.state.params, envs, key_collect, num_steps, on_step_callback, dropout=self._dropout
        )
        return _floats({"reward": self.rollout.reward.mean(), **step_metrics(self.rollout.info, self.rollout.valid)})

    def update(self) -> dict[str, float]:
        """Learn from the last rollout. Returns the update's metrics. Raises ValueError: nothing was collected."""
        record = self._record()
        if self.state is None or self.rollout is None:
            raise ValueError("no rollout has been collected; call collect_rollout first")
        static = {"policy": self.policy, "optimizer": record.make_optimizer(self.cfg), "config": self.cfg}
        self.state, metrics = record.update(self.state, self.rollout, self._keys()[1], **static)
        self.num_updates, self.rollout = self.num_updates + 1, None
        return _floats(metrics)

    def _record(self) -> Algorithm:
        record, name = self.record, type(self).__name__
        if record is None:
            raise NotImplementedError(f"{name} has no record; override this method, or set {name}.record")
        if record.update is None or record.make_own is not None or record.learns_from == "demonstrations":
            text = "does not learn from rollouts; Trainer(env, policy, algorithm).train() trains with it"
            raise NotImplementedError(f"the algorithm of {record.Config.__name__} {text}")
        return record

    def _keys(self) -> Array:
        """Draw the keys of a run's step: to collect, to update, to reset."""
        return jax.random.split(jax.random.fold_in(self._key, self.num_updates), 3)

    def _begin(self, env: Env | HostEnv, at: EnvCarry | PyTree | None, key: Key) -> EnvCarry | PyTree:
        """Start new episodes, where there are none yet, or the algorithm wants them for each rollout."""
        resets = self._record().resets(self.cfg)
        if at is not None and not resets.restart:
            return at
        size = resets.group_size if resets.restart else 1
        if isinstance(env, HostEnv):
            draw = np.random.SeedSequence([self._seed, self.num_updates]).generate_state(env.num_envs // size)
            return env.reset(np.repeat(draw, size).astype(np.uint32))
        if at is not None:
            return restart(env, at, reset(env, key, len(jax.tree.leaves(at.obs)[0]), size), size)
        if self._shape is None:
            raise ValueError("the number of environments is not known; call initialize_buffer first")
        return reset(env, key if resets.restart else jax.random.split(self._key)[1], self._shape[1], size)


def _floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(x) for name, x in jax.device_get(metrics).items()}


def build_algo(name: str, cfg_kwargs: Mapping[str, Any], policy: Policy, device: None = None) -> BaseAlgorithm:
    """Make the algorithm of a registered name, or of ``package.module:ALGORITHM``, for ``Trainer`` or an own loop.

    Args:
        cfg_kwargs: the options, as in ``algorithm.cfg``.
        device: of EmbodiChain's; refused, since arrays are where JAX puts them.

    Raises ValueError for options; errors of ``ejax.schema.registry.resolve`` for names.
    """
    if device is not None:
        raise ValueError(f"device: got {device}; leave it out: a run has Trainer(..., device=…), a loop JAX's own")
    made = resolve("algorithm", name)
    if isinstance(made, type) and issubclass(made, BaseAlgorithm):
        return made(cfg_kwargs, policy)
    return BaseAlgorithm(cfg_kwargs, policy, record=find_algorithm(name))
