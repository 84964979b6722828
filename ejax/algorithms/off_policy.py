"""Off-policy learning: what its algorithms share. An update writes its rollout into a replay buffer, then makes
``gradient_steps`` steps on minibatches of it.

Gradient steps per environment step, ``gradient_steps / (buffer_size · num_envs)``, are a matter of the config alone: a
resumed run neither catches up nor forgets.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import optax
from flax import struct
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ejax.algorithms.demonstrations import (
    DemonstrationConfig,
    demonstration_problems,
    draw_minibatch,
    fill_demonstrations,
    sample_own,
)
from ejax.algorithms.host_rows import HostRows
from ejax.algorithms.options import GradientOptions, indivisible
from ejax.algorithms.record import RunShape, refuse_memory
from ejax.algorithms.replay_buffer import Replay, ReplayConfig, add_and_take, add_rollout, init_replay
from ejax.envs.host.rows import obs_forms
from ejax.optim import OptimizerConfig, get_learning_rate, make_actor_critic_optimizer, step_schedules
from ejax.policies.calls import BatchStatisticsPolicy
from ejax.policies.normalize import update_normalizer
from ejax.runtime.sharding import constrain_split
from ejax.schema.frozen import with_value
from ejax.schema.problems import ConfigError, Problem
from ejax.types import ActionValuePolicy, Array, Env, HostEnv, Key, Metrics, Policy, PyTree, Rollout, TrainState

T = TypeVar("T")
Learn: TypeAlias = Callable[[TrainState, PyTree, Any, Key, bool], tuple[TrainState, PyTree, Metrics]]
"""``(state, extra, minibatch, key, moves_actor) -> (state, extra, metrics)``: one gradient step."""


class OffPolicyOptions(GradientOptions):
    """Options of all off-policy algorithms."""

    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of a step."""
    replay: ReplayConfig = ReplayConfig()
    """The replay buffer."""
    demonstrations: DemonstrationConfig | None = None
    """Demonstrated transitions, a fixed part of each minibatch. None: no demonstrations."""
    batch_size: PositiveInt = 256
    """Transitions of a minibatch, on all devices together."""
    gradient_steps: PositiveInt = 1
    """Gradient steps of an update, which follows ``buffer_size`` · ``num_envs`` environment steps."""
    learning_starts: NonNegativeInt = 5_000
    """Transitions in the buffer before the first gradient step."""
    policy_delay: PositiveInt = 1
    """The actor steps with every so many steps of the critics; divides ``gradient_steps``."""
    tau: float = Field(default=0.005, gt=0.0, le=1.0)
    """τ in Q' ← (1 − τ)·Q' + τ·Q, after each gradient step."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule and the learning rate of the actor, and of the entropy's weight."""
    critic_optimizer: OptimizerConfig = OptimizerConfig()
    """The critics' update rule and learning rate."""
    max_grad_norm: PositiveFloat = Field(default=float("inf"), allow_inf_nan=True)
    """Limit of the actor's gradient and, separately, of the critics'. Infinity: no clipping."""

    def init_extra(self, num_envs: int) -> PyTree:
        """Make ``OffPolicyState.extra``."""
        del num_envs
        return ()


@struct.dataclass(kw_only=True)
class OffPolicyState:
    """``RunState.own`` of an off-policy algorithm."""

    replay: Replay
    demonstrations: Replay | None = None
    """Filled before the first update, and never written again."""
    extra: PyTree = ()
    """Statistics of an algorithm, such as those of its rewards' scale."""


