"""From a config to the objects that it names."""

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import optax

from ejax.algorithms.bc import BCConfig
from ejax.algorithms.differentiable import check_differentiable
from ejax.cloning import BCStepper, make_clone
from ejax.collectors import AsyncCollector, HostCollector, Schedule
from ejax.collectors.config import CollectorConfig
from ejax.config import ConfigError, PolicyConfig, Problem, RunConfig
from ejax.config.data import DataConfig
from ejax.config.spaces import space_problems
from ejax.demonstrations import Demonstrations
from ejax.distributions import action_spec
from ejax.envs.action_chunk import ActionChunk
from ejax.envs.adapters.gymnasium import vectorize
from ejax.envs.calls import call_env
from ejax.envs.guarded import GuardedEnv
from ejax.envs.pure_host import PureHostEnv
from ejax.optim import bind_schedule, make_actor_critic_optimizer, make_optimizer
from ejax.registry import resolve
from ejax.steppers import AsyncStepper, DeviceStepper, HostStepper, Stepper
from ejax.steps import STEPS, UPDATES, RunState, init_host_run_state, init_run_state, make_learn
from ejax.types import Env, HostEnv, Phase, Policy, PyTree

_MAX_UPDATES_PER_DISPATCH = 64


@dataclass(frozen=True)
class Parts:
    """What a run is made of. Nothing is compiled yet. ``stepper`` owns the environments that need closing."""

    policy: Policy
    env: Env | HostEnv
    optimizer: optax.GradientTransformation
    stepper: Stepper
    state: RunState
    """At update 0, without ``policy.init_from``."""
    num_devices: int = 1
    """That share the environments, each ``trainer.num_envs`` of them."""


