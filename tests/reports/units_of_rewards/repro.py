"""Rewards of 1e-6. RIGHT: normalized like those of 1, and a useless critic explains no variance. WRONG: a floor."""

import jax.numpy as jnp
import numpy as np
from common import main

from ejax.numerics.reward_scale import init_reward_scale, scale_rewards
from ejax.returns import explained_variance


@main
def report():
    reward = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    done = jnp.zeros((16, 4), bool)
    sizes = [
        float(jnp.abs(scale_rewards(init_reward_scale(4), reward * unit, done, gamma=0.9)[1]).mean())
        for unit in (1e-6, 1.0, 1e6)
    ]
    useless = float(explained_variance(jnp.zeros(64), reward.ravel() * 1e-6))
    right = max(sizes) < 1.01 * min(sizes) and abs(useless) < 0.1
    return f"{'RIGHT' if right else 'WRONG'} sizes {sizes}, explained {useless:.4f}"
