"""An actor without a critic, for GRPO and APG. Source: EmbodiChain's ActorOnly."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.distributions import ActionSpec
from ejax.policies.heads import actor_head
from ejax.policies.mlp import NetworkConfig
from ejax.policies.record import PolicyKind
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.types import Array, PyTree


class ActorOnly(nn.Module):
    """``obs -> (distribution, zeros [...])``."""

    action_spec: ActionSpec
    actor: NetworkConfig
    initial_log_std: float = 0.0
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    """The standard deviation is exp(clip(log_std, *range)); outside the range the gradient is zero."""
    actor_obs_groups: tuple[str, ...] = ()
    actor_obs_normalization: bool = False

    @nn.compact
    def __call__(
        self, obs: PyTree, *, dropout_seed: Array | None = None, observe: bool | Array = False
    ) -> tuple[Any, Array]:
        distribution = actor_head(self, obs, dropout_seed=dropout_seed, observe=observe)
        rows = jax.tree.leaves(obs)[0].shape[:-1]
        return distribution, jnp.zeros(rows)


def section_of(policy: Any) -> dict[str, Any]:
    """Make the section ``policy`` of a config for the like of an ``ActorOnly`` or ``ActorCritic``."""
    section: dict[str, Any] = {
        "initial_log_std": policy.initial_log_std,
        "log_std_range": list(policy.log_std_range),
        "squash_actions": policy.action_spec.kind == "tanh_normal",
        "obs_groups": {},
    }
    for name in ("actor", "critic"):
        if hasattr(policy, name):
            section[name] = {"type": "mlp", "network_cfg": getattr(policy, name).model_dump(mode="json")}
            section[f"{name}_obs_normalization"] = getattr(policy, f"{name}_obs_normalization")
            section["obs_groups"][name] = list(getattr(policy, f"{name}_obs_groups"))
    return section


POLICY = PolicyKind(
    make=ActorOnly,
    with_memory=ActorCriticWithMemory,
    mlps=("actor",),
    section_of=section_of,
    exporters={ActorOnly: "interop.exporters.mlp:EXPORTER"},
)
