"""NNX modules as policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.distributions import Normal
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import make_optimizer
from ejax.policies.nnx import NnxPolicy
from ejax.rollout import reset, unroll
from ejax.types import make_train_state


class Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(14, 8, rngs=rngs)
        self.mean = nnx.Linear(8, 2, rngs=rngs)
        self.value = nnx.Linear(8, 1, rngs=rngs)
        self.log_std = nnx.Param(jnp.zeros(2))

    def __call__(self, obs: jax.Array) -> tuple[Normal, jax.Array]:
        x = jnp.tanh(self.hidden(obs))
        mean = self.mean(x)
        return Normal(mean, jnp.broadcast_to(self.log_std[...], mean.shape)), self.value(x)[..., 0]


def make(rngs: nnx.Rngs) -> Module:
    return Module(rngs)


def test_the_adapter_computes_what_the_module_computes() -> None:
    policy, obs = NnxPolicy(make), jnp.linspace(-1.0, 1.0, 3 * 14).reshape(3, 14)
    params = policy.init(jax.random.key(0), obs)
    distribution, value = policy.apply(params, obs)
    expected_distribution, expected_value = Module(nnx.Rngs(jax.random.key(0)))(obs)
    np.testing.assert_allclose(distribution.mean, expected_distribution.mean, rtol=1e-6)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)


@pytest.mark.slow
def test_ppo_trains_an_nnx_module() -> None:
    policy, env, config = NnxPolicy(make), PointMassRL(), PPOConfig(batch_size=16, n_epochs=1)
    carry = reset(env, jax.random.key(0), 4)
    params = policy.init(jax.random.key(1), carry.obs)
    optimizer = make_optimizer(config.optimizer)
    state = make_train_state(params, optimizer)
    rollout, _ = unroll(policy, env, params, carry, jax.random.key(2), num_steps=8)
    trained, metrics = ppo_update(state, rollout, jax.random.key(3), policy=policy, optimizer=optimizer, config=config)
    assert np.isfinite(metrics["loss"])
    before, after = jax.tree.leaves(params["params"]), jax.tree.leaves(trained.params["params"])
    assert all(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
