"""Answers of environments outside JAX that are none: refused by name, in every kind of vector."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from host_tasks import Drift, Wrapped

from ejax.envs.adapters.gymnasium import GymnasiumVector, make, vectorize
from ejax.envs.host.answers import answering
from ejax.envs.host.calls import HostEnvError
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.schema.trust import trust

SEED = np.array([3, 5], np.uint32)
STILL = np.zeros((2, 1), np.float32)


class Says(gymnasium.Env[Any, Any]):
    """Answers what it is made with, in its second step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, says: dict[str, Any], space: gymnasium.Space[Any] | None = None) -> None:
        self.says, self.num_steps = says, 0
        self.observation_space = space or self.observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.says.get("first", np.zeros(2, np.float32)), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.num_steps += 1
        says = self.says if self.num_steps == 2 else {}
        obs = self.says.get("first", np.zeros(2, np.float32) if self.observation_space.shape else 0)
        rest = {"reward": 0.5, "terminated": False, "truncated": False, "info": {}}
        return says.get("obs", obs), *(says.get(name, value) for name, value in rest.items())


gymnasium.register("Says-v0", Says)  # in workers too


@refusals(
    ({"terminated": None}, "terminated of row 0", "is None (NoneType); must be True or False"),
    ({"truncated": 0}, "truncated of row 0", "is 0 (int)"),
    ({"terminated": np.array([True])}, "terminated of row 0", "is array([ True]) (ndarray)"),
    ({"reward": "1.0"}, "reward of row 0", "is '1.0' (str); must be a number, such as 1.0"),
    ({"reward": None}, "reward of row 0", "is None"),
    ({"reward": 1j}, "reward of row 0", "is 1j (complex)"),
    ({"reward": np.zeros(1)}, "reward of row 0", "is array"),
    ({"obs": np.zeros(3, np.float32)}, "observation of row 0", "is float32[3]; must be numbers [2]"),
    ({"obs": ["0", "1"]}, "observation of row 0", "is <U1[2], ['0', '1']"),
    ({"obs": np.array([0.0, None])}, "observation of row 0", "is object[2], [0.0, None]"),
    ({"info": {"success": "1.0"}}, "info['success'] of row 0", "is '1.0' (str)"),
    ({"info": {"success": np.array([True])}}, "info['success'] of row 0", "is array([ True]) (ndarray)"),
    ({"info": [1]}, "the info of Says", "is a list; must be a dict"),
)
def test_an_answer_that_is_none_is_refused_by_row(given: dict[str, Any], key: str, word: str) -> None:
    env = vectorize(Says(given), lambda: Says(given), 2)
    env.reset(SEED)
    env.step(STILL)
    refused(env.step, STILL, key=key, word=word)


@cases(
    "says",
    {"reward": 1, "terminated": np.bool_(False)},
    {"reward": np.float16(1.0)},
    {"reward": np.array(1.0), "truncated": np.array(False)},
    {"reward": True, "obs": [0.5, 1]},
    {"obs": np.zeros(2, np.float64), "info": {"success": None}},
    {"info": None},
    {"reward": float("nan")},  # is quarantined
    ids=str,
)
def test_what_says_the_same_in_other_types_passes(says: dict[str, Any]) -> None:
    env = vectorize(Says(says), lambda: Says(says), 2)
    env.reset(SEED)
    env.step(STILL)
    reward = env.step(STILL).reward
    np.testing.assert_array_equal(reward, np.full(2, says.get("reward", 0.5), np.float32))


_PARTS = gymnasium.spaces.Dict(a=gymnasium.spaces.Box(-1, 1, (2,)), b=gymnasium.spaces.Discrete(3))
_PAIR = gymnasium.spaces.Tuple(_PARTS.values())


@refusals(
    ((_PARTS, {"a": np.zeros(2)}), "is ['a']", "must be a dict of ['a', 'b']"),
    ((_PARTS, {"a": np.zeros(3), "b": 0}), "row 0/a", "is float64[3]; must be numbers [2]"),
    ((_PARTS, np.zeros(2)), "is 'ndarray'", "must be a dict of ['a', 'b']"),
    ((_PAIR, (np.zeros(2), 1.5)), "row 0/1", "is of float64, and its space of int64"),
    ((_PAIR, (np.zeros(2),)), "is [0]", "must be a tuple of [0, 1]"),
    ((_PARTS["a"], np.zeros((1, 2))), "row 0", "is float64[1, 2]; must be numbers [2]"),
    ((_PARTS["a"], None), "row 0", "is object[], None; must be numbers [2]"),
)
def test_a_first_observation_of_another_form_is_refused_by_part(given: Any, key: str, word: str) -> None:
    space, first = given
    env = vectorize(Says({}, space), lambda: Says({"first": first}, space), 2)
    refused(env.reset, SEED, key=key, word=word)


