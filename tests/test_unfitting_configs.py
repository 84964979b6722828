"""Configs of which each key is right, and which fit no environment, robot or task."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from test_config import ROOT, gym, make

from ejax.config import ConfigError
from ejax.distributions import action_spec
from ejax.training.build import build

CART_POLE = ROOT / "tests" / "gym_configs" / "cart_pole.json"


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return caught.value


def keys_of(error: ConfigError) -> list[Any]:
    return [key for key, _ in error.problems]


def embodied(gym_config: dict[str, Any], *overrides: Any, **sections: Any) -> Any:
    return make(
        *overrides, trainer={"num_envs": 8}, env={"id": "EmbodiedEnv", "cfg": {"gym_config": gym_config}}, **sections
    )


def cart_pole() -> dict[str, Any]:
    return json.loads(CART_POLE.read_text())


def test_observation_groups_are_looked_up_before_anything_is_built() -> None:
    error = refused(make, "policy.obs_groups={actor: [robot]}")
    assert keys_of(error) == ["policy.obs_groups.actor", "policy.obs_groups.critic"]
    assert "one array without parts" in str(error)
    gym_config = cart_pole()
    assert embodied(gym_config, "policy.obs_groups={actor: [robot.qpos, robot]}")
    text = str(refused(embodied, gym_config, "policy.obs_groups={actor: [robot.qpo]}"))
    assert "there is robot, robot.qf, robot.qpos, robot.qvel" in text
    assert "Did you mean 'robot.qpos'?" in text


def test_observation_groups_of_an_environment_that_must_be_built_are_looked_up_there() -> None:
    config = make("policy.obs_groups={actor: [x]}", "env=gymnax:CartPole-v1")
    assert keys_of(refused(build, config)) == ["policy.obs_groups.actor", "policy.obs_groups.critic"]


@pytest.mark.parametrize("place", ["':x'", "..a:b", "'os:'", "os:path", "builtins:int", "no_such_module:Name"])
@pytest.mark.parametrize("key", ["env.id", "algorithm.name"])
def test_a_place_with_no_such_code_is_refused_by_its_key(key: str, place: str) -> None:
    (told,) = keys_of(refused(make, f"{key}={place}"))
    assert told in (f"{key} (override)", "algorithm.cfg")


@pytest.mark.parametrize("limit", [4e18, -(2.0**40)])
def test_a_time_limit_that_no_counter_reaches_is_refused(limit: float) -> None:
    gym_config = {**cart_pole(), "max_episode_steps": limit}
    assert keys_of(refused(embodied, gym_config)) == ["env.cfg.gym_config.max_episode_steps"]


def test_squashed_actions_need_bounds() -> None:
    gym_config = cart_pole()
    gym_config["env"]["actions"] = {"velocity": {"func": "QvelTerm"}}
    assert embodied(gym_config)
    assert keys_of(refused(embodied, gym_config, "policy.squash_actions=true")) == ["policy.squash_actions (override)"]


def test_an_action_of_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one number"):
        action_spec(gymnasium.spaces.Box(-1.0, 1.0, (0,)))
    gym_config = cart_pole()
    gym_config["robot"]["control_parts"] = {"hand": []}
    gym_config["env"]["control_parts"] = ["hand"]
    assert "env.cfg.gym_config.robot.control_parts.hand" in keys_of(refused(embodied, gym_config))


@pytest.mark.parametrize(
    ("section", "value", "key"),
    [
        ("urdf_cfg", {"components": 5}, "robot.urdf_cfg.components"),
        ("solver_cfg", {"arm": {"tcp": [[1] * 4] * 3 + [[0, {}, 0, 1]]}}, "robot.solver_cfg.arm.tcp"),
        ("solver_cfg", {"arm": {"tcp": [[1] * 16]}}, "robot.solver_cfg.arm.tcp"),
        ("control_parts", {"arm": 3}, "robot.control_parts.arm"),
    ],
)
def test_a_robot_of_another_kind_is_refused_by_its_key(section: str, value: dict[str, Any], key: str) -> None:
    gym_config = cart_pole()
    gym_config["robot"][section] = value
    assert f"env.cfg.gym_config.{key}" in keys_of(refused(embodied, gym_config))


def test_num_envs_of_a_gym_config_does_not_go_unheard(tmp_path: Path) -> None:
    data = {"id": "CartPoleRL", "env": {"num_envs": 4}}
    assert not gym(tmp_path, data, num_envs=4).notices
    (notice,) = gym(tmp_path, data, num_envs=8).notices
    assert notice[:3] == ("gym.json:env.num_envs", "without effect", "no effect: trainer.num_envs is 8")


@pytest.mark.parametrize(
    ("task_cfg", "key"),
    [
        ({"env": {"id": "x"}}, "data.task_cfg.env.id"),
        ({"env": 3}, "data.task_cfg.env"),
        ({"env": {"reaching_weight": "x"}}, "data.task_cfg.env.reaching_weight"),
        ({"env": {"episode_length": 0}}, "data.task_cfg"),
        ({"noise": "x"}, "data.task_cfg.noise"),
        ({"noise": 2.0}, "data.task_cfg"),
        ({"image_size": [64]}, "data.task_cfg"),
    ],
)
def test_a_task_that_cannot_be_made_is_told_at_once(task_cfg: dict[str, Any], key: str) -> None:
    data = {"source": "engine", "task": "PushCubeExpert", "task_cfg": task_cfg}
    error = refused(make, trainer={}, env="PushCubeRL", algorithm={"name": "bc", "cfg": {}}, data=data)
    assert keys_of(error) == [key]
