"""Policies: Flax Linen modules ``obs -> (distribution, value)``, and the pure functions that use them."""

from ejax.schema.lazy_names import lazy_names

_PLACES = {
    "ejax.policies.actor_critic": ("ActorCritic", "ActorOnly"),
    "ejax.policies.calls": ("evaluate_actions", "get_action", "get_value"),
    "ejax.policies.mlp": ("MLP", "NetworkConfig", "build_mlp_from_cfg"),
}
__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_names("ejax.policies", _PLACES)
