"""One entry point for the rollouts of environments inside and outside JAX."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from case_tables import refused
from host_tasks import Drift, Linear
from own_policies import make

import ejax
from ejax.collectors import HostCollector
from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.tasks.point_mass import PointMassRL

KEY = jax.random.key(5)
POLICY = Linear()
PARAMS = POLICY.init(jax.random.key(1), None)
T, N = 6, 3
SEEDS = np.arange(N, dtype=np.uint32)


class Recorder:
    """Keeps copies of what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *step: Any) -> None:
        self.calls.append(jax.tree.map(np.array, step))


def begun(outside: bool) -> tuple[Any, Any]:
    """Return an environment, and the start that ``collect_rollout`` takes for it."""
    if not outside:
        return Drift(limit=4), ejax.reset(Drift(limit=4), KEY, N)
    env = PureHostEnv(Drift(limit=4), N)
    return env, env.reset(SEEDS)


@pytest.mark.parametrize("outside", [False, True])
def test_the_callback_sees_every_step_as_the_rollout_has_it(outside: bool) -> None:
    env, start = begun(outside)
    seen = Recorder()
    rollout, after = ejax.collect_rollout(env, POLICY, PARAMS, start, KEY, T, seen)
    assert len(seen.calls) == T
    for t, (obs, actions, reward, done, info, next_obs) in enumerate(seen.calls):
        np.testing.assert_array_equal(obs, rollout.obs[t])
        np.testing.assert_array_equal(actions, rollout.action[t])
        np.testing.assert_array_equal(reward, rollout.reward[t])
        np.testing.assert_array_equal(done, rollout.done[t])
        np.testing.assert_array_equal(info["truncated"], rollout.truncated[t])
        np.testing.assert_array_equal(info["terminated"], rollout.terminated[t])
        np.testing.assert_array_equal(next_obs, rollout.obs[t + 1] if t + 1 < T else after.obs)
    assert seen.calls[3][3].all() and (seen.calls[3][5][:, 1] == 0.0).all()  # the new episode's first


def test_a_program_is_unrolls_and_the_callback_changes_nothing() -> None:
    env, start = begun(outside=False)
    plain = ejax.unroll(POLICY, env, PARAMS, start, KEY, num_steps=T)
    chex.assert_trees_all_equal(ejax.collect_rollout(env, POLICY, PARAMS, start, KEY, T), plain)
    chex.assert_trees_all_equal(ejax.collect_rollout(env, POLICY, PARAMS, start, KEY, T, Recorder()), plain)


def test_outside_it_is_the_collectors_rollout_and_goes_on_where_the_last_one_ended() -> None:
    env, start = begun(outside=True)
    other = PureHostEnv(Drift(limit=4), N)
    collector = HostCollector(POLICY, [other], num_steps=T, seed=0)
    collector.continue_from(other.reset(SEEDS), ())
    for index in range(2):
        rollout, start = ejax.collect_rollout(env, POLICY, PARAMS, start, KEY, T)
        chex.assert_trees_all_equal(rollout, collector.collect(PARAMS, KEY, index=index).rollout)
    assert (rollout.obs[0][:, 1] == T % 4).all()


def test_an_error_of_the_callback_is_the_callers() -> None:
    def fail(*step: Any) -> None:
        raise KeyError("mine")

    for outside in (False, True):
        env, start = begun(outside)
        refused(ejax.collect_rollout, env, POLICY, PARAMS, start, KEY, T, fail, match="mine", error=KeyError)


def test_wrong_starts_and_no_steps_are_refused() -> None:
    env, start = begun(outside=False)
    refused(ejax.collect_rollout, env, POLICY, PARAMS, start, KEY, 0, match="num_steps must be at least 1, got 0")
    with pytest.raises(ValueError, match=r"starts from an EnvCarry, got a ndarray; pass ejax\.reset"):
        ejax.collect_rollout(env, POLICY, PARAMS, np.zeros((N, 2)), KEY, T)


def begun_with(policy: Any, outside: bool) -> tuple[Any, Any, Any]:
    """Make PointMass inside or outside JAX, the start of its episodes, and parameters."""
    pure = PointMassRL()
    env: Any = PureHostEnv(pure, N) if outside else pure
    start = env.reset(SEEDS) if outside else ejax.reset(pure, KEY, N)
    return env, start, policy.init(KEY, start if outside else start.obs)


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_a_policy_with_memory_remembers_over_calls_and_forgets_at_an_episodes_end(outside: bool) -> None:
    policy = make("linen", "memory")
    env, start, params = begun_with(policy, outside)
    first, after = ejax.collect_rollout(env, policy, params, start, KEY, T)
    second, _ = ejax.collect_rollout(env, policy, params, after, KEY, T)
    assert (first.memory[0] == 0.0).all() and (first.memory[1:] != 0.0).any()
    chex.assert_trees_all_equal(second.memory[0], after.memory)
    assert (second.memory[0] != 0.0).any()


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_dropout_is_kept_in_the_rollout(outside: bool) -> None:
    policy = make("linen", "dropout")
    env, start, params = begun_with(policy, outside)
    rollout, _ = ejax.collect_rollout(env, policy, params, start, KEY, T, Recorder(), dropout=True)
    assert rollout.dropout_seed.shape == (T, N) and len(np.unique(rollout.dropout_seed)) == T * N
