"""Short-horizon actor-critic: an analytic policy gradient over few steps, and a critic's value of the steps after them.

    J = 1/(N·h) · Σ over environments of Σₜ dₜ·(rₜ + ent_coef·Hₜ + γ·V'(s'ₜ)·[t is the last step, or truncated]),
    d₀ = 1, dₜ₊₁ = 1 after an episode's end, else γ·dₜ;  nothing of V' where the episode terminated

s' is the true next observation, before any reset, and V' the target critic: the gradient also flows through V' into the
steps before it. The critic then fits TD(λ) targets of V' on the same steps, and V' follows the critic. The
environment's step is differentiable JAX code. Source: Xu et al. 2022 (SHAC), eq. 5-8, and the defaults of its code.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from pydantic import Field, PositiveFloat, PositiveInt

from ejax.algorithms.differentiable import (
    DifferentiableOptions,
    Dynamics,
    adjoint_metrics,
    differentiable_problems,
    discounted_sum,
    play,
    step_maker,
    without_trajectory,
)
from ejax.algorithms.record import Algorithm, RunShape
from ejax.algorithms.sgd import Batch, sgd_epochs
from ejax.losses import value_loss
from ejax.numerics.traced_options import unjit_for_traced
from ejax.optim import (
    OptimizerConfig,
    ScheduleConfig,
    apply_gradient,
    clip_by_global_norm,
    follow_critic,
    get_learning_rate,
    make_actor_critic_optimizer,
    step_schedules,
)
from ejax.policies.normalize import update_normalizer
from ejax.returns import explained_variance, gae
from ejax.rollout import EnvCarry
from ejax.schema.problems import Problem
from ejax.types import (
    Array,
    Env,
    Key,
    Metrics,
    Params,
    Policy,
    PyTree,
    Timestep,
    TrainState,
    split_critic,
    with_networks,
)

_PAPERS_ADAM = OptimizerConfig(name="adam", learning_rate=2e-3, kwargs=FrozenDict(betas=(0.7, 0.95)))


class SHACConfig(DifferentiableOptions):
    """``algorithm.cfg`` of ``shac``. Defaults: the paper's code for its ant."""

    segment_length: PositiveInt = 32
    """h: steps of one update, all of which a gradient flows back through."""
    optimizer: OptimizerConfig = _PAPERS_ADAM
    """The actor's update rule and learning rate."""
    critic_optimizer: OptimizerConfig = _PAPERS_ADAM
    """The critic's update rule and learning rate."""
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    """Schedule of both optimizers, each from its own learning rate."""
    max_grad_norm: PositiveFloat = Field(default=1.0, allow_inf_nan=True)
    """Limit of the actor's gradient and, separately, of the critic's. Infinity: no clipping."""
    td_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """λ of the critic's targets: 0 is one step, 1 the whole segment."""
    critic_epochs: PositiveInt = 16
    """Passes of the critic over a segment in one update."""
    num_mini_batches: PositiveInt = 4
    """For the critic: minibatches of an epoch, of equal size (the last may be smaller)."""
    target_critic_alpha: float = Field(default=0.2, ge=0.0, lt=1.0)
    """α in V' ← α·V' + (1 − α)·V, once an update: the share of the OLD target that stays. 0: V' is the critic."""
    skip_nonfinite_updates: bool = True
    """Leave everything as it is when the actor's gradient, or the step that the optimizer makes of it, is not finite,
    and the critic where a minibatch's is not; False: training stops."""


