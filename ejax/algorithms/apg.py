"""Analytic policy gradient: the reward is differentiated through the environment's dynamics.

    J = mean over environments of Σₜ dₜ·(rₜ + ent_coef·Hₜ),  d₀ = 1, dₜ₊₁ = 1 after an episode's end, else γ·dₜ

``segmented``: the gradient is cut every ``segment_length`` steps (truncated backpropagation through time), while the
discount goes on. ``complete``: whole episodes from fresh starts, up to the first end. Needs an environment whose step
is differentiable JAX code. Source: EmbodiChain 0.2.4 and 0.3.2.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from ejax.algorithms.differentiable import (
    DifferentiableOptions,
    Trajectory,
    adjoint_metrics,
    adjoint_probe,
    differentiable_problems,
    discounted_sum,
    play,
    step_maker,
    without_trajectory,
)
from ejax.algorithms.record import Algorithm
from ejax.numerics.traced_options import is_active
from ejax.optim import apply_gradient, clip_by_global_norm, get_learning_rate, step_schedule
from ejax.policies.normalize import update_normalizer
from ejax.rollout import EnvCarry, reset
from ejax.types import Array, Env, Key, Metrics, Params, Policy, PyTree, TrainState


class APGConfig(DifferentiableOptions):
    """``algorithm.cfg`` of ``apg``. Horizon, mode and actions have the names of EmbodiChain's ``trainer`` keys."""

    segment_length: PositiveInt = 16
    """Steps that a gradient flows back through."""
    update_horizon: PositiveInt | None = None
    """Steps of one update, a multiple of ``segment_length``. Default: one segment."""
    rollout_mode: Literal["segmented", "complete"] = "segmented"
    """``segmented``: environments go on from update to update, and the gradient is cut every ``segment_length``
    steps. ``complete``: whole episodes from fresh starts, up to the first end."""
    gradient_accumulation_steps: PositiveInt = 1
    """``complete`` only: independent rollouts whose gradients are averaged."""
    max_grad_norm_before_clip: NonNegativeFloat = 0.0
    """Skip an update whose gradient is larger than this before clipping. 0: never."""
    skip_nonfinite_updates: bool = True
    """Leave parameters, optimizer and schedule as they are when the gradient, or the step that the optimizer makes of
    it, is not finite; False: training stops."""

    @model_validator(mode="after")
    def _whole_segments(self) -> "APGConfig":
        if self.horizon % self.segment_length:
            raise ValueError(
                f"update_horizon ({self.horizon}) must be a multiple of segment_length ({self.segment_length})"
            )
        if self.gradient_accumulation_steps > 1 and self.rollout_mode != "complete":
            raise ValueError("gradient_accumulation_steps needs rollout_mode: complete")
        return self

    @property
    def horizon(self) -> int:
        return self.segment_length if self.update_horizon is None else self.update_horizon


def apg_update_with_trajectory(
    state: TrainState,
    carry: EnvCarry,
    key: Key,
    *,
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: APGConfig,
) -> tuple[TrainState, EnvCarry, Metrics, Trajectory]:
    """One APG update from ``carry`` on.

    Args:
        carry: N environments, leaves [N, ...]; ``rollout_mode: complete`` takes only their number.
        env: its ``step`` is differentiable.
        config: an open ``lr_scheduler`` needs its horizon: ``bind_schedule``.

    Returns:
        The new state (``step`` + 1 unless the update was skipped), the environments after it, scalar metrics: ``loss``,
        ``objective`` and ``entropy`` (sums over segments), ``grad_norm`` (before clipping; NaN where not finite),
        ``skipped_update``; and the trajectory.
    """
    gradient = partial(_segmented if config.rollout_mode == "segmented" else _complete, policy=policy, env=env)
    grads, carry, metrics, trajectory = gradient(state.params, carry, key, config=config)
    clipped, norm = clip_by_global_norm(grads, config.max_grad_norm)

    # a gradient that is finite but exploded says nothing about the direction: clipping would only shorten it
    excessive = jnp.asarray(False)
    if is_active(config.max_grad_norm_before_clip):
        excessive = norm > config.max_grad_norm_before_clip

    # whether the step is finite is known once the optimizer has made it; all that follows is undone at once where not
    has_gradient = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    updated, finite = apply_gradient(state, clipped, optimizer=optimizer, finite=has_gradient, skip=False)
    updated = step_schedule(updated, config.optimizer, config.lr_scheduler)
    updated = replace(updated, params=update_normalizer(policy, updated.params, trajectory.obs))
    if config.skip_nonfinite_updates or is_active(config.max_grad_norm_before_clip):
        keep = excessive | ~finite if config.skip_nonfinite_updates else excessive
        updated = jax.tree.map(lambda old, new: jnp.where(keep, old, new), state, updated)

    metrics |= {
        "grad_norm": jnp.where(has_gradient, norm, jnp.nan),
        "skipped_update": (excessive | ~finite).astype(jnp.float32),
        "skipped_excessive_gradient": (excessive & finite).astype(jnp.float32),
        "learning_rate": get_learning_rate(updated.opt_state),
    }
    return updated, carry, metrics, trajectory


apg_update = without_trajectory(apg_update_with_trajectory)
"""``(state, carry, key, *, policy, env, optimizer, config) -> (state, carry, metrics)``: the same, jitted."""


