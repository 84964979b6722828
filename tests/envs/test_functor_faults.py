"""A functor that does not fit is refused by its key when the config is read, with what is wrong and what to do."""

import copy
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejax.config import ConfigError
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.terms.registry import TERMS

CONFIG = json.loads((Path(__file__).parents[1] / "gym_configs" / "push_cube.json").read_text())
CUBE = {"entity_cfg": {"uid": "cube"}}
VELOCITY = {"entity_cfg": {"uid": "Manipulator"}, "velocity_range": [-1.0, 1.0]}


def _branches(world: Any, obs: Any) -> Any:
    return jnp.ones(3) if world.qpos[0] > 0.0 else jnp.zeros(3)


def _asserts(world: Any, obs: Any) -> Any:
    raise AssertionError("three joints")


def _doubles(world: Any, data: Any) -> Any:
    return 2.0 * data


def _as_text(world: Any, obs: Any, flag: "bool" = False) -> Any:
    return obs if flag else jnp.zeros(3)


def _reward(value: Any) -> Any:
    return lambda world, obs, action, info: value


OWN: dict[str, dict[str, Any]] = {
    "observations": {
        "branches": _branches,
        "asserts": _asserts,
        "doubles": _doubles,
        "as_text": _as_text,
        "nothing": lambda world, obs: None,
        "too_few": lambda world: jnp.zeros(3),
        "number": 3,
    },
    "rewards": {
        "vector": _reward(jnp.zeros(3)),
        "text": _reward("a"),
        "nothing": _reward(None),
        "numpy": lambda world, obs, action, info: np.linalg.norm(np.asarray(world.qpos)),
    },
    "actions": {
        "number": lambda scene, active: 3,
        "fails": lambda scene, active: 1 / 0,
    },
    "events": {
        "nothing": lambda world, key: None,
        "array": lambda world, key: world.qpos,
        "shape": lambda world, key: world._with(effort=jnp.zeros(3)),
    },
}


@pytest.mark.parametrize(
    ("section", "entry", "key", "words"),
    [
        ("observations", {"func": "get_rigid_object_pose", "params": CUBE}, "mode", "'modify'.*default.*takes add"),
        ("observations", {"func": "get_robot_eef_pose", "mode": "modify"}, "mode", "get_robot_eef_pose takes add"),
        (
            "observations",
            {"func": "normalize_robot_joint_data", "mode": "add", "params": {"joint_ids": [0]}},
            "mode",
            "got 'add'.*takes modify",
        ),
        ("observations", {"func": "doubles", "mode": "add"}, "mode", "doubles takes modify"),
        ("events", {"func": "push_joints_by_setting_velocity", "params": VELOCITY}, "mode", "takes interval"),
        (
            "observations",
            {"func": "get_rigid_object_pose", "mode": "add", "params": {**CUBE, "to_matrix": "no"}},
            "params.to_matrix",
            "must be true or false",
        ),
        (
            "observations",
            {"func": "target_position", "mode": "add", "params": {"target_pose_key": "gaol"}},
            "params.target_pose_key",
            "no target pose 'gaol'.*goal_pose",
        ),
        (
            "observations",
            {"func": "as_text", "mode": "add", "params": {"flag": "false"}},
            "params.flag",
            "must be true or false",
        ),
        ("observations", {"func": "branches", "mode": "add"}, "", "line .*uses Python's if"),
        ("observations", {"func": "asserts", "mode": "add"}, "", "line .*three joints"),
        ("observations", {"func": "nothing", "mode": "add"}, "", "None is not"),
        ("observations", {"func": "too_few", "mode": "add"}, "", "takes 1 positional argument"),
        ("observations", {"func": "number", "mode": "add"}, "func", "number is 3, not a function"),
        ("actions", {"func": "number"}, "", "gave 3; must give an ActionTerm"),
        ("actions", {"func": "fails"}, "", "line .*ZeroDivisionError"),
        ("rewards", {"func": "vector"}, "", r"must be a scalar; mine has shape \(3,\)"),
        ("rewards", {"func": "text"}, "", "float"),
        ("rewards", {"func": "nothing"}, "", "None is not"),
        ("rewards", {"func": "numpy"}, "", "line .*use jax.numpy"),
        *(
            ("events", {"func": func, "mode": mode}, "", words)
            for mode in ("reset", "interval")
            for func, words in (
                ("nothing", "returned NoneType"),
                ("array", "must return the world"),
                ("shape", "returned SceneWorld; .*the shapes of"),
            )
        ),
    ],
)
def test_it_is_refused_by_its_key(
    section: Any, entry: dict[str, Any], key: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, own in OWN.items():
        monkeypatch.setitem(TERMS, kind, {**TERMS[kind], **own})  # type: ignore[misc, index]
    config = copy.deepcopy(CONFIG)
    name = {"name": "robot/qvel" if entry.get("mode", "modify") == "modify" else "mine"}
    config["env"][section]["mine"] = {**entry, **(name if section == "observations" else {})}
    with pytest.raises(ConfigError, match=words) as caught:
        EmbodiedEnv(config, physics="mujoco")
    assert [problem.key for problem in caught.value.problems] == [f"env.{section}.mine" + (f".{key}" if key else "")]


def test_a_functor_of_ones_own_declares_its_mode_by_its_second_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "observations", {**TERMS["observations"], "doubles": _doubles})
    config = copy.deepcopy(CONFIG)
    config["env"]["observations"]["mine"] = {"func": "doubles", "name": "robot/qvel"}
    assert EmbodiedEnv(config, physics="mujoco").of("observations")[-1].mode == "modify"
