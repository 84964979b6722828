"""Stepping with automatic resets, and rollouts: a counter environment shows exactly what happened."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refused
from flax import struct
from toy_tasks import Line, told

from ejax.distributions import Normal
from ejax.numerics.checks import check_rollout
from ejax.rollout import EnvCarry, _collect, _steps_at_once, reset, starts_of, step, unroll
from ejax.types import Params, Rollout, Timestep

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Counter(Line):
    """State and observation: [episode's tag, steps taken]. Action 0 goes on, 1 terminates; cut off after ``limit``."""

    limit: int = 3
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))

    @property
    def max_episode_steps(self) -> int:
        return self.limit

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        obs = jnp.array([1.0, 0.0]) * jax.random.uniform(key, minval=1.0, maxval=2.0)
        return obs, obs

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[jax.Array, Timestep]:
        del key
        state = state + jnp.array([0.0, 1.0])
        terminated = action[0] > 0.5
        timestep = told(state, state[1], terminated, success=terminated)
        return state, replace(timestep, truncated=state[1] >= self.limit)


class LongCounter(Counter):
    long_reset = True


@struct.dataclass
class Scripted:
    """Acts 0 (or, with noise, around it); V(obs) = 10·tag + steps."""

    log_std: float = struct.field(pytree_node=False, default=-20.0)

    def init(self, key: jax.Array, obs: jax.Array) -> dict[str, Any]:
        del key, obs
        return {"params": {"gain": jnp.asarray(10.0)}}

    def apply(self, params: Params, obs: jax.Array) -> tuple[Normal, Any]:
        mean = jnp.zeros_like(obs[..., :1])
        value = params["params"]["gain"] * obs[..., 0] + obs[..., 1]
        return Normal(mean, jnp.full_like(mean, self.log_std)), value


ENV, POLICY = Counter(), Scripted()
PARAMS = POLICY.init(KEY, None)


@pytest.fixture(scope="module")
def jitted_step() -> Callable[..., Any]:
    return jax.jit(lambda carry, action, key: step(ENV, carry, action, key))


def at(tags: Any, steps: int) -> EnvCarry:
    obs = jnp.stack([jnp.asarray(tags, jnp.float32), jnp.asarray(steps, jnp.float32)], axis=-1)
    return EnvCarry(state=obs, obs=obs)


def test_rows_that_ended_start_anew_and_the_others_go_on(jitted_step: Callable[..., Any]) -> None:
    carry, timestep = jitted_step(at([5, 6, 7], [0, 1, 2]), jnp.array([[1.0], [0.0], [0.0]]), KEY)
    assert timestep.terminated.tolist() == [True, False, False]
    assert timestep.truncated.tolist() == [False, False, True]
    assert timestep.final_obs.tolist() == [[5.0, 1.0], [6.0, 2.0], [7.0, 3.0]]
    assert timestep.obs[1].tolist() == [6.0, 2.0]
    for row in (0, 2):
        assert 1.0 <= timestep.obs[row, 0] < 2.0 and timestep.obs[row, 1] == 0.0
    np.testing.assert_array_equal(carry.obs, timestep.obs)
    np.testing.assert_array_equal(carry.state, timestep.obs)
    # of the ended episode
    assert timestep.reward.tolist() == [1.0, 2.0, 3.0] and timestep.info["success"].tolist() == [True, False, False]


def test_nothing_is_reset_while_no_episode_ends(jitted_step: Callable[..., Any]) -> None:
    carry, timestep = jitted_step(at([5, 6, 7], [0, 1, 1]), jnp.zeros((3, 1)), KEY)
    assert carry.obs.tolist() == [[5.0, 1.0], [6.0, 2.0], [7.0, 2.0]]
    np.testing.assert_array_equal(timestep.final_obs, timestep.obs)


@pytest.mark.parametrize(("platform", "conditions"), [("cpu", 1), ("cuda", 0)])
def test_resets_are_behind_one_condition_for_the_batch_on_a_cpu_and_behind_none_on_a_gpu(
    platform: str, conditions: int
) -> None:
    traced = jax.jit(partial(step, ENV)).trace(at([5], [0]), jnp.zeros((1, 1)), KEY)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.case") == 2 + conditions  # the choice of the platform is two, of constants


