"""Cameras of a gym config: where they look, and what the observation shows."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from numpy.typing import NDArray

from ejax.config import load_config
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.mujoco.scenery import as_view, place_camera
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.training.policies import make_policy
from ejax.types import CameraView

KEY = jax.random.key(0)
FOLDER = Path(__file__).parents[1] / "gym_configs"
CART_POLE = json.loads((FOLDER / "cart_pole.json").read_text())
PUSH_CUBE = json.loads((FOLDER / "push_cube.json").read_text())
EYE = {"eye": [2.6, -0.7, 1.3], "target": [0.0, 0.0, 0.7]}
CAMERA = {"sensor_type": "Camera", "uid": "cam", "width": 24, "height": 16, "intrinsics": [20.0, 24.0, 10.0, 9.0]}


def seeing(config: dict[str, Any], *cameras: dict[str, Any], **observations: Any) -> dict[str, Any]:
    config = {**copy.deepcopy(config), "sensor": list(cameras)}
    config["env"]["observations"] |= observations
    return config


def camera(extrinsics: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {**CAMERA, "extrinsics": EYE if extrinsics is None else extrinsics, **fields}


def functor(name: str, uid: str = "cam", **params: Any) -> dict[str, Any]:
    return {"func": name, "mode": "add", "name": "seen", "params": {"entity_cfg": {"uid": uid}, **params}}


def pose_of(extrinsics: dict[str, Any], config: dict[str, Any] = CART_POLE, **fields: Any) -> NDArray[np.float32]:
    """[4, 4], in the arena."""
    env = EmbodiedEnv(seeing(config, camera(extrinsics, **fields)), physics="mujoco")
    return np.asarray(env.world(env.start(jax.random.key(0))).camera_pose("cam"))


def row(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def near(one: Any, other: Any) -> float:
    """Compute the part of the pixels that are the same, below MuJoCo's haze on the horizon."""
    difference = np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max(axis=-1)
    return float((difference[5:] < 25).mean())


def far(one: Any, other: Any) -> float:
    """Mean difference, levels."""
    return float(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).mean())


@pytest.mark.slow_cases("raycast")
@pytest.mark.parametrize("renderer", ["mujoco", "raycast"])
def test_each_row_of_the_observation_has_its_own_picture(renderer: Any) -> None:
    env = EmbodiedEnv(seeing(CART_POLE, camera()), physics="mujoco", renderer=renderer)
    space = env.observation_space["sensor"]["cam"]["color"]
    assert space == gymnasium.spaces.Box(0, 255, (16, 24, 3), np.uint8)
    state, _ = jax.vmap(env.reset)(jax.random.split(KEY, 2))
    apart = replace(state, physics=replace(state.physics, qpos=jnp.array([[-0.5, 0.3], [0.5, -0.3]])))
    state, timestep = jax.jit(jax.vmap(env.step))(apart, jnp.zeros((2, 2)), jax.random.split(KEY, 2))
    seen = env.spec.scene.camera("cam")
    theirs = [env.render(row(state, i), 24, 16, seen.view(seen.lens())) for i in range(2)]
    mine = timestep.obs["sensor"]["cam"]["color"]
    assert min(near(mine[0], theirs[0]), near(mine[1], theirs[1])) > (0.99 if renderer == "mujoco" else 0.9)
    assert min(far(mine[0], theirs[1]), far(mine[1], theirs[0])) > max(far(mine[0], theirs[0]), far(mine[1], theirs[1]))


