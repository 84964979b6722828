"""EnvWrapper: what a wrapper does not change is the inner environment's; observations of another kind; a config's."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, keys_of, refusals, refused
from flax import struct
from tiny import EPISODE, tiny
from toy_policies import policy_for

from ejax import check_env
from ejax.config import load_config, parse_config
from ejax.config.models import EnvConfig
from ejax.envs.description import caption_of, describe
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.asymmetric import AsymmetricEnv
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.envs.wrappers.wrapper import EnvWrapper, ObservationWrapper, innermost
from ejax.play.acting import load
from ejax.play.saved_policy import evaluate_run
from ejax.rollout import reset, step
from ejax.run import train
from ejax.schema.trust import trust
from ejax.training.environments import build_env
from ejax.training.from_objects import config_of
from ejax.types import Array, Key, PyTree, Timestep
from interop.export import export_run

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Scaled(ObservationWrapper):
    """The observation times a factor."""

    factor: float = 0.5

    def observe(self, state: PyTree, obs: Array) -> Array:
        return self.factor * obs


class WithCount(ObservationWrapper):
    """A dict of the observation and the number of zeros in it."""

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        count = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        return gymnasium.spaces.Dict({"all": self.env.observation_space, "zeros": count})

    def observe(self, state: PyTree, obs: Array) -> dict[str, Array]:
        return {"all": obs, "zeros": jnp.sum(obs == 0.0, dtype=jnp.float32)[None]}


@dataclass(frozen=True)
class Negated(EnvWrapper):
    """Another observation by ``reset`` and ``step``, without a thought of ``persist``."""

    env: Any

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.env.reset(key)
        return state, -obs

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = self.env.step(state, action, key)
        return state, replace(timestep, obs=-timestep.obs)


@struct.dataclass
class CountingState:
    episode: Array
    num_steps: Array


@dataclass(frozen=True)
class CountsEpisodes:
    """Episodes of two steps, counted: what outlasts them. Its observation is [episode, steps, 1]."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = gymnasium.spaces.Box(0.0, np.inf, (3,), np.float32)
    max_episode_steps = 2

    def reset(self, key: Key) -> tuple[CountingState, Array]:
        del key
        state = CountingState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        return state, self._obs(state)

    def persist(self, ended: CountingState, started: CountingState, obs: Array) -> tuple[CountingState, Array]:
        state = replace(started, episode=ended.episode + 1)
        return state, obs.at[0].set(state.episode)  # from the observation given: another's would show

    def step(self, state: CountingState, action: Array, key: Key) -> tuple[CountingState, Timestep]:
        del action, key
        state = replace(state, num_steps=state.num_steps + 1)
        over = state.num_steps == self.max_episode_steps
        return state, Timestep(
            obs=self._obs(state), reward=jnp.ones(()), terminated=jnp.zeros((), bool), truncated=over, info={}
        )

    def _obs(self, state: CountingState) -> Array:
        return jnp.stack([state.episode, state.num_steps, jnp.ones((), jnp.int32)]).astype(jnp.float32)


def counts_after(env: Any, num_steps: int) -> list[Any]:
    """Return the observations of one row after each of so many steps."""
    carry, seen = reset(env, jax.random.key(0), 1), []
    for _ in range(num_steps):
        carry, _ = step(env, carry, jnp.zeros((1, 1)), jax.random.key(1))
        seen.append(jax.tree.map(lambda x: np.asarray(x)[0].tolist(), carry.obs))
    return seen


class Captioned(PointMassRL):
    def caption(self, state: PyTree) -> str:
        return f"step {int(state.episode_step)}"


@dataclass(frozen=True)
class Doubled(EnvWrapper):
    """Twice the reward; its state holds the inner one's."""

    env: Any

    def inner_state(self, state: PyTree) -> PyTree:
        return state["inner"]

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.env.reset(key)
        return {"inner": state}, obs

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        inner, timestep = self.env.step(state["inner"], action, key)
        return {"inner": inner}, replace(timestep, reward=2.0 * timestep.reward)