def off_policy_update(
    state: tuple[TrainState, OffPolicyState],
    rollout: Rollout,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: Any,
    learn: Callable[..., Any],
    see: Callable[..., PyTree] | None = None,
) -> tuple[tuple[TrainState, OffPolicyState], Metrics]:
    """Add a rollout to the buffer, and learn from the buffer once it holds ``learning_starts`` transitions.

    Args:
        rollout: with ``next_obs``, leaves [T, N, ...].
        learn: ``Learn``, with the keywords ``policy``, ``optimizer`` and ``config``; a metric is ``skipped_fraction``.
        see: ``(extra, rollout, config) -> extra``, before it learns.

    Returns:
        The state (``step`` + 1), and metrics: means over the gradient steps, NaN before the first; ``replay_size``.
    """
    train, own = state
    extra = own.extra if see is None else see(own.extra, rollout, config)
    replay, drawn_from, rows = _add(own.replay, rollout, key, config)
    make_step = partial(learn, policy=policy, optimizer=optimizer, config=config)

    def one_delay(carry: tuple[TrainState, PyTree], given: Any) -> tuple[tuple[TrainState, PyTree], Metrics]:
        (keys, rows), logs = given, []
        for i in range(config.policy_delay):  # known when it is traced: a GPU would wait for the host at a condition
            key_rows, key_learn = jax.random.split(keys[i])
            given = key_rows, config.batch_size, config.demonstrations, None if rows is None else rows[i]
            batch = constrain_split(draw_minibatch(drawn_from, own.demonstrations, *given))
            train, extra, metrics = make_step(*carry, batch, key_learn, i == 0)
            carry = train, extra
            logs.append(metrics)
        return carry, {name: jnp.stack([log[name] for log in logs if name in log]).mean() for name in logs[0]}

    def learn_all(carry: tuple[TrainState, PyTree]) -> tuple[tuple[TrainState, PyTree], Metrics]:
        with jax.named_scope("gradient_steps"):
            carry, log = jax.lax.scan(one_delay, carry, (_step_keys(key, config), rows))
        return carry, {name: x.mean() for name, x in log.items()}

    (train, extra), metrics = once_filled(replay, config, learn_all, (train, extra))
    optimizers = {"actor": config.optimizer, "critic": config.critic_optimizer}
    train = step_schedules(train, optimizers, config.lr_scheduler)
    if "normalizer" in train.params:  # statistics of batches are the gradient steps' own
        train = replace(train, params=update_normalizer(policy, train.params, rollout.obs, rollout.valid))
    metrics |= {
        "skipped_minibatches": metrics["skipped_fraction"] * config.gradient_steps,
        "learning_rate": get_learning_rate(train.opt_state["actor"]),
        "replay_size": replay.size.sum().astype(jnp.float32),
    }
    return (train, replace(own, replay=replay, extra=extra)), metrics


def once_filled(replay: Replay, config: Any, learn: Callable[[T], tuple[T, Metrics]], state: T) -> tuple[T, Metrics]:
    """Learn, once the buffer holds ``learning_starts`` transitions; before that metrics are NaN."""

    def wait(state: T) -> tuple[T, Metrics]:
        shapes = jax.eval_shape(learn, state)[1]
        nothing = {name: 0.0 if name.startswith("skipped") else jnp.nan for name in shapes}
        return state, {name: jnp.full(x.shape, nothing[name], x.dtype) for name, x in shapes.items()}

    learned: tuple[T, Metrics] = jax.lax.cond(replay.size.sum() >= max(1, config.learning_starts), learn, wait, state)
    return learned


def _add(replay: Replay, rollout: Rollout, key: Key, config: Any) -> tuple[Replay, Replay, Array | None]:
    """Add a rollout. Of rows on the host, all that the gradient steps learn from come by the same call: the replay
    buffer, what they take rows from, and the numbers of these, where they are drawn."""
    if not isinstance(replay.rows, HostRows):
        replay = add_rollout(replay, rollout, gamma=config.gamma)
        return replay, replay, None

    def draw(ring: Replay, key: Key) -> Array:
        return sample_own(ring, jax.random.split(key)[0], config.batch_size, config.demonstrations)

    keys = _step_keys(key, config)
    return add_and_take(replay, rollout, lambda ring: jax.vmap(jax.vmap(partial(draw, ring)))(keys), gamma=config.gamma)


