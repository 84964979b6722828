"""SHAC through a learned model: the judge, the model and its error, predicted episodes, the certificate, whole runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.algorithms import model_shac
from ejax.algorithms.learned_dynamics import (
    DynamicsConfig,
    Model,
    draw_steps,
    imagine,
    reward_range,
    trusted_horizon,
)
from ejax.algorithms.model_shac import ModelSHACConfig
from ejax.algorithms.replay_buffer import Replay, ReplayConfig, add_rollout, init_replay
from ejax.algorithms.shac import actor_gradient, shac_update
from ejax.config import parse_config
from ejax.distributions import action_spec
from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push import PushCube
from ejax.optim import make_actor_critic_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.rollout import EnvCarry, reset, step_all
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint
from ejax.training.build import build
from ejax.types import Array, Rollout, Timestep, make_train_state

REACH = PlanarReachRL()
SPACE = gymnasium.spaces.Box(-2.0, 2.0, (1,))


TASKS = [PointMassRL(success_bonus=5.0), REACH, pytest.param(PushCube(), marks=pytest.mark.slow)]


@pytest.mark.parametrize("env", TASKS, ids=lambda env: type(env).__name__)
def test_a_task_judges_a_predicted_step_as_its_own(env: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    state, obs = jax.vmap(env.reset)(keys)
    for i in range(2):
        action = jax.random.uniform(jax.random.key(i), (8, *env.action_space.shape), minval=-1.5, maxval=1.5)
        state, truth = step_all(env, state, action, keys[0])
        judged = jax.jit(jax.vmap(env.judge_prediction))(obs, action, truth.obs)
        np.testing.assert_allclose(judged.reward, truth.reward, atol=2e-6)
        np.testing.assert_allclose(judged.obs, truth.obs, atol=2e-6)
        np.testing.assert_array_equal(judged.terminated, truth.terminated)
        obs = truth.obs


def test_no_gradient_flows_through_an_action_that_the_task_detaches() -> None:
    env, obs, action = PointMassRL(), jnp.full(14, 0.1), jnp.zeros(2)
    slope = jax.jacobian(lambda next_obs: env.judge_prediction(obs, action, next_obs).obs)(obs)
    np.testing.assert_array_equal(jnp.diag(slope), np.repeat([1.0, 0.0, 1.0], [6, 2, 6]))


def lane_rollout(num_steps: int = 6) -> Rollout:
    """Two lanes, x' = x + a with a = 1 and 2; lane 0 ends after its third step, and begins at 100 again."""
    x = np.array([[0.0, 50.0]] + [[0.0, 0.0]] * num_steps)
    nxt, done = np.zeros((num_steps, 2)), np.zeros((num_steps, 2), bool)
    action = np.tile(np.array([1.0, 2.0]), (num_steps, 1))
    done[2, 0] = True
    for t in range(num_steps):
        nxt[t] = x[t] + action[t]
        x[t + 1] = np.where(done[t], 100.0, nxt[t])
    as_rows = lambda a: jnp.asarray(a, jnp.float32)[..., None]  # noqa: E731
    zeros, never = jnp.zeros((num_steps, 2)), jnp.zeros((num_steps, 2), bool)
    return Rollout(
        obs=as_rows(x[:-1]),
        action=as_rows(action),
        log_prob=zeros,
        value=zeros,
        next_value=zeros,
        reward=jnp.asarray(action, jnp.float32),
        terminated=never,
        truncated=jnp.asarray(done),
        next_obs=as_rows(nxt),
    )


