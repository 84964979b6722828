"""Environments outside JAX: Gymnasium's vectors in every autoreset mode, EnvPool, classes of one's own, chunks."""

import importlib.util
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from host_tasks import Drift, Linear
from ladder import Asked, Ladder
from tiny import tiny

from ejax.collectors import HostCollector
from ejax.config import ConfigError, parse_config
from ejax.envs.actions import action_form, to_action
from ejax.envs.adapters import gymnasium as adapter
from ejax.envs.adapters.gymnasium import GymnasiumVector
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.host.rows import as_rows, next_seed, rows_space
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.evaluation import evaluate_host
from ejax.schema.trust import trust
from ejax.training.build import build
from ejax.training.environments import build_env, make_env
from ejax.training.host_steppers import HostStepper
from ejax.types import HostEnv, SavableHostEnv

SEED = np.array([3, 5, 7], np.uint32)


def by_hand(mode: AutoresetMode, row: int, rewards: np.ndarray) -> list[dict[str, Any]]:
    """Compute the steps of one row, from a loop over a single environment: transitions, and steps that only reset."""
    env, seed, steps = Ladder(), SEED[row : row + 1], []
    obs, resets_next = env.reset(seed=int(seed[0]))[0], False
    for reward in rewards:
        if resets_next:
            obs, resets_next = env.reset()[0], False
            steps.append({"valid": False, "obs": obs, "terminated": False, "truncated": False})
            continue
        final, told, terminated, truncated, info = env.step([reward, 0.0])
        step = {"valid": True, "reward": told, "terminated": terminated, "truncated": truncated, "final_obs": final}
        step |= {"success": info.get("success", np.nan)}
        obs = final
        if terminated or truncated:
            if mode is AutoresetMode.NEXT_STEP:
                resets_next = True
            elif mode is AutoresetMode.SAME_STEP:
                obs = env.reset()[0]
            else:
                seed = next_seed(seed)
                obs = env.reset(seed=int(seed[0]))[0]
        steps.append({**step, "obs": obs})
    return steps


