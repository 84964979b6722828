"""Evaluation counts each slot's own episodes: short ones are not favoured."""

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from toy_tasks import Formula, Line, told

from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.episodes import episodes, record_episodes
from ejax.evaluation import count_episodes, evaluate, evaluate_host, evaluation_notes, summarize
from ejax.types import Env, Timestep

KEY = jax.random.key(0)


@struct.dataclass
class Episode:
    horizon: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class Lengths(Line):
    """Half of the episodes last one step, half ``long`` and succeed. Reward 1 for a positive action."""

    long: int = 9
    informs: bool = True
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))

    @property
    def max_episode_steps(self) -> int:
        return self.long

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        horizon = jnp.where(jax.random.bernoulli(key), self.long, 1)
        return Episode(horizon, jnp.zeros((), jnp.int32)), jnp.zeros(1)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del key
        state = replace(state, steps=state.steps + 1)
        info = {"success": state.horizon > 1, "metrics": {"steps": state.steps, "vector": jnp.zeros(3)}}
        ended = state.steps >= state.horizon
        return state, told(jnp.zeros(1), action[0] > 0, ended, **(info if self.informs else {}))


POSITIVE = Formula(lambda obs: jnp.full_like(obs, 1e-3), log_std=3.0)
"""Its mean is positive, its samples are mostly not."""
POISONED = Formula(lambda obs: jnp.where(obs == 1.0, jnp.nan, 1e-3), log_std=3.0)
"""Its action is NaN where the observation is 1."""


def play(env: Env = Lengths(), *, key: jax.Array = KEY, num_envs: int = 8, num_episodes: int = 400) -> Any:
    return evaluate(POSITIVE, env, {}, key, num_envs=num_envs, num_episodes=num_episodes)


@pytest.fixture(scope="module")
def played() -> Any:
    return jax.tree.map(np.asarray, play())


def test_every_episode_asked_for_is_there_and_complete(played: Any) -> None:
    assert {name: x.shape for name, x in played.items()} == dict.fromkeys(
        ("return", "length", "nonfinite", "unfinished", "same_start", "success", "metrics/steps"), (400,)
    )
    assert set(np.unique(played["length"])) == {1.0, 9.0}


def test_short_episodes_are_not_favoured() -> None:
    # fair coins: half of all episodes are long, but of those of 400 slots that finish first hardly any
    assert (play(num_envs=400)["length"] == 9.0).mean() == pytest.approx(0.5, abs=4 * 0.5 / 20)
    first = evaluate(POSITIVE, Lengths(), {}, KEY, num_envs=400, num_episodes=400, choice="first_finished")
    assert (first["length"] == 9.0).mean() < 0.1


def test_each_slot_plays_its_own_share() -> None:
    # rows are ordered by slot: with 3 slots for 8 episodes, three, three and two
    shares = np.asarray(play(num_envs=3, num_episodes=8)["length"])
    assert len(shares) == 8 and np.isfinite(shares).all()


def test_actions_are_the_mode_and_success_and_metrics_those_of_the_last_step(played: Any) -> None:
    np.testing.assert_array_equal(played["return"], played["length"])  # reward 1 at every step
    np.testing.assert_array_equal(played["success"], played["length"] == 9.0)
    np.testing.assert_array_equal(played["metrics/steps"], played["length"])


def test_samples_act_as_in_training_in_the_same_episodes(played: Any) -> None:
    sampled = evaluate(POSITIVE, Lengths(), {}, KEY, num_envs=8, num_episodes=400, samples=True)
    np.testing.assert_array_equal(sampled["length"], played["length"])
    # a reward of 1 for about every second action
    assert 0.45 < sampled["return"].sum() / sampled["length"].sum() < 0.55


def test_the_same_key_plays_the_same_episodes() -> None:
    first, second = play(), play()
    chex.assert_trees_all_equal(first, second)
    assert (first["length"] != play(key=jax.random.key(1))["length"]).any()


def test_an_env_that_informs_of_nothing_has_return_and_length_of_fewer_episodes_than_slots() -> None:
    uninformed = play(Lengths(informs=False), num_envs=8, num_episodes=2)
    assert set(uninformed) == {"return", "length", "nonfinite", "unfinished", "same_start"}
    assert uninformed["length"].shape == (2,)


