"""From a config to the parts that it names."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from ejax.algorithms.record import Algorithm
from ejax.algorithms.step import RunState, Step, init_run_state, make_rollout_step
from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.envs.description import describe
from ejax.runtime.processes import JOIN, count, unjoined
from ejax.training.environments import build_env, check_own_env
from ejax.training.given import Given, adopt_envs
from ejax.training.host_parts import group_size, host_parts
from ejax.training.parts import Parts
from ejax.training.policies import build_policy, check_own_policy, uses_dropout
from ejax.training.steppers import DeviceStepper
from ejax.training.teacher import load_teacher
from ejax.types import Env, HostEnv, Policy

_MAX_UPDATES_PER_DISPATCH = 64


def build(
    config: RunConfig,
    *,
    quarantine: Path = Path("quarantine"),
    absent: Sequence[jax.Device] | None = None,
    given: Given | None = None,
) -> Parts:
    """Make environment, policy, optimizer and what steps them.

    Args:
        config: bound, or as it was read; see ``ejax.config.bind``.
        quarantine: folder for what broke host environments.
        absent: devices that are not here, to compile for. Several of them share the environments, whatever
            ``trainer.distributed`` says, and of a state on devices there are only the shapes.
        given: objects of the caller's, instead of those that the config names.

    Raises:
        ConfigError: arguments that the environment or policy refuses, ``policy.action_dim`` that is not the env's, or
            an algorithm and a collector that do not go together.
    """
    if config.population is not None:
        text = "is several runs, and this is about one; leave it out, or name a member's config: RUN/members/I/configs"
        raise ConfigError([Problem("population", text)])
    config = bind(config)
    trainer, algorithm = config.trainer, config.algorithm.record
    devices = all_devices(config) if trainer.distributed and absent is None else None

    if trainer.shard_parameters and absent is None and (not trainer.distributed or count() > 1):
        text = "got true, which needs trainer.distributed: true, in one process"
        raise ConfigError([Problem("trainer.shard_parameters", f"{text}; with several, parameters are whole on each")])

    # the environment comes first: it decides the policy's shapes, and an algorithm may refuse it
    size, eval_env = group_size(config, len(devices or [None])), None
    if given is None:
        first = build_env(config, num_envs=size, quarantine=quarantine)
    else:
        first, eval_env = adopt_envs(config, given, num_envs=size, quarantine=quarantine)
    check_own_env(config, first)
    if problems := list(algorithm.env_problems(config.algorithm.cfg, first)):
        raise ConfigError(problems)
    policy = build_policy(config.policy, first) if given is None else given.policy
    check_own_policy(config.policy, policy, first)
    if problems := list(algorithm.policy_problems(config.algorithm.cfg, policy)):
        raise ConfigError(problems)
    notes = describe(first).notes
    if algorithm.with_teacher is not None:
        teacher, told = load_teacher(config, first)
        notes += told
        algorithm = algorithm.with_teacher(teacher)
    optimizer = algorithm.make_optimizer(config.algorithm.cfg)
    key, dropout = jax.random.key(trainer.seed), uses_dropout(config.policy, policy)

    # where the observations come from decides what steps the run: demonstrations, the program itself, a collector
    if config.data is not None:
        if devices:
            raise ConfigError([Problem("trainer.distributed", "got true, but cloning runs on one device; give false")])
        from ejax.training.cloning import cloning_parts  # brings the data engine, which no other run needs

        parts = cloning_parts(config, config.data, policy, first, optimizer, key, dropout=dropout)
        return replace(parts, notes=notes)
    if not isinstance(first, HostEnv) and trainer.collector.mode in ("auto", "device"):
        if absent is not None:
            devices = list(absent) if len(absent) > 1 else None
        make = partial(_device_parts, config, algorithm, policy, first, optimizer, key, devices, dropout=dropout)
        return replace(make(shapes_only=absent is not None), notes=notes, eval_env=eval_env)
    make_host = partial(host_parts, config, policy, first, optimizer, key)
    parts = make_host(devices=devices, dropout=dropout, quarantine=quarantine)
    return replace(parts, notes=notes, eval_env=eval_env)


def _device_parts(
    config: RunConfig,
    algorithm: Algorithm,
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    devices: list[jax.Device] | None,
    *,
    dropout: bool,
    shapes_only: bool,
) -> Parts:
    """Environments and update in one program."""
    trainer, options = config.trainer, config.algorithm.cfg
    step = device_step(config, algorithm, policy, env, optimizer, options, dropout=dropout)

    # the whole first state in one program; environments of all devices are made here and spread by the stepper
    among = len(devices) if devices else 1
    make_first = partial(first_state, config, algorithm, policy, env, optimizer, key, num_envs=among * trainer.num_envs)
    state = jax.eval_shape(make_first) if shapes_only else make_first()

    # a bound only: how many updates go into a dispatch is a traced number, so that one program serves all
    per_dispatch = trainer.updates_per_dispatch
    max_updates = _MAX_UPDATES_PER_DISPATCH if per_dispatch == "auto" else per_dispatch
    functions = (algorithm.update, algorithm.make_step, algorithm.resets)
    what = None if algorithm.with_teacher else (*functions, policy, env, options, trainer.buffer_size, dropout)
    stepper = DeviceStepper(
        step, key, max_updates, devices=devices, shard_parameters=trainer.shard_parameters, what=what
    )
    return Parts(policy, env, optimizer, stepper, state, among)


def device_step(
    config: RunConfig,
    algorithm: Algorithm,
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    options: Any,
    *,
    dropout: bool,
) -> Step:
    """Environments and update.

    Args:
        options: of the algorithm; ``config.algorithm.cfg``, or with arrays in it.
    """
    num_steps = config.trainer.buffer_size
    if algorithm.make_step is not None:
        return algorithm.make_step(policy, env, optimizer, options, num_steps=num_steps, dropout=dropout)
    return make_rollout_step(
        policy,
        env,
        optimizer,
        options,
        update=algorithm.update,
        resets=algorithm.resets(options),
        num_steps=num_steps,
        dropout=dropout,
    )


def first_state(
    config: RunConfig,
    algorithm: Algorithm,
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    num_envs: int,
) -> RunState:
    """The state at update 0, with environments inside the program."""
    options = config.algorithm.cfg
    state = init_run_state(
        policy,
        env,
        optimizer,
        key,
        num_envs=num_envs,
        reference=algorithm.keeps_reference(options),
        target=algorithm.keeps_target,
        scales_rewards=config.trainer.normalize_reward,
    )
    if algorithm.make_own is None:
        return state
    return replace(state, own=algorithm.make_own(options, policy, env, num_envs))


def num_devices(config: RunConfig) -> int:
    """Devices that would share the environments."""
    return len(all_devices(config)) if config.trainer.distributed else 1


def all_devices(config: RunConfig) -> list[jax.Device]:
    """The devices of the configured kind, in this machine or in those of all processes that train together."""
    if scheduler := unjoined():
        text = f"got true in one of several processes of {scheduler} that do not know each other; {JOIN}"
        raise ConfigError([Problem("trainer.distributed", text)])
    return jax.devices(config.trainer.device.partition(":")[0])