def lane_replay(capacity: int = 64, times: int = 1) -> Replay:
    replay = init_replay(ReplayConfig(capacity=capacity), jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    for _ in range(times):
        replay = add_rollout(replay, lane_rollout(), gamma=0.9)
    return replay


def test_steps_of_a_ring_follow_their_environment_until_its_episode_ends() -> None:
    steps, (weight, alive, still) = draw_steps(lane_replay(), jax.random.key(0), 256, 3)
    first, second = (jax.tree.map(lambda x, k=k: x[k], steps) for k in (0, 1))
    row = {0.0: 0, 1.0: 2, 2.0: 4, 100.0: 6, 101.0: 8, 102.0: 10} | {50.0 + 2 * t: 2 * t + 1 for t in range(6)}
    rows = np.array([row[x] for x in np.asarray(first.obs)[:, 0].tolist()])
    assert set(rows) == set(range(12))
    np.testing.assert_array_equal(weight, rows != 0)  # the first of sixteen is held out
    ends = rows == 4  # its episode's last step; rows 10 and 11 are the last that were written
    np.testing.assert_array_equal(alive, (rows != 0) & ~ends & (rows < 10))
    np.testing.assert_array_equal(still, np.asarray(alive) * ((rows + 2 != 4) & (rows + 2 < 10)))
    np.testing.assert_array_equal(second.obs[alive > 0], first.next_obs[alive > 0])
    held, _ = draw_steps(lane_replay(times=3), jax.random.key(0), 64, 1, held_out=True)
    assert set(np.asarray(held.obs)[0, :, 0].tolist()) == {0.0, 2.0, 101.0}  # rows 0, 16, 32: lane 0, steps 0, 2, 4


def test_the_error_is_0_of_a_perfect_model_and_1_where_nothing_is_predicted_to_move() -> None:
    model = Model(DynamicsConfig(width=8), action_spec(SPACE, squash=True), None)
    rollout, replay = lane_rollout(), lane_replay(times=3)
    state = model.see(model.init(jax.random.key(0), 1), rollout)
    scale = float(np.sqrt(2.5))  # σ: the root mean square of increments 1 and 2
    _, mean, variance = state.seen["increment"]
    np.testing.assert_allclose(jnp.sqrt(variance + mean**2), scale, rtol=1e-6)
    still = jax.tree.map(jnp.zeros_like, state.train.params)
    state = replace(state, train=replace(state.train, params=still))
    np.testing.assert_allclose(model.errors(state, replay, jax.random.key(0), 2), 1.0, rtol=1e-6)
    # held-out rows are of lane 0, which moves by 1 a step: a bias of 1/σ is all that there is to know
    params = still["params"]
    params["dynamics"]["linear_2"]["bias"] = jnp.full(1, 1.0 / scale)
    np.testing.assert_allclose(model.errors(state, replay, jax.random.key(0), 2), 0.0, atol=1e-6)


def test_a_learned_reward_stays_between_the_recorded_ones() -> None:
    model = Model(DynamicsConfig(width=8), action_spec(SPACE, squash=True), None)
    rewards = reward_range(lane_replay())
    assert rewards == (0.0, 2.0)  # of 1 and 2; 0 counts, the value after an end
    state = model.see(model.init(jax.random.key(0), 1), lane_rollout())
    params = jax.tree.map(jnp.zeros_like, state.train.params)
    obs, action = jnp.zeros((1, 1)), jnp.ones((1, 1))
    for bias, predicted in ((1e3, 2.0), (-1e3, 0.0), (0.0, 1.5)):
        params["params"]["outcome"]["linear_2"]["bias"] = jnp.array([bias, 0.0])
        off = replace(state, train=replace(state.train, params=params))
        np.testing.assert_allclose(model.predict(off, obs, action, rewards).reward, predicted, rtol=1e-6)


@pytest.mark.parametrize(("bias", "value"), [(1e3, 2.0), (-1e3, -1.0), (0.5, 0.5)])
def test_a_value_that_no_rewards_add_up_to_is_not_believed(bias: float, value: float) -> None:
    obs = reset(REACH, jax.random.key(0), 4).obs
    params = jax.tree.map(jnp.zeros_like, POLICY.init(jax.random.key(1), obs))
    params["params"]["critic"]["linear_1"]["bias"] = jnp.full(1, bias)
    state = make_train_state(params, OPTIMIZER, target=params)

    def step_rows(state: Any, obs: Array, action: Array) -> tuple[Any, Timestep]:
        never = jnp.zeros(len(obs), bool)
        return state, Timestep(obs=obs, reward=jnp.zeros(len(obs)), terminated=never, truncated=never, info={})

    world, rows = imagine(step_rows, EnvCarry(state=(), obs=obs), 3, (jnp.array(-1.0), jnp.array(2.0)))
    given: Any = {"policy": POLICY, "env": world, "config": OPTIONS}
    _, _, metrics, _, next_value = actor_gradient(state, rows, jax.random.key(2), **given)
    np.testing.assert_allclose(next_value, value, rtol=1e-6)
    # three steps without rewards, then the value, per step
    np.testing.assert_allclose(metrics["objective"], OPTIONS.gamma**3 * value / 3, rtol=1e-5)


@pytest.mark.parametrize(("bound", "horizon"), [(0.05, 1), (0.1, 1), (0.2, 2), (0.35, 4)])
def test_the_horizon_ends_before_the_first_error_beyond_the_bound(bound: float, horizon: int) -> None:
    assert trusted_horizon(jnp.array([0.1, 0.2, 0.3, 0.15]), bound) == horizon


def test_predicted_episodes_are_cut_after_the_horizon_and_begin_at_their_start_again() -> None:
    def step_rows(state: Array, obs: Array, action: Array) -> tuple[Array, Timestep]:
        after, never = obs + action, jnp.zeros(2, bool)
        ends = after[:, 0] > 5.0
        return state + 1, Timestep(obs=after, reward=after[:, 0], terminated=ends, truncated=never, info={})

    world, rows = imagine(step_rows, EnvCarry(state=jnp.zeros(2), obs=jnp.array([[0.0], [4.0]])), 3)
    seen = []
    for _ in range(4):
        rows, timestep = world.step(rows, jnp.ones((2, 1)))
        seen.append([timestep.final_obs[:, 0], timestep.terminated, timestep.truncated, rows.obs[:, 0]])
    final, terminated, truncated, after = (np.stack(x) for x in zip(*seen, strict=True))
    np.testing.assert_array_equal(final, [[1, 5], [2, 6], [3, 5], [1, 6]])
    np.testing.assert_array_equal(terminated, [[False, False], [False, True], [False, False], [False, True]])
    np.testing.assert_array_equal(truncated, [[False, False], [False, False], [True, False], [False, False]])
    np.testing.assert_array_equal(after, [[1, 5], [2, 4], [0, 5], [1, 4]])


POLICY = ActorCritic(
    action_spec(REACH.action_space, squash=True),
    actor=NetworkConfig(hidden_sizes=(8,), activation="tanh"),
    critic=NetworkConfig(hidden_sizes=(8,), activation="tanh"),
)
OPTIONS = ModelSHACConfig(segment_length=3, batch_size=16, model=DynamicsConfig(width=8))
OPTIMIZER = make_actor_critic_optimizer(OPTIONS.optimizer, OPTIONS.critic_optimizer)


def truth(env: Any, obs: Array, horizon: int) -> tuple[Any, EnvCarry]:
    start = EnvCarry(state=jax.vmap(env.state_of)(obs), obs=obs)
    return imagine(lambda state, obs, action: step_all(env, state, action, jax.random.key(0)), start, horizon)


@pytest.mark.slow
def test_through_the_true_dynamics_it_is_shac_bit_for_bit() -> None:
    carry = reset(REACH, jax.random.key(0), 16)
    params = POLICY.init(jax.random.key(1), carry.obs)
    state = make_train_state(params, OPTIMIZER, target=params)
    given: Any = {"policy": POLICY, "optimizer": OPTIMIZER, "config": OPTIONS}
    world, rows = truth(REACH, carry.obs, 100)
    with jax.disable_jit():  # operation by operation: two programs of the same operations are rounded apart
        expected, _, metrics = shac_update(state, carry, jax.random.key(2), env=REACH, **given)
        actual, _, ours = shac_update(state, rows, jax.random.key(2), env=world, **given)
    assert metrics["grad_norm"] > 0.0
    chex.assert_trees_all_equal((expected, metrics), (actual, ours))


@pytest.mark.slow
def test_a_model_that_is_the_truth_has_the_true_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    obs = reset(REACH, jax.random.key(0), 16).obs
    rollout_like = jax.tree.map(lambda x: x[None], {"obs": obs})["obs"]
    replay = init_replay(ReplayConfig(capacity=16), obs, jnp.zeros((16, 2)))
    zeros, never = jnp.zeros((1, 16)), jnp.zeros((1, 16), bool)
    names = ("log_prob", "value", "next_value", "reward")
    rollout = Rollout(
        obs=rollout_like,
        action=jnp.zeros((1, 16, 2)),
        terminated=never,
        truncated=never,
        next_obs=rollout_like,
        **dict.fromkeys(names, zeros),
    )
    replay = add_rollout(replay, rollout, gamma=0.99)
    model = Model(OPTIONS.model, POLICY.action_spec, REACH)
    dynamics = model.see(model.init(jax.random.key(3), obs.shape[-1]), rollout)
    params = POLICY.init(jax.random.key(1), obs)
    state = make_train_state(params, OPTIMIZER, target=params)

    def certify() -> dict[str, Array]:
        return model_shac.certify(
            *(state, model, dynamics, replay, jnp.int32(3), jax.random.key(4)), env=REACH, policy=POLICY, config=OPTIONS
        )

    untrained = certify()
    assert abs(untrained["model/gradient_cosine"]) < 0.99
    step = lambda obs, action: REACH.step(REACH.state_of(obs), action, jax.random.key(0))[1]  # noqa: E731
    monkeypatch.setattr(Model, "predict", lambda self, dynamics, obs, action, rewards: jax.vmap(step)(obs, action))
    for name, value in certify().items():
        np.testing.assert_allclose(value, 1.0, atol=1e-4, err_msg=name)


RAW: dict[str, Any] = {
    "trainer": {
        "learning_env": "PlanarReachRL",
        "exp_name": "model_shac",
        "num_envs": 4,
        "buffer_size": 4,
        "iterations": 4,
        "save_frequency_updates": 2,
        "console": False,
    },
    "policy": {
        "name": "actor_critic",
        "squash_actions": True,
        "actor": {"type": "mlp", "hidden_sizes": [8]},
        "critic": {"type": "mlp", "hidden_sizes": [8]},
        "actor_obs_normalization": True,
    },
    "algorithm": {
        "name": "model_shac",
        "cfg": {
            "segment_length": 3,
            "batch_size": 16,
            "gradient_steps": 2,
            "learning_starts": 32,
            "max_model_error": 0.5,
            "replay": {"capacity": 64},
            "model": {"width": 8, "batch_size": 16, "gradient_steps": 2, "horizon": 2},
        },
    },
}


@cases(
    "overrides message",
    (["policy.squash_actions=false"], r"policy\.squash_actions.*unbounded actions.*set it to true"),
    (["algorithm.cfg.replay.n_step=3"], r"replay\.n_step.*got 3; a model is of single steps"),
    (["algorithm.cfg.replay.storage=host"], r"replay\.storage.*got 'host'.*use 'device'"),
    (["algorithm.cfg.replay.capacity=8"], r"replay\.capacity.*got 8, but a rollout has 16 rows"),
    (["algorithm.cfg.num_mini_batches=49"], r"num_mini_batches.*got 49, but a rollout has 48 rows"),
    (["policy.actor.memory={type: gru}"], r"algorithm\.name.*the policy has a memory"),
    (["policy.name=actor_only", "policy.critic=null"], r"policy\.name.*which has no critic"),
)
def test_what_cannot_train_is_refused_by_name(overrides: list[str], message: str) -> None:
    refused(lambda: build(parse_config(RAW, overrides)), match=message)


DICTIONARY = [
    "trainer.learning_env=null",
    "env={id: PlanarReachRL, wrappers: [{AsymmetricEnv: {}}]}",
    "policy.obs_groups={actor: [policy], critic: [critic]}",
]


@pytest.mark.slow
@cases("where overrides", ("device", []), ("host", []), ("device", DICTIONARY))
def test_a_run_resumes_to_the_same_bits_with_model_and_replay(tmp_path: Path, where: str, overrides: list[str]) -> None:
    where_to = [f"trainer.output_dir={tmp_path}", f"trainer.collector.mode={where}"]
    config = parse_config(RAW, [*where_to, *overrides])
    whole = train(config, run_dir=tmp_path / "whole")
    like = build(config).state
    middle = next(path for path in whole.latest_checkpoint_path.parent.iterdir() if path.name.endswith(f"_{2 * 16}"))
    expected, _ = load_checkpoint(whole.latest_checkpoint_path, like)
    resumed = train(config, resume=str(middle))
    actual, _ = load_checkpoint(resumed.latest_checkpoint_path, like)
    chex.assert_trees_all_equal(expected, actual)
    start, _ = load_checkpoint(middle, like)
    kernel = lambda state: state.own.dynamics.train.params["params"]["dynamics"]["linear_0"]["kernel"]  # noqa: E731
    assert not np.array_equal(kernel(start), kernel(expected))
    names = {"model/error_1", "model/error_3", "model/horizon", "train/objective", "train/model_dynamics_loss"}
    judged = where == "device" and not overrides  # a task judges single vectors, and only in JAX
    names |= {"model/gradient_cosine", "model/gradient_ratio"} if judged else {"train/model_reward_loss"}
    assert names <= whole.last_train_metrics.keys()
