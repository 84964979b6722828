"""Evaluation counts each slot's own episodes: short ones are not favoured."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from ejax.distributions import Normal
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.evaluation import evaluate, evaluate_host, summarize
from ejax.types import Env, Params, Timestep

KEY = jax.random.key(0)


@struct.dataclass
class Episode:
    horizon: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class Lengths:
    """Half of the episodes last one step, half ``long`` and succeed. Reward 1 for a positive action."""

    long: int = 9
    informs: bool = True

    @property
    def observation_space(self) -> gymnasium.Space:
        return gymnasium.spaces.Box(-np.inf, np.inf, (1,))

    @property
    def action_space(self) -> gymnasium.Space:
        return gymnasium.spaces.Box(-np.inf, np.inf, (1,))

    @property
    def max_episode_steps(self) -> int:
        return self.long

    def reset(self, key: jax.Array) -> tuple[Episode, jax.Array]:
        horizon = jnp.where(jax.random.bernoulli(key), self.long, 1)
        return Episode(horizon, jnp.zeros((), jnp.int32)), jnp.zeros(1)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del key
        state = replace(state, steps=state.steps + 1)
        ended = state.steps >= state.horizon
        info = {
            "success": state.horizon > 1,
            "metrics": {"steps": state.steps, "vector": jnp.zeros(3)},
        }
        timestep = Timestep(
            obs=jnp.zeros(1),
            reward=(action[0] > 0).astype(jnp.float32),
            terminated=ended,
            truncated=jnp.zeros((), bool),
            info=info if self.informs else {},
        )
        return state, timestep


@dataclass(frozen=True)
class Positive:
    """Its mean is positive, its samples are mostly not."""

    def init(self, key: jax.Array, obs: jax.Array) -> dict[str, Any]:
        del key, obs
        return {"params": {}}

    def apply(self, params: Params, obs: jax.Array) -> tuple[Normal, Any]:
        del params
        mean = jnp.full_like(obs, 1e-3)
        return Normal(mean, jnp.full_like(mean, 3.0)), obs[..., 0]


def play(env: Env = Lengths(), *, key: jax.Array = KEY, num_envs: int = 8, num_episodes: int = 400) -> Any:
    return evaluate(Positive(), env, {"params": {}}, key, num_envs=num_envs, num_episodes=num_episodes)


@pytest.fixture(scope="module")
def episodes() -> Any:
    return jax.tree.map(np.asarray, play())


def test_every_episode_asked_for_is_there_and_complete(episodes: Any) -> None:
    assert {name: x.shape for name, x in episodes.items()} == dict.fromkeys(
        ("return", "length", "nonfinite", "success", "metrics/steps"), (400,)
    )
    assert set(np.unique(episodes["length"])) == {1.0, 9.0}


def test_short_episodes_are_not_favoured() -> None:
    # fair coins: half of all episodes are long, but of those of 400 slots that finish first hardly any
    assert (play(num_envs=400)["length"] == 9.0).mean() == pytest.approx(0.5, abs=4 * 0.5 / 20)
    params = {"params": {}}
    first = evaluate(Positive(), Lengths(), params, KEY, num_envs=400, num_episodes=400, choice="first_finished")
    assert (first["length"] == 9.0).mean() < 0.1


def test_each_slot_plays_its_own_share() -> None:
    # rows are ordered by slot: with 3 slots for 8 episodes, three, three and two
    shares = np.asarray(play(num_envs=3, num_episodes=8)["length"])
    assert len(shares) == 8 and np.isfinite(shares).all()


def test_actions_are_the_distributions_mode(episodes: Any) -> None:
    np.testing.assert_array_equal(episodes["return"], episodes["length"])  # reward 1 at every step


def test_success_and_metrics_are_those_of_the_last_step(episodes: Any) -> None:
    np.testing.assert_array_equal(episodes["success"], episodes["length"] == 9.0)
    np.testing.assert_array_equal(episodes["metrics/steps"], episodes["length"])


def test_the_same_key_plays_the_same_episodes() -> None:
    first, second = play(), play()
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (first["length"] != play(key=jax.random.key(1))["length"]).any()


@pytest.fixture(scope="module")
def uninformed() -> Any:
    return play(Lengths(informs=False), num_envs=8, num_episodes=2)


def test_an_env_that_informs_of_nothing_still_has_return_and_length(uninformed: Any) -> None:
    assert set(uninformed) == {"return", "length", "nonfinite"}


def test_fewer_episodes_than_slots_use_as_many_slots(uninformed: Any) -> None:
    assert uninformed["length"].shape == (2,)


def test_summaries_carry_embodichains_tags(episodes: Any) -> None:
    summary = summarize(episodes)
    tags = {"avg_reward", "avg_length", "success_rate", "metrics/steps", "nonfinite_episodes"}
    assert set(summary) == {f"eval/{tag}" for tag in tags}
    assert summary["eval/nonfinite_episodes"] == 0
    assert summary["eval/avg_length"] == pytest.approx(episodes["length"].mean())
    assert summary["eval/success_rate"] == pytest.approx(episodes["success"].mean())


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (-1, 4)])
def test_counts_that_are_not_positive_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {counts[0]} and {counts[1]}"):
        play(num_envs=counts[0], num_episodes=counts[1])


@dataclass(frozen=True)
class Liar(Lengths):
    """Four steps, and always a success; in every other episode ``what`` is NaN or infinite at step ``at``."""

    what: str = "obs"
    at: int = 2
    value: float = float("nan")

    @property
    def max_episode_steps(self) -> int:
        return 4

    def reset(self, key: jax.Array) -> tuple[Episode, Any]:
        broken = jax.random.bernoulli(key)
        first = jnp.where(broken & (self.what == "obs") & (self.at == 0), self.value, broken)
        return Episode(broken, jnp.zeros((), jnp.int32)), first.astype(jnp.float32)[None]

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del action, key
        state = replace(state, steps=state.steps + 1)
        poison = jnp.where(state.horizon & (state.steps == self.at), self.value, 0.0)
        timestep = Timestep(
            obs=state.horizon + (poison if self.what == "obs" else jnp.zeros(()))[None],
            reward=1.0 + (poison if self.what == "reward" else 0.0),
            terminated=state.steps >= 4,
            truncated=jnp.zeros((), bool),
            info={"success": jnp.ones((), bool), "metrics": {"broken": state.horizon}},
        )
        return state, timestep


class Poisoned(Positive):
    """Its action is NaN where the observation is 1."""

    def apply(self, params: Params, obs: jax.Array) -> tuple[Any, Any]:
        distribution, value = super().apply(params, obs)
        return replace(distribution, mean=jnp.where(obs == 1.0, jnp.nan, distribution.mean)), value


BREAKS = [("obs", 0), ("obs", 2), ("obs", 4), ("reward", 1), ("reward", 4), ("action", 1)]


@pytest.mark.parametrize("choice", ["fixed", "first_finished"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("what", "at"), BREAKS)
def test_an_episode_that_was_not_finite_throughout_is_no_success_whatever_the_env_says(
    what: str, at: int, value: float, choice: str
) -> None:
    policy, env = (Poisoned() if what == "action" else Positive()), Liar(what=what, at=at, value=value)
    played = evaluate(policy, env, {"params": {}}, KEY, num_envs=4, num_episodes=24, choice=choice)
    broken = np.asarray(played["metrics/broken"])
    assert 0 < broken.sum() < 24
    np.testing.assert_array_equal(played["success"], 1.0 - broken)
    np.testing.assert_array_equal(played["nonfinite"], broken)
    assert summarize(played)["eval/nonfinite_episodes"] == broken.sum()

    host = evaluate_host(policy, PureHostEnv(env, 4), {"params": {}}, 0, num_episodes=24, choice=choice)
    assert 0 < host["metrics/broken"].sum() < 24
    np.testing.assert_array_equal(host["success"], 1.0 - host["metrics/broken"])
    np.testing.assert_array_equal(host["nonfinite"], host["metrics/broken"])


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

    played = evaluate(Positive(), Endless(), {"params": {}}, KEY, num_envs=12, num_episodes=12)
    assert np.isnan(played["return"]).all()
    assert 0 < summarize(played)["eval/nonfinite_episodes"] < 12


def test_a_quarantined_episode_counts_as_a_failure(tmp_path: Path) -> None:
    """Left out it would be a way to success: to break where it gets difficult."""
    make = lambda: PureHostEnv(Liar(what="obs", at=4), 4)  # noqa: E731
    env = GuardedEnv(make(), make, recipe={"id": "liar"}, folder=tmp_path)
    played = evaluate_host(Positive(), env, {"params": {}}, 0, num_episodes=24)
    assert 0 < played["nonfinite"].sum() == env.num_quarantined < 24
    np.testing.assert_array_equal(played["success"], 1.0 - played["nonfinite"])
    assert len(played["return"]) == 24 and np.isfinite(played["return"]).all()
