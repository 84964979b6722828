"""A policy's numbers become actions of the space in one place, wherever an environment is stepped."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from gymnasium import spaces
from toy_policies import policy_for

from ejax.collectors import HostCollector
from ejax.envs.actions import action_form, to_action
from ejax.envs.check import check_env, clips_actions
from ejax.envs.wrappers.action_chunk import chunk_space
from ejax.episodes import record_episodes
from ejax.evaluation import evaluate, evaluate_host
from ejax.play.show import play_episodes
from ejax.rollout import reset, unroll, with_memory
from ejax.training.fields import policy_numbers
from ejax.types import HostTimestep, Timestep

INF = np.inf
HALF = spaces.Box(np.array([0.0, -INF], np.float32), np.array([INF, 1.0], np.float32))
OF_64_BITS = np.iinfo(np.int64)


def contained(space: Any, actions: Any) -> bool:
    is_number = space.shape == () and not isinstance(space, spaces.Box)
    return all(space.contains(each[()] if is_number else np.asarray(each)) for each in actions)


@cases(
    "space given expected",
    (spaces.Box(-10, 10, (3,), np.int64), [[-11.0, 0.4, 0.6], [10.4, np.nan, -2.6]], [[-10, 0, 1], [10, -10, -3]]),
    (spaces.Box(0, 255, (2,), np.uint8), [[-3.0, 300.0], [254.6, INF]], [[0, 255], [255, 255]]),
    (spaces.Box(OF_64_BITS.min, OF_64_BITS.max, (2,), np.int64), [[1e30, 3.3]], [[OF_64_BITS.max, 3]]),
    (HALF, [[-3.0, -3.0], [9.0, 9.0]], [[0.0, -3.0], [9.0, 1.0]]),
    (spaces.Box(-0.1, 0.1, (2,), np.float64), [[-3.0, 3.0]], [[-0.1, 0.1]]),
    (spaces.Box(-1.0, 1.0, ()), [[-3.0], [0.5]], [-1.0, 0.5]),
    (spaces.Box(-1.0, 1.0, (2, 1)), [[-3.0, 0.5]], [[[-1.0], [0.5]]]),
    (spaces.Discrete(3, start=-1), [0, 2], [-1, 1]),
    (spaces.MultiDiscrete([[2], [2]]), [[0, 1], [1, 1]], [[[0], [1]], [[1], [1]]]),
    (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, -4]]), [[0, 1, 2, 3]], [[[1, 3], [5, -1]]]),
    (spaces.MultiDiscrete([3, 2], np.int32, start=[5, -2]), [[2, 0]], [[7, -2]]),
    ids=str,
)
def test_numbers_become_actions_of_the_space(space: Any, given: Any, expected: Any) -> None:
    numbers = jnp.asarray(given, jnp.float32 if isinstance(space, spaces.Box) else jnp.int32)
    form = action_form(space, clips=True)
    made = to_action(form, numbers)
    np.testing.assert_array_equal(made, expected)
    assert made.dtype == space.dtype and made.flags.writeable and made.flags.owndata
    assert contained(space, made)
    inside = jax.jit(lambda x: to_action(form, x, jnp))(numbers)
    if np.abs(expected).max() < 1e9:  # JAX has 32 bits
        np.testing.assert_array_equal(inside, np.asarray(expected, inside.dtype))


@cases(
    "space numbers",
    (spaces.Discrete(3, start=-1), [[0, 2]]),
    (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, -4]]), [[[0, 1, 2, 3], [1, 2, 3, 4]]]),
    (spaces.Box(-10, 10, (2,), np.int64), [[[3.0, -4.0]]]),
    ids=str,
)
def test_demonstrated_actions_become_a_policys_numbers(space: Any, numbers: Any) -> None:
    actions = to_action(action_form(space), np.array(numbers)[0])[None]
    found = policy_numbers(space, 1, actions)
    np.testing.assert_array_equal(found, numbers)
    assert found.dtype.kind == ("f" if isinstance(space, spaces.Box) else "i")
    beyond = actions * 15 if isinstance(space, spaces.Box) else actions + 3
    refused(policy_numbers, space, 1, beyond, match="action_field")
    policy_numbers(space, 1, beyond, np.zeros(beyond.shape[:2], bool))  # padding


def test_demonstrated_actions_may_be_beyond_the_bounds_by_their_range() -> None:
    space = chunk_space(spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, np.inf]), dtype=np.float64), 2)
    actions = np.array([[[2.9, 1e9]]])
    np.testing.assert_array_equal(policy_numbers(space, 2, actions), np.float32(actions))
    refused(policy_numbers, space, 2, actions + 0.2, match="of .* beyond the bounds")


def test_in_a_program_what_is_as_it_should_be_is_no_operation() -> None:
    for space, x in ((spaces.Box(-1.0, 1.0, (2,)), jnp.ones((3, 2))), (spaces.Discrete(2), jnp.zeros(3, jnp.int32))):
        program = jax.make_jaxpr(partial(to_action, action_form(space), numpy=jnp))(x)
        assert not program.eqns


@dataclass(frozen=True)
class Strict:
    """An environment whose reward is 1 for an action of its space."""

    action_space: Any
    clips: bool = False
    max_episode_steps: int = 4
    observation_space = spaces.Box(-INF, INF, (3,))

    def __hash__(self) -> int:
        return hash((str(self.action_space), self.clips))

    def reset(self, key: Any) -> Any:
        return jnp.zeros((), jnp.int32), jax.random.normal(key, (3,))

    def step(self, state: Any, action: Any, key: Any) -> Any:
        space, no = self.action_space, jnp.zeros((), bool)
        assert action.shape == space.shape
        value = action.astype(jnp.float32)
        if isinstance(space, spaces.Box):
            low, high = (jnp.asarray(x, jnp.float32) for x in (space.low, space.high))
            value = jnp.clip(value, low, high) if self.clips else value
            fits = ((value >= low) & (value <= high)).all()
        else:
            low, count = jnp.asarray(space.start), jnp.asarray(space.n if space.shape == () else space.nvec)
            fits = ((action >= low) & (action < low + count)).all()
        obs = jax.random.normal(key, (3,)) + 0.1 * value.sum()
        timestep = Timestep(
            obs=obs,
            reward=fits.astype(jnp.float32),
            terminated=no,
            truncated=state + 1 >= self.max_episode_steps,
            info={"metrics": {"fits": fits.astype(jnp.float32)}},
        )
        return state + 1, timestep

    def render(self, state: Any, width: int = 8, height: int = 8, camera: Any = None) -> Any:
        return np.zeros((height, width, 3), np.uint8)

    control_period = 0.1


class StrictHost:
    """Rows outside JAX that write into the action that they were given; the reward is 1 for one of the space."""

    seeds_rows = False

    def __init__(self, num_envs: int, space: Any) -> None:
        self.num_envs, self.action_space, self.max_episode_steps = num_envs, space, 4
        self.observation_space = spaces.Box(-INF, INF, (3,))
        self.row_seed, self.t = np.zeros(num_envs, np.uint32), np.zeros(num_envs, int)

    def reset(self, seed: Any, rows: Any = None) -> Any:
        self.t[slice(None) if rows is None else rows] = 0
        return np.ones((self.num_envs, 3), np.float32)

    def step(self, action: Any) -> HostTimestep:
        fits = contained(self.action_space, action)
        action[...] = 0
        self.t += 1
        done, no = self.t >= 4, np.zeros(self.num_envs, bool)
        self.t[done] = 0
        obs = np.ones((self.num_envs, 3), np.float32)
        reward = np.full(self.num_envs, float(fits), np.float32)
        return HostTimestep(obs=obs, reward=reward, terminated=no, truncated=done, info={"valid": ~no}, final_obs=obs)

    def close(self) -> None:
        pass


SPACES = {
    "start": spaces.Discrete(3, start=-1),
    "table": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, -4]]),
    "one row of a table": spaces.MultiDiscrete([[2], [2]]),
    "integers": spaces.Box(-2, 3, (2,), np.int32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_a_pure_environment_is_given_actions_of_its_space(name: str) -> None:
    env = Strict(SPACES[name])
    policy, params = policy_for(env)
    start = with_memory(reset(env, jax.random.key(0), 2), policy)
    rollout, _ = unroll(policy, env, params, start, jax.random.key(1), num_steps=6)
    assert (rollout.reward == 1.0).all()
    again = policy.apply(params, rollout.obs)[0].log_prob(rollout.action)  # of the policy's own numbers
    np.testing.assert_allclose(again, rollout.log_prob, atol=1e-5)
    found = evaluate(policy, env, params, jax.random.key(0), num_envs=2, num_episodes=2)
    assert (found["return"] == 4.0).all()
    steps = play_episodes(policy, env, params, 0, samples=True)
    next(steps)
    step = next(steps)
    assert step.reward == 1.0 and step.action.shape == env.action_space.shape
    record_episodes(policy, env, params, jax.random.key(0), num_envs=2, samples=True)
    assert "fits" in check_env(env)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_a_host_environment_is_given_actions_of_its_own(name: str) -> None:
    env: Any = StrictHost(2, SPACES[name])
    policy, params = policy_for(env)
    assert (evaluate_host(policy, env, params, 0, num_episodes=2)["return"] == 4.0).all()
    collector = HostCollector(policy, [env], num_steps=5, seed=0)
    heard: list[Any] = []
    collector.listeners = [lambda step: heard.append(step.action.copy())]
    rollout = collector.collect(params, jax.random.key(0), index=0).rollout
    assert (np.asarray(rollout.reward) == 1.0).all()
    again = policy.apply(params, rollout.obs)[0].log_prob(rollout.action)
    np.testing.assert_allclose(again, rollout.log_prob, atol=1e-5)
    form = action_form(env.action_space)  # what was given, and not what the environment made of it
    np.testing.assert_array_equal(np.stack(heard), [to_action(form, each) for each in np.asarray(rollout.action)])


@pytest.mark.slow
@pytest.mark.parametrize("space", [HALF, spaces.Box(-0.5, 0.5, (2,), np.float64), spaces.Box(-1.0, 1.0, ())], ids=str)
def test_whether_an_environment_clips_is_found_by_playing_it(space: Any) -> None:
    assert clips_actions(Strict(space, clips=True)) and not clips_actions(Strict(space))
    assert clips_actions(StrictHost(2, space)) is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_check_env_draws_within_one_bound_too() -> None:
    class Bounded(Strict):
        observation_space = spaces.Box(0.0, 1.0, (1,))

        def reset(self, key: Any) -> Any:
            return jnp.zeros((), jnp.int32), jnp.ones(1)

        def step(self, state: Any, action: Any, key: Any) -> Any:
            state, timestep = super().step(state, action, key)
            return state, timestep.replace(obs=timestep.reward[None] - 0.5)  # type: ignore[attr-defined]

    low, high = np.array([50.0, -INF], np.float32), np.array([INF, -40.0], np.float32)
    assert "fits" in check_env(Bounded(spaces.Box(low, high)))
