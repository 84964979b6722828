"""RenderedEnv drawn in JAX: what its observations hold, and how looks differ between episodes."""

import json
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refusals, refused

from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.rendered import RenderedEnv, WristCamera, draw_state, draw_wrist
from ejax.experts.push_cube import make_task
from ejax.rollout import reset, step
from ejax.types import CameraView

SIZE = {"width": 24, "height": 16}
PLACED = {"camera_eye": (2.6, -0.7, 1.3), "camera_target": (0.0, 0.0, 0.7), "camera_fovy": 40.0}
GYM_CONFIG = Path(__file__).parents[1] / "gym_configs" / "cart_pole.json"


def entry(func: str, uid: str | None = None, **params: Any) -> dict[str, Any]:
    named = {} if uid is None else {"entity_cfg": {"uid": uid}}
    return {"func": func, "mode": "reset", "params": {**named, **params}}


LOOKS = {
    "camera": entry("randomize_camera_extrinsics", eye_range=[[-0.2] * 3, [0.2] * 3]),
    "lens": entry("randomize_camera_intrinsics", focal_x_range=[-2, 2], cy_range=[-1, 1]),
    "key": entry("randomize_light", "key", color_range=[[0.2] * 3, [0.8] * 3], direction_range=[[-0.3] * 3, [0.3] * 3]),
    "glow": entry("randomize_emission_light", intensity_range=[0.5, 1.5]),
    "floor": entry("randomize_visual_material", "floor", base_color_range=[[0.3] * 3, [1.0] * 3]),
}


@pytest.mark.slow
def test_a_picture_drawn_in_jax_is_that_of_the_state_and_calls_nobody_back() -> None:
    env = RenderedEnv(CartPoleRL(physics="mujoco"), renderer="raycast", **SIZE, **PLACED)
    assert "callback" not in str(jax.make_jaxpr(env.reset)(jax.random.key(0)))
    envs = reset(env, jax.random.key(0), 2)
    after, timestep = jax.jit(step, static_argnums=0)(env, envs, jnp.full((2, 2), 2.0), jax.random.key(1))
    assert after.obs["image"].shape == (2, 16, 24, 3) and after.obs["image"].dtype == jnp.uint8
    np.testing.assert_array_equal(timestep.final_obs["image"], after.obs["image"])
    for envs_ in (envs, after):
        one = jax.tree.map(lambda x: np.asarray(x[1]), envs_.state)
        theirs = env.render(one, 24, 16, CameraView(*PLACED.values(), effects=False)).astype(int)  # type: ignore[call-arg]
        near = np.abs(np.asarray(envs_.obs["image"][1]).astype(int) - theirs).max(axis=-1) < 25
        assert near[4:].mean() > 0.9  # above is MuJoCo's haze on the horizon


@pytest.mark.slow
def test_demonstrations_and_training_see_the_same_picture() -> None:
    task = make_task(num_envs=2, image_size=(16, 24), renderer="raycast")
    state, _ = task.start(3)
    camera = task._camera
    assert camera is not None
    env = RenderedEnv(
        PushCubeRL(physics="mujoco"),
        renderer="raycast",
        **SIZE,
        camera_eye=camera.eye,
        camera_target=camera.target,
        camera_fovy=camera.fovy,
    )
    trained = jax.jit(jax.vmap(lambda state: env._pictures(state)["image"]))(state)
    shown = np.asarray(task._drawn["obs/image"](state)).astype(int)
    alone = draw_state(task.env, jax.tree.map(operator.itemgetter(1), state), 24, 16, camera)
    for other in (np.asarray(trained) - shown, np.asarray(alone) - shown[1]):
        assert np.abs(other).max() <= 1  # another program may round otherwise
    with pytest.raises(ValueError, match="renderer must be 'mujoco' or 'raycast', got 'warp'"):
        make_task(num_envs=1, renderer="warp")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_camera_at_the_tool_sees_what_is_below_it_wherever_it_is() -> None:
    options = {"renderer": "raycast", "wrist": {"width": 12, "height": 12}}
    env = RenderedEnv(InstructedPlaceRL(physics="mujoco"), **SIZE, **PLACED, **options)
    state, obs = env.reset(jax.random.key(0))
    assert obs["wrist"].shape == env.observation_space["wrist"].shape == (12, 12, 3)
    turned = replace(state, physics=replace(state.physics, qpos=state.physics.qpos.at[0].add(0.5)))
    moved = draw_wrist(env, turned, WristCamera(width=12, height=12))
    dark = [np.asarray(x).max(axis=-1) < 40 for x in (obs["wrist"], moved)]  # the fingers, and nothing else
    assert dark[0].any() and (dark[0] == dark[1]).mean() > 0.8
    assert (np.asarray(obs["wrist"]) != np.asarray(moved)).mean() > 0.1


