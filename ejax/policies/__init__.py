"""Policies: Flax Linen modules ``obs -> (distribution, value)``, and the pure functions that use them."""

from typing import TYPE_CHECKING

from ejax.schema.lazy_names import lazy_names

if TYPE_CHECKING:
    from ejax.policies.actor_critic import ActorCritic, ActorOnly
    from ejax.policies.calls import evaluate_actions, get_action, get_value
    from ejax.policies.mlp import MLP, NetworkConfig, build_mlp_from_cfg

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
__getattr__ = lazy_names(
    "ejax.policies",
    {
        "ejax.policies.actor_critic": ("ActorCritic", "ActorOnly"),
        "ejax.policies.calls": ("evaluate_actions", "get_action", "get_value"),
        "ejax.policies.mlp": ("MLP", "NetworkConfig", "build_mlp_from_cfg"),
    },
)