@cases("vector", SyncVectorEnv, partial(AsyncVectorEnv, context="forkserver"), ids=["sync", "async"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_gives_the_true_next_observation(vector: Any, mode: AutoresetMode) -> None:
    env = GymnasiumVector(vector([Ladder] * 3, autoreset_mode=mode))
    rewards = np.random.default_rng(0).uniform(-1, 1, (16, 3)).astype(np.float32)
    rows = [by_hand(mode, row, rewards[:, row]) for row in range(3)]
    try:
        if mode is AutoresetMode.DISABLED:
            obs = env.reset(SEED)
        else:  # one seed makes those of all rows, one after the other
            env.env.reset(seed=SEED.tolist())
        seen = [env.step(np.stack([each, 0 * each], axis=1)) for each in rewards]
    finally:
        env.close()
    flags = [(step["terminated"], step["truncated"]) for row in rows for step in row]
    assert {(True, False), (False, True)} <= set(flags)
    for t, told in enumerate(seen):
        for row in range(3):
            expected = rows[row][t]
            np.testing.assert_array_equal(told.obs[row], expected["obs"])
            assert told.info["valid"][row] == expected["valid"]
            assert (told.terminated[row], told.truncated[row]) == (expected["terminated"], expected["truncated"])
            if expected["valid"]:
                np.testing.assert_array_equal(told.final_obs[row], expected["final_obs"])
                assert told.reward[row] == np.float32(expected["reward"])
                np.testing.assert_array_equal(told.info["success"][row], expected["success"])
    if mode is AutoresetMode.DISABLED:
        assert env.seeds_rows and obs.shape == (3, 2)


def test_each_row_starts_from_its_own_seed() -> None:
    env = GymnasiumVector(SyncVectorEnv([Ladder] * 3, autoreset_mode=AutoresetMode.DISABLED))
    first = env.reset(SEED)
    again = env.reset(SEED[::-1].copy(), np.array([True, False, True]))
    np.testing.assert_array_equal(again[0], Ladder().reset(seed=7)[0])
    np.testing.assert_array_equal(again[1], first[1])
    assert env.row_seed.tolist() == [7, 5, 3]
    env.close()


def test_seeds_that_follow_each_other_do_not_meet() -> None:
    seed = np.arange(2**16, dtype=np.uint32)
    assert len(np.unique(next_seed(seed))) == len(seed)


def test_a_vector_that_does_not_tell_its_mode_is_refused() -> None:
    env = SyncVectorEnv([Ladder])
    del env.metadata["autoreset_mode"]
    refused(GymnasiumVector, env, match="SyncVectorEnv has no metadata")
    env.close()


@cases(
    "space given expected",
    (spaces.Discrete(3, start=2), np.array([0, 2]), [2, 4]),
    (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [0, 0]]), [[1, 2], [0, 0]]),
    (spaces.Box(-1.0, 1.0, (2,), np.float64), np.array([[2.0, 0.5], [-9.0, 0.0]]), [[1.0, 0.5], [-1.0, 0.0]]),
)
def test_actions_arrive_as_the_space_has_them(space: Any, given: Any, expected: Any) -> None:
    envs = [Asked(space, Ladder.observation_space) for _ in range(2)]
    env = GymnasiumVector(SyncVectorEnv([lambda each=each: each for each in envs], autoreset_mode="Disabled"))
    env.reset(SEED[:2])
    env.step(to_action(action_form(space), given))
    for each, action in zip(envs, expected, strict=True):
        np.testing.assert_array_equal(each.actions[0], action)
        assert space.contains(each.actions[0])
    env.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_observations_of_every_kind_become_vectors(mode: AutoresetMode) -> None:
    parts = {
        "image": spaces.Box(0, 255, (2, 3), np.uint8),
        "kind": spaces.Discrete(3, start=1),
        "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
    }
    space = spaces.Dict(parts)
    env = GymnasiumVector(SyncVectorEnv([partial(Asked, Ladder.action_space, space)] * 3, autoreset_mode=mode))
    env.reset(SEED)
    sizes = {"image": 6, "kind": 3, "pair": {"0": 2, "1": 5}}
    for _ in range(9):
        told = env.step(np.zeros((3, 2), np.float32))
        for tree in (told.obs, told.final_obs):
            assert jax.tree.map(lambda x: x.shape[1], tree) == sizes
            one = jax.tree.map(lambda x: x[0], tree)
            assert env.observation_space.contains(one)
            assert one["kind"].sum() == 1.0 and one["pair"]["1"].sum() == 2.0
    env.close()


def test_spaces_without_vectors_are_refused() -> None:
    refused(lambda: rows_space(spaces.Text(5)), match="are not vectors; allowed: Box, Discrete")


def test_tuples_end_in_their_own_final_observation() -> None:
    space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
    rows = as_rows(space, (np.array([0, 2]), np.zeros((2, 2))))
    assert rows["0"].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_a_chunk_is_its_actions_one_after_the_other_until_the_episode_ends() -> None:
    env = adapter.ChunkedSteps(Ladder(fall=9, limit=5), 3)
    assert env.action_space.shape == (6,)
    env.reset(seed=0)
    obs, reward, _, truncated, _ = env.step(np.arange(6.0))  # rewards 0, 2, 4
    assert (obs[1], reward, truncated) == (3.0, 6.0, False)
    obs, reward, _, truncated, _ = env.step(np.arange(6.0))
    assert (obs[1], reward, truncated) == (5.0, 2.0, True)  # two of three
    with pytest.raises(ValueError, match="needs a one-dimensional Box"):
        adapter.ChunkedSteps(Asked(spaces.Discrete(2), Ladder.observation_space), 2)


def test_a_chunk_of_a_pure_environment_is_the_same() -> None:
    env, chunked = Drift(limit=5), ActionChunk(Drift(limit=5), 3)
    assert chunked.action_space.shape == (3,) and chunked.max_episode_steps == 2
    state, _ = chunked.reset(jax.random.key(0))
    step = jax.jit(chunked.step)
    for t, (length, truncated) in enumerate([(3, False), (2, True)]):
        key, action = jax.random.key(t), jnp.array([0.3, -0.2, 0.1])
        total, by_hand = 0.0, state
        for i in range(length):
            by_hand, told = env.step(by_hand, action[i : i + 1], jax.random.fold_in(key, i))
            total += told.reward
        state, timestep = step(state, action, key)
        np.testing.assert_allclose(state, by_hand, rtol=1e-6)
        np.testing.assert_allclose(timestep.reward, total, rtol=1e-6)
        assert bool(timestep.truncated) == truncated


