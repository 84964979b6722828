"""Actor and critic MLPs with a learned, state-independent log_std. Source: EmbodiChain's ActorCritic."""

from typing import Any

import flax.linen as nn

from ejax.distributions import ActionSpec
from ejax.policies.actor_only import section_of
from ejax.policies.heads import actor_head
from ejax.policies.mlp import MLP, NetworkConfig
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.observations import select_observation
from ejax.policies.record import PolicyKind
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.types import Array, PyTree


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
        distribution = actor_head(self, obs, dropout_seed=dropout_seed, observe=observe)
        x = select_observation(obs, self.critic_obs_groups)
        if self.critic_obs_normalization:
            x = ObsNormalizer(name="critic_obs_normalizer")(x, observe=observe)
        value = MLP(self.critic, 1, name="critic")(x, dropout_seed=dropout_seed)[..., 0]
        return distribution, value


POLICY = PolicyKind(
    make=ActorCritic,
    with_memory=ActorCriticWithMemory,
    mlps=("actor", "critic"),
    section_of=section_of,
    exporters={
        ActorCritic: "interop.exporters.mlp:EXPORTER",
        ActorCriticWithMemory: "interop.exporters.memory:EXPORTER",
    },
)
