"""Rollouts that older parameters made, as the policy that an update starts with sees them.

The surrogate is clipped around that policy, not around the one that acted; the difference between the two is a weight
of each row. Source: Hilton et al. 2022, "Batch size-invariance for policy optimization".
"""

from dataclasses import replace

import jax.numpy as jnp

from ejax.algorithms.batch import evaluate_rollout
from ejax.losses import kl_k3
from ejax.types import Array, Metrics, Params, Policy, Rollout


def refresh(
    params: Params, rollout: Rollout, length: int | None, *, policy: Policy, weight_threshold: float
) -> tuple[Rollout, Array, Metrics]:
    """The rollout with log-probabilities and values of ``params`` for those of the parameters that acted.

    Args:
        length: of sequences; see ``ejax.algorithms.batch.sequence_length``.
        weight_threshold: the most that a weight may be.

    Returns:
        The rollout, the weight π(params)/π(acted) of each step [T, N], and metrics of how far apart the two are.
    """
    log_prob, value = evaluate_rollout(params, rollout, length, policy=policy)
    # V of the true next observation is V of the next row, but where an episode ended; there the old one must do
    following = jnp.concatenate([value[1:], rollout.next_value[-1:]])
    goes_on = ~rollout.done & (jnp.arange(len(value)) < len(value) - 1)[:, None]
    next_value = jnp.where(goes_on, following, rollout.next_value)
    log_ratio = log_prob - rollout.log_prob
    ratio = jnp.exp(log_ratio)
    metrics = {
        "behave_approx_kl": kl_k3(log_ratio).mean(where=rollout.valid),
        "behave_weight_clipped": (ratio > weight_threshold).mean(where=rollout.valid),
    }
    seen = replace(rollout, log_prob=log_prob, value=value, next_value=next_value)
    return seen, jnp.minimum(ratio, weight_threshold), metrics
