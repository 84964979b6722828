"""SHAC through a learned model: on any environment, one that cannot be differentiated too.

An update writes its rollout into a replay buffer, fits a model of the environment's steps (``learned_dynamics``), and
makes updates of SHAC (``shac``) on short episodes that begin at observations of the buffer and go on in the model.

Where the true gradient exists, since the environment is differentiable and its state follows from an observation, each
update compares the actor's gradient with it, from the same observations and noise: ``model/gradient_cosine``, and
``model/gradient_ratio``, the model's norm by the true one.

Source: SHAC, Xu et al. 2022; a learned model in place of the simulator: Georgiev et al. 2024 (PWM). Differs: the model
has no latent state, predicts increments of observations, and is fitted while the policy learns; learned rewards stay
within the recorded ones, and values within their sums.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.flatten_util import ravel_pytree
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ejax.algorithms.differentiable import Dynamics, differentiable_problems
from ejax.algorithms.learned_dynamics import (
    DynamicsConfig,
    JudgingEnv,
    LearnedDynamics,
    Model,
    imagine,
    reward_range,
    trusted_horizon,
)
from ejax.algorithms.off_policy import capacity_problems, once_filled
from ejax.algorithms.record import Algorithm, ResetPolicy, RunShape, refuse_memory
from ejax.algorithms.replay_buffer import Replay, ReplayConfig, add_rollout, init_replay, sample_rows, take_rows
from ejax.algorithms.shac import SHACConfig, actor_gradient, shac_problems, shac_update_with_trajectory
from ejax.algorithms.step import Step, make_rollout_step
from ejax.distributions import ActionSpec
from ejax.envs.host.rows import obs_forms
from ejax.optim import ScheduleConfig, get_learning_rate, make_actor_critic_optimizer, step_schedules
from ejax.policies.normalize import update_normalizer
from ejax.rollout import EnvCarry, step_all
from ejax.schema.paths import named
from ejax.schema.problems import ConfigError, Problem
from ejax.types import Array, Env, HostEnv, Key, Metrics, Policy, PyTree, Rollout, Timestep, TrainState

Imagined: TypeAlias = Callable[[PyTree], tuple[Dynamics, EnvCarry]]
"""Observations [N, ...] -> dynamics of predicted episodes that begin there, and their rows."""


class ModelSHACConfig(SHACConfig):
    """``algorithm.cfg`` of ``model_shac``: SHAC's, with the model and its data."""

    segment_length: PositiveInt = 4
    """h: steps that the model predicts, and that a gradient flows back through; the most of them, see
    ``max_model_error``."""
    critic_epochs: PositiveInt = 2
    """Passes of the critic over the predicted steps of a gradient step."""
    num_mini_batches: PositiveInt = 1
    """For the critic: minibatches of an epoch, of equal size (the last may be smaller)."""
    target_critic_alpha: float = Field(default=0.98, ge=0.0, lt=1.0)
    """α in V' ← α·V' + (1 − α)·V, after each gradient step: the share of the OLD target that stays."""
    model: DynamicsConfig = DynamicsConfig()
    """The learned model."""
    max_model_error: PositiveFloat | None = None
    """Predicted episodes end, with the critic's value, before the first step whose error on held-out rows is larger: 0
    is a perfect model, 1 one that is as good as "nothing moves". At least one step is predicted. None: all are."""
    replay: ReplayConfig = ReplayConfig()
    """The replay buffer, of single steps."""
    batch_size: PositiveInt = 256
    """Observations of the buffer that predicted episodes begin at."""
    gradient_steps: PositiveInt = 8
    """SHAC's updates in one update, which follows ``buffer_size`` · ``num_envs`` environment steps."""
    learning_starts: NonNegativeInt = 5_000
    """Transitions in the buffer before the first gradient step."""


@struct.dataclass(kw_only=True)
class ModelState:
    """``RunState.own``."""

    replay: Replay
    dynamics: LearnedDynamics


