"""PointMassRL: its resets, observations and gradients. EmbodiChain's own steps are in test_goldens.py."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from releases import IS_JAX_0_10

from ejax.envs.tasks.point_mass import PointMassRL

ENV = PointMassRL(max_episode_steps=30, success_bonus=5.0)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def step() -> Callable[..., Any]:
    return jax.jit(jax.vmap(lambda state, action: ENV.step(state, action, KEY)))


@pytest.fixture(scope="module")
def fresh() -> tuple[Any, np.ndarray]:
    """2000 new episodes."""
    state, obs = jax.jit(jax.vmap(ENV.reset))(jax.random.split(KEY, 2000))
    return jax.tree.map(np.asarray, state), np.asarray(obs)


def test_resets_cover_their_ranges_and_stay_in_them(fresh: tuple[Any, np.ndarray]) -> None:
    state, _ = fresh
    for values, bound in ((state.goal_position, 0.7), (state.position, 0.6)):
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.99 * bound
        assert np.abs(values.mean(0)).max() < 0.05
    assert np.abs(state.obstacle_position).max() <= 0.8
    assert state.obstacle_radius.min() >= 0.08 and state.obstacle_radius.max() <= 0.15
    assert np.ptp(state.obstacle_radius) > 0.069


def test_a_new_episode_starts_at_rest_with_its_counters_at_zero(fresh: tuple[Any, np.ndarray]) -> None:
    state, _ = fresh
    for name in ("velocity", "last_action", "episode_step", "path_length", "collision_count"):
        assert not getattr(state, name).any(), name


def test_obstacles_keep_their_distance_from_the_goal(fresh: tuple[Any, np.ndarray]) -> None:
    state, _ = fresh
    distance = np.linalg.norm(state.obstacle_position - state.goal_position[:, None], axis=-1)
    assert distance.min() > 0.25


def test_an_obstacle_that_finds_no_place_goes_opposite_the_goal() -> None:
    state, _ = PointMassRL(obstacle_min_goal_distance=9.0).reset(KEY)
    np.testing.assert_allclose(state.obstacle_position, np.tile(-0.5 * np.asarray(state.goal_position), (2, 1)))


def test_observations_list_the_state_in_embodichains_order(fresh: tuple[Any, np.ndarray]) -> None:
    state, obs = fresh
    expected = np.concatenate(
        [
            state.position,
            state.velocity,
            state.goal_position,
            state.last_action,
            state.obstacle_position.reshape(-1, 4),
            state.obstacle_radius,
        ],
        axis=-1,
    )
    np.testing.assert_array_equal(obs, expected)
    assert ENV.observation_space.shape == (14,)


def test_actions_are_clipped_to_one(step: Callable[..., Any], fresh: tuple[Any, np.ndarray]) -> None:
    state = jax.tree.map(lambda x: jnp.asarray(x[:64]), fresh[0])
    _, far = step(state, jnp.full((64, 2), 50.0))
    _, bound = step(state, jnp.ones((64, 2)))
    np.testing.assert_array_equal(far.obs, bound.obs)


@pytest.fixture
def one(fresh: tuple[Any, np.ndarray]) -> Any:
    """Start a single new episode."""
    return jax.tree.map(lambda x: jnp.asarray(x[0]), fresh[0])


@pytest.fixture(scope="module")
def objective(fresh: tuple[Any, np.ndarray]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return of eight environments over five steps, as a function of the actions [5, 8, 2]."""
    state = jax.tree.map(lambda x: jnp.asarray(x[:8]), fresh[0])

    def total(actions: Any) -> Any:
        def one(state: Any, action: jax.Array) -> tuple[Any, Any]:
            state, timestep = jax.vmap(ENV.step, in_axes=(0, 0, None))(state, action, KEY)
            return state, timestep.reward

        return jax.lax.scan(one, state, actions)[1].sum()

    return jax.jit(total), jax.jit(jax.grad(total))


@pytest.mark.slow
def test_gradients_reach_the_first_action_through_later_steps(objective: tuple) -> None:
    _, gradient = objective
    slope = gradient(jnp.full((5, 8, 2), 0.1))
    assert jnp.isfinite(slope).all()
    assert (jnp.abs(slope).max(axis=-1) > 1e-5).all()


def test_gradients_are_finite_differences(objective: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    # of the last action only: earlier ones also enter the next step's smoothness term, where the gradient is cut
    total, gradient = objective
    actions = jnp.full((5, 8, 2), 0.1)
    direction = np.zeros((5, 8, 2), np.float32)
    direction[4] = np.random.default_rng(0).normal(size=(8, 2))
    difference = (total(actions + 1e-2 * direction) - total(actions - 1e-2 * direction)) / 2e-2
    assert float(jnp.sum(gradient(actions) * direction)) == pytest.approx(float(difference), rel=0.02)


def test_gradients_at_the_goal_and_at_rest_are_finite(one: Any) -> None:
    goal = one.goal_position
    state = replace(one, position=goal, obstacle_position=jnp.tile(goal, (2, 1)))
    slope = jax.jit(jax.grad(lambda a: ENV.step(state, a, KEY)[1].reward))(jnp.zeros(2))
    assert jnp.isfinite(slope).all()


def test_the_gradient_passes_on_the_bounds_and_ends_beyond_them(one: Any) -> None:
    slope = jax.jit(jax.grad(lambda a: ENV.step(one, a, KEY)[1].reward))
    np.testing.assert_allclose(slope(jnp.array([1.0, -1.0])), slope(jnp.array([0.9999, -0.9999])), rtol=1e-2)
    assert slope(jnp.array([1.0, -1.0])).all()
    assert not slope(jnp.array([1.001, -1.001])).any()


@pytest.mark.slow
def test_obstacles_are_drawn_alike_on_a_gpu(request: pytest.FixtureRequest) -> None:
    env, keys = PointMassRL(obstacle_min_goal_distance=0.6), jax.random.split(jax.random.key(5), 200)  # many draws fail
    expected = jax.jit(lambda keys: jax.vmap(env.reset)(keys))(keys)
    request.getfixturevalue("as_on_a_gpu")
    found = jax.jit(lambda keys: jax.vmap(env.reset)(keys))(keys)
    # with jax 0.11 and the tests' compiler flags the two forms are rounded differently, by 6e-8 at most
    compare = partial(np.testing.assert_allclose, rtol=0.0, atol=0.0 if IS_JAX_0_10 else 1e-7)
    jax.tree.map(compare, found, expected)
