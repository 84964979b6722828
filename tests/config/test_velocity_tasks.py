"""Gym configs of EmbodiChain's velocity tasks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_tables import cases, refused
from stick_robots import h1_2_sticks, microduck_sticks

from ejax.config import ConfigError, load_config
from ejax.config.embodichain.check import check, count_by_status
from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.robots import LeggedRobot, robot_file
from ejax.schema.frozen import thaw

H1_2 = velocity_task("h1_2").robot
MICRODUCK = velocity_task("microduck").robot
ANYMAL_C = velocity_task("anymal_c").robot
GO1 = velocity_task("go1").robot

AXES = ("x", "y", "z", "roll", "pitch", "yaw")
SIZES = (0.5, 0.5, 0.4, 0.52, 0.52, 0.78)
OBSERVATION = {"func": "velocity_locomotion_observation", "mode": "add"}
GYM: dict[str, Any] = {
    "physics": "default",
    "id": "UnitreeGo1FlatRL-v1",
    "max_episode_steps": 1000,
    "num_envs": 8,
    "physics_config": {"cache_material": True, "gravity": [0.0, 0.0, -9.81], "physics_dt": 0.005},
    "env": {
        "sim_steps_per_control": 4,
        "control_parts": ["locomotion"],
        "events": {
            "push_robot": {
                "func": "push_articulation_by_setting_velocity",
                "mode": "interval",
                "interval_step": 1,
                "is_global": False,
                "params": {
                    "entity_cfg": {"uid": "robot"},
                    "interval_range_s": [1.0, 3.0],
                    "velocity_range": {axis: [-size, size] for axis, size in zip(AXES, SIZES, strict=True)},
                },
            }
        },
        "observations": {
            "policy": {**OBSERVATION, "name": "policy", "params": {"privileged": False, "enable_corruption": True}},
            "critic": {**OBSERVATION, "name": "critic", "params": {"privileged": True, "enable_corruption": False}},
        },
        "rewards": {"total": {"func": "velocity_locomotion_total_reward", "mode": "add", "weight": 1.0, "params": {}}},
        "actions": {"joint_position": {"contract": "joint_position.default_offset@1", "params": {}}},
        "extensions": {},
    },
    "robot": {
        "uid": "robot",
        "fpath": "UnitreeGo1Locomotion/go1.usda",
        "init_pos": [0.0, 0.0, 0.278],
        "init_qpos": [0.0] * 12,
        "control_parts": {"locomotion": list(GO1.joints)},
        "root_props": {"fixed_base": False, "self_collision_enabled": False, "min_position_iters": 4},
    },
    "sensor": [{"uid": "locomotion_contacts", "sensor_type": "ContactSensor", "max_contacts_per_env": 96}],
    "rigid_object": [],
}
"""In the form of ``go1_flat/env.yaml`` of EmbodiChain 0.3.2, which its package has and this one does not."""
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "elu"}}
TRAIN = {
    "trainer": {"gym_config": "env.yaml", "num_envs": 4, "iterations": 1, "buffer_size": 8, "device": "cpu"},
    "policy": {
        "name": "actor_critic",
        "obs_groups": {"actor": ["policy"], "critic": ["critic"]},
        "actor": NETWORK,
        "critic": NETWORK,
    },
    "algorithm": {"name": "ppo", "cfg": {"batch_size": 16, "num_mini_batches": 2}},
}


def written(folder: Path, gym: dict[str, Any]) -> Path:
    (folder / "env.yaml").write_text(yaml.safe_dump(gym))
    (folder / "ppo.yaml").write_text(yaml.safe_dump(TRAIN))
    return folder / "ppo.yaml"


def installed(robot: LeggedRobot) -> None:
    """Skips without the robot's links."""
    try:
        robot_file(str(robot.source))
    except ModuleNotFoundError:
        pytest.skip(f"the package with the links of {robot.name} is not installed")


@pytest.fixture
def links() -> None:
    installed(GO1)


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    gym = copy.deepcopy(GYM)
    node: Any = gym
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return gym


def test_a_gym_config_becomes_arguments_of_the_task(tmp_path: Path, links: None) -> None:
    config = load_config(written(tmp_path, GYM))
    assert config.env.id == "VelocityRL"
    push = {"interval": [1.0, 3.0], **{axis: [-size, size] for axis, size in zip(AXES, SIZES, strict=True)}}
    expected = {"robot": "go1", "max_episode_steps": 1000, "sim_steps_per_control": 4, "push": push}
    assert thaw(config.env.cfg) == expected


def test_every_key_is_used_or_has_a_reason(tmp_path: Path, links: None) -> None:
    notes = check(written(tmp_path, GYM))
    counts = count_by_status(notes)
    assert counts["unsupported"] == 0
    assert all(note.text for note in notes if note.status == "without effect")
    assert sum(note.key.startswith("env.yaml:") for note in notes) > 40


def test_without_noise_and_pushes_there_are_none(tmp_path: Path, links: None) -> None:
    gym = changed("env", "events", value={})
    gym["env"]["observations"]["policy"]["params"]["enable_corruption"] = False
    cfg = load_config(written(tmp_path, gym)).env.cfg
    assert cfg["push"] is None
    assert set(cfg["noise"].values()) == {0.0}