_NESTED = gymnasium.spaces.Dict(c=_PARTS, d=_PAIR)
_FULL = {"a": np.zeros(2, np.float32), "b": 0}
_TWO = tuple(_FULL.values())


@refusals(
    ((_PARTS, _FULL, {"a": np.zeros(2)}), "row 0 is ['a']", "must be a dict of ['a', 'b']"),
    ((_PARTS, _FULL, _TWO), "row 0 is 'tuple'", "must be a dict of ['a', 'b']"),
    ((_PAIR, _TWO, (*_TWO, 1)), "row 0 is [0, 1, 2]", "must be a tuple of [0, 1]"),
    ((_PAIR, _TWO, _TWO[:1]), "row 0 is [0]", "must be a tuple of [0, 1]"),
    ((_NESTED, {"c": _FULL, "d": _TWO}, {"c": {"b": 0}, "d": _TWO}), "row 0/c is ['b']", "dict of ['a', 'b']"),
    ((_NESTED, {"c": _FULL, "d": _TWO}, {"c": _FULL, "d": [*_TWO, 2]}), "row 0/d is [0, 1, 2]", "tuple of [0, 1]"),
)
def test_a_later_observation_with_other_parts_is_refused(given: Any, key: str, word: str) -> None:
    space, first, later = given
    env = vectorize(Says({}, space), lambda: Says({"first": first, "obs": later}, space), 2)
    env.reset(SEED)
    env.step(STILL)
    refused(env.step, STILL, key=key, word=word)


@refusals(
    ((_PARTS, _FULL, {"b": np.zeros(1, int)}), "has no 'a'", "must be a dict of ['a', 'b']"),
    ((_PAIR, _TWO, (np.zeros((1, 2)), np.zeros(1, int), 5)), "has 3 parts", "must be a tuple of 2"),
)
def test_a_vector_that_gives_other_parts_is_refused(given: Any, key: str, word: str) -> None:
    space, first, later = given
    env = vectorize(Says({}, space), lambda: Says({"first": first}, space), 1)
    env.reset(SEED[:1])
    env.env.step = lambda action: (later, np.zeros(1), *np.zeros((2, 1), bool), {})
    refused(env.step, STILL[:1], key=key, word=word)


class Reports(Says):
    """Gives the ``info`` that it is made with for each step, and ends with its second."""

    def step(self, action: Any) -> tuple[Any, ...]:
        self.num_steps += 1
        return np.zeros(2, np.float32), 0.0, False, self.num_steps == 2, self.says[str(self.num_steps)]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_rewards_and_metrics_are_the_numbers_that_the_first_step_has(mode: AutoresetMode) -> None:
    def made(x: float) -> Any:
        first = {"rewards": {"x": x, "text": "a"}, "metrics": {"m": 2, "vector": np.zeros(2), "ragged": [1, [2]]}}
        return answering(Reports({"1": first, "2": {"rewards": {"x": np.float64(3 * x), "late": 1.0}}}), 0)

    env = GymnasiumVector(SyncVectorEnv([partial(made, 1), partial(made, 0.5)], autoreset_mode=mode))
    env.reset(SEED)
    for x, m in (([1.0, 0.5], 2.0), ([3.0, 1.5], np.nan)):
        info = env.step(STILL).info
        assert info.keys() == {"success", "valid", "rewards", "metrics"}
        np.testing.assert_equal((info["rewards"], info["metrics"]), ({"x": np.array(x)}, {"m": np.array([m, m])}))


def test_choices_are_looked_at() -> None:
    space = gymnasium.spaces.Discrete(4)
    with pytest.raises(ValueError, match=r"observation of row 0 is 4; must be of Discrete\(4\)"):
        vectorize(Says({}, space), lambda: Says({"first": 4}, space), 2).reset(SEED)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's, of the worker that failed
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_registered_environment_is_looked_at_before_its_wrappers_hide_it(vectorization: Any) -> None:
    trust(name := "test_answers:Says-v0")
    options: dict[str, Any] = {"says": {"terminated": None}, "disable_env_checker": True}
    env = make(name, num_envs=2, vectorization=vectorization, action_chunk=2, **options)
    env.reset(SEED)
    refused(env.step, np.zeros((2, 2), np.float32), match=r"terminated of row [01] is None")
    env.close()