def config(env: str, num_envs: int = 4, overrides: tuple[str, ...] = (), **cfg: Any) -> Any:
    return parse_config(tiny(env=env, env_cfg=cfg, num_envs=num_envs), list(overrides))


class OwnHost(PureHostEnv):
    def __init__(self, num_envs: int = 1, limit: int = 7) -> None:
        super().__init__(Drift(limit), num_envs)


class FourAlways(PureHostEnv):
    def __init__(self) -> None:
        super().__init__(Drift(), 4)


def test_classes_of_ones_own_are_named_by_their_place() -> None:
    trust("ladder:Ladder", "host_tasks:Drift")
    assert isinstance(make_env("ladder:Ladder", {"limit": 5}, num_envs=3), HostEnv)
    assert make_env("host_tasks:Drift", {"limit": 5}, num_envs=3) == Drift(5)
    guarded = build_env(config("test_host_env:OwnHost", limit=5))
    assert isinstance(guarded, GuardedEnv) and guarded.num_envs == 4
    assert isinstance(guarded.inner, SavableHostEnv)
    guarded.close()
    with pytest.raises(ConfigError, match="has 4 environments instead of 3; let it take num_envs"):
        build_env(config("test_host_env:FourAlways", num_envs=3))


def test_a_chunk_is_asked_for_in_the_config() -> None:
    assert build_env(config("PointMassRL", action_chunk=3)).action_space.shape == (6,)
    env = build_env(config("gymnasium:Pendulum-v1", action_chunk=4))
    assert env.action_space.shape == (4,) and env.max_episode_steps == 50
    env.close()
    with pytest.raises(ConfigError, match=r"env\.cfg\.action_chunk: got 0; must be an integer of at least 1"):
        config("PointMassRL", action_chunk=0)


def test_gymnasium_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="gymnasium has no environment 'HalfCheeta-v5'; nearest: HalfCheetah"):
        build_env(config("gymnasium:HalfCheeta-v5"))
    with pytest.raises(ConfigError, match=r"env\.cfg\.vectorization: got 'none'; must be 'sync' or 'async'"):
        build_env(config("gymnasium:Pendulum-v1", vectorization="none"))


def test_an_environment_outside_jax_is_not_stepped_inside_it() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.collector\.mode: got 'device', but gymnasium:Pendulum-v1 lives"):
        build(config("gymnasium:Pendulum-v1", overrides=("trainer.collector.mode=device",)))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_discrete_actions_are_collected(vectorization: str) -> None:
    parts = build(config("gymnasium:CartPole-v1", num_envs=2, vectorization=vectorization))
    with parts.stepper as stepper:
        assert isinstance(stepper, HostStepper)
        rollout = stepper.collector.collect(parts.state.train.params, jax.random.key(0), index=0).rollout
    assert set(np.unique(rollout.action)) == {0, 1}
    assert (rollout.reward == 1.0).all() and np.isfinite(rollout.log_prob).all()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_evaluation_counts_whole_episodes_whatever_the_mode(mode: AutoresetMode) -> None:
    """Resets that take a step of their own neither count nor use up the steps that there are for episodes."""
    vector = SyncVectorEnv([partial(Ladder, fall=99)] * 2, autoreset_mode=mode)
    env = GymnasiumVector(vector, max_episode_steps=6)
    params = Pair().init(jax.random.key(0), None)
    played = evaluate_host(Pair(), env, params, seed=1, num_episodes=7)
    assert played["length"].tolist() == [6.0] * 7
    assert played["return"].tolist() == [6.0] * 7  # reward 1 a step
    assert played["success"].tolist() == [0.0] * 7
    env.close()


class Pair(Linear):
    """Always the action [1, 0]."""

    def apply(self, params: Any, obs: Any) -> Any:
        distribution, value = super().apply(params, obs)
        mean = jnp.concatenate([jnp.ones_like(distribution.mean), jnp.zeros_like(distribution.mean)], axis=-1)
        return type(distribution)(mean, jnp.zeros_like(mean)), value


