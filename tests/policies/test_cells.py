"""Sequences of recurrent cells in the form that is lowered for GPUs: the values and gradients of autodiff."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from ejax.distributions import ActionSpec
from ejax.policies.mlp import NetworkConfig
from ejax.policies.recurrence import MemoryConfig
from ejax.policies.with_memory import ActorCriticWithMemory

KEY = jax.random.key(0)
NUM_STEPS, NUM_ROWS, NUM_OBSERVED = 9, 4, 3  # a trip of eight steps, and one more
NETWORK = NetworkConfig(hidden_sizes=(4,), activation="tanh")
CRITICS = {"equal": {}, "other": {"hidden_size": 6, "encoder": NETWORK}}


def loss_and_gradients(policy: Any, params: Any, memory: Any, obs: Any, first: Any) -> Any:
    def loss(params: Any, memory: Any, obs: Any) -> Any:
        distribution, value, after = policy.apply(params, obs, memory=memory, first=first)
        weights = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
        remembered = sum(jnp.square(x).sum() for x in jax.tree.leaves(after))
        return (weights * value).sum() + distribution.log_prob(obs[..., :2]).sum() + remembered

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(params, memory, obs)


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_gpus_form_has_the_values_and_gradients_of_autodiff(
    kind: Any, critic: str, request: pytest.FixtureRequest
) -> None:
    # what is compiled grows with the layers, and the everyday run has one
    actors = MemoryConfig(type=kind, hidden_size=5, num_layers=1 if critic == "equal" else 2)
    policy = ActorCriticWithMemory(
        ActionSpec("normal", (2,)),
        actor=NETWORK,
        actor_memory=actors,
        critic=NETWORK,
        critic_memory=actors.model_copy(update=CRITICS[critic]),
    )
    with jax.enable_x64(True):
        obs = jax.random.normal(KEY, (NUM_STEPS, NUM_ROWS, NUM_OBSERVED), jnp.float64)
        first = jnp.zeros((NUM_STEPS, NUM_ROWS), bool).at[0, 1].set(True).at[3, 2].set(True).at[7:9, 3].set(True)
        widen = partial(jax.tree.map, lambda x: 1.5 * x.astype(jnp.float64))
        params, memory = widen(policy.init(KEY, obs[0])), policy.init_memory(NUM_ROWS)
        memory = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape, jnp.float64), memory)
        memory = jax.tree.map(lambda x: x.at[1].set(jnp.nan), memory)  # from before an episode that starts
        arguments = policy, params, memory, obs, first
        expected = loss_and_gradients(*arguments)
        request.getfixturevalue("as_on_a_gpu")
        found = loss_and_gradients(*arguments)
    assert all(jnp.isfinite(x).all() and x.any() for x in jax.tree.leaves(expected[1][0]))
    chex.assert_trees_all_close(found, expected, rtol=1e-12, atol=1e-12)