class Loose(SyncVectorEnv):
    """A vector environment of somebody else's, whose flags are what they are."""

    def step(self, actions: Any) -> Any:
        obs, reward, _, truncated, info = super().step(actions)
        return obs, reward, np.array([False, None]), truncated, info


def test_a_vector_environments_arrays_are_looked_at() -> None:
    env = GymnasiumVector(Loose([lambda: Says({})] * 2, autoreset_mode=AutoresetMode.DISABLED))
    env.reset(SEED)
    refused(env.step, STILL, match=r"terminated is object\[2\], \[False, None\]; must be booleans \[2\]")


@refusals(
    ({"reward": np.zeros((2, 1), np.float32)}, "reward", "is float32[2, 1]; must be numbers [2]"),
    ({"reward": np.array(["1.0", "2.0"])}, "reward", "is <U3[2], ['1.0', '2.0']"),
    ({"terminated": np.zeros(2, int)}, "terminated", "is int64[2]; must be booleans [2]"),
    ({"truncated": False}, "truncated", "is bool[]"),
    ({"obs": np.zeros((1, 2), np.float32)}, "obs", "is float32[1, 2]; must be numbers [2, 2]"),
    ({"final_obs": {"a": 1}}, "final_obs", "is object[], {'a': 1}"),
    ({"info": None}, "info", "is None (NoneType); info must be a dict of arrays of numbers [2, ...]"),
    ({"info": {"success": True}}, "info/success", "is True (bool); info must be a dict"),
    ({"info": {"metrics": {"a": [1.0, 2.0]}}}, "info/metrics/a", "is [1.0, 2.0] (list)"),
    ({"info": {"metrics": {"a": np.zeros(3)}}}, "info/metrics/a", "is array([0., 0., 0.]) (ndarray)"),
    ({"info": {"success": np.array([None, True])}}, "info/success", "is array([None, True], dtype=object)"),
)
def test_an_environment_of_ones_own_is_looked_at_and_named(tmp_path: Any, given: Any, key: str, word: str) -> None:
    class Odd(Wrapped):
        def step(self, action: Any) -> Any:
            return replace(super().step(action), **given)

    env = Odd(PureHostEnv(Drift(), 2))
    guard = GuardedEnv(env, lambda: env, recipe={"id": "odd", "cfg": {}}, folder=tmp_path)
    guard.reset(SEED)
    text = rf"env 'odd' raised at its step 1 \(2 rows\): ValueError\(.{re.escape(f'{key} {word}')}"
    refused(guard.step, STILL, match=text, error=HostEnvError)


def test_an_info_of_other_names_than_before_is_refused_by_them(tmp_path: Any) -> None:
    class Late(Wrapped):
        def step(self, action: Any) -> Any:
            made = super().step(action)
            return replace(made, info={} if guard.num_steps < 3 else {"metrics": {"late": made.reward}})

    env = Late(PureHostEnv(Drift(), 2))
    guard = GuardedEnv(env, lambda: env, recipe={"id": "odd", "cfg": {}}, folder=tmp_path)
    guard.reset(SEED)
    guard.step(STILL)
    guard.step(STILL)
    refused(guard.step, STILL, match=r"info is PyTreeDef.*late.*same names at every step", error=HostEnvError)


def limited(*limits: int) -> Any:
    """Wrap an environment that was never registered; 0 is a wrapper that is not a TimeLimit."""
    env: Any = Says({})
    for limit in limits:
        env = gymnasium.wrappers.TimeLimit(env, limit) if limit else gymnasium.wrappers.RecordEpisodeStatistics(env)
    return env


@pytest.mark.parametrize(("limits", "found"), [((), 0), ((0,), 0), ((7,), 7), ((7, 0), 7), ((0, 7, 0, 0), 7)])
def test_a_time_limit_is_found_around_a_class_that_is_not_registered(limits: tuple[int, ...], found: int) -> None:
    assert vectorize(limited(*limits), lambda: limited(*limits), 2).max_episode_steps == found
    made = SyncVectorEnv([lambda: limited(*limits)] * 2, autoreset_mode=AutoresetMode.DISABLED)
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(made)
    assert [vectorize(env, None, 2).max_episode_steps for env in (made, wrapped)] == [found] * 2


def test_a_time_limit_is_found_inside_a_registered_factory() -> None:
    gymnasium.register("Limited-v0", lambda: limited(7, 0))
    env = make("Limited-v0", num_envs=2, action_chunk=3)
    assert env.max_episode_steps == 3  # decisions
    env.close()