def test_a_wrapper_has_all_that_it_does_not_change() -> None:
    env = PointMassRL(max_episode_steps=7)
    wrapped = Doubled(env)
    assert (wrapped.observation_space, wrapped.action_space) == (env.observation_space, env.action_space)
    assert wrapped.max_episode_steps == 7 and describe(wrapped) == describe(env)
    (state, _), (inner, _) = wrapped.reset(KEY), env.reset(KEY)
    after, timestep = wrapped.step(state, jnp.ones(2), KEY)
    expected, plain = env.step(inner, jnp.ones(2), KEY)
    chex.assert_trees_all_equal(after["inner"], expected)
    assert timestep.reward == 2.0 * plain.reward


def test_a_caption_comes_from_within() -> None:
    env = ActionChunk(Doubled(Captioned()), 2)
    state, _ = env.reset(KEY)
    assert caption_of(env, env.step(state, jnp.zeros(4), KEY)[0]) == "step 2"
    assert caption_of(Doubled(PointMassRL()), {"inner": None}) == caption_of(PointMassRL(), None) == ""


def test_the_innermost_environment_is_no_wrapper() -> None:
    env = PointMassRL()
    assert innermost(ActionChunk(Doubled(env), 2)) is env is innermost(env)


def test_a_wrapper_without_an_environment_says_so() -> None:
    class Empty(EnvWrapper):
        pass

    with pytest.raises(AttributeError, match="'Empty' object has no attribute 'env'"):
        _ = Empty().action_space


def test_a_wrapper_of_observations_needs_one_method() -> None:
    env, plain = Scaled(PointMassRL(), 0.5), PointMassRL()
    assert check_env(env, num_steps=20).startswith("Scaled fits")
    (state, obs), (inner, whole) = env.reset(KEY), plain.reset(KEY)
    chex.assert_trees_all_equal(state, inner)  # nothing outlasts an episode: nothing is kept
    np.testing.assert_array_equal(obs, 0.5 * whole)
    seen, expected = (each.step(state, jnp.ones(2), KEY)[1] for each in (env, plain))
    np.testing.assert_array_equal(seen.obs, 0.5 * expected.obs)
    assert env.observation_space == plain.observation_space
    assert describe(env).observation == {} and describe(env).action == describe(plain).action


def test_its_space_may_be_another_and_wrappers_nest() -> None:
    env = ActionChunk(WithCount(Scaled(PointMassRL())), 2)
    assert check_env(env, num_steps=20).startswith("ActionChunk fits")
    assert env.reset(KEY)[1].keys() == {"all", "zeros"} == {*env.observation_space.spaces}


def test_persist_inside_gets_its_own_observation() -> None:
    assert check_env(Scaled(CountsEpisodes()), num_steps=4).startswith("Scaled fits")
    plain = counts_after(CountsEpisodes(), 5)
    assert plain == [[0, 1, 1], [1, 0, 1], [1, 1, 1], [2, 0, 1], [2, 1, 1]]
    halves = [[0.5 * x for x in obs] for obs in plain]
    assert counts_after(Scaled(CountsEpisodes()), 5) == halves
    nested = counts_after(WithCount(Scaled(CountsEpisodes())), 5)
    assert [obs["all"] for obs in nested] == halves
    parts = counts_after(AsymmetricEnv(CountsEpisodes(), (1,)), 5)
    assert [obs["critic"] for obs in parts] == plain


def test_a_wrapper_that_forgets_persist_is_refused_where_something_outlasts_an_episode() -> None:
    """It would hand its own observation to ``persist`` inside."""
    check_env(Negated(PointMassRL()), num_steps=4)
    with pytest.raises(TypeError, match=r"Negated overrides reset, .*: override persist too, or derive from Obs"):
        counts_after(Negated(CountsEpisodes()), 1)


PARTS = AsymmetricEnv(PointMassRL(), observation_indices=(4, 0))


def first_two(env: Any) -> list[Any]:
    """Return the observations of a reset and of a step."""
    carry = reset(env, KEY, 3)
    return [carry.obs, step(env, carry, jnp.full((3, 2), 0.3), KEY)[1].obs]


