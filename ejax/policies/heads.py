"""Action distributions of policies: the actor's network and its log_std."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.policies.mlp import MLP
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.observations import select_observation
from ejax.types import Array, PyTree


def actor_head(module: Any, obs: PyTree, *, dropout_seed: Array | None, observe: bool | Array) -> Any:
    """Make the action distribution of a module with ``ActorOnly``'s fields; its parameters become the module's own."""
    x = select_observation(obs, module.actor_obs_groups)
    if module.actor_obs_normalization:
        x = ObsNormalizer(name="actor_obs_normalizer")(x, observe=observe)
    return action_head(module, x, dropout_seed=dropout_seed)


def action_head(module: Any, x: Array, *, dropout_seed: Array | None) -> Any:
    """Apply the head to features [..., F]."""
    output = MLP(module.actor, module.action_spec.num_outputs, name="actor")(x, dropout_seed=dropout_seed)
    if not module.action_spec.continuous:
        return module.action_spec.distribution(output, None)
    log_std = module.param("log_std", nn.initializers.constant(module.initial_log_std), module.action_spec.sizes)
    return module.action_spec.distribution(output, clip_like_torch(log_std, *module.log_std_range))


def clip_like_torch(x: Array, low: float, high: float) -> Array:
    """Clip as torch.clamp: the gradient is 1 on the bounds too; ``jnp.clip`` halves it."""
    outside = (x < low) | (x > high)
    return jnp.where(outside, jax.lax.stop_gradient(jnp.clip(x, low, high)), x)
