"""Updates in which the critic learns alone, for a policy that was cloned or distilled and that no critic knows yet."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ejax.algorithms.gradient import Loss
from ejax.algorithms.sgd import MinibatchConfig, sgd_epochs
from ejax.optim import of_critic, restart
from ejax.types import Array, Key, Metrics, Params, PyTree, TrainState, with_critic


def warm_up_critic(
    state: TrainState,
    batch: dict[str, PyTree],
    key: Key,
    *,
    num_updates: int,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[..., Any] | None = None,
    **of_policy: Any,
) -> tuple[TrainState, Metrics]:
    """``sgd_epochs`` of all networks, but in the first ``num_updates`` of the critic alone.

    Args:
        of_policy: what else ``sgd_epochs`` takes; it is about the policy's steps, and waits for them.
    """
    epochs = partial(sgd_epochs, minibatches=minibatches, prepare=prepare)
    learn_all = partial(epochs, loss=loss, optimizer=optimizer, **of_policy)
    learn_critic = partial(epochs, loss=partial(_critic_loss, loss=loss), optimizer=of_critic(optimizer))
    # what the critic's steps have counted would be taken for the policy's, whose moments are still those of a start
    begin = partial(restart, optimizer)
    state = jax.lax.cond(state.step == num_updates, begin, lambda state: state, state)
    return jax.lax.cond(state.step < num_updates, learn_critic, learn_all, state, batch, key)


def hold_policy(before: TrainState, after: TrainState, num_updates: int) -> TrainState:
    """The state after an update: while the critic warms up, only its parameters differ from those before.

    Normalizers of what the policy sees are held as well: it acts as it was cloned to act.
    """
    held = {name: with_critic(before.params[name], part) for name, part in after.params.items()}
    warming_up = before.step < num_updates
    return replace(after, params=jax.tree.map(lambda held, new: jnp.where(warming_up, held, new), held, after.params))


def _critic_loss(params: Params, batch: dict[str, PyTree], *, loss: Loss) -> tuple[Array, Metrics]:
    """The loss, whose gradient goes to the critic alone."""
    networks = params["params"]
    if "critic" not in networks:
        raise ValueError(f"critic_warmup_updates needs a network 'critic', got a policy with {', '.join(networks)}")
    held = with_critic(jax.lax.stop_gradient(networks), networks)
    return loss({**params, "params": held}, batch)