@partial(jax.jit, static_argnames=("policy", "optimizer", "config", "env"))
def model_shac_update(
    state: tuple[TrainState, ModelState],
    rollout: Rollout,
    key: Key,
    *,
    policy: Any,
    optimizer: optax.GradientTransformation,
    config: ModelSHACConfig,
    env: Env | None = None,
) -> tuple[tuple[TrainState, ModelState], Metrics]:
    """Add a rollout to the buffer; make ``model.gradient_steps`` steps of the model, then ``gradient_steps`` of SHAC.

    Args:
        state: ``TrainState`` as of ``shac_update``.
        rollout: with ``next_obs``, leaves [T, N, ...].
        env: for its own reward and end, and its true gradient. None: as of an environment outside the program.

    Returns:
        The state (``step`` + 1), and metrics: means over the gradient steps, NaN before the first; ``replay_size``.
    """
    train, own = state
    key_fit, key_error, key_improve, key_certify = jax.random.split(key, 4)
    model = model_of(config, policy.action_spec, env)
    replay = add_rollout(own.replay, rollout, gamma=config.gamma)
    before = train.step
    # before anything is predicted: nothing is divided by the deviation of nothing
    train = replace(train, params=update_normalizer(policy, train.params, rollout.obs, rollout.valid))
    dynamics = model.see(own.dynamics, rollout)
    given: Any = {"policy": policy, "config": config}

    def learn(state: tuple[TrainState, LearnedDynamics]) -> tuple[tuple[TrainState, LearnedDynamics], Metrics]:
        train, dynamics = state

        def fit(dynamics: LearnedDynamics, key: Key) -> tuple[LearnedDynamics, Metrics]:
            return model.fit(dynamics, replay, key, config)

        with jax.named_scope("fit_model"):
            dynamics, log = jax.lax.scan(fit, dynamics, jax.random.split(key_fit, config.model.gradient_steps))
        errors = model.errors(dynamics, replay, key_error, config.segment_length)
        bound = config.max_model_error
        horizon = jnp.int32(config.segment_length) if bound is None else trusted_horizon(errors, bound)
        imagined = _imagined(model, dynamics, replay, horizon, config)

        def improve(train: TrainState, key: Key) -> tuple[TrainState, Metrics]:
            return _improve(train, imagined, replay, key, policy=policy, optimizer=optimizer, config=config)

        with jax.named_scope("gradient_steps"):
            train, of_shac = jax.lax.scan(improve, train, jax.random.split(key_improve, config.gradient_steps))
        metrics = {name: x.mean() for name, x in (log | of_shac).items()}
        metrics |= {f"model/error_{k}": errors[k - 1] for k in {1, config.segment_length}}
        metrics["model/horizon"] = horizon.astype(jnp.float32)
        if _has_true_gradient(env):
            metrics |= certify(train, model, dynamics, replay, horizon, key_certify, env=env, **given)
        return (train, dynamics), metrics

    (train, dynamics), metrics = once_filled(replay, config, learn, (train, dynamics))
    # one update for the schedule, however many gradient steps it made
    optimizers = {"actor": config.optimizer, "critic": config.critic_optimizer}
    train = step_schedules(replace(train, step=before), optimizers, config.lr_scheduler)
    metrics |= {
        "learning_rate": get_learning_rate(train.opt_state["actor"]),
        "critic_learning_rate": get_learning_rate(train.opt_state["critic"]),
        "replay_size": replay.size.sum().astype(jnp.float32),
    }
    return (train, ModelState(replay=replay, dynamics=dynamics)), metrics


def _improve(
    train: TrainState,
    imagined: Imagined,
    replay: Replay,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: ModelSHACConfig,
) -> tuple[TrainState, Metrics]:
    """Make an update of SHAC on predicted steps."""
    key_rows, key_update = jax.random.split(key)
    world, rows = imagined(_draw_obs(replay, key_rows, config))
    fixed = config.model_copy(update={"lr_scheduler": ScheduleConfig()})
    after, _, metrics, _ = shac_update_with_trajectory(
        train, rows, key_update, policy=policy, env=world, optimizer=optimizer, config=fixed
    )
    if "normalizer" in train.params:  # of what was seen, not of what was predicted
        seen = {"normalizer": train.params["normalizer"]}
        after = replace(after, params={**after.params, **seen}, target={**after.target, **seen})
    return after, metrics


def _imagined(
    model: Model, dynamics: LearnedDynamics, replay: Replay, horizon: Array, config: ModelSHACConfig
) -> Imagined:
    rewards = values = None
    if model.env is None:
        # a network that is asked for what it never saw answers anything, and a critic that believes it adds to that
        rewards = low, high = reward_range(replay)
        steps = 1.0 / jnp.maximum(1.0 - config.gamma, 1e-6)
        values = low * steps, high * steps

    def step_rows(state: PyTree, obs: PyTree, action: Array) -> tuple[PyTree, Timestep]:
        return state, model.predict(dynamics, obs, action, rewards)

    return lambda obs: imagine(step_rows, EnvCarry(state=(), obs=obs), horizon, values)


def _draw_obs(replay: Replay, key: Key, config: ModelSHACConfig) -> PyTree:
    return take_rows(replay, sample_rows(replay, key, config.batch_size)).obs


