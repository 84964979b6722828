"""From a config to the parts that it names."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import optax

from ejax.algorithms.record import Algorithm
from ejax.algorithms.step import RunState, init_run_state, make_rollout_step
from ejax.config import ConfigError, PolicyConfig, Problem, RunConfig
from ejax.config.bind import bind
from ejax.config.spaces import space_problems
from ejax.distributions import action_spec
from ejax.policies import ActorCritic, ActorOnly
from ejax.policies.observations import select_observation
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.processes import JOIN, count, unjoined
from ejax.registry import resolve
from ejax.training.cloning import cloning_parts
from ejax.training.environments import build_env, sample_obs
from ejax.training.host_parts import group_size, host_parts
from ejax.training.parts import Parts
from ejax.training.steppers import DeviceStepper
from ejax.types import Env, HostEnv, Policy

_MAX_UPDATES_PER_DISPATCH = 64


def build(
    config: RunConfig, *, quarantine: Path = Path("quarantine"), absent: Sequence[jax.Device] | None = None
) -> Parts:
    """Make environment, policy, optimizer and what steps them.

    Args:
        config: bound, or as it was read; see ``ejax.config.bind``.
        quarantine: folder for what broke host environments.
        absent: devices that are not here, to compile for. Several of them share the environments, whatever
            ``trainer.distributed`` says, and of a state on devices there are only the shapes.

    Raises:
        ConfigError: arguments that the environment or policy refuses, ``policy.action_dim`` that is not the env's, or
            an algorithm and a collector that do not go together.
    """
    config = bind(config)
    trainer, algorithm = config.trainer, config.algorithm.record
    devices = _all_devices(config) if trainer.distributed and absent is None else None

    if trainer.shard_parameters and absent is None and (not trainer.distributed or count() > 1):
        text = "got true, which needs trainer.distributed: true, in one process"
        raise ConfigError([Problem("trainer.shard_parameters", f"{text}; with several, parameters are whole on each")])

    # the environment comes first: it decides the policy's shapes, and an algorithm may refuse it
    first = build_env(config, num_envs=group_size(config, len(devices or [None])), quarantine=quarantine)
    if problems := list(algorithm.env_problems(config.algorithm.cfg, first)):
        raise ConfigError(problems)
    policy = build_policy(config.policy, first)
    if problems := list(algorithm.policy_problems(config.algorithm.cfg, policy)):
        raise ConfigError(problems)
    optimizer = algorithm.make_optimizer(config.algorithm.cfg)
    key, dropout = jax.random.key(trainer.seed), uses_dropout(config.policy)

    # where the observations come from decides what steps the run: demonstrations, the program itself, a collector
    if config.data is not None:
        if devices:
            raise ConfigError([Problem("trainer.distributed", "got true, but cloning runs on one device; give false")])
        return cloning_parts(config, config.data, policy, first, optimizer, key, dropout=dropout)
    if not isinstance(first, HostEnv) and trainer.collector.mode in ("auto", "device"):
        if absent is not None:
            devices = list(absent) if len(absent) > 1 else None
        make = partial(_device_parts, config, algorithm, policy, first, optimizer, key, devices, dropout=dropout)
        return make(shapes_only=absent is not None)
    make_host = partial(host_parts, config, policy, first, optimizer, key)
    return make_host(devices=devices, dropout=dropout, quarantine=quarantine)


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
    if algorithm.make_step is not None:
        step = algorithm.make_step(policy, env, optimizer, options, num_steps=trainer.buffer_size, dropout=dropout)
    else:
        step = make_rollout_step(
            policy,
            env,
            optimizer,
            options,
            update=algorithm.update,
            starts=algorithm.starts(options),
            num_steps=trainer.buffer_size,
            dropout=dropout,
        )

    # the whole first state in one program; environments of all devices are made here and spread by the stepper
    among = len(devices) if devices else 1

    def first_state() -> RunState:
        num_envs = among * trainer.num_envs
        state = init_run_state(
            policy,
            env,
            optimizer,
            key,
            num_envs=num_envs,
            reference=algorithm.keeps_reference(options),
            target=algorithm.keeps_target,
        )
        if algorithm.make_own is None:
            return state
        return replace(state, own=algorithm.make_own(options, policy, env, num_envs))

    state = jax.eval_shape(first_state) if shapes_only else first_state()

    # a bound only: how many updates go into a dispatch is a traced number, so that one program serves all
    per_dispatch = trainer.updates_per_dispatch
    max_updates = _MAX_UPDATES_PER_DISPATCH if per_dispatch == "auto" else per_dispatch
    stepper = DeviceStepper(step, key, max_updates, devices=devices, shard_parameters=trainer.shard_parameters)
    return Parts(policy, env, optimizer, stepper, state, among)


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
        "vla_config": config.vla_config,
        **config.memories,
        "instructions": getattr(env, "instructions", ()),
        "held_out_instructions": getattr(env, "held_out_instructions", ()),
    }
    make = resolve("policy", config.name)
    if config.memories and make in (ActorCritic, ActorOnly):
        make = ActorCriticWithMemory
        offered |= {"actor_width": _width(env, config.obs_groups.actor)}
        offered |= {"critic_width": _width(env, config.obs_groups.critic)}
        offered["critic"] = None if config.name == "actor_only" else offered["critic"]
    accepted = inspect.signature(make).parameters
    if ignored := config.memories.keys() - accepted.keys():
        text = f"{config.name} takes no {', '.join(sorted(ignored))}; leave it out, or give actor_critic or actor_only"
        raise ConfigError([Problem("policy.actor.memory", text)])
    try:
        return make(**{name: value for name, value in offered.items() if name in accepted}, **config.cfg)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("policy", f"{config.name} refuses it: {error}")]) from error


def _width(env: Env | HostEnv, groups: tuple[str, ...]) -> int:
    """Numbers of an observation that a network reads."""
    return int(jax.eval_shape(lambda: select_observation(sample_obs(env, 1), groups)).shape[-1])


def uses_dropout(config: PolicyConfig) -> bool:
    networks = [block.network_cfg for block in (config.actor, config.critic) if block is not None]
    networks += [memory.encoder for memory in config.memories.values() if memory.encoder is not None]
    return any(network.dropout_p > 0.0 for network in networks)


def num_devices(config: RunConfig) -> int:
    """Devices that would share the environments."""
    return len(_all_devices(config)) if config.trainer.distributed else 1


def _all_devices(config: RunConfig) -> list[jax.Device]:
    """The devices of the configured kind, in this machine or in those of all processes that train together."""
    if scheduler := unjoined():
        text = f"got true in one of several processes of {scheduler} that do not know each other; {JOIN}"
        raise ConfigError([Problem("trainer.distributed", text)])
    return jax.devices(config.trainer.device.partition(":")[0])
