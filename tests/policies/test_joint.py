"""Computed as one, actor and critic give what each gives by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.distributions import ActionSpec
from ejax.policies import ActorCritic, NetworkConfig
from ejax.policies.actor_critic import are_alike

NORMAL, DISCRETE = ActionSpec("normal", (2,)), ActionSpec("categorical", (3,))
TANH = NetworkConfig(hidden_sizes=(8, 6), activation="tanh", orthogonal_init=(1.0, 1.0, 0.5))
BOUNDED = TANH.model_copy(update={"last_activation": "tanh", "orthogonal_init": None})
DROPPING = NetworkConfig(hidden_sizes=(8,), use_layernorm=True, dropout_p=0.3)
LINEAR = NetworkConfig(hidden_sizes=())
OBS = {"a": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), "b": np.ones((5, 3), np.float32)}
SEEDS = jnp.arange(5, dtype=jnp.uint32)
POLICIES = {
    "tanh": ActorCritic(NORMAL, BOUNDED, TANH),
    "dropout": ActorCritic(NORMAL, DROPPING, DROPPING),
    "linear": ActorCritic(NORMAL, LINEAR, LINEAR),
    "discrete": ActorCritic(DISCRETE, TANH, TANH),
    "other parts": ActorCritic(NORMAL, TANH, TANH, actor_obs_groups=("a",), critic_obs_groups=("b",)),
    "normalized": ActorCritic(NORMAL, TANH, TANH, critic_obs_normalization=True),
}


def params_of(policy: ActorCritic) -> Any:
    params = jax.device_get(jax.jit(policy.init)(jax.random.key(1), OBS))
    # biases begin at 0, where a wrong one would not show
    return jax.tree.map(lambda x: x + 0.1, params)


def gradient(policy: ActorCritic, params: Any, **form: bool) -> Any:
    def loss(trained: Any) -> jax.Array:
        distribution, value = policy.apply({**params, "params": trained}, OBS, dropout_seed=SEEDS, **form)
        return distribution.entropy().sum() + jnp.square(distribution.mode()).sum() + jnp.square(value).sum()

    return jax.value_and_grad(loss)(params["params"])


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", POLICIES)
def test_outputs_and_gradients_are_those_of_each_by_itself(name: str) -> None:
    policy = POLICIES[name]
    params = params_of(policy)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6),
        gradient(policy, params, joint=True),
        gradient(policy, params),
    )


@pytest.mark.slow
def test_a_cpu_has_the_bits_of_each_by_itself() -> None:
    policy = POLICIES["tanh"]
    params = params_of(policy)
    jax.tree.map(
        np.testing.assert_array_equal, gradient(policy, params, joint=True), gradient(policy, params, joint=False)
    )


def test_other_hidden_layers_or_features_are_computed_apart() -> None:
    x = {"actor": np.ones((5, 3)), "critic": np.ones((5, 3))}
    assert are_alike(POLICIES["tanh"], x)
    assert not are_alike(ActorCritic(NORMAL, TANH, LINEAR), x)
    assert not are_alike(POLICIES["tanh"], {**x, "critic": np.ones((5, 4))})
