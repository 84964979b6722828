"""AsymmetricEnv: two parts of one observation, noise in one of them, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.envs.description import describe
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.wrappers.asymmetric import AsymmetricEnv
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.rollout import reset, step

KEY = jax.random.key(0)
ENV = AsymmetricEnv(PointMassRL(), observation_indices=(4, 0))
NUM_ROWS = 3


def first_two(env: Any) -> list[Any]:
    """Give the observations of a reset and of a step."""
    carry = reset(env, KEY, NUM_ROWS)
    action = jnp.full((NUM_ROWS, 2), 0.3)
    return [carry.obs, step(env, carry, action, KEY)[1].obs]


@pytest.mark.slow
def test_parts_are_numbers_of_the_tasks_own_observation() -> None:
    for obs, whole in zip(first_two(ENV), first_two(PointMassRL()), strict=True):
        np.testing.assert_array_equal(obs["critic"], whole)
        np.testing.assert_array_equal(obs["policy"], whole[:, [4, 0]])
    space, named = ENV.observation_space, describe(ENV).observation
    assert {name: part.shape for name, part in space.items()} == {"policy": (2,), "critic": (14,)}
    assert [feature.name for feature in named["policy"]] == ["goal x", "position x"] and len(named["critic"]) == 14


@pytest.mark.slow
def test_noise_of_the_policys_part_leaves_the_other_as_it_is() -> None:
    noise = {"camera": {"func": "add_observation_noise", "params": {"part": "policy", "noise": 0.1}}}
    for seen, true in zip(first_two(RandomizedEnv(ENV, noise)), first_two(ENV), strict=True):
        np.testing.assert_array_equal(seen["critic"], true["critic"])
        assert not np.isclose(seen["policy"], true["policy"]).any()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"env": PointMassRL(), "observation_indices": (14,)}, r"must be of 0 to 13, at least one; got \[14\]"),
        ({"env": PointMassRL(), "observation_indices": ()}, r"must be of 0 to 13, at least one; got \[\]"),
        ({"env": ENV}, "is not a vector"),
    ],
)
def test_what_has_no_such_numbers_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AsymmetricEnv(**arguments)