def test_starts_that_were_drawn_beforehand_are_those_that_a_step_draws(jitted_step: Callable[..., Any]) -> None:
    before, action = at([5, 6], [2, 0]), jnp.zeros((2, 1))
    drawn, _ = jitted_step(before, action, KEY)
    start = jax.tree.map(lambda x: x[0], starts_of(ENV, KEY[None], 2))
    given, _ = jax.jit(partial(step, ENV))(before, action, KEY, start)
    chex.assert_trees_all_equal(given, drawn)


def test_a_long_reset_of_the_rows_that_ended_is_that_of_all_rows() -> None:
    ended = np.arange(21) % 2 == 0  # eleven of them: more than are reset at once, and not a multiple
    before, action = at(np.arange(21), [0] * 21), jnp.asarray(ended, jnp.float32)[:, None]
    whole, _ = jax.jit(partial(step, ENV))(before, action, KEY)
    few, _ = jax.jit(partial(step, LongCounter()))(before, action, KEY)
    chex.assert_trees_all_equal(few, whole)
    np.testing.assert_array_equal(few.obs[~ended, 0], np.arange(21)[~ended])


@pytest.mark.slow
def test_a_gpu_draws_one_long_reset_for_each_row_of_a_rollout() -> None:
    form = partial(_collect, POLICY, LongCounter(), first_episodes=False, few_kernels=True)
    traced = jax.make_jaxpr(form)(PARAMS, (at([5, 6], [0, 1]), jnp.zeros(2, bool)), (jax.random.split(KEY, 8), {}))
    assert "while" not in str(traced)
    (_, _), made = jax.jit(form)(PARAMS, (at([5, 6], [0, 1]), jnp.zeros(2, bool)), (jax.random.split(KEY, 8), {}))
    tags, steps = made.obs[..., 0], made.obs[..., 1]
    assert steps[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1] and steps[:, 1].tolist() == [1, 2, 0, 1, 2, 0, 1, 2]
    assert tags[3, 0] == tags[6, 0] != tags[2, 1] and (tags[3:] < 2.0).all()


def test_environments_reset_independently() -> None:
    carry = reset(ENV, KEY, 50)
    assert len(np.unique(carry.obs[:, 0])) == 50


@pytest.fixture(scope="module")
def rollout() -> Any:
    """Eight steps of two environments that are cut off after every third step, the second one step ahead."""
    return unroll(POLICY, ENV, PARAMS, at([5, 6], [0, 1]), KEY, num_steps=8)[0]


