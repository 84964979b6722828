"""Policies: Flax Linen modules ``obs -> (distribution, value)``, and the pure functions that use them."""

from functools import partial

import chex
import jax

from ejax.numerics.checks import value_errors
from ejax.policies.actor_critic import ActorCritic, ActorOnly
from ejax.policies.mlp import MLP, NetworkConfig, build_mlp_from_cfg
from ejax.types import Array, Key, Params, Policy, PyTree

__all__ = [
    "MLP",
    "ActorCritic",
    "ActorOnly",
    "NetworkConfig",
    "build_mlp_from_cfg",
    "evaluate_actions",
    "get_action",
    "get_value",
]


@partial(jax.jit, static_argnames=("policy", "deterministic"))
def get_action(
    policy: Policy, params: Params, obs: PyTree, key: Key, deterministic: bool = False
) -> tuple[Array, Array, Array]:
    """Act: ``(action [..., A], log_prob [...], value [...])`` for observations with leaves [..., F].

    ``params`` are Flax variables. ``deterministic`` takes the distribution's mode and does not use ``key``. log π is
    summed over action dimensions.
    """
    distribution, value = policy.apply(params, obs)
    action = distribution.mode() if deterministic else distribution.sample(key)
    return action, distribution.log_prob(action), value


@partial(jax.jit, static_argnames="policy")
def get_value(policy: Policy, params: Params, obs: PyTree) -> Array:
    """Compute V(obs) [...] for observations with leaves [..., F]; zeros of a policy without a critic."""
    return policy.apply(params, obs)[1]


@partial(jax.jit, static_argnames="policy")
def evaluate_actions(policy: Policy, params: Params, obs: PyTree, action: Array) -> tuple[Array, Array, Array]:
    """Compute ``(log_prob, entropy, value)``, each [...], of actions [..., A] taken at ``obs``, leaves [..., F].
    Raises ValueError: actions of another shape than the policy draws."""
    distribution, value = policy.apply(params, obs)
    with value_errors("evaluate_actions takes actions as the policy draws them"):
        chex.assert_equal_shape([action, jax.eval_shape(distribution.sample, jax.random.key(0))])
    return distribution.log_prob(action), distribution.entropy(), value