def shac_update_with_trajectory(
    state: TrainState,
    carry: EnvCarry,
    key: Key,
    *,
    policy: Policy,
    env: Env | Dynamics,
    optimizer: optax.GradientTransformation,
    config: SHACConfig,
) -> tuple[TrainState, EnvCarry, Metrics, Timestep]:
    """Make one SHAC update from ``carry`` on: ``segment_length`` steps, one of the actor, epochs of the critic.

    Args:
        state: ``target`` holds the policy with the target critic; at the start, the parameters themselves.
        carry: N environments whose ``step`` is differentiable, leaves [N, ...].
        optimizer: from ``ejax.optim.make_actor_critic_optimizer``.
        config: an open ``lr_scheduler`` needs its horizon: ``bind_schedule``.

    Returns:
        The new state (``step`` + 1 unless the update was skipped), the environments after it, scalar metrics
        (``grad_norm`` before clipping, NaN where not finite; ``explained_variance`` of the target critic), and the
        trajectory.

    Raises:
        ValueError: a policy without a critic, or a state without a target critic.
    """
    _check_networks(state)
    key_play, key_critic = jax.random.split(key)
    grads, carry, metrics, trajectory, next_value = actor_gradient(
        state, carry, key_play, policy=policy, env=env, config=config
    )
    # the actor steps first, and alone: its optimizer has no moments of the critic
    actor, _ = split_critic(state.params["params"])
    clipped, norm = clip_by_global_norm(grads, config.max_grad_norm)
    has_gradient = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    stepped, finite = apply_gradient(
        replace(state, params={"params": actor}), clipped, optimizer=optimizer, finite=has_gradient, skip=False
    )
    acted = replace(stepped, params=with_networks(state.params, stepped.params["params"]))

    updated, critic_metrics = _fit_critic(
        acted, trajectory, next_value, key_critic, policy=policy, optimizer=optimizer, config=config
    )

    # once per update: schedules, statistics of what was seen, and the target a part of the way after the critic
    optimizers = {"actor": config.optimizer, "critic": config.critic_optimizer}
    updated = step_schedules(updated, optimizers, config.lr_scheduler)
    updated = replace(updated, params=update_normalizer(policy, updated.params, trajectory.obs))
    updated = replace(updated, target=follow_critic(state.target, updated.params, 1.0 - config.target_critic_alpha))

    # an actor's step that is not finite takes the critic's and the target's back with it
    if config.skip_nonfinite_updates:
        updated = jax.tree.map(lambda old, new: jnp.where(finite, new, old), state, updated)
    metrics |= critic_metrics | {
        "grad_norm": jnp.where(has_gradient, norm, jnp.nan),
        "skipped_update": (~finite).astype(jnp.float32),
        "learning_rate": get_learning_rate(updated.opt_state["actor"]),
        "critic_learning_rate": get_learning_rate(updated.opt_state["critic"]),
    }
    return updated, carry, metrics, trajectory


shac_update = without_trajectory(shac_update_with_trajectory)
"""``(state, carry, key, *, policy, env, optimizer, config) -> (state, carry, metrics)``: the same, jitted."""


def short_horizon_return(
    reward: Array, next_value: Array, terminated: Array, truncated: Array, *, gamma: float
) -> Array:
    """Compute Σₜ dₜ·(rₜ + γ·V'(s'ₜ)·[t last or truncatedₜ]·(1 − terminatedₜ)), [N], of arrays [T, N], the discount
    restarting after each end. ``next_value[t]`` is the value of the true next observation."""
    num_steps = reward.shape[0]
    # a value replaces the rest of an episode where the segment or a time limit cuts it, not where it terminates
    last = jnp.arange(num_steps)[:, None] == num_steps - 1
    ends_open = (last | truncated) & ~terminated
    done = terminated | truncated
    total, _ = discounted_sum(
        reward + gamma * jnp.where(ends_open, next_value, 0.0), done, jnp.ones_like(reward[0]), gamma=gamma
    )
    return total


