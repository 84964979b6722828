"""An environment's misfits are named by leaf, before anything is compiled and without JAX's traceback."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax import check_env
from ejax.config import ConfigError, parse_config
from ejax.envs.check import check_shapes
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.run import train
from ejax.schema.trust import trust
from ejax.types import Array, Key, PyTree, Timestep


@dataclass(frozen=True)
class Walk:
    """A fitting environment: a number walks between ±5."""

    max_episode_steps: int = 6
    observation_space = gymnasium.spaces.Box(-5.0, 5.0, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, key: Key) -> tuple[PyTree, Array]:
        place = jax.random.uniform(key, (1,))
        return {"place": place, "count": jnp.zeros((), jnp.int32)}, place

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state = {"place": jnp.clip(state["place"] + action, -5.0, 5.0), "count": state["count"] + 1}
        return state, Timestep(
            obs=state["place"],
            reward=-jnp.abs(state["place"][0]),
            terminated=jnp.zeros((), bool),
            truncated=state["count"] >= self.max_episode_steps,
            info={"metrics": {"place": state["place"][0]}},
        )


def changed(**parts: Any) -> Any:
    """``Walk`` whose step answers otherwise."""

    class Odd(Walk):
        def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
            state, timestep = Walk.step(self, state, action, key)
            return state, replace(timestep, **{name: part(timestep) for name, part in parts.items()})

    return Odd()


@pytest.mark.slow
def test_what_fits_passes() -> None:
    assert "4 episodes of " in check_env(Walk())
    text = check_env(PointMassRL(max_episode_steps=5), num_steps=7)
    assert text.startswith("PointMassRL") and "4 episodes of 5 random actions" in text and text.endswith(", ends")


@cases(
    "env told",
    (changed(reward=lambda t: t.obs), r"step: reward: got float32\[1\]; must be float32\[\]"),
    (changed(reward=lambda t: 0), r"step: reward: got int32\[\]; must be float32\[\]"),
    (changed(terminated=lambda t: t.reward), r"step: terminated: got float32\[\]; must be bool\[\]"),
    (changed(truncated=lambda t: t.reward[None] > 0), r"step: truncated: got bool\[1\]; .* jnp.asarray\(…, bool\)"),
    (changed(obs=lambda t: t.reward), r"step: obs: got float32\[\]; observation_space says float32\[1\]"),
    (changed(obs=lambda t: {"a": t.obs}), "step: obs: got dict; observation_space says"),
    (changed(obs=lambda t: t.obs.astype(jnp.int32)), r"step: obs: got int32\[1\]; .* float32\[1\]"),
    (changed(info=lambda t: {"success": t.reward}), r"info.success: got float32\[\]; must be bool\[\]"),
    (changed(info=lambda t: {"rewards": {"near": t.obs}}), r"info.rewards.near: got float32\[1\]; must be a scalar"),
    (changed(info=lambda t: {"metrics": [t.reward]}), "info.metrics: got list of 1; must be a dict of arrays"),
    (changed(info=lambda t: None), "step: info: got nothing; must be a dict"),
    (changed(final_obs=lambda t: t.obs), "final_obs: is not None; ejax.rollout fills it"),
    (Walk, r"got the class Walk; pass an environment: Walk\(\)"),
    (Walk(max_episode_steps=2.5), "max_episode_steps: got float 2.5; must be an integer"),  # type: ignore[arg-type]
)
def test_a_misfit_is_named_with_what_was_given_and_what_is_allowed(env: Any, told: str) -> None:
    refused(check_shapes, env, match=told)


class Grows(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        after, timestep = Walk.step(self, state, action, key)
        return {"place": after["place"].astype(jnp.bfloat16), "more": action}, timestep


def test_a_state_that_does_not_stay_alike_is_named_by_leaf() -> None:
    caught = refused(lambda: check_shapes(Grows()))
    told = {problem.key: problem.text for problem in caught.problems}
    assert told["step: state['count']"] == "is missing; reset gives int32[]"
    assert told["step: state['more']"].startswith("got float32[1]; reset gives nothing there")
    assert told["step: state['place']"].startswith("got bfloat16[1]; reset gives float32[1]")


class Branches(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        if action[0] > 0:
            return Walk.step(self, state, action, key)
        return Walk.step(self, state, -action, key)


class Numbers(Walk):
    def reset(self, key: Key) -> tuple[PyTree, Array]:
        state, obs = Walk.reset(self, key)
        return state, np.sin(obs)  # type: ignore[return-value]


class Misfits(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        return Walk.step(self, state, action.reshape(3), key)


class Silent(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        return Walk.step(self, state, action, key)[0]  # type: ignore[return-value]


@cases(
    "env told",
    (Branches(), r"step: .*test_check\.py, line \d+: uses Python's if.* use jnp.where.*\(if action\[0\] > 0:\)"),
    (Numbers(), r"reset: .*test_check\.py, line \d+: gives an array to NumPy; use jax.numpy"),
    (Misfits(), r"step: .*test_check\.py, line \d+: TypeError: cannot reshape"),
    (Silent(), r"step: gave dict; must be \(state, ejax.Timestep\)"),
)
def test_what_cannot_be_traced_is_told_by_the_users_own_line(env: Any, told: str) -> None:
    caught = refused(check_shapes, env, match=told)
    assert "JAX_TRACEBACK" not in str(caught) and "site-packages" not in str(caught)


class Dice(Walk):
    def reset(self, key: Key) -> tuple[PyTree, Array]:
        state, obs = Walk.reset(self, key)
        return state, obs * np.random.default_rng().uniform()


class Diverges(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = Walk.step(self, state, action, key)
        return state, replace(timestep, reward=jnp.where(state["count"] == 3, jnp.nan, 0.0))


class Escapes(Walk):
    observation_space = gymnasium.spaces.Box(-0.1, 0.1, (1,))


class Endless(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = Walk.step(self, state, action, key)
        return state, replace(timestep, truncated=jnp.zeros((), bool))


KEPT: list[Array] = []


class Leaks(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        KEPT.append(action)
        return Walk.step(self, state, action, key)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    KEPT.clear()


@pytest.mark.slow
@cases(
    "env told",
    (Dice(), "differs between two episodes of the same key; draw from the key alone"),
    (Diverges(), "reward: is not finite after 2 steps of random actions"),
    (Escapes(), r"obs\[0\]: got -?\d.*, (above|below) the -?0.1 of observation_space"),
    (Endless(), "truncated: no end after max_episode_steps, 6"),
    (Leaks(), "an array of one trace is kept outside the state"),
)
def test_what_only_playing_shows_is_told(env: Any, told: str) -> None:
    check_shapes(env)
    KEPT.clear()
    refused(check_env, env, match=told)


def test_an_environment_outside_jax_is_sent_to_gymnasiums_checker() -> None:
    with pytest.raises(ConfigError, match=r"gymnasium.utils.env_checker.check_env"):
        check_env(gymnasium.make("CartPole-v1").unwrapped)  # type: ignore[arg-type]


class Vague(Walk):
    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = Walk.step(self, state, action, key)
        return state, replace(timestep, reward=state["place"])


def test_a_run_looks_at_an_environment_of_ones_own_before_it_compiles(tmp_path: Path) -> None:
    name = f"{__name__}:Vague"
    trust(name)
    with pytest.raises(ConfigError, match=rf"env.id: {name}: step: reward: got float32\[1\]; must be float32\[\]"):
        train(parse_config(tiny(tmp_path, name, env_cfg={})))
    assert not list(tmp_path.iterdir())  # the folder is taken back
