"""Algorithms that hold what their pure functions hand on, in EmbodiChain's form, for training loops of your own:

    algorithm = PPO(PPOConfig(learning_rate=3e-4), policy)
    algorithm.initialize_buffer(num_steps=128, num_envs=64)
    for _ in range(100):
        algorithm.collect_rollout(env, policy, None, 128)
        losses = algorithm.update()

The numbers are those of ``ejax.unroll`` and of the record's ``update``, which are compiled once for all loops.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejax.algorithms.record import Algorithm, RunShape, find_algorithm
from ejax.algorithms.step import init_host_run_state
from ejax.collectors.collect import StepCallback, collect_rollout
from ejax.rollout import EnvCarry, reset, restart
from ejax.schema.problems import ConfigError
from ejax.schema.registry import resolve
from ejax.types import Array, Env, HostEnv, Key, Policy, PyTree, Rollout, TrainState


class BaseAlgorithm:
    """An algorithm of rollouts with its parameters, its environments under way and the last rollout.

    A subclass names its ``record``; ``Trainer`` takes such a class's object, and ``register_algo`` the class. One that
    overrides ``collect_rollout`` and ``update`` instead serves loops of your own alone.

    Args:
        cfg: the record's ``Config``, or a mapping that makes one. None: the defaults.
        record: in place of the class's.
        seed: decides parameters, starts of episodes, actions and minibatches, as ``trainer.seed`` does.
        dropout: the policy drops units in training.
    """

    record: ClassVar[Algorithm | None] = None

    def __init__(
        self, cfg: Any, policy: Policy, *, record: Algorithm | None = None, seed: int = 0, dropout: bool = False
    ) -> None:
        if record is not None:
            self.record = record  # type: ignore[misc]  # this object's own
        if self.record is not None and (cfg is None or isinstance(cfg, Mapping)):
            cfg = self.record.Config(**(cfg or {}))
        self.cfg, self.policy = cfg, policy
        self.state: TrainState | None = None
        self.envs: EnvCarry | None = None
        """The environments between two rollouts."""
        self.rollout: Rollout | None = None
        """The last one that was collected, leaves [T, N, ...]."""
        self.num_updates = 0
        self._key, self._seed, self._dropout = jax.random.key(seed), seed, dropout
        self._shape: tuple[int, int] | None = None

    @property
    def device(self) -> jax.Device:
        """The one that the parameters are on; before there are any, JAX's default."""
        (device,) = jnp.zeros(()).devices() if self.state is None else self.state.step.devices()
        return device

    def bind_schedule(self, total_updates: int) -> None:
        """Give a learning-rate schedule without a horizon this one."""
        self.cfg = self._record().bind(self.cfg, total_updates)

    def initialize_buffer(self, num_steps: int, num_envs: int, obs_dim: Any = None, action_dim: Any = None) -> None:
        """Fix the sizes of all rollouts, T and N; observations and actions are as environment and policy have them.

        Raises ConfigError: options that do not fit rollouts of this size.
        """
        del obs_dim, action_dim
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
            obs: where the environments are, as ``ejax.collect_rollout`` takes it: given by ``ejax.reset``, or of a
                ``HostEnv`` by its ``reset``. None: they go on, at first from new episodes.
            on_step_callback: see ``ejax.collect_rollout``.

        Raises:
            ConfigError: the algorithm cannot learn in this environment, or with this policy.
            ValueError: another policy, or other sizes than ``initialize_buffer`` was given.
        """
        record = self._record()
        if policy != self.policy:
            raise ValueError(f"got another policy, {type(policy).__name__}; give the one that the algorithm trains")
        if self.state is None and (
            problems := [*record.env_problems(self.cfg, env), *record.policy_problems(self.cfg, policy)]
        ):
            raise ConfigError(problems)
        # as a run's step: the same numbers
        key_collect, _, key_reset = self._keys()
        envs = self._begin(env, self.envs if obs is None else obs, key_reset)
        num_envs = len(jax.tree.leaves(envs.obs if isinstance(envs, EnvCarry) else envs)[0])
        if self._shape is None:
            self.initialize_buffer(num_steps, num_envs)
        if self._shape != (num_steps, num_envs):
            raise ValueError(f"rollouts are {self._shape} steps and environments, got {(num_steps, num_envs)}")
        if self.state is None:
            self.state = self._first_state(envs.obs if isinstance(envs, EnvCarry) else envs)
        self.rollout, self.envs = collect_rollout(
            env, policy, self.state.params, envs, key_collect, num_steps, on_step_callback, dropout=self._dropout
        )
        seen = {
            f"{group}/{name}": x
            for group, of in self.rollout.info.items()
            if isinstance(of, dict)
            for name, x in of.items()
        }
        means = {name: x.mean() for name, x in {"reward": self.rollout.reward, **seen}.items() if x.ndim == 2}
        return {name: float(x) for name, x in jax.device_get(means).items()}

    def update(self) -> dict[str, float]:
        """Learn from the last rollout. Returns the update's metrics. Raises ValueError: nothing was collected."""
        record = self._record()
        if self.state is None or self.rollout is None:
            raise ValueError("there is no rollout to learn from; call collect_rollout first")
        static = {"policy": self.policy, "optimizer": record.make_optimizer(self.cfg), "config": self.cfg}
        self.state, metrics = record.update(self.state, self.rollout, self._keys()[1], **static)
        self.num_updates, self.rollout = self.num_updates + 1, None
        return {name: float(x) for name, x in jax.device_get(metrics).items()}

    def _record(self) -> Algorithm:
        record, name = self.record, type(self).__name__
        if record is None:
            raise NotImplementedError(f"{name} has no record; override this method, or give {name}.record")
        if record.update is None or record.learns_from == "demonstrations":
            text = "does not learn from rollouts; Trainer(env, policy, algorithm).train() trains with it"
            raise NotImplementedError(f"the algorithm of {record.Config.__name__} {text}")
        return record

    def _keys(self) -> Array:
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
            raise ValueError("how many environments there are is not known; call initialize_buffer first")
        # the first ones of a run
        key = key if resets.restart else jax.random.split(self._key)[1]
        return reset(env, key, self._shape[1], size)

    def _first_state(self, obs: PyTree) -> TrainState:
        record = self._record()
        keeps = {"reference": record.keeps_reference(self.cfg), "target": record.keeps_target}
        return init_host_run_state(self.policy, record.make_optimizer(self.cfg), self._key, obs, **keeps).train


def build_algo(name: str, cfg_kwargs: Mapping[str, Any], policy: Policy, device: None = None) -> BaseAlgorithm:
    """Make the algorithm of a registered name, or of ``package.module:ALGORITHM``, for ``Trainer`` or an own loop.

    Args:
        cfg_kwargs: the options, as in ``algorithm.cfg``.
        device: of EmbodiChain's; arrays are where JAX puts them.

    Raises:
        ValueError: unknown or impossible options, or a ``device``.
        ImportError, UnknownNameError, UntrustedCodeError: no such algorithm, as ``ejax.schema.registry.resolve``.
    """
    if device is not None:
        raise ValueError(f"device: got {device}; leave it out: a run has Trainer(..., device=…), a loop JAX's own")
    made = resolve("algorithm", name)
    if isinstance(made, type) and issubclass(made, BaseAlgorithm):
        return made(cfg_kwargs, policy)
    return BaseAlgorithm(cfg_kwargs, policy, record=find_algorithm(name))
