"""``ActorCritic`` and ``ActorOnly`` with a memory between the observation and their networks."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.distributions import ActionSpec
from ejax.policies.heads import action_head
from ejax.policies.mlp import MLP, NetworkConfig
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.observations import select_observation
from ejax.policies.recurrence import MemoryConfig, Recurrence, history_step, in_sequence, recur
from ejax.types import Array, PyTree


class ActorCriticWithMemory(nn.Module):
    """Actor and critic that remember, ``(obs, memory) -> (distribution, value, memory after it)``.

    See ``ejax.types.PolicyWithMemory``. Parameters: those of ``ActorCritic``, and ``actor_memory`` and
    ``critic_memory`` of a GRU or an LSTM. Statistics are over single observations, and a history remembers observations
    as they were.
    """

    action_spec: ActionSpec
    actor: NetworkConfig
    actor_memory: MemoryConfig
    critic: NetworkConfig | None = None
    """None: the value is 0."""
    critic_memory: MemoryConfig = MemoryConfig(type="none")
    initial_log_std: float = 0.0
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    actor_obs_groups: tuple[str, ...] = ()
    critic_obs_groups: tuple[str, ...] = ()
    actor_obs_normalization: bool = False
    critic_obs_normalization: bool = False
    actor_width: int = 0
    """Numbers of an observation that the actor reads, for a history."""
    critic_width: int = 0

    def init_memory(self, num_rows: int) -> dict[str, Array]:
        """Make zeros [num_rows, M] for each network with a memory."""
        return {name: jnp.zeros((num_rows, size)) for name, size in self.memory_sizes.items()}

    @property
    def memory_sizes(self) -> dict[str, int]:
        """M of each network with a memory."""
        sizes = {"actor": self.actor_memory.size(self.actor_width)}
        if self.critic is not None and self.critic_memory.remembers:
            sizes["critic"] = self.critic_memory.size(self.critic_width)
        return sizes

    @nn.compact
    def __call__(
        self,
        obs: PyTree,
        *,
        memory: PyTree = None,
        first: Array | None = None,
        dropout_seed: Array | None = None,
        observe: bool | Array = False,
    ) -> tuple[Any, Array, dict[str, Array]]:
        """Evaluate ``obs``, leaves [..., F]; keywords as in ``ActorCritic``.

        ``memory`` has leaves [..., M]; None: an episode starts here. With ``first`` [L, B] bool, an episode's first
        steps, ``obs`` is a sequence [L, B, F], and ``memory`` [B, M].
        """
        rows = jax.tree.leaves(obs)[0].shape[:-1]
        if memory is None:
            batch = rows if first is None else rows[1:]
            memory = {name: jnp.zeros((*batch, size)) for name, size in self.memory_sizes.items()}
        # the actor's memory is learned by the actor alone
        reads_actors = self.critic_memory.type == "actor"
        memories = {"actor": self.actor_memory}
        if self.critic is not None and not reads_actors:
            memories["critic"] = self.critic_memory
        known, opened, after = {}, {}, {}
        for name, config in memories.items():
            x = select_observation(obs, getattr(self, f"{name}_obs_groups"))
            normalizes = getattr(self, f"{name}_obs_normalization")
            normalizer = ObsNormalizer(name=f"{name}_obs_normalizer") if normalizes else None
            if config.type == "history":
                step = partial(history_step, length=config.length or 0)
                window, after[name] = in_sequence(step, x, memory[name], first)
                if normalizer is not None:
                    window = normalizer(window)
                    if observe is not False:  # by x alone: in windows each observation would count K times
                        normalizer(x, observe=observe)
                known[name] = window.reshape(*window.shape[:-2], -1)
                continue
            known[name] = x if normalizer is None else normalizer(x, observe=observe)
            if config.remembers:
                opened[name] = Recurrence(config, name=f"{name}_memory").open(known[name], dropout_seed)
        for name, result in recur(opened, memory, first).items():
            known[name], after[name] = result
        distribution = action_head(self, known["actor"], dropout_seed=dropout_seed)
        if self.critic is None:
            return distribution, jnp.zeros(rows), after
        x = jax.lax.stop_gradient(known["actor"]) if reads_actors else known["critic"]
        return distribution, MLP(self.critic, 1, name="critic")(x, dropout_seed=dropout_seed)[..., 0], after