def test_a_row_of_a_pure_environment_follows_from_its_seed_alone() -> None:
    three, one = PureHostEnv(Drift(), 3), PureHostEnv(Drift(), 1)
    action = np.random.default_rng(0).normal(size=(20, 3, 1)).astype(np.float32)
    three.reset(SEED)
    one.reset(SEED[1:2])
    ends = 0
    for each in action:
        a, b = three.step(each), one.step(each[1:2])
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1:2], y), a, b)
        assert (b.final_obs == b.obs).all() == (not (b.terminated | b.truncated)[0])
        ends += int(b.truncated[0])
    assert ends >= 2


def test_a_pure_environment_goes_on_from_its_saved_state() -> None:
    env, other = PureHostEnv(Drift(), 3), PureHostEnv(Drift(), 3)
    shapes = jax.tree.map(jnp.shape, env.get_state())
    env.reset(SEED)
    action = np.full((3, 1), 0.1, np.float32)
    for _ in range(4):
        told = env.step(action)
    assert jax.tree.map(jnp.shape, env.get_state()) == shapes
    np.testing.assert_array_equal(other.set_state(env.get_state()), told.obs)
    for _ in range(9):
        chex.assert_trees_all_equal(env.step(action), other.step(action))


with_envpool = pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="pip install -e '.[envpool]'")


@with_envpool
@pytest.mark.filterwarnings("ignore")
def test_envpool_resets_in_the_next_step_and_repeats_itself() -> None:
    env = make_env("envpool:CartPole-v1", {"num_threads": 1}, num_envs=3)
    runs = []
    for _ in range(2):
        steps = [env.reset(SEED)]
        ended = np.zeros(3, bool)
        for _ in range(40):
            told = env.step(np.array([1, 1, 0]))
            np.testing.assert_array_equal(told.info["valid"], ~ended)
            assert (told.reward == told.info["valid"]).all()  # 1 a step, nothing for a reset
            assert (np.abs(told.obs[ended]) <= 0.05).all()  # CartPole starts there
            assert (np.abs(told.final_obs[told.terminated, 2]) > 0.2).all()  # and falls here
            ended = told.terminated | told.truncated
            steps.append(told.obs)
        runs.append(np.stack(steps))
    np.testing.assert_array_equal(*runs)
    env.close()


@with_envpool
@pytest.mark.filterwarnings("ignore")
def test_envpool_resets_rows_and_takes_float64_actions() -> None:
    env = make_env("envpool:Pendulum-v1", {}, num_envs=3)
    first = env.reset(SEED)
    obs = env.reset(SEED, np.array([False, True, False]))
    assert (obs == first).all(axis=1).tolist() == [True, False, True]
    assert np.isfinite(env.step(np.full((3, 1), 50.0, np.float32)).reward).all()
    collector = HostCollector(Linear3(), [env], num_steps=5, seed=0)
    params = Linear3().init(jax.random.key(0), None)
    assert collector.collect(params, jax.random.key(0), index=0).rollout.valid.all()
    collector.close()


class Linear3(Linear):
    """For observations of three numbers."""

    def apply(self, params: Any, obs: Any) -> Any:
        return super().apply(params, obs[..., :2])


@pytest.mark.slow
def test_a_policy_is_shown_the_numbers_that_are_asked_for() -> None:
    whole = adapter.make("CartPole-v1", num_envs=2)
    part = adapter.make("CartPole-v1", num_envs=2, observation_indices=(2, 0))
    seed = np.array([1, 2], np.uint32)
    np.testing.assert_array_equal(part.reset(seed), whole.reset(seed)[:, [2, 0]])
    action = np.array([0, 1])
    np.testing.assert_array_equal(part.step(action).final_obs, whole.step(action).final_obs[:, [2, 0]])
    assert part.observation_space.shape == (2,)
    for wrong in ((4,), (-1,), (), (0.5,)):
        with pytest.raises(ValueError, match="observation_indices must be of 0 to 3, at least one; got"):
            adapter.make("CartPole-v1", num_envs=1, observation_indices=wrong)  # type: ignore[arg-type]  # what a config may hold
    with pytest.raises(ValueError, match="needs observations that are one vector"):
        adapter.make("Blackjack-v1", num_envs=1, observation_indices=(0,))