@pytest.mark.slow
@pytest.mark.parametrize("renderer", ["mujoco", "raycast"])
def test_a_camera_that_goes_with_the_arm_sees_what_one_placed_there_does(renderer: Any) -> None:
    at = {"parent": "Manipulator/ee_link", "pos": [0.0, 0.3, 0.1], "quat": [0.0, 2.0, 0.0, 0.0]}
    env = EmbodiedEnv(seeing(PUSH_CUBE, camera(at)), physics="mujoco", renderer=renderer)
    states, obs = jax.jit(jax.vmap(env.reset))(jax.random.split(KEY, 2))
    for i in range(2):
        world = env.world(row(states, i))
        pose, flange = np.asarray(world.camera_pose("cam"), np.float64), np.asarray(world.body_pose("flange"))
        np.testing.assert_allclose(pose[:3, 3], flange[:3] @ [0.0, 0.3, 0.1, 1.0], atol=1e-6)
        np.testing.assert_allclose(pose[:3, :2], flange[:3, :2] * [-1.0, 1.0], atol=1e-6)  # half a turn about y
        fovx, fovy = (np.degrees(2.0 * np.arctan(half)) for half in (12 / 20, 8 / 24))
        view = CameraView(
            tuple(pose[:3, 3]),
            tuple(pose[:3, 3] - pose[:3, 2]),
            fovy,
            False,
            tuple(pose[:3, 1]),
            fovx,
            (10 / 24, 9 / 16),
        )
        theirs = env.render(row(states, i), 24, 16, view)
        assert near(obs["sensor"]["cam"]["color"][i], theirs) > (0.99 if renderer == "mujoco" else 0.85)


@pytest.mark.slow
def test_a_config_with_a_camera_observes_the_same_numbers() -> None:
    _, plain = EmbodiedEnv(CART_POLE, physics="mujoco").reset(KEY)
    _, seen = EmbodiedEnv(seeing(CART_POLE, camera()), physics="mujoco", renderer="raycast").reset(KEY)
    del seen["sensor"]
    chex.assert_trees_all_equal(plain, seen)


@cases(
    "extrinsics rotation position",
    ({"eye": [1, 2, 3], "target": [2, 2, 3]}, [[0, 0, -1], [-1, 0, 0], [0, 1, 0]], [1, 2, 3]),
    ({"pos": [1, 2, 3], "quat": [-0.5, 0.5, -0.5, 0.5]}, [[0, 0, -1], [-1, 0, 0], [0, 1, 0]], [1, 2, 3]),
    ({"eye": [0, 0, 2], "target": [0, 0, 0]}, [[-1, 0, 0], [0, -1, 0], [0, 0, 1]], [0, 0, 2]),
    ({"eye": [0, -3, 0], "target": [0, 1, 0], "up": [0, 1, 0]}, [[0, -1, 0], [0, 0, -1], [1, 0, 0]], [0, -3, 0]),
    (
        {"eye": [-0.5, -0.9, 0.88], "target": [-0.5, 0.1, 0.2]},
        [[1, 0, 0], [0, 0.56231, -0.82693], [0, 0.82693, 0.56231]],
        [-0.5, -0.9, 0.88],
    ),
    ids=["eye", "the same by pos and quat", "straight down", "along up", "oblique"],
)
def test_a_camera_stands_where_embodichain_puts_it(extrinsics: dict, rotation: list, position: list) -> None:
    """Rotations: ``look_at_to_pose`` and ``matrix_from_quat`` of EmbodiChain 0.3.2, turned to OpenGL's axes."""
    pose = pose_of(extrinsics)
    np.testing.assert_allclose(pose[:3, :3], rotation, atol=1e-5)
    np.testing.assert_allclose(pose[:3, 3], position, atol=1e-6)


def test_a_pinhole_of_known_numbers_is_the_view_that_it_was_made_of() -> None:
    view = CameraView((2.6, -0.7, 1.3), (0.0, 0.2, 0.7), 40.0, False, (0.1, 0.0, 1.0), 55.0, (0.4, 0.6))
    env = EmbodiedEnv(CART_POLE, physics="mujoco")
    made = as_view(place_camera(env.spec.scene.xml, view, 1.5))
    again = place_camera(env.spec.scene.xml, made, 1.5)
    np.testing.assert_allclose(again.frame, place_camera(env.spec.scene.xml, view, 1.5).frame, atol=1e-6)
    np.testing.assert_allclose(made.eye, view.eye, atol=1e-6)


