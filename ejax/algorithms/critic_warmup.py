"""Updates in which the critic learns alone, for a policy that was cloned or distilled and that no critic knows yet."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ejax.algorithms.sgd import Batch, Loss, MinibatchConfig, sgd_epochs
from ejax.numerics.kernels import map_parts
from ejax.optim import set_learning_rate
from ejax.types import Array, Key, Metrics, Params, PyTree, TrainState, with_critic


def warm_up_critic(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    num_updates: int,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[..., Any] | None = None,
    **policy_hooks: Any,
) -> tuple[TrainState, Metrics]:
    """Run ``sgd_epochs``, in the first ``num_updates`` updates of the critic alone and without ``policy_hooks``."""
    epochs = partial(sgd_epochs, minibatches=minibatches, prepare=prepare)
    learn_all = partial(epochs, loss=loss, optimizer=optimizer, **policy_hooks)
    learn_critic = partial(epochs, loss=partial(_critic_loss, loss=loss), optimizer=critic_optimizer(optimizer))
    # the count of the critic's steps would be taken for the policy's, whose moments are still those of a start
    begin = partial(_restart, optimizer)
    state = jax.lax.cond(state.step == num_updates, begin, lambda state: state, state)
    return jax.lax.cond(state.step < num_updates, learn_critic, learn_all, state, batch, key)


def hold_policy(before: TrainState, after: TrainState, num_updates: int) -> TrainState:
    """Keep all parameters but the critic's while it warms up, normalizers of the policy's input among them."""
    held = {name: with_critic(before.params[name], part) for name, part in after.params.items()}
    warming_up = before.step < num_updates
    return replace(after, params=jax.tree.map(lambda held, new: jnp.where(warming_up, held, new), held, after.params))


def _critic_loss(params: Params, batch: Batch, *, loss: Loss) -> tuple[Array, Metrics]:
    """Compute the loss; its gradient goes to the critic alone."""
    networks = params["params"]
    if "critic" not in networks:
        raise ValueError(f"critic_warmup_updates needs a network 'critic', got a policy with {', '.join(networks)}")
    held = with_critic(jax.lax.stop_gradient(networks), networks)
    return loss({**params, "params": held}, batch)


def _restart(optimizer: optax.GradientTransformation, state: TrainState) -> TrainState:
    """Start the optimizer again, with the learning rate that it has."""
    opt_state = optimizer.init(state.params["params"])  # moments of the warm-up are the critic's alone
    rate = optax.tree_utils.tree_get(state.opt_state, "learning_rate", default=None)
    return replace(state, opt_state=opt_state if rate is None else set_learning_rate(opt_state, rate))


def critic_optimizer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Restrict the optimizer to the critic: other parameters and their moments do not change. Its state has the same
    form, and shares its counts."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        directions, after = optimizer.update(updates, state, params)
        nothing = jax.tree.map(lambda x: jnp.full_like(x, -0.0), directions)  # −0 + 0 would lose its sign
        return with_critic(nothing, directions), map_parts(with_critic, updates, state, after)

    return optax.GradientTransformation(optimizer.init, update)
