"""EnvWrapper: what a wrapper does not change is the inner environment's, its text for videos included."""

from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from ejax.envs.description import caption_of, describe
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.wrapper import EnvWrapper, innermost
from ejax.types import Array, Key, PyTree, Timestep

KEY = jax.random.key(0)


class Captioned(PointMassRL):
    def caption(self, state: PyTree) -> str:
        return f"step {int(state.episode_step)}"


@dataclass(frozen=True)
class Doubled(EnvWrapper):
    """Twice the reward; its state holds the inner one's."""

    env: Any

    @property
    def inner(self) -> Any:
        return self.env

    def inner_state(self, state: PyTree) -> PyTree:
        return state["inner"]

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.env.reset(key)
        return {"inner": state}, obs

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        inner, timestep = self.env.step(state["inner"], action, key)
        return {"inner": inner}, replace(timestep, reward=2.0 * timestep.reward)


def test_a_wrapper_has_all_that_it_does_not_change() -> None:
    env = PointMassRL(max_episode_steps=7)
    wrapped = Doubled(env)
    assert (wrapped.observation_space, wrapped.action_space) == (env.observation_space, env.action_space)
    assert wrapped.max_episode_steps == 7 and describe(wrapped) == describe(env)
    (state, _), (inner, _) = wrapped.reset(KEY), env.reset(KEY)
    after, timestep = wrapped.step(state, jnp.ones(2), KEY)
    expected, plain = env.step(inner, jnp.ones(2), KEY)
    chex.assert_trees_all_equal(after["inner"], expected)
    assert timestep.reward == 2.0 * plain.reward


def test_a_caption_comes_from_within() -> None:
    env = ActionChunk(Doubled(Captioned()), 2)
    state, _ = env.reset(KEY)
    assert caption_of(env, env.step(state, jnp.zeros(4), KEY)[0]) == "step 2"
    assert caption_of(Doubled(PointMassRL()), {"inner": None}) == caption_of(PointMassRL(), None) == ""


def test_the_innermost_environment_is_no_wrapper() -> None:
    env = PointMassRL()
    assert innermost(ActionChunk(Doubled(env), 2)) is env is innermost(env)


def test_a_wrapper_without_an_environment_says_so() -> None:
    class Empty(EnvWrapper):
        pass

    with pytest.raises(NotImplementedError, match="Empty wraps nothing: give it inner"):
        _ = Empty().action_space