@pytest.mark.slow
def test_a_stereo_camera_has_two_pictures_of_lenses_apart() -> None:
    stereo = camera(sensor_type="StereoCamera", left_to_right_pos=[0.3, 0.0, 0.0], intrinsics_right=[30, 30, 12, 8])
    env = EmbodiedEnv(seeing(CART_POLE, stereo), physics="mujoco", renderer="raycast")
    state, obs = env.reset(KEY)
    pictures, world = obs["sensor"]["cam"], env.world(state)
    assert sorted(pictures) == ["color", "color_right"] and np.any(pictures["color"] != pictures["color_right"])
    left, right = (world.camera_pose("cam", right=side) for side in (False, True))
    np.testing.assert_allclose(left.T[0, :3] @ (right[:3, 3] - left[:3, 3]), 0.3, atol=1e-6)
    np.testing.assert_allclose((left + right)[:3, 3] / 2.0, EYE["eye"], atol=1e-6)
    assert env.spec.scene.camera("cam").lens(right=True).intrinsics == (30.0, 30.0, 12.0, 8.0)


def test_functors_tell_the_lens_and_the_place_in_the_robots_frame() -> None:
    config = seeing(CART_POLE, camera(enable_color=False), lens=functor("get_sensor_intrinsics"))
    config["robot"] |= {"init_pos": [1.0, 0.0, 0.0], "init_rot": [0.0, 0.0, 90.0]}
    _, obs = EmbodiedEnv(config, physics="mujoco").reset(KEY)
    np.testing.assert_array_equal(obs["seen"], [20, 0, 10, 0, 24, 9, 0, 0, 1])
    assert "sensor" not in obs
    config["env"]["observations"]["lens"] = functor("get_sensor_pose_in_robot_frame")
    _, obs = EmbodiedEnv(config, physics="mujoco").reset(KEY)
    np.testing.assert_allclose(obs["seen"].reshape(4, 4)[:3, 3], [-0.7, -1.6, 1.3], atol=1e-6)


def test_without_sensors_there_are_no_pictures_and_no_functors_that_read_them() -> None:
    config = seeing(CART_POLE, camera(), lens=functor("get_sensor_intrinsics"))
    env = EmbodiedEnv(config | {"enable_sensor": False}, physics="mujoco")
    _, obs = env.reset(KEY)
    assert sorted(obs) == ["robot"]
    status = {note.key: (note.status, note.text) for note in env.spec.notes}
    said = ("without effect", "no effect: enable_sensor is false")
    assert status["env.observations.lens"] == status["sensor"] == said


def refusing(*sensors: dict[str, Any], **observations: dict[str, Any]) -> dict[str, Any]:
    return seeing(CART_POLE, *sensors, **observations)


@refusals(
    (refusing({"sensor_type": "Lidar", "uid": "cam"}), "sensor[0].sensor_type", "allowed: Camera, StereoCamera"),
    (refusing({"sensor_type": "ContactSensor", "uid": "cam"}), "sensor[0].sensor_type", "no observation of contacts"),
    (refusing({**CAMERA, "uid": None}), "sensor[0].uid", "got None; must be a name"),
    (refusing({**CAMERA, "width": 0}), "sensor[0].width", "got 0; must be an integer >= 1"),
    (refusing({**CAMERA, "enable_depth": True}), "sensor[0].enable_depth", "only colour pictures are supported"),
    (refusing({**CAMERA, "intrinsics": [0, 1, 2, 3]}), "sensor[0].intrinsics", "fx and fy must be > 0"),
    (refusing({**CAMERA, "zoom": 2}), "sensor[0].zoom", "unknown key"),
    (refusing({**CAMERA, "intrinsics_right": [1, 1, 1, 1]}), "sensor[0].intrinsics_right", "unknown key"),
    (refusing(camera({"eye": [1, 2, 3]})), "sensor[0].extrinsics.target", "is missing: eye needs a point"),
    (refusing(camera({"eye": [1, 2, 3], "target": [1, 2, 3]})), "sensor[0].extrinsics", "eye and target are both"),
    (refusing(camera({"target": [1, 2, 3]})), "sensor[0].extrinsics.target", "is read only together with eye"),
    (refusing(camera({"quat": [0, 0, 0, 0]})), "sensor[0].extrinsics.quat", "must be a rotation"),
    (refusing(camera({"parent": "slider"})), "sensor[0].extrinsics.parent", "the robot has no link 'slider'"),
    (refusing(camera(), camera()), "sensor", "two are called 'cam'"),
    (refusing(camera(), seen=functor("get_sensor_intrinsics", "can")), "env.observations.seen", "Did you mean 'cam'"),
    (refusing(camera(), seen=functor("get_rigid_object_pose")), "env.observations.seen", "no 'cam' in the scene"),
    (refusing(camera(), seen=functor("compute_semantic_mask")), "env.observations.seen", "see colours, no masks"),
)
def test_cameras_and_functors_that_cannot_be_had_are_refused(given: dict[str, Any], key: str, word: str) -> None:
    refused(EmbodiedEnv, given, key=key, word=word)


