"""APG: gradients through dynamics, segments, discounts, skipped updates, clipped adjoints."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refused

from ejax.algorithms.apg import APGConfig, apg_update
from ejax.algorithms.differentiable import clip_adjoint, discounted_sum
from ejax.config import ConfigError, parse_config
from ejax.distributions import action_spec
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import ActorOnly, NetworkConfig
from ejax.rollout import EnvCarry, reset
from ejax.training.build import build
from ejax.types import Array, Key, Timestep, TrainState, make_train_state


@dataclass(frozen=True)
class Integrator:
    """x' = x + ½a, r = −x'², ends after ``length`` steps; ``poison``: the reward is NaN."""

    length: int = 1000
    poison: bool = False
    max_episode_steps: int = 1000

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, key: Key) -> tuple[tuple[Array, Array], Array]:
        x = jax.random.uniform(key, (1,), minval=0.5, maxval=1.0)
        return (x, jnp.zeros((), jnp.int32)), x

    def step(self, state: tuple[Array, Array], action: Array, key: Key) -> tuple[tuple[Array, Array], Timestep]:
        del key
        x, t = state[0] + 0.5 * action, state[1] + 1
        reward = -jnp.square(x[0]) + (jnp.nan if self.poison else 0.0)
        timestep = Timestep(
            obs=x, reward=reward, terminated=jnp.asarray(False), truncated=t >= self.length, info={"metrics": {}}
        )
        return (x, t), timestep


OPTIMIZER = OptimizerConfig(name="sgd", learning_rate=1.0)  # parameters move by exactly the gradient
BASE = {"optimizer": OPTIMIZER, "gamma": 0.9, "max_grad_norm": 1e9, "deterministic_actions": True}


def policy_for(env: Integrator) -> ActorOnly:
    return ActorOnly(action_spec(env.action_space), NetworkConfig(hidden_sizes=(4,), activation="tanh"))


def update(env: Integrator, config: APGConfig, num_envs: int = 3) -> tuple[TrainState, TrainState, dict[str, Array]]:
    """State before, state after, metrics."""
    policy, optimizer = policy_for(env), make_optimizer(config.optimizer)
    carry = reset(env, jax.random.key(0), num_envs)
    params = policy.init(jax.random.key(1), carry.obs)
    state = make_train_state(params, optimizer)
    after, _, metrics = apg_update(
        state, carry, jax.random.key(2), policy=policy, env=env, optimizer=optimizer, config=config
    )
    return state, after, metrics


@pytest.mark.slow
def test_the_form_for_gpus_learns_the_same_through_new_episodes(request: pytest.FixtureRequest) -> None:
    env, config = Integrator(length=3), APGConfig(segment_length=8, **BASE)
    _, expected, _ = update(env, config)
    request.getfixturevalue("as_on_a_gpu")
    before, after, _ = update(env, config)
    chex.assert_trees_all_close(after.params, expected.params, rtol=1e-6, atol=1e-7)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True))


def objective(params: Any, policy: ActorOnly, x: Array, gamma: float, num_steps: int) -> Array:
    """Compute the return by a plain Python loop."""
    total, discount = jnp.zeros(x.shape[0]), 1.0
    for _ in range(num_steps):
        x = x + 0.5 * policy.apply(params, x)[0].mode()
        total = total - discount * jnp.square(x[:, 0])
        discount *= gamma
    return total.mean()


@pytest.mark.slow
def test_the_gradient_is_the_central_difference_of_the_return() -> None:
    env = Integrator()
    before, after, metrics = update(env, APGConfig(segment_length=6, **BASE))
    x = reset(env, jax.random.key(0), 3).obs
    gradient = jax.tree.map(jnp.subtract, after.params["params"], before.params["params"])  # of +objective
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), before.params)
        value = partial(
            objective, policy=policy_for(env), x=jnp.asarray(np.asarray(x, np.float64)), gamma=0.9, num_steps=6
        )
        for layer, name, index in (
            ("linear_0", "kernel", (0, 1)),
            ("linear_1", "kernel", (2, 0)),
            ("linear_1", "bias", (0,)),
        ):
            shifted = []
            for sign in (1.0, -1.0):
                moved = jax.tree.map(np.copy, wide)
                moved["params"]["actor"][layer][name][index] += sign * 1e-5
                shifted.append(float(value(moved)))
            difference = (shifted[0] - shifted[1]) / 2e-5
            np.testing.assert_allclose(gradient["actor"][layer][name][index], difference, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["objective"], objective(before.params, policy_for(env), x, 0.9, 6), rtol=1e-5)


@pytest.mark.slow
def test_segments_change_the_gradient_but_not_the_objective() -> None:
    env = Integrator()
    _, whole, metrics = update(env, APGConfig(segment_length=4, **BASE))
    _, halves, metrics_halves = update(env, APGConfig(segment_length=2, update_horizon=4, **BASE))
    np.testing.assert_allclose(metrics["objective"], metrics_halves["objective"], rtol=1e-5)
    assert not np.allclose(
        whole.params["params"]["actor"]["linear_0"]["kernel"],
        halves.params["params"]["actor"]["linear_0"]["kernel"],
        rtol=1e-3,
    )


def test_returns_restart_their_discount_after_done() -> None:
    reward, done = jnp.array([[1.0], [2.0], [4.0]]), jnp.array([[True], [False], [False]])
    total, discount = discounted_sum(reward, done, jnp.ones(1), gamma=0.5)
    np.testing.assert_allclose((total, discount), [[1.0 + 2.0 + 0.5 * 4.0], [0.25]])


@pytest.mark.slow
def test_a_nonfinite_update_is_skipped_and_counted() -> None:
    schedule = {"name": "step", "kwargs": {"step_size": 1}}
    before, after, metrics = update(Integrator(poison=True), APGConfig(lr_scheduler=schedule, **BASE))
    chex.assert_trees_all_equal(before, after)  # the schedule has not moved either
    assert metrics["skipped_update"] == 1.0
    assert np.isnan(metrics["grad_norm"])


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_though_its_gradient_was() -> None:
    overflows = OptimizerConfig(name="sgd", learning_rate=1e38, kwargs={"weight_decay": 1e38})
    before, after, metrics = update(Integrator(), APGConfig(**(BASE | {"optimizer": overflows})))
    chex.assert_trees_all_equal(before, after)
    assert metrics["skipped_update"] == 1.0 and metrics["skipped_excessive_gradient"] == 0.0
    assert np.isfinite(metrics["grad_norm"])


def test_an_excessive_gradient_is_skipped() -> None:
    before, after, metrics = update(Integrator(), APGConfig(max_grad_norm_before_clip=1e-6, **BASE))
    chex.assert_trees_all_equal(before.params, after.params)
    assert metrics["skipped_excessive_gradient"] == 1.0


def test_complete_rollouts_stop_at_the_first_end() -> None:
    env = Integrator(length=2)
    config = APGConfig(segment_length=6, rollout_mode="complete", **BASE)
    before, _, metrics = update(env, config)
    key_reset, _ = jax.random.split(jax.random.split(jax.random.key(2), 1)[0])
    x = reset(env, key_reset, 3).obs
    expected = objective(before.params, policy_for(env), x, 0.9, 2)
    np.testing.assert_allclose(metrics["objective"], expected, rtol=1e-5)


def test_adjoints_are_clipped_row_by_row_and_broken_ones_dropped() -> None:
    action = jnp.zeros((3, 2))
    weight = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 1.0]])
    grad, stats = jax.grad(lambda a, t: (weight * clip_adjoint(a, t, 1.0)).sum(), argnums=(0, 1))(action, jnp.zeros(4))
    np.testing.assert_allclose(grad, [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(stats, [5.5, 5.0, 1.0, 1.0], rtol=1e-6)


@pytest.mark.slow
def test_adjoint_metrics_are_reported() -> None:
    _, _, metrics = update(Integrator(), APGConfig(segment_length=3, action_adjoint_max_norm=1e-3, **BASE))
    assert metrics["action_adjoint_clipped_fraction"] == 1.0
    assert metrics["action_adjoint_nonfinite_fraction"] == 0.0
    assert 0.0 < metrics["action_adjoint_preclip_mean_norm"] <= metrics["action_adjoint_preclip_max_norm"]


def test_the_policy_learns_to_go_to_zero() -> None:
    env = Integrator(length=8)
    config = APGConfig(
        segment_length=8, gamma=0.99, deterministic_actions=True, optimizer=OptimizerConfig(learning_rate=0.05)
    )
    policy, optimizer = policy_for(env), make_optimizer(config.optimizer)
    carry: EnvCarry = reset(env, jax.random.key(0), 8)
    params = policy.init(jax.random.key(1), carry.obs)
    state = make_train_state(params, optimizer)
    objectives = []
    for i in range(40):
        state, carry, metrics = apg_update(
            state, carry, jax.random.key(i), policy=policy, env=env, optimizer=optimizer, config=config
        )
        objectives.append(float(metrics["objective"]))
    assert objectives[-1] > 0.25 * objectives[0]  # both negative: the cost fell to less than a quarter


def test_the_horizon_is_a_number_of_segments_and_not_the_buffer_size() -> None:
    raw = {
        "trainer": {"learning_env": "PointMassRL", "segment_length": 2, "update_horizon": 4},
        "policy": {"name": "actor_only", "actor": {"type": "mlp", "hidden_sizes": [8]}},
        "algorithm": {"name": "apg", "cfg": {}},
    }
    assert parse_config(raw).trainer.buffer_size == 4
    with pytest.raises(ConfigError, match="update_horizon 5 must be a multiple of segment_length 2"):
        parse_config(raw, ["trainer.update_horizon=5"])
    config = parse_config(raw, ["trainer.rollout_steps=7"])
    assert config == parse_config(raw)
    assert [(each.key, each.text) for each in config.notices] == [
        ("trainer.rollout_steps (override)", "no effect: the options of apg make it 4")
    ]


@pytest.mark.parametrize("name", ["apg", "shac"])
def test_the_buffer_size_of_a_gym_config_is_not_for_those_with_a_horizon(name: str, tmp_path: Path) -> None:
    (tmp_path / "gym.json").write_text(json.dumps({"id": "PointMassRL", "env": {}}))
    network = {"type": "mlp", "hidden_sizes": [8]}
    raw = {
        "trainer": {"gym_config": "gym.json"},
        "policy": {"name": "actor_critic", "actor": network, "critic": network},
        "algorithm": {"name": name, "cfg": {"segment_length": 4}},
    }
    config = parse_config(raw, folder=tmp_path)
    assert config.trainer.buffer_size == 4 and config.notices == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apg", "shac"])
def test_an_environment_without_gradients_is_refused_before_the_first_step(name: str) -> None:
    network = {"type": "mlp", "hidden_sizes": [8]}
    raw = {
        "trainer": {"learning_env": "CartPoleRL", "num_envs": 2},
        "policy": {"name": "actor_critic", "actor": network, "critic": network},
        "algorithm": {"name": name, "cfg": {}},
    }
    message = r"algorithm.name: the environment cannot be differentiated \(The FFI call.*PointMassRL"
    refused(lambda: build(parse_config(raw)), match=message)
