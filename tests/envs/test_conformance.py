"""Every registered environment keeps the contract of ``ejax.types.Env`` and describes itself.

A task's own file tests its formula, its ends and that it can be done.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import env_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax import check_env
from ejax.envs.description import WHOLE, describe
from ejax.envs.mujoco.engine import Physics
from ejax.envs.wrappers.wrapper import innermost
from ejax.schema.frozen import thaw
from ejax.schema.registry import ENVS, WRAPPERS, resolve

KEY = jax.random.key(0)
MADE: dict[str, dict[str, Any]] = {
    "PointMassRL": {"max_episode_steps": 3},
    "PlanarReachRL": {"max_episode_steps": 3},
    "CartPoleRL": {"max_episode_steps": 3, "physics": "mujoco"},
    "PushCube": {"episode_length": 3, "physics": "mujoco"},
    "PushCubeRL": {"episode_length": 3, "physics": "mujoco"},
    "PickPlaceRL": {"episode_length": 3, "physics": "mujoco"},
    "InstructedPlaceRL": {"episode_length": 3, "physics": "mujoco"},
    "VelocityRL": {"max_episode_steps": 3, "physics": "mujoco"},
    "TrackingRL": {"max_episode_steps": 3, "physics": "mujoco", "starts": {"by": "first"}},
    "EmbodiedEnv": {"gym_config": env_steps.gym_config("cart_pole") | {"max_episode_steps": 3}, "physics": "mujoco"},
}
WRAPPED: dict[str, dict[str, Any]] = {
    "RenderedEnv": {"renderer": "raycast", "width": 6, "height": 4},
    "AsymmetricEnv": {"observation_indices": [1, 0]},
    "ActionChunk": {"size": 1},
    "RandomizedEnv": {"events": {"noise": {"func": "add_action_noise", "mode": "reset", "params": {"noise": 0.1}}}},
}
"""Wrappers, here around CartPoleRL."""
SLOW = ("VelocityRL", "TrackingRL", "RenderedEnv")
PLAYED = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in (*MADE, *WRAPPED)]
TASKS = [name for name in MADE if name != "EmbodiedEnv"]


def make(name: str) -> Any:
    if name in WRAPPED:
        return resolve("wrapper", name)(make("CartPoleRL"), **WRAPPED[name])
    return resolve("env", name)(**MADE[name])


@pytest.mark.parametrize(("table", "here"), [(ENVS, MADE), (WRAPPERS, WRAPPED)], ids=["tasks", "wrappers"])
def test_every_registered_environment_is_here(table: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    assert here.keys() == {name for name, place in table.items() if str(place).startswith("ejax.")}


@pytest.mark.parametrize("name", PLAYED)
def test_an_episode_is_in_its_spaces_and_ends_by_its_limit(name: str) -> None:
    env = make(name)
    step = jax.jit(env.step)
    state, obs = env.reset(KEY)
    action = jnp.zeros(env.action_space.shape)
    for i in range(3):
        assert env.observation_space.contains(jax.tree.map(np.asarray, obs))
        after, timestep = step(state, action, KEY)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert (bool(timestep.terminated), bool(timestep.truncated)) == (False, i == 2)
        assert timestep.final_obs is None
        state, obs = after, timestep.obs
    rewards, terms = timestep.info["rewards"], timestep.info["terms"]
    assert rewards.keys() == terms.keys()
    for each, weight in getattr(innermost(env), "own_weights", {}).items():
        np.testing.assert_allclose(rewards[each], weight * terms[each], rtol=1e-6)
    if rewards and name != "EmbodiedEnv":  # whose base reward comes in addition
        np.testing.assert_allclose(sum(rewards.values()), timestep.reward, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*MADE, *WRAPPED) if name not in SLOW])
def test_it_passes_the_check_of_environments(name: str) -> None:
    assert "random actions" in check_env(make(name), num_steps=4)


@pytest.mark.parametrize("name", TASKS)
def test_an_action_of_another_shape_is_refused(name: str) -> None:
    env = make(name)
    state, _ = jax.eval_shape(env.reset, KEY)
    with pytest.raises(ValueError, match=r"step takes an action of shape \(\d+,\), got \(99,\)"):
        jax.eval_shape(env.step, state, jnp.zeros(99), KEY)


SHAPED = ("PushCube", "PickPlaceRL", "InstructedPlaceRL")
PAID_BY_THE_STEP = {
    "PointMassRL": "EmbodiChain's: hovering pays, which configs/point_mass/ppo.yaml outweighs by gamma",
    "PlanarReachRL": "its episodes end by the time limit alone: staying at the goal is the task",
    "CartPoleRL": "EmbodiChain's: balancing is the task",
    "PushCubeRL": "EmbodiChain's: the tool is paid for being near the cube, and the cube for coming, not for going",
    "VelocityRL": "walking is the task",
    "TrackingRL": "tracking is the task",
}


def test_every_task_is_shaped_or_says_why_not() -> None:
    assert {*SHAPED, *PAID_BY_THE_STEP} == set(TASKS)


@pytest.mark.slow_cases("InstructedPlaceRL")
@pytest.mark.parametrize("name", SHAPED)
def test_there_and_back_earns_nothing_and_neither_does_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = resolve("env", name)(**{**MADE[name], "episode_length": 99})
    state, _ = env.reset(KEY)
    if hasattr(state, "was_lifted"):  # lifting pays once; then it is a part of the state that the loop returns to
        state = state.replace(was_lifted=jnp.ones_like(state.was_lifted))
    rest = np.asarray(state.physics.qpos)
    arm, cube = np.zeros_like(rest), np.zeros_like(rest)
    arm[1:3] = 0.04
    goal = env.target(state)[1] if hasattr(env, "target") else state.goal
    for at in range(len(rest) % 7, len(rest), 7):  # the cubes, towards the goal and up
        cube[at : at + 3] = np.append(0.1 * (np.asarray(goal)[:2] - rest[at : at + 2]), 0.02)
    way = [0, 1, 2, 3, 3, 2, 1, 0]
    motions = [[rest + k * each for k in way] for each in (arm, cube, arm + cube)]
    monkeypatch.setattr(Physics, "step", lambda self, before, ctrl: before.replace(qpos=jnp.asarray(place)))
    still = jnp.zeros(env.action_space.shape)
    for motion in motions:
        earned = 0.0
        for place in motion:  # noqa: B007 - read by the step above
            state, timestep = env.step(state, still, KEY)
            assert not timestep.terminated and not timestep.truncated
            earned += float(timestep.reward)
        assert earned < 1e-4
    assert all(env.step(state, still, KEY)[1].reward < 1e-5 for _ in range(2))  # waiting


@pytest.mark.parametrize("name", TASKS)
def test_a_task_describes_every_number(name: str) -> None:
    env = make(name)
    description = describe(env)
    assert description.action is not None
    parts = getattr(env.observation_space, "spaces", {WHOLE: env.observation_space})
    widths = {path: part.shape[0] for path, part in parts.items() if path not in description.text}
    assert {path: len(part) for path, part in description.observation.items()} == widths
    assert len(description.action) == env.action_space.shape[0]
    for part in description.observation.values():  # two groups of one observation may share a number
        named = [feature.name for feature in (*part, *description.action)]
        assert len(set(named)) == len(named)
    assert all(each.unit for each in (*chain.from_iterable(description.observation.values()), *description.action))
    assert description.parameters == thaw(asdict(env))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_static_argument(name: str) -> None:
    assert hash(make(name)) == hash(resolve("env", name.lower())(**MADE[name]))
    limit = {field: 4 for field in ("max_episode_steps", "episode_length") if field in MADE[name]}
    assert replace(make(name), **limit) != make(name)


@cases(
    "name cfg text",
    *((name, {limit: 0}, f"{limit} must be > 0, got 0") for name in TASKS for limit in MADE[name] if "ep" in limit),
    *((name, {"physics": "bullet"}, "'bullet'") for name in TASKS if "physics" in MADE[name]),
    ("PointMassRL", {"obstacle_radius_range": (0.2, 0.1)}, "obstacle_radius_range"),
    ("PointMassRL", {"obstacle_radius_range": (0.0, 0.1)}, "obstacle_radius_range"),
    ("PointMassRL", {"success_bonus": -1.0}, "success_bonus"),
    ("PointMassRL", {"mass": 0.0}, "mass"),
    ("PointMassRL", {"dt": 0.0}, "dt"),
    ("PlanarReachRL", {"link_length": (1.0, 0.0)}, r"link_length must be two lengths > 0, got \(1.0, 0.0\)"),
    ("PlanarReachRL", {"action_scale": 0.0}, "action_scale must be > 0"),
    ("PlanarReachRL", {"success_threshold": -0.1}, "success_threshold must be >= 0"),
    ("CartPoleRL", {"reset_range": -1.0}, "reset_range must be >= 0, got -1"),
    ("PushCube", {"success_max_speed": 0.0}, "success_max_speed must be > 0"),
    ("PushCube", {"start_range": (0.5, 0.2)}, "start_range must be"),
    ("PushCubeRL", {"obs_mode": "rgb"}, "obs_mode must be 'state', got 'rgb'"),
    ("PushCubeRL", {"goal_position": (1.0, 2.0)}, "goal_position takes positions of three numbers"),
    ("PushCubeRL", {"cube_position_range": ((0.0, 0.0, 0.0),)}, "takes two positions, low and high"),
    ("PushCubeRL", {"goal_position_range": ((0.0, 0.0), (0.0, 0.0))}, "positions of three numbers"),
    ("PickPlaceRL", {"action_scale": 0}, "action_scale must be > 0, got 0"),
    ("PickPlaceRL", {"goal_position": (0.1, 0.2, 0.3)}, "goal_position takes two numbers"),
    ("PickPlaceRL", {"cube_position": (-0.9, 0.0)}, "leaves the tool's workspace"),
    ("PickPlaceRL", {"cube_turn": 1}, r"cube_turn must be in \[0, 0.3\] rad, got 1"),
    ("InstructedPlaceRL", {"wordings": "test"}, "wordings must be 'train', .*'paraphrases', got 'test'"),
    ("InstructedPlaceRL", {"pairs": "test"}, "pairs must be 'train', 'held_out' or 'all', got 'test'"),
    ("InstructedPlaceRL", {"instruction": "wrong"}, "must be 'right' or 'shuffled', got 'wrong'"),
    ("InstructedPlaceRL", {"zone_offset": 0.1}, r"zone_offset must be in \[0, 0.04\] m, got 0.1"),
    ("InstructedPlaceRL", {"cube_turn": 1}, r"InstructedPlaceRL: cube_turn must be in \[0, 0.3\] rad, got 1"),
)
def test_a_wrong_option_is_refused_by_its_name(name: str, cfg: Mapping[str, Any], text: str) -> None:
    refused(lambda: resolve("env", name)(**cfg), match=text)
