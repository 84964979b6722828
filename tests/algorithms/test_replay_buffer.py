"""The replay buffer, against a loop over transitions in NumPy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.algorithms.replay_buffer import ReplayConfig, add_rollout, drop_tails, init_replay, sample_rows, take_rows
from ejax.types import Rollout

GAMMA = 0.9


def make_rollout(seed: int, num_steps: int = 6, num_envs: int = 4, **flags: Any) -> Rollout:
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    zeros = jnp.zeros(shape)
    given = {
        "terminated": rng.random(shape) < 0.15,
        "truncated": rng.random(shape) < 0.15,
        "valid": rng.random(shape) < 0.85,
        **flags,
    }
    return Rollout(
        obs=jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        action=jnp.asarray(rng.normal(size=(*shape, 2)), jnp.float32),
        reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        next_obs=jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        log_prob=zeros,
        value=zeros,
        next_value=zeros,
        **{name: jnp.asarray(x) for name, x in given.items()},
    )


def transitions(rollouts: list[Rollout], n_step: int) -> list[tuple[Any, ...]]:
    """Make the n-step transitions of rollouts that follow on each other, in the order of their first steps."""
    seq = jax.tree.map(lambda *parts: np.concatenate(parts), *rollouts)
    num_steps, num_envs = seq.reward.shape
    found = []
    for t in range(num_steps - n_step + 1):
        for i in range(num_envs):
            if not seq.valid[t, i]:
                continue
            total, last = 0.0, t
            for k in range(n_step):
                if k > 0 and (seq.terminated[last, i] or seq.truncated[last, i] or not seq.valid[t + k, i]):
                    break
                total, last = total + GAMMA**k * seq.reward[t + k, i], t + k
            discount = 0.0 if seq.terminated[last, i] else GAMMA ** (last - t + 1)
            found.append((seq.obs[t, i], seq.action[t, i], total, seq.next_obs[last, i], discount))
    return found


def empty(capacity: int, n_step: int = 1, num_strata: int = 1, num_envs: int = 4) -> Any:
    config = ReplayConfig(capacity=capacity, n_step=n_step)
    return init_replay(config, jnp.zeros((num_envs, 3)), jnp.zeros((num_envs, 2)), num_strata=num_strata)


def assert_holds(replay: Any, wanted: list[tuple[Any, ...]]) -> None:
    capacity = replay.rows.discount.shape[1]
    kept = {place % capacity: row for place, row in enumerate(wanted)}
    assert int(replay.size[0]) == len(kept)
    for place, row in kept.items():
        stored = jax.tree.map(lambda x, place=place: np.asarray(x[0, place]), replay.rows)
        for name, want in zip(("obs", "action", "reward", "next_obs", "discount"), row, strict=True):
            np.testing.assert_allclose(getattr(stored, name), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("capacity", [200, 31])
def test_rows_are_the_n_step_transitions_of_a_loop(n_step: int, capacity: int) -> None:
    """Ends, steps that are no transitions, rollouts that follow on each other, and a ring that has gone round."""
    rollouts = [make_rollout(seed) for seed in range(5)]
    replay = empty(capacity, n_step)
    for rollout in rollouts:
        replay = add_rollout(replay, rollout, gamma=GAMMA)
    assert_holds(replay, transitions(rollouts, n_step))


def test_truncation_keeps_its_discount_and_termination_has_none() -> None:
    flags = {name: np.zeros((1, 4), bool) for name in ("terminated", "truncated")}
    flags["terminated"][0, 1] = flags["truncated"][0, 2] = True
    rollout = make_rollout(0, num_steps=1, valid=np.ones((1, 4), bool), **flags)
    replay = add_rollout(empty(8), rollout, gamma=GAMMA)
    np.testing.assert_allclose(replay.rows.discount[0, :4], [GAMMA, 0.0, GAMMA, GAMMA], rtol=1e-6)
    np.testing.assert_array_equal(replay.rows.next_obs[0, :4], rollout.next_obs[0])


def test_numbers_that_are_not_finite_stay_out() -> None:
    rollout = make_rollout(0, valid=np.ones((6, 4), bool))
    broken = replace(
        rollout, reward=rollout.reward.at[2, 1].set(jnp.nan), next_obs=rollout.next_obs.at[3, 0].set(jnp.inf)
    )
    replay = add_rollout(empty(50), broken, gamma=GAMMA)
    assert int(replay.size[0]) == 22
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(replay.rows))


def test_pictures_of_8_bits_stay_so() -> None:
    rollout = make_rollout(0)
    pictures = jax.random.bits(jax.random.key(0), (6, 4, 5), jnp.uint8)
    rollout = replace(rollout, obs={"image": pictures}, next_obs={"image": pictures})
    replay = init_replay(ReplayConfig(capacity=40), {"image": pictures[0]}, jnp.zeros((4, 2)))
    replay = add_rollout(replay, rollout, gamma=GAMMA)
    batch = take_rows(replay, sample_rows(replay, jax.random.key(1), 8))
    assert batch.obs["image"].dtype == batch.next_obs["image"].dtype == jnp.uint8
    assert {tuple(x) for x in np.asarray(batch.obs["image"])} <= {tuple(x) for x in np.asarray(pictures.reshape(-1, 5))}


def test_every_row_is_drawn_equally_often_and_no_row_that_was_never_written() -> None:
    replay = add_rollout(empty(64), make_rollout(0, valid=np.ones((6, 4), bool)), gamma=GAMMA)
    counts = np.bincount(np.asarray(sample_rows(replay, jax.random.key(0), 24_000))[0], minlength=64)
    assert counts[24:].sum() == 0
    assert np.abs(counts[:24] - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.slow
def test_each_stratum_has_its_environments_and_gives_equally_many_rows() -> None:
    rollouts = [make_rollout(seed) for seed in range(3)]
    replay = empty(80, n_step=2, num_strata=2)
    halves = [empty(40, n_step=2, num_envs=2) for _ in range(2)]
    for rollout in rollouts:
        replay = add_rollout(replay, rollout, gamma=GAMMA)
        parts = [jax.tree.map(lambda x, i=i: x[:, 2 * i : 2 * i + 2], rollout) for i in range(2)]
        halves = [add_rollout(half, part, gamma=GAMMA) for half, part in zip(halves, parts, strict=True)]
    for i, half in enumerate(halves):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y[0]), replay, half)
    assert sample_rows(replay, jax.random.key(0), 6).shape == (2, 3)
    assert take_rows(replay, sample_rows(replay, jax.random.key(0), 6)).reward.shape == (6,)


def test_broken_off_episodes_leave_no_transition_that_crosses_the_reset() -> None:
    first, second = (make_rollout(seed, valid=np.ones((6, 4), bool)) for seed in range(2))
    replay = add_rollout(empty(100, n_step=3), first, gamma=GAMMA)
    replay = add_rollout(drop_tails(replay), second, gamma=GAMMA)
    assert_holds(replay, [*transitions([first], 3), *transitions([second], 3)])


@pytest.mark.slow
def test_a_rollout_that_the_ring_cannot_hold_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rollout of 6 x 4 steps does not fit a ring of 23 rows.*raise replay.capacity"
    ):
        add_rollout(empty(23), make_rollout(0), gamma=GAMMA)


@cases(
    "part made text",
    ("next_obs", None, r"next_obs of a step of a rollout is None, .* made for float32\[4, 3\]"),
    ("obs", np.zeros((6, 4, 2), np.float32), r"obs of a step of a rollout is float32\[4, 2\]"),
    ("action", np.zeros((6, 4, 1), np.float32), r"action .* float32\[4, 1\], .* made for float32\[4, 2\]"),
    ("action", None, "needs obs and action, and has None"),
    ("next_obs", np.zeros((5, 4, 3), np.float32), r"a rollout needs leaves \[T, N, ...\]: Tree leaf 'next_obs'"),
    ("truncated", np.zeros((6, 1), bool), r"arrays of one shape \[T, N\]"),
    ("terminated", np.zeros((6, 4), np.float32), "are bool"),
)
def test_a_rollout_of_other_forms_than_the_rows_is_refused(part: str, made: Any, text: str) -> None:
    refused(add_rollout, empty(24), replace(make_rollout(0), **{part: made}), gamma=GAMMA, match=text)


def test_numbers_that_the_rows_would_cut_and_other_environments_are_refused() -> None:
    kept = init_replay(ReplayConfig(capacity=24), jnp.zeros((4, 3), jnp.uint8), jnp.zeros((4, 2)))
    refused(add_rollout, kept, make_rollout(0), gamma=GAMMA, match=r"obs .* float32\[4, 3\], .* for uint8\[4, 3\]")
    refused(
        add_rollout,
        empty(24),
        make_rollout(0, num_envs=3),
        gamma=GAMMA,
        match=r"obs .* is float32\[3, 3\], .* made for float32\[4, 3\]",
    )
