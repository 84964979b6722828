"""From a config to the objects that it names."""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import optax

from ejax.config import ConfigError, PolicyConfig, Problem, RunConfig
from ejax.distributions import action_spec
from ejax.optim import bind_schedule, make_actor_critic_optimizer, make_optimizer
from ejax.registry import resolve
from ejax.steps import STEPS, RunState, Step, init_run_state
from ejax.types import Env, Policy


@dataclass(frozen=True)
class Parts:
    """What a run is made of. ``step`` is not compiled yet."""

    policy: Policy
    env: Env
    optimizer: optax.GradientTransformation
    step: Step
    state: RunState
    """At update 0."""


def build(config: RunConfig, *, schedule_updates: int | None = None) -> Parts:
    """Make environment, policy, optimizer and training step.

    Args:
        schedule_updates: horizon of a learning-rate schedule that has none of its own. None: the run's updates.

    Raises:
        ConfigError: arguments that the environment or policy refuses, or ``policy.action_dim`` that is not the env's.
    """
    env = build_env(config)
    policy = build_policy(config.policy, env)
    options: Any = config.algorithm.cfg
    options = options.model_copy(
        update={"lr_scheduler": bind_schedule(options.lr_scheduler, schedule_updates or config.trainer.num_updates)}
    )
    critic_optimizer = getattr(options, "critic_optimizer", None)
    if critic_optimizer is None:
        optimizer = make_optimizer(options.optimizer)
    else:
        optimizer = make_actor_critic_optimizer(options.optimizer, critic_optimizer)
    make_step = STEPS.get(config.algorithm.name) or resolve("algorithm", config.algorithm.name).make_step
    step = make_step(
        policy,
        env,
        optimizer,
        options,
        num_steps=config.trainer.buffer_size,
        dropout=uses_dropout(config.policy),
    )
    state = init_run_state(
        policy,
        env,
        optimizer,
        jax.random.key(config.trainer.seed),
        num_envs=config.trainer.num_envs,
        keep_reference=getattr(options, "kl_coef", 0.0) > 0.0 or critic_optimizer is not None,
    )
    return Parts(policy, env, optimizer, step, state)


def build_env(config: RunConfig) -> Env:
    """The environment that ``config.env`` names.

    Raises:
        ConfigError: its constructor refuses the arguments.
    """
    make = resolve("env", config.env.id)
    try:
        return make(**config.env.cfg)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("env.cfg", f"{config.env.id} refuses it: {error}")]) from error


def build_policy(config: PolicyConfig, env: Env) -> Policy:
    """The policy that the config names, for this environment's spaces.

    A policy class of your own is called with ``policy.cfg`` and whichever of ``action_spec``, ``observation_space``,
    ``action_space``, ``actor``, ``critic`` its constructor takes.

    Raises:
        ConfigError: the action dimension is not the env's, or the constructor refuses the arguments.
    """
    spec = action_spec(env.action_space, squash=config.squash_actions)
    width = len(spec.sizes) if not spec.continuous else spec.sizes[0]
    if config.action_dim not in (None, width):
        raise ConfigError(
            [Problem("policy.action_dim", f"got {config.action_dim}, but the env's actions have {width}")]
        )
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
