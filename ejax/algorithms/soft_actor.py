"""The soft actor: what SAC, FlashSAC and REPPO share. Its actions are weighed by −α·log π, of actions in [-1, 1], and
it follows the gradient of critics that value actions."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ejax.optim import apply_gradient, clip_by_global_norm
from ejax.types import Array, Key, Metrics, Params, PyTree, TrainState, with_networks


def sample_soft(distribution: Any, key: Key) -> tuple[Array, Array]:
    """Draw actions; return them with log π of them in [-1, 1], [...]: entropies do not depend on the units of the
    environment's actions."""
    action, log_prob = distribution.sample_and_log_prob(key)
    # log π of actions in [-1, 1] is greater by the logarithm of the action space's volume
    return action, log_prob + jnp.sum(jnp.log(distribution.half_width), axis=-1)


def learned_alpha(params: Params) -> Array:
    """Return α, [], the entropy's weight; no gradient goes to it."""
    return jnp.exp(jax.lax.stop_gradient(params["params"]["log_alpha"]))


def step_networks(
    state: TrainState, trained: PyTree, loss: Any, optimizer: optax.GradientTransformation, config: Any, name: str
) -> tuple[TrainState, Metrics]:
    """Step the parameters ``trained``, by the loss's gradient, and no others. Metrics: ``<name>_loss``,
    ``<name>_grad_norm`` (before clipping), ``skipped_<name>``, and those of the loss."""
    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    grads, norm = clip_by_global_norm(grads, config.max_grad_norm)
    stepped, finite = apply_gradient(
        replace(state, params={"params": trained}),
        grads,
        optimizer=optimizer,
        finite=jnp.isfinite(norm) & jnp.isfinite(value),
        skip=config.skip_nonfinite_updates,
    )
    metrics = {f"{name}_loss": value, f"{name}_grad_norm": norm, f"skipped_{name}": ~finite, **metrics}
    return replace(stepped, params=with_networks(state.params, stepped.params["params"])), metrics


def with_skipped_fraction(metrics: Metrics) -> Metrics:
    """Replace ``skipped_critic`` and ``skipped_actor`` by ``skipped_fraction``: 1 where either was skipped."""
    skipped = [value for name, value in metrics.items() if name.startswith("skipped_")]
    rest = {name: value for name, value in metrics.items() if not name.startswith("skipped_")}
    return rest | {"skipped_fraction": jnp.stack(skipped).any().astype(jnp.float32)}