def actor_gradient(
    state: TrainState, carry: EnvCarry, key: Key, *, policy: Policy, env: Env | Dynamics, config: SHACConfig
) -> tuple[PyTree, EnvCarry, Metrics, Timestep, Array]:
    """Compute the gradient of the actor's loss, its steps, and V' of their next observations, [T, N]."""

    def loss(actor: PyTree, taps: Array) -> tuple[Array, Any]:
        after, trajectory, entropy = play(
            with_networks(state.params, actor), taps, carry, key, policy=policy, env=env, options=config
        )
        # the gradient goes through V' into the last observation and so into the actions; V' itself is held
        next_value = policy.apply(state.target, trajectory.final_obs)[1]
        if isinstance(env, Dynamics) and env.values is not None:
            next_value = jnp.clip(next_value, *env.values)
        ends = (trajectory.terminated, trajectory.truncated)
        start = jnp.ones_like(trajectory.reward[0])
        means = {
            "objective": short_horizon_return(trajectory.reward, next_value, *ends, gamma=config.gamma).mean(),
            "entropy": discounted_sum(entropy, trajectory.done, start, gamma=config.gamma)[0].mean(),
        }
        # per step, so that one learning rate fits segments of any length
        means = {name: mean / config.segment_length for name, mean in means.items()}
        value = -means["objective"] - config.ent_coef * means["entropy"]
        return value, (after, means | {"loss": value}, trajectory, next_value)

    actor, _ = split_critic(state.params["params"])
    (grads, tapped), (after, metrics, trajectory, next_value) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
        actor, jnp.zeros((config.segment_length, 4))
    )
    num_envs = trajectory.reward.shape[1]
    metrics |= adjoint_metrics(tapped, num_envs, config.action_adjoint_max_norm)
    return grads, after, metrics, *jax.lax.stop_gradient((trajectory, next_value))


def _fit_critic(
    state: TrainState,
    trajectory: Timestep,
    next_value: Array,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: SHACConfig,
) -> tuple[TrainState, Metrics]:
    """Make epochs of minibatch steps on E[(V − target)²], of the critic alone."""
    # TD(λ) targets by the target critic, which the actor's objective was bootstrapped from as well
    value = policy.apply(state.target, trajectory.obs)[1]
    rates = {"gamma": config.gamma, "gae_lambda": config.td_lambda}
    ends = (trajectory.terminated, trajectory.truncated)
    _, value_target = unjit_for_traced(gae, *rates.values())(trajectory.reward, value, next_value, *ends, **rates)
    _, critic = split_critic(state.params["params"])
    num_rows = value_target.size
    batch = {"obs": trajectory.obs, "value_target": value_target}
    # flat, since a critic without memory may see steps in any order
    batch = jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), batch)

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        value = policy.apply(with_networks(state.params, params["params"]), batch["obs"])[1]
        return jnp.sum(batch["weight"] * value_loss(value, batch["value_target"])), {}

    fitted, metrics = sgd_epochs(
        replace(state, params={"params": critic}),
        batch,
        key,
        loss=loss,
        optimizer=optimizer,
        # rounded up: one more would hold the rest
        minibatches=config.minibatches_of(-(-num_rows // config.num_mini_batches), config.critic_epochs),
    )
    state = replace(fitted, params=with_networks(state.params, fitted.params["params"]))
    return state, {
        "value_loss": metrics["loss"],
        "value_grad_norm": metrics["grad_norm"],
        "skipped_minibatches": metrics["skipped_minibatches"],
        "skipped_fraction": metrics["skipped_fraction"],
        "explained_variance": explained_variance(value, value_target),
    }


def _check_networks(state: TrainState) -> None:
    if "critic" not in state.params["params"]:
        names = ", ".join(state.params["params"])
        raise ValueError(f"shac needs a policy with a network 'critic', got one with {names}; use actor_critic")
    if state.target is None:
        raise ValueError("shac needs a target critic, got target=None; start with init_train_state(…, target=True)")


def shac_problems(options: SHACConfig, run: RunShape) -> Iterator[Problem]:
    if run.policy == "actor_only":
        yield Problem("policy.name", "got 'actor_only', which has no critic; shac needs one: use actor_critic")
    if options.num_mini_batches > run.rows:
        yield run.too_many("num_mini_batches", options.num_mini_batches)


ALGORITHM = Algorithm(
    Config=SHACConfig,
    make_step=step_maker(shac_update_with_trajectory),
    make_optimizer=lambda options: make_actor_critic_optimizer(options.optimizer, options.critic_optimizer),
    keeps_target=True,
    sizes=lambda options, chunk_size: {"buffer_size": options.segment_length},
    problems=shac_problems,
    actions=(gymnasium.spaces.Box,),
    env_problems=differentiable_problems,
)