def certify(
    train: TrainState,
    model: Model,
    dynamics: LearnedDynamics,
    replay: Replay,
    horizon: Array,
    key: Key,
    *,
    env: Any,
    policy: Policy,
    config: ModelSHACConfig,
) -> Metrics:
    """Compare the actor's gradient through the model with that through the environment."""
    key_rows, key_play, key_env = jax.random.split(key, 3)
    obs = _draw_obs(replay, key_rows, config)
    truth = imagine(
        lambda state, obs, action: step_all(env, state, action, key_env),
        EnvCarry(state=jax.vmap(env.state_of)(obs), obs=obs),
        horizon,
    )
    ours, true = (
        ravel_pytree(actor_gradient(train, rows, key_play, policy=policy, env=world, config=config)[0])[0]
        for world, rows in (_imagined(model, dynamics, replay, horizon, config)(obs), truth)
    )
    norms = jnp.linalg.norm(ours), jnp.maximum(jnp.linalg.norm(true), 1e-12)
    return {
        "model/gradient_cosine": ours @ true / jnp.maximum(norms[0] * norms[1], 1e-12),
        "model/gradient_ratio": norms[0] / norms[1],
    }


def model_of(config: ModelSHACConfig, action_spec: ActionSpec, env: Env | HostEnv | None) -> Model:
    judges = config.model.rewards == "auto" and isinstance(env, JudgingEnv) and env.judges
    return Model(config.model, action_spec, env if judges else None)  # type: ignore[arg-type]


def _has_true_gradient(env: Env | None) -> bool:
    return isinstance(env, JudgingEnv) and env.judges and not list(differentiable_problems(None, env))


def _make_step(
    policy: Policy, env: Env, optimizer: optax.GradientTransformation, config: Any, *, num_steps: int, dropout: bool
) -> Step:
    if dropout:
        text = "got a policy with dropout, which this algorithm does not support; leave it out, or use ppo or grpo"
        raise ConfigError([Problem("algorithm.name", text)])
    update = partial(inspect.unwrap(model_shac_update), env=env)  # a member's options may be arrays
    return make_rollout_step(
        policy, env, optimizer, config, update=update, resets=ResetPolicy(), num_steps=num_steps, dropout=False
    )


def _make_own(options: ModelSHACConfig, policy: Any, env: Env | HostEnv, num_envs: int) -> ModelState:
    """Make an empty buffer and a new model, the same in every run: its data differ."""
    forms, spec = obs_forms(env, num_envs), policy.action_spec
    model = model_of(options, spec, None if isinstance(env, HostEnv) else env)
    return ModelState(
        replay=init_replay(options.replay, forms, jnp.zeros((num_envs, spec.num_actions))),
        dynamics=model.init(jax.random.key(0), sum(x.shape[-1] for x in jax.tree.leaves(forms))),
    )


def _problems(options: ModelSHACConfig, run: RunShape) -> Iterator[Problem]:
    predicted = replace(run, num_envs=options.batch_size, buffer_size=options.segment_length)
    yield from shac_problems(options, predicted)
    yield from capacity_problems(options, run)
    if run.distributed:
        text = "got true, but model_shac is for one device; leave it out, or use sac, which several devices share"
        yield Problem("trainer.distributed", text)
    if options.replay.storage != "device":
        text = f"got '{options.replay.storage}'; model_shac draws its rows in the program: use 'device'"
        yield Problem("algorithm.cfg.replay.storage", text)
    if options.replay.strata not in (None, 1):
        text = f"got {options.replay.strata}, which is for several devices: leave it out"
        yield Problem("algorithm.cfg.replay.strata", text)
    if options.replay.n_step != 1:
        text = f"got {options.replay.n_step}; a model is of single steps: leave it out, or set it to 1"
        yield Problem("algorithm.cfg.replay.n_step", text)


def _env_problems(options: Any, env: Env | HostEnv) -> Iterator[Problem]:
    del options
    for name, space in named(env.observation_space).items():
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1 or np.dtype(space.dtype).kind != "f":
            of = f"'{name}' of the observation" if name else "the observation"
            text = f"got model_shac, whose model predicts vectors of numbers, but {of} is {space}; use an"
            yield Problem("algorithm.name", f"{text} environment with state observations, or ppo or sac")


def _policy_problems(options: Any, policy: Policy) -> Iterator[Problem]:
    yield from refuse_memory(options, policy)
    spec = getattr(policy, "action_spec", None)
    if not isinstance(spec, ActionSpec) or spec.kind != "tanh_normal":
        text = "got unbounded actions, and a model knows only those near the ones that it saw; set it to true"
        yield Problem("policy.squash_actions", text)


ALGORITHM = Algorithm(
    Config=ModelSHACConfig,
    update=model_shac_update,
    make_step=_make_step,
    make_optimizer=lambda options: make_actor_critic_optimizer(options.optimizer, options.critic_optimizer),
    keeps_target=True,
    make_own=_make_own,
    problems=_problems,
    actions=(gymnasium.spaces.Box,),
    env_problems=_env_problems,
    policy_problems=_policy_problems,
)
