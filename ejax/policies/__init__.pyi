"""Types of the names that ``ejax.policies`` looks up lazily; ``__init__.py`` has the table."""

from ejax.policies.actor_critic import ActorCritic as ActorCritic, ActorOnly as ActorOnly
from ejax.policies.calls import evaluate_actions as evaluate_actions, get_action as get_action, get_value as get_value
from ejax.policies.mlp import MLP as MLP, NetworkConfig as NetworkConfig, build_mlp_from_cfg as build_mlp_from_cfg