def _step_keys(key: Key, config: Any) -> Key:
    return jax.random.split(key, (config.gradient_steps // config.policy_delay, config.policy_delay))


def make_own(options: Any, policy: Policy, env: Env | HostEnv, num_envs: int) -> OffPolicyState:
    """Make an empty buffer for the environments of a run, and one for its demonstrations, if it has any. ConfigError:
    strata that do not divide them."""
    del policy
    strata, wanted = options.replay.strata or 1, options.demonstrations
    problems = [*_storage_problems(options.replay)]
    problems += indivisible("replay.strata", strata, num_envs, "the environments of all devices")
    problems += indivisible("replay.strata", strata, options.batch_size, "algorithm.cfg.batch_size")
    if wanted is not None:
        rows = wanted.num_rows(options.batch_size)
        problems += indivisible("replay.strata", strata, rows, "the demonstrated rows of a minibatch")
    if problems:
        raise ConfigError(problems)
    forms = obs_forms(env, num_envs)
    action = jnp.zeros((num_envs, math.prod(env.action_space.shape or ())))  # a policy's numbers: one of no axes
    replay = init_replay(options.replay, forms, action, num_strata=strata)
    own = OffPolicyState(replay=replay, extra=options.init_extra(num_envs))
    if wanted is None:
        return own
    whole = ReplayConfig(capacity=wanted.num_transitions)  # of n_step steps already
    return replace(own, demonstrations=init_replay(whole, forms, action, num_strata=strata))


def _rescale_for_devices(options: Any, was: int, now: int) -> Any:
    """Keep the strata of ``was`` devices on ``now``. ConfigError: these cannot share them."""
    strata = options.replay.strata or was
    if strata % now:
        text = f"got {strata}, which {now} devices cannot share; use a multiple of their number"
        raise ConfigError([Problem("algorithm.cfg.replay.strata", text)])
    return with_value(options, "replay.strata", strata)


def _storage_problems(replay: ReplayConfig, shared_by: str | None = None) -> Iterator[Problem]:
    """Find rings that only a device's memory can have."""
    shared_by = shared_by or (f"replay.strata {replay.strata}" if (replay.strata or 1) > 1 else None)
    if replay.storage != "device" and shared_by is not None:
        text = f"got '{replay.storage}', one ring for one device, with {shared_by}"
        yield Problem("algorithm.cfg.replay.storage", f"{text}; use 'device', or leave out {shared_by}")


def shape_problems(options: OffPolicyOptions, run: RunShape) -> Iterator[Problem]:
    """Find options that contradict each other or the run's sizes."""
    yield from _storage_problems(options.replay, run.shared_by)
    yield from capacity_problems(options, run)
    if options.gradient_steps % options.policy_delay:
        text = f"got {options.policy_delay}, which does not divide gradient_steps {options.gradient_steps}"
        yield Problem("algorithm.cfg.policy_delay", f"{text}; use a divisor")
    if options.demonstrations is not None:
        yield from demonstration_problems(options.demonstrations, options.batch_size)


def capacity_problems(options: Any, run: RunShape) -> Iterator[Problem]:
    """Find a buffer that is too small for a rollout, or for what learning waits for."""
    capacity = options.replay.capacity
    if run.rows > capacity:
        text = f"got {capacity}, but {run.rows_text}: raise algorithm.cfg.replay.capacity"
        yield Problem("algorithm.cfg.replay.capacity", text)
    if options.learning_starts > capacity:
        text = f"got {options.learning_starts}, which a buffer of {capacity} never holds; use at most that"
        yield Problem("algorithm.cfg.learning_starts", text)


def policy_problems(options: Any, policy: Policy) -> Iterator[Problem]:
    """Refuse policies without critics of actions, those with batch statistics, and those with memory."""
    if not isinstance(policy, ActionValuePolicy):
        text = f"got {type(policy).__name__}, whose critic values no actions; set policy.name to actor_q"
        yield Problem("policy.name", text)
    elif isinstance(policy, BatchStatisticsPolicy):
        text = "got flash_q, whose statistics only flash_sac updates; use actor_q, or algorithm.name: flash_sac"
        yield Problem("policy.name", text)
    yield from refuse_memory(options, policy)


OFF_POLICY_FIELDS: dict[str, Any] = {
    "actions": (gymnasium.spaces.Box,),
    "make_own": make_own,
    "add_demonstrations": fill_demonstrations,
    "keeps_target": True,
    "make_optimizer": lambda options: make_actor_critic_optimizer(options.optimizer, options.critic_optimizer),
    "problems": shape_problems,
    "policy_problems": policy_problems,
    "rescale_for_devices": _rescale_for_devices,
}
"""Fields of an ``Algorithm`` whose options are ``OffPolicyOptions``."""
