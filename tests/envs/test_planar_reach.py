"""PlanarReachRL: kinematics by hand, episodes, gradients through steps and resets, and the bar that APG has to pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases

from ejax.algorithms.apg import APGConfig, apg_update
from ejax.distributions import action_spec
from ejax.envs.tasks.planar_reach import PlanarReachRL, PlanarReachState
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import ActorOnly, NetworkConfig
from ejax.rollout import EnvCarry, reset, step
from ejax.types import Array, Policy, make_train_state

ENV = PlanarReachRL()
KEY = jax.random.key(0)
HALF_PI = np.pi / 2


def at(joint_position: Any, target_position: Any = (0.5, 0.5)) -> PlanarReachState:
    return PlanarReachState(
        joint_position=jnp.asarray(joint_position, float),
        target_position=jnp.asarray(target_position, float),
        last_action=jnp.zeros(2),
        episode_step=jnp.zeros((), jnp.int32),
    )


@cases(
    "joint_position expected",
    ((0.0, 0.0), (0.0, -1.8)),  # hangs down
    ((HALF_PI, 0.0), (1.8, 0.0)),  # stretched to the side
    ((0.0, HALF_PI), (0.8, -1.0)),  # an elbow at a right angle
    ((HALF_PI, HALF_PI), (1.0, 0.8)),  # out, then up
    ((np.pi, np.pi), (0.0, 1.0 - 0.8)),  # up, then folded back
)
def test_the_tip_is_where_geometry_puts_it(joint_position: Any, expected: Any) -> None:
    np.testing.assert_allclose(ENV.end_effector(jnp.asarray(joint_position)), expected, atol=1e-6)


def test_a_step_moves_the_joints_and_is_paid_by_the_squared_distance() -> None:
    state, timestep = ENV.step(at((0.0, 0.0), (0.3, -1.0)), jnp.array([0.5, -3.0]), KEY)
    np.testing.assert_allclose(state.joint_position, [0.1, -0.2], rtol=1e-6)  # the second action is clipped to -1
    tip = np.array([np.sin(0.1) + 0.8 * np.sin(-0.1), -np.cos(0.1) - 0.8 * np.cos(-0.1)])
    np.testing.assert_allclose(timestep.reward, -np.sum((tip - [0.3, -1.0]) ** 2), rtol=1e-5)
    np.testing.assert_allclose(timestep.obs, [0.1, -0.2, *tip, 0.3, -1.0, 0.5, -1.0], rtol=1e-5)
    assert not timestep.terminated and not timestep.truncated
    assert ENV.observation_space.shape == timestep.obs.shape


def test_joints_stop_at_half_a_turn() -> None:
    state, _ = ENV.step(at((3.1, -3.1)), jnp.array([1.0, -1.0]), KEY)
    np.testing.assert_allclose(state.joint_position, [np.pi, -np.pi], rtol=1e-6)


def test_episodes_end_at_the_target_or_at_the_time_limit() -> None:
    _, near = ENV.step(at((0.0, 0.0), (0.04, -1.8)), jnp.zeros(2), KEY)
    assert near.terminated and near.info["success"] and not near.truncated
    _, beside = ENV.step(at((0.0, 0.0), (0.06, -1.8)), jnp.zeros(2), KEY)
    assert not beside.terminated and not beside.info["success"]
    np.testing.assert_allclose(beside.info["metrics"]["final_distance"], 0.06, rtol=1e-4)
    _, late = ENV.step(at((0.0, 0.0)).replace(episode_step=jnp.asarray(31)), jnp.zeros(2), KEY)
    assert late.truncated and not late.terminated


@pytest.mark.slow
def test_starts_and_targets_cover_their_ranges() -> None:
    state, obs = jax.vmap(ENV.reset)(jax.random.split(KEY, 4000))
    assert np.abs(state.joint_position).max() <= HALF_PI
    assert np.abs(state.joint_position).max() > 0.99 * HALF_PI
    radius = np.linalg.norm(state.target_position, axis=-1)
    assert radius.min() >= 0.2 - 1e-6 and radius.max() <= 1.8 + 1e-6  # within reach of links of 1 and 0.8 m
    assert radius.min() < 0.25 and radius.max() > 1.79
    np.testing.assert_allclose(obs[:, 2:4], jax.vmap(ENV.end_effector)(state.joint_position), rtol=1e-6)


def rewards(env: PlanarReachRL, carry: EnvCarry, actions: Array) -> tuple[Array, Array]:
    """Sum of rewards over batched steps with automatic resets, and which of them ended an episode, [T, N]."""

    def one(carry: EnvCarry, xs: Any) -> Any:
        key, action = xs
        carry, timestep = step(env, carry, action, key)
        return carry, (timestep.reward, timestep.terminated | timestep.truncated)

    _, (reward, done) = jax.lax.scan(one, carry, (jax.random.split(KEY, len(actions)), actions))
    return reward.sum(), done


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, 3])
def test_gradients_are_finite_differences_also_across_resets(length: int) -> None:
    with jax.enable_x64(True):
        env = PlanarReachRL(max_episode_steps=length, success_threshold=0.0)
        carry = jax.tree.map(jnp.asarray, reset(env, KEY, 4))
        actions = jnp.asarray(np.random.default_rng(0).uniform(-0.9, 0.9, (8, 4, 2)))
        slope, done = jax.grad(lambda a: rewards(env, carry, a), has_aux=True)(actions)
        assert int(done.sum()) == (4 * 2 if length == 3 else 0)
        total = jax.jit(lambda a: rewards(env, carry, a)[0])
        for index in [(0, 0, 0), (1, 2, 1), (2, 3, 0), (4, 1, 1), (7, 3, 1)]:
            up, down = (total(actions.at[index].add(sign * 1e-5)) for sign in (1.0, -1.0))
            np.testing.assert_allclose(slope[index], (up - down) / 2e-5, rtol=1e-6, atol=1e-8)
        if length == 3:  # what was done before a reset has no part in what comes after it
            later = jax.grad(lambda a: rewards(env, carry, a.at[:3].set(a[:3] ** 2))[0])(actions)
            np.testing.assert_array_equal(later[3:], slope[3:])


def mean_min_distance(policy: Policy, params: Any, num_envs: int = 256) -> float:
    """Compute the smallest distance of each held-out episode, averaged."""
    carry = reset(ENV, jax.random.key(999), num_envs)
    obs_distance = jnp.linalg.norm(carry.obs[:, 2:4] - carry.obs[:, 4:6], axis=-1)

    def one(carry: tuple[EnvCarry, Array, Array], key: Any) -> Any:
        envs, closest, running = carry
        envs, timestep = step(ENV, envs, policy.apply(params, envs.obs)[0].mode(), key)
        distance = jnp.where(running, timestep.info["metrics"]["final_distance"], jnp.inf)
        running &= ~(timestep.terminated | timestep.truncated)
        return (envs, jnp.minimum(closest, distance), running), None

    start = (carry, obs_distance, jnp.ones(num_envs, bool))
    keys = jax.random.split(KEY, ENV.max_episode_steps)
    (_, closest, running), _ = jax.jit(lambda: jax.lax.scan(one, start, keys))()
    assert not running.any()
    return float(closest.mean())


@pytest.mark.slow
def test_apg_passes_embodichains_bar() -> None:
    """300 updates of 32 environments and 16 steps: on held-out episodes a quarter of the distance at the start."""
    policy = ActorOnly(
        action_spec(ENV.action_space),
        NetworkConfig(
            hidden_sizes=(64, 64), activation="relu", last_activation="tanh", orthogonal_init=(1.414, 1.414, 0.01)
        ),
        initial_log_std=-2.0,
    )
    config = APGConfig(
        segment_length=16,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        lr_scheduler={"name": "linear", "kwargs": {"total_iters": 300}},
        max_grad_norm=1.0,
    )
    optimizer = make_optimizer(config.optimizer)
    carry = reset(ENV, KEY, 32)
    params = policy.init(jax.random.key(1), carry.obs)
    state = make_train_state(params, optimizer)

    def one(state: Any, key: Any) -> Any:
        train, carry, metrics = apg_update(*state, key, policy=policy, env=ENV, optimizer=optimizer, config=config)
        return (train, carry), metrics["skipped_update"]

    before = mean_min_distance(policy, state.params)
    (state, _), skipped = jax.jit(lambda s, k: jax.lax.scan(one, s, k))((state, carry), jax.random.split(KEY, 300))
    assert skipped.sum() == 0.0
    assert mean_min_distance(policy, state.params) < 0.25 * before