def test_summaries_carry_embodichains_tags(played: Any) -> None:
    summary = summarize(played)
    tags = {"avg_reward", "avg_length", "success_rate", "metrics/steps"}
    tags |= {"nonfinite_episodes", "unfinished_episodes", "repeated_episodes"}
    assert set(summary) == {f"eval/{tag}" for tag in tags}
    assert summary["eval/nonfinite_episodes"] == 0
    assert summary["eval/avg_length"] == pytest.approx(played["length"].mean())
    assert summary["eval/success_rate"] == pytest.approx(played["success"].mean())


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (-1, 4)])
def test_counts_that_are_not_positive_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {counts[0]} and {counts[1]}"):
        play(num_envs=counts[0], num_episodes=counts[1])


def test_decisions_and_records_are_of_the_episodes_that_an_evaluation_counts() -> None:
    env, num_envs, seed = Lengths(), 3, 5
    counted = evaluate(POSITIVE, env, {}, jax.random.key(seed), num_envs=num_envs, num_episodes=2 * num_envs)["length"]
    ends: list[list[int]] = [[] for _ in range(num_envs)]
    made = (each for each in episodes(POSITIVE, env, {}, seed, num_envs=num_envs) if each.timestep is not None)
    for t, decision in enumerate(itertools.islice(made, 2 * env.long), 1):
        for row in np.flatnonzero(decision.timestep.done):
            ends[row].append(t)
    lengths = [np.diff([0, *each])[:2] for each in ends]  # a slot's episodes follow on each other
    np.testing.assert_array_equal(np.concatenate(lengths), counted)
    _, ended = record_episodes(POSITIVE, env, {}, jax.random.key(seed), num_envs=num_envs)
    np.testing.assert_array_equal(ended.argmax(axis=0) + 1, counted[::2])


NAN, INF = float("nan"), float("inf")
BREAKS = [
    *[("obs", at, value) for at in (0, 2, 4) for value in (NAN, INF)],
    *[("reward", at, value) for at in (1, 4) for value in (NAN, INF)],
    ("action", 0, NAN),
]
"""Part of an episode that is not finite, its step, and its value. An action is the policy's: always."""


@struct.dataclass
class Story:
    kind: jax.Array  # int32: which of ``breaks`` happens; none from their number on
    steps: jax.Array


@dataclass(frozen=True)
class Liar(Lengths):
    """Four steps, and always a success; half of the episodes break in one of the ways of ``breaks``."""

    breaks: tuple[tuple[str, int, float], ...] = (("obs", 2, NAN),)

    max_episode_steps = 4

    def poison(self, state: Story, where: str) -> jax.Array:
        amounts = [value if what == where else 0.0 for what, _, value in self.breaks]
        steps = [at for _, at, _ in self.breaks]
        now = state.steps == jnp.array([*steps, -1])[jnp.minimum(state.kind, len(steps))]
        return jnp.where(now, jnp.array([*amounts, 0.0])[jnp.minimum(state.kind, len(steps))], 0.0)

    def observe(self, state: Story) -> jax.Array:
        """1 where the policy is to fail."""
        fails = jnp.array([*[what == "action" for what, _, _ in self.breaks], False])
        return (fails[jnp.minimum(state.kind, len(self.breaks))] + self.poison(state, "obs"))[None]

    def reset(self, key: jax.Array) -> tuple[Story, Any]:
        state = Story(jax.random.randint(key, (), 0, 2 * len(self.breaks)), jnp.zeros((), jnp.int32))
        return state, self.observe(state)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del action, key
        state = replace(state, steps=state.steps + 1)
        kind = jnp.minimum(state.kind, len(self.breaks))
        reward, success = 1.0 + self.poison(state, "reward"), jnp.ones((), bool)
        return state, told(self.observe(state), reward, state.steps >= 4, success=success, metrics={"kind": kind})


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["fixed", "first_finished"])
def test_an_episode_that_was_not_finite_throughout_is_no_success_whatever_the_env_says(choice: str) -> None:
    env, count = Liar(breaks=tuple(BREAKS)), 200
    played = evaluate(POISONED, env, {}, KEY, num_envs=4, num_episodes=count, choice=choice)
    host = evaluate_host(POISONED, PureHostEnv(env, 4), {}, 0, num_episodes=count, choice=choice)
    for each in (played, host):
        kind = np.asarray(each["metrics/kind"])
        assert set(kind) == set(range(len(BREAKS) + 1))  # each has happened, and none
        np.testing.assert_array_equal(each["success"], kind == len(BREAKS))
        np.testing.assert_array_equal(each["nonfinite"], kind < len(BREAKS))
    assert summarize(played)["eval/nonfinite_episodes"] == (np.asarray(played["metrics/kind"]) < len(BREAKS)).sum()


