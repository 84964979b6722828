"""One update from a rollout. PPO, GRPO and distillation differ in the columns that they add to it, and in the loss."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import optax

from ejax.algorithms.batch import flatten, sequence_length
from ejax.algorithms.options import MinibatchOptions
from ejax.algorithms.sgd import sgd_epochs
from ejax.optim import get_learning_rate, step_schedule
from ejax.policies.normalize import update_normalizer
from ejax.runtime.sharding import num_shards
from ejax.types import Key, Metrics, Policy, PyTree, Rollout, TrainState


def on_policy_update(
    state: TrainState,
    rollout: Rollout,
    key: Key,
    *,
    columns: dict[str, PyTree | None],
    loss: Callable[..., Any],
    policy: Policy,
    optimizer: optax.GradientTransformation,
    options: MinibatchOptions,
    normalizers: Literal["first", "last", "never"] = "last",
    learn: Callable[..., tuple[TrainState, Metrics]] = sgd_epochs,
) -> tuple[TrainState, Metrics]:
    """Make ``n_epochs`` of minibatch steps over a rollout [T, N, ...], and one of the learning-rate schedule.

    Args:
        columns: beside those of the rollout, leaves [T, N, ...]; see ``ejax.algorithms.batch.flatten``.
        loss: ``(params, minibatch, policy=…, config=options) -> (loss, metrics)``.
        normalizers: the moment at which observation normalizers take in the rollout. ``last``: in the epochs the policy
            sees what it saw when it acted, so that the probability ratio begins at 1.
        learn: ``sgd_epochs``, with what a loss needs besides, or in its place.

    Returns:
        The new state (``step`` + 1) and scalar metrics, ``learning_rate`` among them.
    """
    num_strata, length = rows_of(policy, rollout, options)
    if normalizers == "first":
        state = replace(state, params=update_normalizer(policy, state.params, rollout.obs, rollout.valid))
    state, metrics = learn(
        state,
        flatten(rollout, num_strata, length, **columns),
        key,
        loss=partial(loss, policy=policy, config=options),
        optimizer=optimizer,
        minibatches=options.minibatches(rollout.reward.size, num_strata, length or 1),
    )
    # once per update, however many minibatches it has: schedules count updates
    state = step_schedule(state, options.optimizer, options.lr_scheduler)
    if normalizers == "last":
        state = replace(state, params=update_normalizer(policy, state.params, rollout.obs, rollout.valid))
    return state, metrics | {"learning_rate": get_learning_rate(state.opt_state)}


def rows_of(policy: Policy, rollout: Rollout, options: MinibatchOptions) -> tuple[int, int | None]:
    """Compute ``(strata, steps of a sequence)`` of a batch; see ``ejax.algorithms.batch``."""
    num_strata = options.minibatch_strata or num_shards()
    steps = None if options.minibatch_steps is None else num_shards() * options.minibatch_steps
    return num_strata, sequence_length(policy, rollout, options.sequence_length, steps, num_strata)