def segmented_discounted_return(reward: Array, done: Array, *, gamma: float) -> Array:
    """Σₜ dₜ·rₜ with a discount that restarts after each done. [T, N] -> [N].

    Raises:
        ValueError: no steps.
    """
    if reward.shape[0] == 0:
        raise ValueError(f"a return needs at least one step, got reward of shape {reward.shape}")
    total, _ = discounted_sum(reward, done, jnp.ones_like(reward[0]), gamma=gamma)
    return total


def _segmented(
    params: Params, carry: EnvCarry, key: Key, *, policy: Policy, env: Env, config: APGConfig
) -> tuple[PyTree, EnvCarry, Metrics, Trajectory]:
    """The gradient summed over segments; each starts where the one before it ended, without a gradient into it."""

    def loss(trained: PyTree, taps: Array, carry: EnvCarry, discount: Array, key: Key) -> tuple[Array, Any]:
        variables = {**params, "params": trained}
        carry, trajectory, entropy = play(variables, taps, carry, key, policy=policy, env=env, options=config)
        # the discount goes on over the border of a segment, as the episode does; the gradient does not
        objective, next_discount = discounted_sum(trajectory.reward, trajectory.done, discount, gamma=config.gamma)
        entropy_sum, _ = discounted_sum(entropy, trajectory.done, discount, gamma=config.gamma)
        sums = {"objective": objective.mean(), "entropy": entropy_sum.mean()}
        value = -sums["objective"] - config.ent_coef * sums["entropy"]
        return value, (carry, next_discount, sums | {"loss": value}, trajectory)

    def one_segment(running: tuple[PyTree, EnvCarry, Array], key: Key) -> tuple[Any, Any]:
        grads, carry, discount = running
        # the probe is zero and added to each action: its gradient is the action's adjoint, which metrics report
        (_, aux), (grad, tapped) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            params["params"], adjoint_probe(config.segment_length), carry, discount, key
        )
        carry, discount, sums, trajectory = aux
        return (jax.tree.map(jnp.add, grads, grad), carry, discount), (sums, trajectory, tapped)

    num_segments = config.horizon // config.segment_length
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    start = (jax.tree.map(jnp.zeros_like, params["params"]), carry, jnp.ones(num_envs))
    (grads, carry, _), (sums, trajectory, tapped) = jax.lax.scan(
        one_segment, start, jax.random.split(key, num_segments)
    )
    trajectory = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trajectory)
    metrics = {name: x.sum() for name, x in sums.items()} | adjoint_metrics(
        tapped, num_envs, config.action_adjoint_max_norm
    )
    return grads, carry, metrics, jax.lax.stop_gradient(trajectory)


def _complete(
    params: Params, carry: EnvCarry, key: Key, *, policy: Policy, env: Env, config: APGConfig
) -> tuple[PyTree, EnvCarry, Metrics, Trajectory]:
    """The mean gradient of independent rollouts from fresh starts, each up to the first end of its episode."""
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    discount = config.gamma ** jnp.arange(config.horizon, dtype=jnp.float32)[:, None]

    def loss(trained: PyTree, taps: Array, carry: EnvCarry, key: Key) -> tuple[Array, Any]:
        variables = {**params, "params": trained}
        carry, trajectory, entropy = play(variables, taps, carry, key, policy=policy, env=env, options=config)
        # steps after the first end belong to another start, which no other rollout would share
        alive = (jnp.cumsum(trajectory.done, axis=0) - trajectory.done) == 0
        sums = {
            "objective": (discount * alive * trajectory.reward).sum(axis=0).mean(),
            "entropy": (discount * alive * entropy).sum(axis=0).mean(),
        }
        value = -sums["objective"] - config.ent_coef * sums["entropy"]
        return value, (carry, sums | {"loss": value}, trajectory)

    def one_rollout(grads: PyTree, key: Key) -> tuple[PyTree, Any]:
        key_reset, key_play = jax.random.split(key)
        fresh = reset(env, key_reset, num_envs)
        (_, aux), (grad, tapped) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            params["params"], adjoint_probe(config.horizon), fresh, key_play
        )
        return jax.tree.map(jnp.add, grads, grad), (*aux, tapped)

    # a scan, not a vmap: one rollout's activations are kept at a time, which is what accumulation is for
    num_rollouts = config.gradient_accumulation_steps
    zeros = jax.tree.map(jnp.zeros_like, params["params"])
    grads, (carries, sums, trajectory, tapped) = jax.lax.scan(one_rollout, zeros, jax.random.split(key, num_rollouts))
    metrics = {name: x.mean() for name, x in sums.items()} | adjoint_metrics(
        tapped, num_envs, config.action_adjoint_max_norm
    )
    # the last rollout stands for all in the statistics of episodes and of the normalizer
    last = jax.tree.map(lambda x: x[-1], (carries, trajectory))
    return jax.tree.map(lambda g: g / num_rollouts, grads), last[0], metrics, jax.lax.stop_gradient(last[1])


ALGORITHM = Algorithm(
    Config=APGConfig,
    make_step=step_maker(apg_update_with_trajectory, starts_afresh=lambda options: options.rollout_mode == "complete"),
    stops_at_nonfinite=lambda options: not options.skip_nonfinite_updates,
    sizes=lambda options, chunk_size: {"buffer_size": options.horizon},
    env_problems=differentiable_problems,
    ignored_options=("gae_lambda", "batch_size"),
)