@cases(
    "path value text",
    (("physics_config", "physics_dt"), 0.01, "the velocity task of go1 has 0.005"),
    (("physics_config", "gravity"), [0.0, 0.0, 0.0], "the velocity task of go1 has (0.0, 0.0, -9.81)"),
    (("physics_config", "num_substeps"), 2, "the velocity task of go1 has 1"),
    (("rigid_object",), [{"uid": "cube"}], "nothing else"),
    (("robot", "init_pos"), [0.0, 0.0, 1.0], "episodes start at height 0.278"),
    (("robot", "root_props", "fixed_base"), True, "the robot walks"),
    (("robot", "root_props", "self_collision_enabled"), True, "must be false for go1"),
    (("robot", "control_parts", "locomotion"), ["FR_hip_joint"], "in this order"),
    (("sensor", 0, "sensor_type"), "Camera", "a ContactSensor, nothing else"),
    (("env", "control_parts"), ["arm"], "acts on all joints"),
    (("env", "extensions"), {"speed": 1.0}, "the task's class reads none"),
    (("env", "events", "push_robot", "func"), "shove", "one push_articulation_by_setting_velocity"),
    (("env", "events", "push_robot", "interval_step"), 5, "its own timer"),
    (("env", "events", "push_robot", "params", "interval_range_s"), [1.0], "must be a list of 2 numbers"),
    (("env", "actions", "joint_position", "contract"), "joint_effort@1", "act by joint_position.default_offset@1"),
    (("env", "actions", "joint_position", "params"), {"clip": 2.0}, "clipped to ±1"),
    (("env", "rewards", "total", "weight"), 2.0, "must be 1"),
    (("env", "rewards", "total", "func"), "upright", "must be velocity_locomotion_total_reward"),
    (("env", "observations", "policy", "name"), "actor", "is called policy here"),
    (("env", "observations", "policy", "func"), "pixels", "must be velocity_locomotion_observation"),
    (("max_episode_steps",), "long", "must be an integer"),
    (("speed",), 1.0, "unknown key"),
    ids=str,
)
def test_what_it_would_not_do_is_refused(tmp_path: Path, path: tuple[str | int, ...], value: Any, text: str) -> None:
    error = refused(lambda: load_config(written(tmp_path, changed(*path, value=value))))
    assert text in str(error)
    assert str(path[0]) in str(error)


def gym_of(robot: LeggedRobot, env_id: str, **drives: Any) -> dict[str, Any]:
    gym = changed("id", value=env_id)
    gym["robot"]["init_pos"] = [0.0, 0.0, robot.height]
    gym["robot"]["control_parts"]["locomotion"] = list(robot.joints)
    gym["robot"]["root_props"]["self_collision_enabled"] = bool(robot.self_contacts)
    if drives:
        gym["robot"]["joint_drive_props"] = {"drive_type": "force", "max_velocity": 7.5, **drives}
    return gym


def test_a_robot_that_no_package_has_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"robot.fpath: .*no known package has a model of h1_2: set model to the path"
    ):
        load_config(written(tmp_path, gym_of(H1_2, "UnitreeH1_2FlatRL-v1")))


def test_a_users_file_stands_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "h1_2.xml").write_text(h1_2_sticks())
    file = written(tmp_path, gym_of(H1_2, "UnitreeH1_2FlatRL-v1"))
    cfg = load_config(file, [f"env.cfg.model={tmp_path / 'h1_2.xml'}"]).env.cfg
    assert (cfg["robot"], cfg["sim_steps_per_control"]) == ("h1_2", 4)


def test_microduck_has_shorter_physics_steps(tmp_path: Path) -> None:
    (tmp_path / "duck.xml").write_text(microduck_sticks())
    gym = gym_of(
        MICRODUCK, "MicroDuckFlatRL-v1", stiffness={".*": 0.55}, damping={".*": 0.053}, max_effort={".*": 0.96}
    )
    gym["physics_config"]["physics_dt"] = 0.002
    gym["env"]["sim_steps_per_control"] = 10
    model = f"env.cfg.model={tmp_path / 'duck.xml'}"
    assert load_config(written(tmp_path, gym), [model]).env.cfg["sim_steps_per_control"] == 10
    gym["physics_config"]["physics_dt"] = 0.005
    gym["robot"]["joint_drive_props"]["stiffness"] = {".*": 0.5}
    error = refused(lambda: load_config(written(tmp_path, gym), [model]))
    assert "the velocity task of microduck has 0.002" in str(error)
    assert "got {'.*': 0.5}; the drives of microduck have 0.55" in str(error)


def test_anymal_c_has_no_noise_and_no_pushes(tmp_path: Path) -> None:
    gym = gym_of(ANYMAL_C, "ANYmalCFlatRL-v1", stiffness=40.0, damping=5.0, max_effort=80.0)
    gym["env"]["events"] = {}
    gym["robot"]["qpos_limits"] = {"LF_HAA": [-0.72, 0.49]}
    installed(ANYMAL_C)
    file = written(tmp_path, gym)
    assert thaw(load_config(file).env.cfg) == {
        "robot": "anymal_c",
        "max_episode_steps": 1000,
        "sim_steps_per_control": 4,
        "push": None,
    }
    assert count_by_status(check(file))["unsupported"] == 0
