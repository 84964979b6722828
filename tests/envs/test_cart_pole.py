"""CartPoleRL: observation, reward, endings, and that the task can be done."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.envs.mujoco.engine import Physics
from ejax.envs.tasks.cart_pole import CartPoleRL, CartPoleState
from ejax.types import Timestep

KEY = jax.random.key(0)
ENV = CartPoleRL(physics="mujoco")
STEP = jax.jit(ENV.step)


def place(qpos: list[float], qvel: list[float], episode_step: int = 0) -> CartPoleState:
    state, _ = ENV.reset(KEY)
    physics = state.physics.replace(qpos=jnp.array(qpos), qvel=jnp.array(qvel))
    return state.replace(physics=physics, target=jnp.array(qpos), episode_step=jnp.int32(episode_step))


def test_an_episode_starts_at_rest_where_embodichain_starts_it() -> None:
    _, obs = ENV.reset(KEY)
    # qpos (−0.2, 0.07) scaled by ±15 and ±π; the drives hold where they are
    np.testing.assert_allclose(obs, [0.0, 0.0, 14.8 / 30.0, (np.pi + 0.07) / (2 * np.pi), 0.0, 0.0], atol=1e-6)


def test_reset_range_spreads_the_start() -> None:
    state, _ = jax.vmap(CartPoleRL(reset_range=0.05).reset)(jax.random.split(KEY, 100))
    offset = np.asarray(state.physics.qpos) - [-0.2, 0.07]
    assert np.abs(offset).max() <= 0.05 and offset.std(0).min() > 0.02


def test_the_observed_force_is_the_drives_law_and_its_limit() -> None:
    state = place([0.0, 0.0], [0.0, 0.0])
    for action in ([2.0, 1.0], [500.0, 200.0]):
        next_state, timestep = STEP(state, jnp.array(action), KEY)
        qpos, qvel = np.asarray(next_state.physics.qpos), np.asarray(next_state.physics.qvel)
        target = 0.1 * np.array(action)
        force = np.clip([10.0, 0.01] * (target - qpos) - [1.0, 0.001] * qvel, [-100.0, -0.1], [100.0, 0.1])
        np.testing.assert_allclose(timestep.obs[:2], force, rtol=1e-4)


def test_the_cart_accelerates_as_newton_says() -> None:
    """Drive: 10 N/m from 1 m away, with 1 N s/m: semi-implicit Euler, four steps of 0.01 s. The pole hangs, so that
    gravity pulls it back by less than 2 % of the cart's motion in 0.04 s.
    """
    _, cart_mass, pole_mass = Physics("cart_pole.xml").model.body_mass
    moved_mass = cart_mass + pole_mass / 4.0  # a uniform rod on a pivot at its end takes along a quarter of its mass
    position, velocity = 0.0, 0.0
    for _ in range(4):
        velocity += 0.01 * (10.0 * (1.0 - position) - velocity) / moved_mass
        position += 0.01 * velocity
    state, _ = STEP(place([0.0, np.pi], [0.0, 0.0]), jnp.array([10.0, 0.0]), KEY)
    np.testing.assert_allclose(state.physics.qpos[0], position, rtol=0.02)
    np.testing.assert_allclose(state.physics.qvel[0], velocity, rtol=0.02)


def test_the_reward_is_the_formula() -> None:
    for qpos, qvel in (([0.3, -0.4], [0.2, -1.5]), ([0.0, 1.2], [0.0, 2.0])):
        state, timestep = STEP(place(qpos, qvel), jnp.array([0.5, -0.5]), KEY)
        angle, velocity = np.asarray(state.physics.qpos)[1], np.asarray(state.physics.qvel)[1]
        np.testing.assert_allclose(timestep.reward, 1.0 - abs(angle) / np.pi - 0.005 * abs(velocity), rtol=1e-5)
        np.testing.assert_allclose(sum(timestep.info["rewards"].values()), timestep.reward, rtol=1e-6)
        np.testing.assert_allclose(timestep.info["metrics"]["distance_to_goal"], abs(angle), rtol=1e-6)


def ending(timestep: Timestep) -> tuple[bool, bool]:
    return bool(timestep.terminated), bool(timestep.truncated)


def test_a_fallen_pole_truncates() -> None:
    assert ending(STEP(place([0.0, 1.5], [0.0, 0.0]), jnp.zeros(2), KEY)[1]) == (False, False)
    assert ending(STEP(place([0.0, 1.5], [0.0, 4.0]), jnp.zeros(2), KEY)[1]) == (False, True)


def test_success_is_judged_in_the_last_step_only() -> None:
    upright, tilted, moving = ([0.0, 0.0], [0.0, 0.0]), ([0.0, 0.1], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.2])
    assert ending(STEP(place(*upright, 498), jnp.zeros(2), KEY)[1]) == (False, False)
    assert ending(STEP(place(*upright, 499), jnp.zeros(2), KEY)[1]) == (True, True)
    assert ending(STEP(place(*tilted, 499), jnp.zeros(2), KEY)[1]) == (False, True)
    assert ending(STEP(place(*moving, 499), jnp.zeros(2), KEY)[1]) == (False, True)


def test_a_linear_controller_balances_the_pole_for_a_whole_episode() -> None:
    @jax.jit
    def run(state: CartPoleState) -> Timestep:
        def step(state: CartPoleState, _: None) -> tuple[CartPoleState, Timestep]:
            (x, angle), (v, w) = state.physics.qpos, state.physics.qvel
            action = jnp.array([x + 2.0 * v - 30.0 * angle - 8.0 * w, 0.0])
            return ENV.step(state, action, KEY)

        return jax.lax.scan(step, state, length=500)[1]

    timestep = run(ENV.reset(KEY)[0])
    assert timestep.terminated[-1] and not timestep.truncated[:-1].any()
    assert timestep.reward.sum() > 495.0


@pytest.mark.slow
def test_mjx_follows_the_c_engine() -> None:
    """No contacts here: float32 against float64 over 25 steps; measured 2e-6."""
    pytest.importorskip("mujoco.mjx")
    action = 3.0 * jax.random.normal(KEY, (25, 2))

    def run(env: CartPoleRL) -> np.ndarray:
        state, _ = env.reset(KEY)
        step = jax.jit(lambda state: jax.lax.scan(lambda s, a: env.step(s, a, KEY), state, action)[1].obs)
        return np.asarray(step(state))

    np.testing.assert_allclose(run(CartPoleRL(physics="mjx")), run(ENV), atol=1e-4)
