"""Parameters as one vector, and the optimizer's moments with them."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from ejax.numerics.flat import vectors_of
from ejax.optim import OptimizerConfig, make_optimizer

PARAMS = {
    "actor": {"bias": jnp.arange(2.0), "kernel": jnp.arange(6.0).reshape(3, 2)},
    "critic": {"kernel": 10.0 + jnp.arange(3.0)},
    "log_std": -jnp.ones(2),
}


@pytest.mark.parametrize("critic_apart", [False, True])
def test_what_was_packed_comes_back(critic_apart: bool) -> None:
    vectors = vectors_of(PARAMS, critic_apart=critic_apart)
    assert vectors is not None
    packed = vectors.pack(PARAMS)
    assert {name: x.size for name, x in packed.items()} == ({"rest": 10, "critic": 3} if critic_apart else {"all": 13})
    chex.assert_trees_all_equal(vectors.unpack(packed), PARAMS)


def test_moments_are_packed_and_counts_stay() -> None:
    optimizer = make_optimizer(OptimizerConfig())
    _, state = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    vectors = vectors_of(PARAMS)
    assert vectors is not None
    packed = vectors.pack_within(state)
    assert sorted(x.shape for x in jax.tree.leaves(packed)) == [(), (), (13,), (13,)]
    back = vectors.unpack_within(packed, like=state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    chex.assert_trees_all_equal(back, state)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_every_optimizer_of_a_config_takes_the_vector_for_the_tree(name: Any) -> None:
    optimizer = make_optimizer(OptimizerConfig(name=name, kwargs={"weight_decay": 0.1}))
    vectors = vectors_of(PARAMS)
    assert vectors is not None
    grads = jax.tree.map(jnp.sin, PARAMS)
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    packed = vectors.pack(PARAMS)
    flat_updates, _ = optimizer.update(vectors.pack(grads), optimizer.init(packed), packed)
    chex.assert_trees_all_close(vectors.unpack(flat_updates), updates, rtol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        {"kernel": jnp.zeros(3)},
        {"kernel": jnp.zeros(3), "bias": jnp.zeros(3, jnp.bfloat16)},
        {"kernel": jnp.zeros((1024, 1025)), "bias": jnp.zeros(3)},
    ],
    ids=["one", "types", "large"],
)
def test_one_array_types_that_differ_and_large_parameters_stay_as_they_are(params: Any) -> None:
    assert vectors_of(params) is None


def test_a_critic_apart_needs_a_critic_and_something_else() -> None:
    assert vectors_of({"a": jnp.zeros(2), "b": jnp.zeros(2)}, critic_apart=True) is None
    assert vectors_of({"critic": {"a": jnp.zeros(2), "b": jnp.zeros(2)}}, critic_apart=True) is None
