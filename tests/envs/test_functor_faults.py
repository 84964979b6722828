"""A functor that does not fit is refused by its key when the config is read, with what is wrong and what to do."""

import copy
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refusals, refused

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


FUNCTORS: dict[str, dict[str, Any]] = {
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
    "actions": {"number": lambda scene, active: 3, "fails": lambda scene, active: 1 / 0},
    "events": {
        "nothing": lambda world, key: None,
        "array": lambda world, key: world.qpos,
        "shape": lambda world, key: world._with(effort=jnp.zeros(3)),
    },
}


def seen(func: str, mode: str = "add", **params: Any) -> tuple[str, dict[str, Any]]:
    name = "robot/qvel" if mode == "modify" else "mine"
    return "observations", {"func": func, "mode": mode, "name": name, "params": params}


@refusals(
    (("observations", {"func": "get_rigid_object_pose", "params": CUBE, "name": "robot/qvel"}), "mode", "takes add"),
    (seen("get_robot_eef_pose", "modify"), "mode", "get_robot_eef_pose takes add"),
    (seen("normalize_robot_joint_data", joint_ids=[0]), "mode", "takes modify"),
    (seen("doubles"), "mode", "doubles takes modify"),
    (seen("get_rigid_object_pose", **CUBE, to_matrix="no"), "params.to_matrix", "must be true or false"),
    (seen("target_position", target_pose_key="gaol"), "params.target_pose_key", "no target pose 'gaol'"),
    (seen("as_text", flag="false"), "params.flag", "must be true or false"),
    (seen("branches"), "", "uses Python's if"),
    (seen("asserts"), "", "three joints"),
    (seen("nothing"), "", "None is not"),
    (seen("too_few"), "", "takes 1 positional argument"),
    (seen("number"), "func", "number is 3, not a function"),
    (("actions", {"func": "number"}), "", "gave 3; must give an ActionTerm"),
    (("actions", {"func": "fails"}), "", "ZeroDivisionError"),
    (("rewards", {"func": "vector"}), "", "must be a scalar"),
    (("rewards", {"func": "text"}), "", "float"),
    (("rewards", {"func": "nothing"}), "", "None is not"),
    (("rewards", {"func": "numpy"}), "", "use jax.numpy"),
    (("events", {"func": "push_joints_by_setting_velocity", "params": VELOCITY}), "mode", "takes interval"),
    *(
        (("events", {"func": func, "mode": mode}), "", word)
        for mode in ("reset", "interval")
        for func, word in (("nothing", "NoneType"), ("array", "must return the world"), ("shape", "the shapes of"))
    ),
)
def test_it_is_refused_by_its_key(given: tuple, key: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, functors in FUNCTORS.items():
        monkeypatch.setitem(TERMS, kind, {**TERMS[kind], **functors})  # type: ignore[misc, index]
    section, entry = given
    config = copy.deepcopy(CONFIG)
    config["env"][section]["mine"] = entry
    error = refused(EmbodiedEnv, config, word=word)
    assert [problem.key for problem in error.problems] == [f"env.{section}.mine" + (f".{key}" if key else "")]


def test_a_custom_functor_declares_its_mode_by_its_second_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "observations", {**TERMS["observations"], "doubles": _doubles})
    config = copy.deepcopy(CONFIG)
    config["env"]["observations"]["mine"] = {"func": "doubles", "name": "robot/qvel"}
    assert EmbodiedEnv(config, physics="mujoco").of("observations")[-1].mode == "modify"