@pytest.mark.slow
def test_parts_are_numbers_of_the_tasks_own_observation() -> None:
    for obs, whole in zip(first_two(PARTS), first_two(PointMassRL()), strict=True):
        np.testing.assert_array_equal(obs["critic"], whole)
        np.testing.assert_array_equal(obs["policy"], whole[:, [4, 0]])
    space, named = PARTS.observation_space, describe(PARTS).observation
    assert {name: part.shape for name, part in space.items()} == {"policy": (2,), "critic": (14,)}
    assert [feature.name for feature in named["policy"]] == ["goal x", "position x"] and len(named["critic"]) == 14


@pytest.mark.slow
def test_noise_of_the_policys_part_leaves_the_other_as_it_is() -> None:
    noise = {"camera": {"func": "add_observation_noise", "params": {"part": "policy", "noise": 0.1}}}
    for seen, true in zip(first_two(RandomizedEnv(PARTS, noise)), first_two(PARTS), strict=True):
        np.testing.assert_array_equal(seen["critic"], true["critic"])
        assert not np.isclose(seen["policy"], true["policy"]).any()


OWN = [{"test_wrapper:Scaled": {"factor": 2.0}}, {"AsymmetricEnv": {"observation_indices": [0, 1, 4, 5]}}]


def wrapped(folder: Path | None, wrappers: Any, env: str = "PointMassRL", **trainer: Any) -> dict[str, Any]:
    raw = tiny(folder, env, **trainer)
    raw["env"]["wrappers"] = wrappers
    return raw


@pytest.fixture
def trusted() -> None:
    trust("test_wrapper:Scaled")


@pytest.mark.usefixtures("trusted")
def test_the_last_of_a_configs_wrappers_is_the_outermost() -> None:
    config = parse_config(wrapped(None, OWN))
    env: Any = build_env(config)
    assert env == AsymmetricEnv(Scaled(PointMassRL(max_episode_steps=EPISODE), 2.0), (0, 1, 4, 5))
    again = parse_config(config.to_dict())
    assert again.env == config.env and config.to_dict()["env"]["wrappers"] == OWN


def test_events_and_chunks_come_below_what_draws_or_decides_and_above_the_rest() -> None:
    noise = {"noise": {"func": "add_action_noise", "params": {"noise": 0.1}}}
    drawn = [{"AsymmetricEnv": {}}, {"RenderedEnv": {"blank": True}}]
    raw = wrapped(None, drawn, "CartPoleRL", events={"train": noise})
    raw["env"]["cfg"]["action_chunk"] = 2
    layers, env = [], build_env(parse_config(raw))
    while isinstance(env, EnvWrapper):
        layers.append(type(env).__name__)
        env = env.inner
    assert layers == ["RenderedEnv", "ActionChunk", "RandomizedEnv", "AsymmetricEnv"]