def test_the_parts_of_a_dict_stay_beside_the_picture() -> None:
    inner = EmbodiedEnv(json.loads(GYM_CONFIG.read_text()), physics="mujoco")
    env = RenderedEnv(inner, blank=True, **SIZE)
    space = env.observation_space
    assert set(space.spaces) == {"image", *inner.observation_space.spaces}
    _, obs = jax.jit(env.reset)(jax.random.key(0))
    assert set(obs) == set(space.spaces) and (np.asarray(obs["image"]) == 127).all()
    refused(RenderedEnv, env, blank=True, match="RenderedEnv has an 'image' already")


@pytest.mark.slow
def test_an_episode_keeps_its_look_and_the_next_has_another() -> None:
    env = RenderedEnv(
        CartPoleRL(physics="mujoco", max_episode_steps=2), renderer="raycast", randomizers=LOOKS, **SIZE, **PLACED
    )
    plain = RenderedEnv(CartPoleRL(physics="mujoco", max_episode_steps=2), blank=True, **SIZE)
    first = reset(env, jax.random.key(0), 3)
    assert len({bytes(np.asarray(image)) for image in first.obs["image"]}) == 3
    np.testing.assert_array_equal(first.obs["state"], reset(plain, jax.random.key(0), 3).obs["state"])
    take = jax.jit(step, static_argnums=0)
    second, _ = take(env, first, jnp.zeros((3, 2)), jax.random.key(1))
    chex.assert_trees_all_equal(second.state.look, first.state.look)
    third, timestep = take(env, second, jnp.zeros((3, 2)), jax.random.key(2))
    assert np.asarray(timestep.truncated).all()
    for part in (
        lambda look: look.camera.eye,
        lambda look: look.camera.frame,
        lambda look: look.lights.diffuse[:, 1],
        lambda look: look.lights.direction[:, 1],
        lambda look: look.lights.ambient,
        lambda look: look.rgba["floor"][:, :3],
    ):
        assert (np.asarray(part(third.state.look)) != np.asarray(part(first.state.look))).any(axis=-1).all()
    moved = np.asarray(first.state.look.camera.eye) - np.array(PLACED["camera_eye"])
    assert (np.abs(moved) <= 0.2).all() and len(np.unique(moved)) == 9


@refusals(
    (entry("randomize_indirect_lighting", path="x"), "randomizers.one", "use randomize_emission_light"),
    (entry("randomize_lights", "key"), "randomizers.one", "Did you mean 'randomize_light'"),
    (entry("randomize_light", "key", position_range=[[0] * 3] * 2), "position_range", "is not supported: the lights"),
    (entry("randomize_light", "key", color_range=[0, 1]), "color_range", "must be two lists of 3 numbers"),
    (entry("randomize_light", "key"), "randomizers.one", "gives no range"),
    (entry("randomize_light", color_range=[[0] * 3] * 2), "entity_cfg", "takes {uid: …}, got None"),
    (entry("randomize_camera_intrinsics", "wrist", cx_range=[0, 1]), "uid", "the one camera is 'camera', got 'wrist'"),
    (entry("randomize_camera_extrinsics", eye_range=[[0] * 3] * 2), "randomizers.one", "set camera_eye"),
    (entry("randomize_visual_material", "cart", roughness_range=[0, 1]), "randomizers.one", "use base_color_range"),
    ({**entry("randomize_light", "key"), "mode": "interval"}, "mode", "must be 'reset', got 'interval'"),
    ({**entry("randomize_light", "key"), "interval_step": 3}, "randomizers.one", "interval_step"),
)
def test_randomizers_that_mean_nothing_here_are_refused_by_name(given: dict[str, Any], key: str, word: str) -> None:
    refused(RenderedEnv, CartPoleRL(), renderer="raycast", randomizers={"one": given}, key=key, word=word)


@refusals(
    ({"renderer": "raycast", "effects": True}, "renderer", "draws no effects"),
    ({"renderer": "madrona"}, "renderer", "must be 'mujoco' or 'raycast', got 'madrona'"),
    ({"wrist": {}}, "wrist", "drawn by renderer: raycast only"),
    ({"renderer": "raycast", "wrist": {}}, "wrist", "CartPoleRL has no tool_position"),
    ({"randomizers": LOOKS}, "randomizers (camera, ", "need renderer: raycast"),
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], key: str, word: str) -> None:
    refused(RenderedEnv, CartPoleRL(), **given, key=key, word=word)


@pytest.mark.slow
def test_a_light_or_geom_that_is_not_there_is_named() -> None:
    for randomizer, message in (
        (entry("randomize_light", "sun", color_range=[[0] * 3] * 2), "no light 'sun'; there is headlight, key"),
        (entry("randomize_visual_material", "flor", base_color_range=[[0] * 3] * 2), "no geom 'flor' is drawn"),
    ):
        env = RenderedEnv(CartPoleRL(), renderer="raycast", randomizers={"one": randomizer}, **SIZE)
        refused(jax.eval_shape, env.reset, jax.random.key(0), match=message)