def test_an_episode_that_never_ends_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejax.evaluation._UNLIMITED", 8)

    @dataclass(frozen=True)
    class Endless(Liar):
        @property
        def max_episode_steps(self) -> int:
            return 0

        def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Any]:
            state, timestep = super().step(state, action, key)
            return state, replace(timestep, terminated=jnp.zeros((), bool))

    played = evaluate(POSITIVE, Endless(), {}, KEY, num_envs=12, num_episodes=36)
    assert np.isnan(played["length"]).sum() == 24  # none has ended, so that no other is begun
    assert set(played["length"][~np.isnan(played["length"])].tolist()) == {8.0}
    metrics = summarize(played)
    assert 0 < metrics["eval/nonfinite_episodes"] <= 12
    assert metrics["eval/avg_length"] == 8.0 and metrics["eval/unfinished_episodes"] == 36
    assert re.search("no episode ended within 8 steps.*time limit", evaluation_notes(metrics, 36)[0])
    host = evaluate_host(POSITIVE, PureHostEnv(Endless(), 12), {}, 0, num_episodes=36)
    assert summarize(host)["eval/avg_length"] == 8.0 and summarize(host)["eval/unfinished_episodes"] == 36


@dataclass(frozen=True)
class Starts(Lengths):
    """Episodes of nine steps that begin at one of so many places."""

    places: int = 1

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        place = jax.random.randint(key, (1,), 0, self.places)
        return Episode(jnp.asarray(self.long), jnp.zeros((), jnp.int32)), place.astype(jnp.float32)


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_episodes_that_are_all_the_same_one_count_as_one(places: int, num_envs: int) -> None:
    env = Starts(places=places)
    host = evaluate_host(POSITIVE, PureHostEnv(env, num_envs), {}, 0, num_episodes=16)
    for found in (play(env, num_envs=num_envs, num_episodes=16), host):
        metrics, same = summarize(found), np.asarray(found["same_start"])
        assert metrics["eval/repeated_episodes"] == same[1:].sum() and (places == 1) == same.all()
        assert count_episodes(metrics, 16) == (1 if places == 1 else 16)
        assert [
            bool(re.search("all 16 episodes.*one; let episodes start at different places", x))
            for x in evaluation_notes(metrics, 16)
        ] == [True] * (places == 1)
    assert not evaluation_notes(summarize(play(env, num_envs=1, num_episodes=1)), 1)  # one is one
    # what begins alike and goes otherwise, by what the observation does not show, is not repeated
    assert count_episodes(summarize(play(num_episodes=16)), 16) == 16


def test_success_that_an_end_does_not_state_is_none_where_others_state_it() -> None:
    """Else one such end makes the mean unknown, and no evaluation is the best."""

    class Forgetful(PureHostEnv):
        forgotten = slice(1, 2)

        def step(self, action: Any) -> Any:
            timestep = super().step(action)
            timestep.info["success"] = np.ones(2, np.float32)
            timestep.info["success"][self.forgotten] = np.nan
            return timestep

    env = Forgetful(Lengths(), 2)
    played = evaluate_host(POSITIVE, env, {}, 0, num_episodes=2)
    assert sorted(played["success"]) == [0.0, 1.0]
    env.forgotten = slice(None)
    assert "success" not in evaluate_host(POSITIVE, env, {}, 0, num_episodes=2)


@pytest.mark.slow
def test_a_quarantined_episode_counts_as_a_failure(tmp_path: Path) -> None:
    """Left out it would be a way to success: to break where it gets difficult."""
    make = lambda: PureHostEnv(Liar(breaks=(("obs", 4, NAN),)), 4)  # noqa: E731
    env = GuardedEnv(make(), make, recipe={"id": "liar"}, folder=tmp_path)
    played = evaluate_host(POSITIVE, env, {}, 0, num_episodes=24)
    assert 0 < played["nonfinite"].sum() == env.num_quarantined < 24
    np.testing.assert_array_equal(played["success"], 1.0 - played["nonfinite"])
    assert len(played["return"]) == 24 and np.isfinite(played["return"]).all()