def build(config: RunConfig, *, schedule_updates: int | None = None, quarantine: Path = Path("quarantine")) -> Parts:
    """Make environment, policy, optimizer and what steps them.

    Args:
        schedule_updates: horizon of a learning-rate schedule that has none of its own. None: the run's updates.
        quarantine: folder for what broke host environments.

    Raises:
        ConfigError: arguments that the environment or policy refuses, ``policy.action_dim`` that is not the env's, or
            an algorithm and a collector that do not go together.
    """
    trainer = config.trainer
    options: Any = config.algorithm.cfg
    options = options.model_copy(
        update={"lr_scheduler": bind_schedule(options.lr_scheduler, schedule_updates or trainer.num_updates)}
    )
    critic_optimizer = getattr(options, "critic_optimizer", None)
    if critic_optimizer is None:
        optimizer = make_optimizer(options.optimizer)
    else:
        optimizer = make_actor_critic_optimizer(options.optimizer, critic_optimizer)
    keep_reference = getattr(options, "kl_coef", 0.0) > 0.0 or critic_optimizer is not None
    key = jax.random.key(trainer.seed)
    devices = _all_devices(config) if trainer.distributed else None
    if devices and hasattr(options, "batch_size"):
        options = options.model_copy(update={"batch_size": len(devices) * options.batch_size})

    first = build_env(config, num_envs=trainer.num_envs // trainer.collector.num_groups, quarantine=quarantine)
    policy = build_policy(config.policy, first)
    if config.data is not None:
        if devices:
            raise ConfigError([Problem("trainer.distributed", "got true, but cloning runs on one device; give false")])
        return _cloning_parts(config, config.data, options, policy, first, optimizer, key)
    if not isinstance(first, HostEnv) and trainer.collector.mode in ("auto", "device"):
        if config.algorithm.name in ("apg", "shac"):
            try:
                check_differentiable(first)
            except ValueError as error:
                raise ConfigError([Problem("algorithm.name", f"got '{config.algorithm.name}', but {error}")]) from error
        make_step = STEPS.get(config.algorithm.name) or resolve("algorithm", config.algorithm.name).make_step
        step = make_step(
            policy, first, optimizer, options, num_steps=trainer.buffer_size, dropout=uses_dropout(config.policy)
        )
        num_devices = len(devices) if devices else 1
        num_envs = num_devices * trainer.num_envs
        state = init_run_state(policy, first, optimizer, key, num_envs=num_envs, keep_reference=keep_reference)
        per_dispatch = trainer.updates_per_dispatch
        most = _MAX_UPDATES_PER_DISPATCH if per_dispatch == "auto" else per_dispatch
        return Parts(policy, first, optimizer, DeviceStepper(step, key, most, devices=devices), state, num_devices)

    if devices:
        text = f"got true, but {config.env.id} is stepped outside JAX; give trainer.collector.learner_devices instead"
        raise ConfigError([Problem("trainer.distributed", text)])
    groups = _host_groups(config, first, quarantine)
    stepper = _host_stepper(config, options, policy, optimizer, groups, key)
    obs = sample_obs(groups[0], trainer.num_envs)
    state = init_host_run_state(policy, optimizer, key, obs, keep_reference=keep_reference)
    return Parts(policy, first, optimizer, stepper, replace(state, envs=stepper.collector.state()))


def _cloning_parts(
    config: RunConfig,
    data: DataConfig,
    options: BCConfig,
    policy: Policy,
    env: Env | HostEnv,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
) -> Parts:
    """The environment is there for its spaces, and to be evaluated in."""
    space = env.action_space
    continuous = isinstance(space, gymnasium.spaces.Box)
    if options.loss == "mse" and not continuous:
        text = f"got 'mse', but the actions of {config.env.id} are choices: {space}; give nll"
        raise ConfigError([Problem("algorithm.cfg.loss", text)])
    obs = sample_obs(env, 1)
    demonstrations = Demonstrations(data, options.batch_size * options.updates_per_step, obs)
    stepper = BCStepper(
        demonstrations,
        make_clone(policy, optimizer, options, dropout=uses_dropout(config.policy)),
        key,
        action_chunk=config.env.cfg.get("action_chunk", 1),
        num_outputs=space.shape[0] if isinstance(space, gymnasium.spaces.Box) else 0,
        env=env if isinstance(env, HostEnv) else None,
    )
    state = init_host_run_state(policy, optimizer, key, obs)
    return Parts(policy, env, optimizer, stepper, replace(state, envs=demonstrations.state()))


def _host_groups(config: RunConfig, first: Env | HostEnv, quarantine: Path) -> list[HostEnv]:
    """The groups of environments, the first of which there is."""
    trainer = config.trainer
    num_groups, size = trainer.collector.num_groups, trainer.num_envs // trainer.collector.num_groups
    if not isinstance(first, HostEnv):
        return [PureHostEnv(first, size) for _ in range(num_groups)]
    if trainer.collector.mode == "device":
        text = f"got 'device', but {config.env.id} lives outside JAX; allowed: auto, host, async"
        raise ConfigError([Problem("trainer.collector.mode", text)])
    others = [build_env(config, num_envs=size, quarantine=quarantine) for _ in range(num_groups - 1)]
    return [first, *(env for env in others if isinstance(env, HostEnv))]


def _host_stepper(
    config: RunConfig,
    options: Any,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    groups: Sequence[HostEnv],
    key: jax.Array,
) -> HostStepper:
    """A collector of these groups, and updates from what it collects."""
    trainer, wanted, name = config.trainer, config.trainer.collector, config.algorithm.name
    update = UPDATES.get(name) or getattr(resolve("algorithm", name), "update", None)
    if update is None:
        text = f"{name} needs an environment inside its program; with host environments: {', '.join(UPDATES)}"
        raise ConfigError([Problem("algorithm.name", text)])
    group_size = 1
    if getattr(options, "reset_every_rollout", False) and options.shared_start:
        group_size = options.group_size
        if not groups[0].seeds_rows:
            text = f"is true, but the starts of {config.env.id} cannot be chosen; give false"
            raise ConfigError([Problem("algorithm.cfg.shared_start", text)])
        if groups[0].num_envs % group_size:
            text = f"got {wanted.num_groups} groups of {groups[0].num_envs} envs; group_size {group_size} must divide"
            raise ConfigError([Problem("trainer.collector.num_groups", text)])
    actors = [_device(each, "trainer.collector.actor_devices") for each in wanted.actor_devices]
    learners = [_device(each, "trainer.collector.learner_devices") for each in wanted.learner_devices]
    if learners and trainer.num_envs % len(learners):
        text = f"got {len(learners)} devices for num_envs {trainer.num_envs}, which they must divide"
        raise ConfigError([Problem("trainer.collector.learner_devices", text)])
    collector = HostCollector(
        policy,
        groups,
        num_steps=trainer.buffer_size,
        seed=trainer.seed,
        dropout=uses_dropout(config.policy),
        restart=getattr(options, "reset_every_rollout", False),
        group_size=group_size,
        devices=actors or ([_device(trainer.device, "trainer.device")] if learners else None),
    )
    learn = make_learn(policy, optimizer, options, update)
    if wanted.mode != "async":
        return HostStepper(collector, learn, key, devices=learners or None)
    background = AsyncCollector(
        collector,
        key,
        schedule=_schedule(wanted),
        stop_timeout_s=wanted.stop_timeout_s,
        env_timeout_s=wanted.env_timeout_s,
    )
    return AsyncStepper(background, learn, devices=learners or None)


def _schedule(wanted: CollectorConfig) -> Schedule:
    recorded, path = None, wanted.replay_schedule
    try:
        if path is not None:
            recorded = tuple(int(version) for version in json.loads(Path(path).read_text())["versions"])
        return Schedule(wanted.max_staleness, wanted.schedule == "free", recorded)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"'{path}' is no schedule.json for this run: {error}"
        raise ConfigError([Problem("trainer.collector.replay_schedule", text)]) from error


def rows_per_update(config: RunConfig, parts: Parts) -> int:
    """Environment steps (of cloning: samples) of one update, on all devices."""
    return config.trainer.buffer_size * config.trainer.num_envs * parts.num_devices


def _all_devices(config: RunConfig) -> list[jax.Device]:
    """The devices of the configured kind in this machine."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or jax.process_count() > 1:
        text = "got true in one of several processes; one process drives all devices of a machine: start it by itself"
        raise ConfigError([Problem("trainer.distributed", text)])
    return jax.devices(config.trainer.device.partition(":")[0])


def _device(name: str, key: str) -> jax.Device:
    """``cuda:1`` and the like."""
    platform, _, index = name.partition(":")
    try:
        devices = jax.devices(platform)
        return devices[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        here = ", ".join(f"{each.platform}:{each.id}" for each in jax.devices())
        raise ConfigError([Problem(key, f"got '{name}'; the devices of jax here are {here}")]) from error


def sample_obs(env: Env | HostEnv, num_rows: int) -> PyTree:
    """Zeros in the form of ``num_rows`` observations."""

    def zeros(space: Any) -> PyTree:
        if isinstance(space, gymnasium.spaces.Dict):
            return {name: zeros(part) for name, part in space.spaces.items()}
        return np.zeros((num_rows, *space.shape), np.float32)

    return zeros(env.observation_space)


def build_env(
    config: RunConfig, *, phase: Phase = "train", num_envs: int | None = None, quarantine: Path = Path("quarantine")
) -> Env | HostEnv:
    """The environment that ``config.env`` names, with the phase's ``trainer.events``.

    Args:
        num_envs: rows of a host environment. None: ``trainer.num_envs``.
        quarantine: folder for what broke a host environment.

    Raises:
        ConfigError: its constructor refuses the arguments.
    """
    trainer = config.trainer
    num_rows = trainer.num_envs if num_envs is None else num_envs
    options = dict(config.env.cfg)
    if events := trainer.events.of(phase):
        options["interval_events"] = events
    make = partial(make_env, config.env.id, options, num_envs=num_rows)
    try:
        env = call_env(config.env.id, "make", make)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("env.cfg", f"{config.env.id} refuses it: {error}")]) from error
    if not isinstance(env, HostEnv):
        return env
    if env.num_envs != num_rows:
        env.close()
        text = f"{config.env.id} has {env.num_envs} environments, asked for were {num_rows}; let it take num_envs"
        raise ConfigError([Problem("env.id", text)])
    return GuardedEnv(
        env,
        make,
        recipe=config.env.model_dump(mode="json"),
        folder=quarantine,
        max_quarantined=trainer.collector.max_quarantined,
        max_restarts=trainer.collector.max_env_restarts,
    )


def make_env(name: str, cfg: Mapping[str, Any], *, num_envs: int) -> Any:
    """``name(**cfg)``: an ``Env``, or a ``HostEnv`` of ``num_envs`` rows; environments of Gymnasium's kind become one.

    ``action_chunk`` in ``cfg`` wraps a pure environment that does not know the word itself.
    """
    make = resolve("env", name)
    parameters = inspect.signature(make).parameters
    options, size = dict(cfg), 1
    if "action_chunk" not in parameters:
        size = options.pop("action_chunk", 1)
    make_one = partial(make, **options, **({"num_envs": num_envs} if "num_envs" in parameters else {}))
    env = vectorize(make_one(), make_one, num_envs)
    if size == 1:
        return env
    if isinstance(env, HostEnv):
        raise ValueError(f"action_chunk {size} needs a pure environment, or one that takes action_chunk itself")
    return ActionChunk(env, size)


def evaluation_env(config: RunConfig, env: Any) -> Any:
    """The environment to evaluate in: the training's, ``env``, unless ``trainer.events`` tell them apart."""
    events = config.trainer.events
    return env if events.train == events.eval else build_env(config, phase="eval")


def build_policy(config: PolicyConfig, env: Env | HostEnv) -> Policy:
    """The policy that the config names, for this environment's spaces.

    A policy class of your own is called with ``policy.cfg`` and whichever of ``action_spec``, ``observation_space``,
    ``action_space``, ``actor``, ``critic`` its constructor takes.

    Raises:
        ConfigError: the action dimension is not the env's, or the constructor refuses the arguments.
    """
    if problems := space_problems(config, env.action_space, env.observation_space):
        raise ConfigError(problems)
    spec = action_spec(env.action_space, squash=config.squash_actions)
    offered = {
        "action_spec": spec,
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "actor": config.actor and config.actor.network_cfg,
        "critic": config.critic and config.critic.network_cfg,
        "initial_log_std": config.initial_log_std,
        "log_std_range": config.log_std_range,
        "actor_obs_groups": config.obs_groups.actor,
        "critic_obs_groups": config.obs_groups.critic,
        "actor_obs_normalization": config.actor_obs_normalization,
        "critic_obs_normalization": config.critic_obs_normalization,
    }
    make = resolve("policy", config.name)
    accepted = inspect.signature(make).parameters
    try:
        return make(**{name: value for name, value in offered.items() if name in accepted}, **config.cfg)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("policy", f"{config.name} refuses it: {error}")]) from error


def uses_dropout(config: PolicyConfig) -> bool:
    return any(block is not None and block.network_cfg.dropout_p > 0.0 for block in (config.actor, config.critic))