@cases(
    "old new",
    (
        {"id": "AsymmetricEnv", "cfg": {"env": "PointMassRL", "env_cfg": {"dt": 0.1}, "observation_indices": [0]}},
        {"id": "PointMassRL", "cfg": {"dt": 0.1}, "wrappers": [{"AsymmetricEnv": {"observation_indices": [0]}}]},
    ),
    (
        {"id": "renderedenv", "cfg": {"env": "CartPoleRL", "action_chunk": 2, "blank": True}},
        {"id": "CartPoleRL", "cfg": {}, "wrappers": [{"ActionChunk": {"size": 2}}, {"RenderedEnv": {"blank": True}}]},
    ),
    (
        {"id": "RenderedEnv", "cfg": {"env": "AsymmetricEnv", "env_cfg": {"env": "CartPoleRL"}}},
        {"id": "CartPoleRL", "cfg": {}, "wrappers": [{"AsymmetricEnv": {}}, {"RenderedEnv": {}}]},
    ),
)
def test_a_wrapper_that_names_its_environment_is_read_as_before(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert EnvConfig(**old) == EnvConfig(**new)


def test_an_override_names_a_wrapper_and_its_argument(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(wrapped(tmp_path, [{"AsymmetricEnv": {}}])))
    config = load_config(file, ["env.wrappers.AsymmetricEnv.observation_indices=[3]", "env.cfg.env_cfg.dt=0.1"])
    assert config.env.layers == (("AsymmetricEnv", {"observation_indices": (3,)}),) and config.env.cfg["dt"] == 0.1
    refused(load_config, file, ["env.wrappers.ActionChunk.size=3"], match=r"env\.wrappers has no ActionChunk")


@refusals(
    (["AsymetricEnv"], "env.wrappers.0", "Did you mean 'AsymmetricEnv'?"),
    ([{"AsymmetricEnv": {"indices": [0]}}], "env.wrappers.AsymmetricEnv.indices", "unknown key"),
    ([{"AsymmetricEnv": {"observation_indices": [14]}}], "env.wrappers.AsymmetricEnv", "0 to 13"),
    ([{"AsymmetricEnv": {"observation_indices": []}}], "env.wrappers.AsymmetricEnv", "at least one"),
    ([{"ActionChunk": {"size": "2"}}], "env.wrappers.ActionChunk.size", "must be a valid integer"),
    (["AsymmetricEnv", "AsymmetricEnv"], "env.wrappers.AsymmetricEnv", "not a vector"),
    (["test_wrapper:Negated"], "env.wrappers.0", "--trust test_wrapper:Negated"),
    (["test_wrapper:Nothing"], "env.wrappers.0", "test_wrapper:Nothing"),
    ([{"AsymmetricEnv": {}, "ActionChunk": {}}], "env.wrappers.0", "{name: arguments}"),
    ([{"AsymmetricEnv": 3}], "env.wrappers.0", "mapping"),
    (3, "env.wrappers", "valid array"),
)
def test_a_configs_wrapper_that_cannot_be_is_refused_by_key(given: Any, key: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(wrapped(tmp_path, given)))
    error = refused(load_config, file, key=key, word=word)
    assert keys_of(error) == [key]


def test_an_environment_outside_jax_takes_no_wrappers() -> None:
    raw = wrapped(None, ["AsymmetricEnv"], "gymnasium:Pendulum-v1")
    refused(lambda: build_env(parse_config(raw)), match="is stepped outside JAX: it takes no wrappers")


@pytest.mark.slow
def test_a_run_with_wrappers_goes_on_is_evaluated_acts_and_is_exported(tmp_path: Path) -> None:
    raw = wrapped(tmp_path, OWN, save_frequency_updates=1)
    raw["policy"]["obs_groups"] = {"actor": ["policy"], "critic": ["critic"]}
    trust("test_wrapper:Scaled")
    whole = train(parse_config(raw | {"trainer": {**raw["trainer"], "output_dir": str(tmp_path / "whole")}}))
    half = train(parse_config(raw | {"trainer": {**raw["trainer"], "iterations": 1}}))
    went_on = train(parse_config(raw), resume="latest", run_dir=half.run_dir)
    chex.assert_trees_all_equal(went_on.params, whole.params)
    assert evaluate_run(went_on.run_dir, num_episodes=2, num_envs=2)["eval/avg_length"] > 0.0
    assert load(went_on.run_dir).env == build_env(parse_config(raw))
    assert export_run(went_on.run_dir, tmp_path / "out", ["safetensors"])["artefacts"]
    contract = json.loads((tmp_path / "out" / "contract.json").read_text())
    assert contract["env"]["wrappers"] == OWN


def test_objects_with_wrappers_are_described_by_what_a_file_would_name() -> None:
    env = AsymmetricEnv(Scaled(PointMassRL(dt=0.1), 2.0), (0, 1))
    trainer = {"num_envs": 4, "buffer_size": 16, "iterations": 1}
    config = config_of(env, policy_for(env)[0], "ppo", None, trainer)
    assert config.env.id == "PointMassRL" and config.env.cfg == {"dt": 0.1} and build_env(config) == env
