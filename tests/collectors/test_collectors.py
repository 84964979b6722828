"""Rollouts of host environments: what is in them, groups in threads, devices."""

import threading
import time
import traceback
from contextlib import nullcontext
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refused
from host_tasks import Drift, Linear, SameArrays, Sleepy, Wrapped
from ladder import Ladder

from ejax.collectors import CollectionStopped, HostCollector, Share
from ejax.envs.adapters.gymnasium import vectorize
from ejax.envs.host.pure_host import PureHostEnv
from ejax.runtime.sharding import make_mesh
from ejax.types import HostTimestep, Rollout

KEY = jax.random.key(5)
POLICY = Linear()
PARAMS = POLICY.init(jax.random.key(1), None)
T, N = 6, 3


def drift(num_envs: int = N) -> PureHostEnv:
    return PureHostEnv(Drift(limit=4), num_envs)


def collector(*groups: Any, **options: Any) -> HostCollector:
    return HostCollector(POLICY, groups, num_steps=T, seed=7, **options)


class Recording(Wrapped):
    """Keeps copies of all that it was given and gave."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen: list[tuple[Any, HostTimestep]] = []

    def step(self, action: Any) -> HostTimestep:
        told = super().step(action)
        self.seen.append(jax.tree.map(np.array, (action, told)))
        return told


def test_a_rollout_is_what_was_played_with_the_policys_numbers_for_it() -> None:
    env = Recording(drift())
    rollout: Rollout = collector(env).collect(PARAMS, KEY, index=0).rollout
    start = drift().reset(env.row_seed * 0)  # for its shape
    assert rollout.obs.shape == (T, *start.shape)
    for t, (action, told) in enumerate(env.seen):
        np.testing.assert_array_equal(rollout.action[t], action)
        np.testing.assert_array_equal(rollout.reward[t], told.reward)
        np.testing.assert_array_equal(rollout.truncated[t], told.truncated)
        if t + 1 < T:
            np.testing.assert_array_equal(rollout.obs[t + 1], told.obs)
        distribution, value = POLICY.apply(PARAMS, rollout.obs[t])
        np.testing.assert_allclose(rollout.log_prob[t], distribution.log_prob(jnp.asarray(action)), rtol=1e-5)
        np.testing.assert_allclose(rollout.value[t], value, rtol=1e-5)
        final_value = POLICY.apply(PARAMS, jnp.asarray(told.final_obs))[1]
        np.testing.assert_allclose(rollout.next_value[t], final_value, rtol=1e-5)
    assert rollout.truncated[3].all()  # D7: the end of an episode is reported, and the next begins at once
    assert (rollout.obs[4][:, 1] == 0.0).all()
    assert rollout.valid.all()


def test_steps_do_not_share_memory_though_the_environment_reuses_its_arrays() -> None:
    """D8"""
    env = SameArrays()
    rollout = collector(env).collect(PARAMS, KEY, index=0).rollout
    assert rollout.obs[:, 0, 0].tolist() == [100.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert rollout.reward[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_same_key_and_parameters_give_the_same_bits_and_others_do_not() -> None:
    first = collector(drift()).collect(PARAMS, KEY, index=0)
    chex.assert_trees_all_equal(first.rollout, collector(Sleepy(drift())).collect(PARAMS, KEY, index=0).rollout)
    assert (first.rollout.action != collector(drift()).collect(PARAMS, jax.random.key(6), index=0).rollout.action).any()


def test_rollouts_go_on_where_the_last_one_ended_unless_they_restart() -> None:
    goes_on, restarts = collector(drift()), collector(drift(), restart=True)
    for index in range(2):
        a = goes_on.collect(PARAMS, KEY, index=index).rollout
        b = restarts.collect(PARAMS, KEY, index=index).rollout
    assert (a.obs[0][:, 1] == T % 4).all()
    assert (b.obs[0][:, 1] == 0).all()


def test_groups_of_the_algorithm_start_alike() -> None:
    rollout = collector(drift(6), restart=True, group_size=3).collect(PARAMS, KEY, index=0).rollout
    start = np.asarray(rollout.obs[0])
    assert (start[:3] == start[0]).all() and (start[3:] == start[3]).all()
    assert (start[0] != start[3]).any()


class Meeting(Wrapped):
    """Steps only when as many others step at the same time."""

    barrier: threading.Barrier

    def before(self) -> None:
        self.barrier.wait(timeout=30)


def test_three_groups_step_at_the_same_time() -> None:
    Meeting.barrier = threading.Barrier(3)
    groups = [Meeting(drift(2)) for _ in range(3)]
    rollout = collector(*groups).collect(PARAMS, KEY, index=0).rollout
    assert [group.num_steps for group in groups] == [T] * 3
    assert rollout.reward.shape == (T, 6)


class Waits(Wrapped):
    """A step ends only after the policy was asked for another group's."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.asked_for_other = threading.Semaphore(0)
        self.other: Any = None

    def before(self) -> None:
        self.other.asked_for_other.release()  # it was asked for this one
        if self.num_steps < T - 1:
            assert self.asked_for_other.acquire(timeout=30)