def test_a_rollout_follows_its_episodes(rollout: Rollout) -> None:
    assert rollout.obs[:, 0, 1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rollout.obs[:, 1, 1].tolist() == [1, 2, 0, 1, 2, 0, 1, 2]
    assert rollout.truncated[:, 0].tolist() == [False, False, True, False, False, True, False, False]
    assert rollout.reward[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    np.testing.assert_array_equal(rollout.done, rollout.truncated)


def test_the_next_value_is_the_next_steps_and_of_a_cut_off_step_that_of_the_final_observation(rollout: Rollout) -> None:
    tags, steps, within = rollout.obs[..., 0], rollout.obs[..., 1], ~np.asarray(rollout.done)[:-1]
    # the tag is still the old episode's: V(the reset observation) would be 10·new tag
    np.testing.assert_allclose(rollout.next_value, 10.0 * tags + steps + 1.0, rtol=1e-6)
    np.testing.assert_allclose(rollout.value, 10.0 * tags + steps, rtol=1e-6)
    np.testing.assert_allclose(rollout.next_value[:-1][within], rollout.value[1:][within])


def test_flags_that_are_not_bool_and_a_rollout_without_steps_are_refused(rollout: Rollout) -> None:
    refused(check_rollout, replace(rollout, valid=jnp.ones(rollout.reward.shape)), match="and valid.*float32")
    refused(check_rollout, jax.tree.map(lambda x: x[:0], rollout), match="at least one step of one environment")


def test_a_rollout_goes_on_where_the_last_one_stopped(rollout: Rollout) -> None:
    first, carry = unroll(POLICY, ENV, PARAMS, at([5, 6], [0, 1]), KEY, num_steps=4)
    second, _ = unroll(POLICY, ENV, PARAMS, carry, KEY, num_steps=4)
    both = np.concatenate([first.obs[..., 1], second.obs[..., 1]])
    np.testing.assert_array_equal(both, rollout.obs[..., 1])


def test_a_rollout_of_first_episodes_stops_when_all_have_ended(rollout: Rollout) -> None:
    first, carry = unroll(POLICY, ENV, PARAMS, at([5, 6], [0, 1]), KEY, num_steps=8, first_episodes=True)
    assert first.valid.tolist() == [[True, True]] * 3 + [[False, False]] * 5  # they end at 3 and at 2
    for name in ("obs", "action", "log_prob", "reward", "terminated", "truncated", "value", "next_value"):
        np.testing.assert_array_equal(getattr(first, name)[:3], getattr(rollout, name)[:3])
    assert not first.obs[3:].any() and not first.reward[3:].any() and not first.done[3:].any()
    np.testing.assert_array_equal(carry.obs, rollout.obs[3])  # nothing was simulated after it


@pytest.mark.slow
@pytest.mark.parametrize("first_episodes", [False, True])
def test_the_form_for_gpus_makes_the_same_bits(first_episodes: bool) -> None:
    xs = (jax.random.split(KEY, 8), {})
    forms = [
        jax.jit(partial(_collect, Scripted(-2.0), ENV, first_episodes=first_episodes, few_kernels=few_kernels))
        for few_kernels in (False, True)
    ]
    start = (at([5, 6], [0, 1]), jnp.zeros(2, bool))
    (envs, ended), made = forms[0](PARAMS, start, xs)
    (gpu_envs, gpu_ended), gpu_made = forms[1](PARAMS, start, xs)
    chex.assert_trees_all_equal((gpu_ended, gpu_made), (ended, made))
    if not first_episodes:  # else the other form has simulated on, to no avail
        chex.assert_trees_all_equal(gpu_envs, envs)


@pytest.mark.slow
@pytest.mark.parametrize("first_episodes", [False, True])
def test_large_observations_are_valued_a_few_steps_at_a_time_with_the_same_results(
    monkeypatch: pytest.MonkeyPatch, first_episodes: bool
) -> None:
    start = at([5, 6], [0, 1])
    whole, end = unroll(POLICY, ENV, PARAMS, start, KEY, num_steps=6, first_episodes=first_episodes)
    monkeypatch.setattr("ejax.numerics.kernels._LARGE_OBS", 8)
    monkeypatch.setattr("ejax.rollout._STEPS_OF_LARGE_OBS", 4)
    in_parts = unroll.__wrapped__(POLICY, ENV, PARAMS, start, KEY, num_steps=6, first_episodes=first_episodes)
    # which keep no next observations: those were valued with their part
    chex.assert_trees_all_equal(in_parts, (replace(whole, next_obs=None), end))


def test_the_steps_between_values_of_large_observations_divide_the_rollout() -> None:
    image = jnp.zeros((2, 64, 64, 3), jnp.uint8)
    assert [_steps_at_once(steps, image) for steps in (128, 24, 17, 1)] == [16, 12, 1, 1]
    assert _steps_at_once(128, {"state": image[:, 0, 0]}) == 128


@pytest.fixture(scope="module")
def noisy() -> Callable[..., Any]:
    """Collect the rollout that a policy with noise makes with a key."""
    return lambda key: unroll(Scripted(-2.0), ENV, PARAMS, at([5, 6], [0, 1]), key, num_steps=4)[0]


def test_a_key_gives_a_rollout_bit_by_bit_and_each_action_its_noise(noisy: Callable[..., Any]) -> None:
    chex.assert_trees_all_equal(noisy(KEY), noisy(KEY))
    assert (noisy(KEY).action != noisy(jax.random.key(1)).action).all()
    assert len(np.unique(noisy(KEY).action)) == 8


@pytest.mark.slow
def test_log_prob_and_extras_are_the_acting_distributions(noisy: Callable[..., Any]) -> None:
    rollout = noisy(KEY)
    z = np.asarray(rollout.action)[..., 0] / np.exp(-2.0)
    np.testing.assert_allclose(rollout.log_prob, -0.5 * z**2 + 2.0 - 0.5 * np.log(2 * np.pi), rtol=1e-5)
    assert rollout.distribution.mean.shape == (4, 2, 1)
    assert rollout.info["success"].shape == (4, 2)