def train_file(folder: Path, policy: dict[str, Any]) -> Path:
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [4]}}
    (folder / "gym.json").write_text(json.dumps(seeing(CART_POLE, camera())))
    trainer = {"gym_config": "gym.json", "num_envs": 2, "buffer_size": 32, "iterations": 1, "device": "cpu"}
    path = folder / "train.json"
    sections = {"trainer": trainer, "policy": {"actor": network, **policy}, "algorithm": {"name": "ppo"}}
    path.write_text(json.dumps(sections | {"env": {"cfg": {"renderer": "raycast"}}}))
    return path


@pytest.mark.slow
def test_a_policy_of_vectors_is_told_to_leave_pictures_out(tmp_path: Path) -> None:
    plain = {"name": "actor_critic", "critic": {"type": "mlp", "network_cfg": {"hidden_sizes": [4]}}}
    text = "actor_critic reads vectors, and sensor.cam.color is a"
    refused(load_config, train_file(tmp_path, plain), key="policy.obs_groups.actor", word=text)
    groups = {"obs_groups": {"actor": ["robot"]}}
    assert load_config(train_file(tmp_path, plain | groups)).policy.obs_groups.critic == ("robot",)
    file = train_file(tmp_path, plain | {"obs_groups": {"actor": ["robot"], "critic": ["robot", "sensor"]}})
    refused(load_config, file, key="policy.obs_groups.critic", word="actor_critic reads vectors")


@pytest.mark.slow
def test_the_vision_policy_sees_a_camera_by_its_path(tmp_path: Path) -> None:
    config = load_config(train_file(tmp_path, {"name": "vision", "cfg": {"images": ["sensor.cam.color"]}}))
    env = EmbodiedEnv(**config.env.cfg)
    policy = make_policy(config.policy, env)
    _, obs = env.reset(KEY)
    params = jax.eval_shape(policy.init, KEY, obs)["params"]
    assert params["encoder_sensor_cam_color"]["conv_0"]["linear_0"]["kernel"].shape == (4 * 4 * 3, 16)
    assert params["actor"]["linear_0"]["kernel"].shape[0] == 64 + 6


@pytest.mark.parametrize("inside", [True, False], ids=["env.events", "trainer.events"])
def test_sizes_that_pictures_would_not_show_are_refused(inside: bool) -> None:
    params = {"entity_cfg": {"uid": "cube"}, "scale_factor_range": [0.8, 1.2]}
    event = {"size": {"func": "randomize_rigid_object_scale", "params": params}}
    config = seeing(PUSH_CUBE, camera())
    if inside:
        config["env"]["events"] |= event
        refused(EmbodiedEnv, config, key="env.events.size", word="pictures show the sizes of the config")
    else:
        refused(RandomizedEnv, EmbodiedEnv(config), event, word="pictures show the sizes of the model")


@pytest.mark.slow
def test_what_changes_looks_is_named_with_where_it_is() -> None:
    config = seeing(CART_POLE, camera())
    config["env"]["events"] = {"light": {"func": "randomize_light", "params": {}}}
    refused(EmbodiedEnv, config, word="'randomize_light': what pictures look like is randomized by env RenderedEnv's")