def test_the_policy_is_asked_for_one_group_while_another_steps() -> None:
    one, two = Waits(drift(2)), Waits(drift(2))
    one.other, two.other = two, one
    collector(one, two).collect(PARAMS, KEY, index=0)
    assert one.num_steps == two.num_steps == T


def test_what_groups_collect_does_not_depend_on_their_timing() -> None:
    calm = collector(*[drift(2) for _ in range(3)])
    hectic = collector(*[Sleepy(drift(2)) for _ in range(3)])
    for index in range(2):
        key = jax.random.fold_in(KEY, index)
        a, b = calm.collect(PARAMS, key, index=index), hectic.collect(PARAMS, key, index=index)
        chex.assert_trees_all_equal(a.rollout, b.rollout)
        chex.assert_trees_all_equal(a.envs, b.envs)


class Breaks(Wrapped):
    def before(self) -> None:
        if self.num_steps == 2:
            raise RuntimeError("a cable came loose")


class Slow(Wrapped):
    def before(self) -> None:
        time.sleep(0.02)


def test_a_group_that_fails_stops_the_others_and_is_raised_with_its_traceback() -> None:
    slow = Slow(drift(2))
    rollouts = HostCollector(POLICY, [Breaks(drift(2)), slow], num_steps=10_000, seed=7)
    caught = refused(rollouts.collect, PARAMS, KEY, index=0, match="a cable came loose", error=RuntimeError)
    assert "in before" in "".join(traceback.format_exception(caught))
    assert slow.num_steps < 1000
    assert rollouts.lost_steps == 2 * (2 + slow.num_steps)


def test_a_rollout_is_given_up_before_the_next_step_and_its_steps_are_accounted_for() -> None:
    env, stops = Wrapped(drift()), iter([False] * 4 + [True])  # a reset, three steps
    rollouts = collector(env)
    with pytest.raises(CollectionStopped):
        rollouts.collect(PARAMS, KEY, index=0, gate=lambda: nullcontext(next(stops)))
    assert env.num_steps == 3 and rollouts.lost_steps == 3 * N
    assert rollouts.collect(PARAMS, KEY, index=1).rollout.obs[0, 0, 1] == 3.0  # its episodes go on


def test_groups_of_different_sizes_are_refused() -> None:
    refused(lambda: collector(drift(2), drift(3)), match=r"equal numbers of environments, got \[2, 3\]")


def test_the_policy_acts_where_it_is_told_to() -> None:
    device = jax.devices()[1]
    there = (
        collector(drift(2), drift(2), share=Share(devices=[device, jax.devices()[2]]))
        .collect(PARAMS, KEY, index=0)
        .rollout
    )
    here = collector(drift(2), drift(2)).collect(PARAMS, KEY, index=0).rollout
    assert there.value.devices() == {device}
    chex.assert_trees_all_equal(there, here)


def test_shares_of_the_groups_collect_their_parts_of_the_rollout() -> None:
    """As in several processes that have some groups each."""
    options: dict[str, Any] = {"restart": True, "group_size": 2}
    whole = collector(*[drift(2) for _ in range(4)], **options).collect(PARAMS, KEY, index=3).rollout
    for first in (0, 2):
        share = collector(drift(2), drift(2), share=Share(first_group=first, num_groups=4), **options)
        part, rows = share.collect(PARAMS, KEY, index=3).rollout, slice(2 * first, 2 * first + 4)
        chex.assert_trees_all_equal((part.obs, part.action), (whole.obs[:, rows], whole.action[:, rows]))


def test_several_devices_have_their_rows_of_a_rollout() -> None:
    mesh = make_mesh(jax.devices()[1:3])
    split = collector(drift(2), drift(2), share=Share(mesh=mesh)).collect(PARAMS, KEY, index=0).rollout
    one = collector(drift(2), drift(2)).collect(PARAMS, KEY, index=0).rollout
    chex.assert_trees_all_equal((split.action, split.reward), (one.action, one.reward))
    np.testing.assert_allclose(split.value, one.value, rtol=1e-6)
    for leaf in jax.tree.leaves(split):
        assert [(shard.device.id, shard.data.shape[1]) for shard in leaf.addressable_shards] == [(1, 2), (2, 2)]


def test_environments_that_can_be_saved_go_on() -> None:
    first = collector(drift(2), drift(2))
    saved = first.collect(PARAMS, KEY, index=0).envs
    second = collector(drift(2), drift(2))
    second.restore(saved)
    chex.assert_trees_all_equal(
        first.collect(PARAMS, KEY, index=1).rollout, second.collect(PARAMS, KEY, index=1).rollout
    )


def test_environments_that_cannot_be_saved_have_no_state() -> None:
    rollouts = HostCollector(Both(), [vectorize(Ladder(), Ladder, 2)], num_steps=T, seed=7)
    assert rollouts.collect(PARAMS, KEY, index=0).envs == ()
    refused(rollouts.restore, (0,), match="has no state to set")


class Both(Linear):
    """Two equal actions."""

    def apply(self, params: Any, obs: Any) -> Any:
        distribution, value = super().apply(params, obs)
        return jax.tree.map(lambda x: jnp.concatenate([x, x], axis=-1), distribution), value


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    rollouts = collector(drift(2), drift(2))
    rollouts.collect(PARAMS, KEY, index=0)
    rollouts.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() == before
