"""MLPs of an actor, with a learned, state-independent log_std, and of a critic, if there is one.

Source: EmbodiChain's ActorCritic and ActorOnly.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.distributions import ActionSpec
from ejax.policies.heads import action_head
from ejax.policies.mlp import MLP, NetworkConfig
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.observations import select_observation
from ejax.policies.record import PolicyKind
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.types import Array, PyTree


class ActorOnly(nn.Module):
    """``obs -> (distribution, zeros [...])``, for GRPO and APG."""

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
        x = _observed(self, "actor", obs, observe)
        rows = jax.tree.leaves(obs)[0].shape[:-1]  # of any leaf: all have the rows of the observation
        return action_head(self, x, dropout_seed=dropout_seed), jnp.zeros(rows)


class ActorCritic(nn.Module):
    """``obs -> (distribution, value [...])``, with the fields of ``ActorOnly`` and the critic's."""

    action_spec: ActionSpec
    actor: NetworkConfig
    critic: NetworkConfig
    initial_log_std: float = 0.0
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    actor_obs_groups: tuple[str, ...] = ()
    critic_obs_groups: tuple[str, ...] = ()
    """Dotted paths of the critic's part of the observation: it may see more than the actor."""
    actor_obs_normalization: bool = False
    critic_obs_normalization: bool = False

    @nn.compact
    def __call__(
        self, obs: PyTree, *, dropout_seed: Array | None = None, observe: bool | Array = False
    ) -> tuple[Any, Array]:
        """Evaluate ``obs``, leaves [..., F]; without ``dropout_seed`` [...] uint32 there is no dropout."""
        distribution = action_head(self, _observed(self, "actor", obs, observe), dropout_seed=dropout_seed)
        x = _observed(self, "critic", obs, observe)
        return distribution, MLP(self.critic, 1, name="critic")(x, dropout_seed=dropout_seed)[..., 0]


def _observed(module: Any, name: str, obs: PyTree, observe: bool | Array) -> Array:
    """Select the part of the observation that a network reads, normalized where the module's fields ask for it."""
    x = select_observation(obs, getattr(module, f"{name}_obs_groups"))
    if getattr(module, f"{name}_obs_normalization"):
        x = ObsNormalizer(name=f"{name}_obs_normalizer")(x, observe=observe)
    return x


def _section_of(policy: Any) -> dict[str, Any]:
    """Make the section ``policy`` of a config for the like of ``policy``."""
    names = ("actor", "critic") if isinstance(policy, ActorCritic) else ("actor",)
    networks = {name: getattr(policy, name).model_dump(mode="json") for name in names}
    return {
        "initial_log_std": policy.initial_log_std,
        "log_std_range": list(policy.log_std_range),
        "squash_actions": policy.action_spec.kind == "tanh_normal",
        "obs_groups": {name: list(getattr(policy, f"{name}_obs_groups")) for name in names},
        **{name: {"type": "mlp", "network_cfg": network} for name, network in networks.items()},
        **{f"{name}_obs_normalization": getattr(policy, f"{name}_obs_normalization") for name in names},
    }


POLICY = PolicyKind(
    make=ActorCritic,
    with_memory=ActorCriticWithMemory,
    mlps=("actor", "critic"),
    section_of=_section_of,
    exporters={
        ActorCritic: "interop.exporters.mlp:EXPORTER",
        ActorCriticWithMemory: "interop.exporters.memory:EXPORTER",
    },
)
ACTOR_ONLY = PolicyKind(
    make=ActorOnly,
    with_memory=ActorCriticWithMemory,
    mlps=("actor",),
    section_of=_section_of,
    exporters={ActorOnly: "interop.exporters.mlp:EXPORTER"},
)
