"""Analytic policy gradient: the reward is differentiated through the environment's dynamics.

    J = mean over environments of Σₜ dₜ·(rₜ + ent_coef·Hₜ),  d₀ = 1, dₜ₊₁ = 1 after an episode's end, else γ·dₜ

``segmented``: the gradient is cut every ``segment_length`` steps, while the discount continues. ``complete``: whole
episodes from fresh starts, up to the first end. Source: EmbodiChain 0.2.4 and 0.3.2.
"""

from dataclasses import replace
from typing import Any, Literal

import gymnasium
import jax
import jax.numpy as jnp
import optax
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from ejax.algorithms.differentiable import (
    DifferentiableOptions,
    adjoint_metrics,
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
from ejax.types import Array, Env, Key, Metrics, Params, Policy, PyTree, Timestep, TrainState


class APGConfig(DifferentiableOptions):
    """``algorithm.cfg`` of ``apg``. Horizon, mode and actions have the names of EmbodiChain's ``trainer`` keys."""

    ignored = ("gae_lambda", "batch_size")
    segment_length: PositiveInt = 16
    """Steps that a gradient flows back through."""
    update_horizon: PositiveInt | None = None
    """Steps of one update, a multiple of ``segment_length``. Default: one segment."""
    rollout_mode: Literal["segmented", "complete"] = "segmented"
    """``segmented``: environments continue from update to update, and the gradient is cut every ``segment_length``
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
                f"update_horizon {self.horizon} must be a multiple of segment_length {self.segment_length}"
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
) -> tuple[TrainState, EnvCarry, Metrics, Timestep]:
    """Make one APG update from ``carry`` on.

    Args:
        carry: N environments whose ``step`` is differentiable, leaves [N, ...]; ``rollout_mode: complete`` takes only
            their number.
        config: an open ``lr_scheduler`` needs its horizon: ``bind_schedule``.

    Returns:
        The new state (``step`` + 1 unless the update was skipped), the environments after it, scalar metrics
        (``objective`` and ``entropy`` summed over segments, ``grad_norm`` before clipping, NaN where not finite), and
        the trajectory.
    """
    grads, carry, metrics, trajectory = _gradient(state.params, carry, key, policy=policy, env=env, config=config)
    clipped, norm = clip_by_global_norm(grads, config.max_grad_norm)
    # whether the step is finite is known once the optimizer has made it; all that follows is undone together where not
    has_gradient = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    updated, finite = apply_gradient(state, clipped, optimizer=optimizer, finite=has_gradient, skip=False)
    updated = step_schedule(updated, config.optimizer, config.lr_scheduler)
    updated = replace(updated, params=update_normalizer(policy, updated.params, trajectory.obs))

    # a gradient that is finite but exploded points nowhere: clipping would only shorten it
    excessive = jnp.asarray(False)
    if is_active(config.max_grad_norm_before_clip):
        excessive = norm > config.max_grad_norm_before_clip
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


def _gradient(
    params: Params, carry: EnvCarry, key: Key, *, policy: Policy, env: Env, config: APGConfig
) -> tuple[PyTree, EnvCarry, Metrics, Timestep]:
    """Sum the gradient over segments, or average it over complete rollouts."""
    complete = config.rollout_mode == "complete"
    num_steps = config.horizon if complete else config.segment_length
    num_parts = config.gradient_accumulation_steps if complete else config.horizon // config.segment_length
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    # of complete rollouts, which begin with their episodes; segments carry their discount on
    power = config.gamma ** jnp.arange(config.horizon, dtype=jnp.float32)[:, None]

    def loss(trained: PyTree, taps: Array, carry: EnvCarry, discount: Array, key: Key) -> tuple[Array, Any]:
        variables = {**params, "params": trained}
        carry, trajectory, entropy = play(variables, taps, carry, key, policy=policy, env=env, options=config)
        done = trajectory.done
        if complete:
            # steps after the first end belong to another start, which no other rollout would share
            alive = (jnp.cumsum(done, axis=0) - done) == 0
            objective, entropy = ((power * alive * x).sum(axis=0) for x in (trajectory.reward, entropy))
        else:
            # the discount continues over the border of a segment, as the episode does; the gradient does not
            entropy, _ = discounted_sum(entropy, done, discount, gamma=config.gamma)
            objective, discount = discounted_sum(trajectory.reward, done, discount, gamma=config.gamma)
        sums = {"objective": objective.mean(), "entropy": entropy.mean()}
        value = -sums["objective"] - config.ent_coef * sums["entropy"]
        return value, (carry, discount, sums | {"loss": value}, trajectory)

    def one_part(running: tuple[PyTree, EnvCarry, Array], key: Key) -> tuple[Any, Any]:
        grads, carry, discount = running
        if complete:
            key_reset, key = jax.random.split(key)
            carry = reset(env, key_reset, num_envs)
        # the probe is zero and added to each action: its gradient is the action's adjoint, which metrics report
        (_, aux), (grad, tapped) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            params["params"], jnp.zeros((num_steps, 4)), carry, discount, key
        )
        carry, discount, sums, trajectory = aux
        return (jax.tree.map(jnp.add, grads, grad), carry, discount), (sums, trajectory, tapped)

    # a scan, not a vmap: one part's activations are kept at a time, which is what accumulation is for
    start = (jax.tree.map(jnp.zeros_like, params["params"]), carry, jnp.ones(num_envs))
    (grads, carry, _), (sums, trajectory, tapped) = jax.lax.scan(one_part, start, jax.random.split(key, num_parts))
    if complete:
        grads = jax.tree.map(lambda g: g / num_parts, grads)  # rollouts are averaged, segments of one are summed
        # the last rollout represents all in the statistics of episodes and of the normalizer
        trajectory = jax.tree.map(lambda x: x[-1], trajectory)
    else:
        trajectory = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trajectory)
    metrics = {name: x.mean() if complete else x.sum() for name, x in sums.items()}
    metrics |= adjoint_metrics(tapped, num_envs, config.action_adjoint_max_norm)
    return grads, carry, metrics, jax.lax.stop_gradient(trajectory)


ALGORITHM = Algorithm(
    Config=APGConfig,
    make_step=step_maker(apg_update_with_trajectory, starts_afresh=lambda options: options.rollout_mode == "complete"),
    sizes=lambda options, chunk_size: {"buffer_size": options.horizon},
    actions=(gymnasium.spaces.Box,),
    env_problems=differentiable_problems,
    ignored_options=APGConfig.ignored,
)
