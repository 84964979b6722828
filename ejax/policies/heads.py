"""Action distributions of policies: the actor's network and its log_std."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.policies.mlp import MLP
from ejax.types import Array


def action_head(module: Any, x: Array, *, dropout_seed: Array | None) -> Any:
    """Make the distribution for features [..., F], with fields and parameters of ``module``, such as ``ActorOnly``."""
    output = MLP(module.actor, module.action_spec.num_outputs, name="actor")(x, dropout_seed=dropout_seed)
    if not module.action_spec.continuous:
        return module.action_spec.distribution(output, None)
    log_std = module.param("log_std", nn.initializers.constant(module.initial_log_std), module.action_spec.sizes)
    return module.action_spec.distribution(output, clip_like_torch(log_std, *module.log_std_range))


def clip_like_torch(x: Array, low: float, high: float) -> Array:
    """Clip as torch.clamp: the gradient is 1 on the bounds too; ``jnp.clip`` halves it."""
    outside = (x < low) | (x > high)
    return jnp.where(outside, jax.lax.stop_gradient(jnp.clip(x, low, high)), x)  # outside, the gradient is 0
