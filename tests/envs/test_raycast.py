"""Pictures drawn in JAX, beside MuJoCo's rays and MuJoCo's renderer."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import refused
from numpy.typing import NDArray

from ejax.envs.mujoco.drawing import Appearance, free_camera
from ejax.envs.mujoco.engine import render
from ejax.envs.mujoco.kinematics import body_poses
from ejax.envs.mujoco.models import load_model
from ejax.envs.mujoco.raycast import draw
from ejax.envs.mujoco.scenery import Lights, place_camera, scenery
from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.experts import pick_place, push_cube
from ejax.types import Array, CameraView

VIEW = CameraView((-1.0, -1.6, 1.3), (0.0, 0.1, 0.15), 45.0, effects=False)
SIZE = 40
JOINTS = """
<mujoco><compiler angle="radian"/><option><flag warmstart="disable"/></option><worldbody>
  <body name="mark" mocap="true" pos="1 2 3" euler="0.1 0.2 0.3"><geom size="0.1"/></body>
  <body name="still" pos="0.3 0 1" euler="0.5 0 0"><geom size="0.1"/>
    <body name="arm" pos="0 0.4 0" euler="0 0.3 0"><joint type="hinge" axis="0 1 1" pos="0.1 0 0" ref="0.2"/>
      <joint type="slide" axis="1 0 2"/><geom size="0.1"/>
      <body name="hand" pos="0.2 0 0"><joint type="ball" pos="0 0.1 0"/><geom size="0.1"/>
        <body name="tip" pos="0 0 0.2"><geom size="0.1"/></body></body></body></body>
  <body name="free"><freejoint/><geom size="0.1"/></body>
</worldbody></mujoco>"""
SOLIDS = """
<mujoco><option><flag warmstart="disable"/></option>
<visual><headlight ambient="0.2 0.2 0.2" diffuse="0.3 0.3 0.3" specular="0 0 0"/></visual><worldbody>
  <light directional="true" dir="0.3 0.6 -1" diffuse="0.5 0.4 0.4" specular="0.2 0.2 0.2"/>
  <camera name="main" pos="0 -2 0.6" xyaxes="1 0 0 0 0.3 1"/>
  <geom name="floor" type="plane" size="0.9 0.7 0.1" rgba="0.3 0.3 0.35 1"/>
  <body pos="0 0 0.2"><freejoint/>
    <geom name="box" type="box" pos="-0.45 -0.1 0" size="0.12 0.08 0.15" euler="10 20 30" rgba="0.8 0.1 0.1 1"/>
    <geom name="sphere" type="sphere" pos="-0.15 0.1 0.1" size="0.14" rgba="0.1 0.8 0.1 1"/>
    <geom name="capsule" type="capsule" pos="0.15 -0.3 0" size="0.07 0.15" euler="70 0 30" rgba="0.1 0.2 0.9 1"/>
    <geom name="cylinder" type="cylinder" pos="0.2 0.2 0.1" size="0.12 0.1" euler="20 -30 0" rgba="0.8 0.7 0.1 1"/>
    <geom name="ellipsoid" type="ellipsoid" pos="0.55 0 0" size="0.1 0.18 0.14" euler="0 40 0" rgba="0.7 0.1 0.7 1"/>
    <geom name="hidden" type="box" group="3" size="0.5 0.5 0.5"/>
  </body>
</worldbody></mujoco>"""
NAMES = ("floor", "box", "sphere", "capsule", "cylinder", "ellipsoid")


def test_poses_are_those_of_mujoco() -> None:
    model = load_model(JOINTS, visual=True)
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    data.qpos[:] = rng.normal(size=model.nq)
    data.mocap_pos[0] = mark = np.array([0.5, -0.4, 0.3])
    mujoco.mj_kinematics(model, data)
    poses: list[Any] = []

    @jax.jit
    def moving(qpos: Array, mark: Array) -> list[Array]:
        poses[:] = body_poses(model, qpos, {"mark": mark})
        return [pose for pose in poses if not isinstance(pose, np.ndarray)]

    moved = iter(moving(data.qpos.astype(np.float32), mark.astype(np.float32)))
    still = [isinstance(pose, np.ndarray) for pose in poses]
    assert still == [True, False, True, False, False, False, False]
    for body in range(model.nbody):
        pose = poses[body] if still[body] else next(moved)
        np.testing.assert_allclose(pose[:3, 3], data.xpos[body], atol=1e-5)
        np.testing.assert_allclose(pose[:3, :3], data.xmat[body].reshape(3, 3), atol=1e-5)


@functools.partial(jax.jit, static_argnames=("size", "view", "traced"))
def picture(seen: Appearance, size: int = SIZE, view: CameraView | None = VIEW, traced: bool = False) -> Array:
    if not traced:
        return draw(seen, width=size, height=size, view=view)
    camera = place_camera(seen.asset, view, 1.0)
    lights = jax.tree.map(jnp.asarray, scenery(seen.asset).lights)
    return draw(seen, width=size, height=size, camera=camera, lights=lights)


@functools.partial(jax.jit, static_argnames=("size", "view"))
def numbers(seen: Appearance, size: int, view: CameraView) -> Array:
    """[H, W]: the geom that each pixel shows, by its level of red; 0 for what is none, and for the floor."""
    flat = Lights(
        direction=jnp.zeros((1, 3)), diffuse=jnp.zeros((1, 3)), specular=jnp.zeros((1, 3)), ambient=jnp.ones(3)
    )
    solids = [solid for solid in scenery(seen.asset).solids if solid.geom is not None and solid.kind != "plane"]
    rgba = {
        solid.name: jnp.array([(solid.geom or 0) / 255.0 / (1.0 + solid.surface[0]), 1.0, 0.0, 1.0]) for solid in solids
    }
    image = draw(seen.replace(rgba=rgba), width=size, height=size, view=view, lights=flat)  # type: ignore[attr-defined]
    return jnp.where((image[..., 1] > 130) & (image[..., 2] < 110), image[..., 0], 0)


def seen_solids(**changes: Any) -> Appearance:
    return Appearance(asset=SOLIDS, qpos=jnp.asarray(load_model(SOLIDS, visual=True).qpos0, jnp.float32), **changes)


def rays_hit(model: mujoco.MjModel, qpos: NDArray[Any], size: int, view: CameraView) -> NDArray[np.int64]:
    """[H, W]: geoms that MuJoCo's own rays hit, -1 for none."""
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    mujoco.mj_forward(model, data)
    camera = jax.tree.map(lambda x: np.asarray(x, np.float64), place_camera(SOLIDS, view, 1.0))
    shown, found = np.array([1, 1, 1, 0, 0, 0], np.uint8), np.zeros(1, np.int32)
    hits = np.zeros((size, size), np.int64)
    for row, column in np.ndindex(size, size):
        place = np.array([(2 * column + 1) / size - 1.0, 1.0 - (2 * row + 1) / size, 1.0])
        mujoco.mj_ray(model, data, camera.eye, camera.frame @ place, shown, 1, -1, found)
        hits[row, column] = found[0]
    return hits


def test_each_ray_meets_the_solid_that_mujocos_ray_meets() -> None:
    model = load_model(SOLIDS, visual=True)
    hits = rays_hit(model, model.qpos0, SIZE, VIEW)
    kinds = {model.geom(int(i)).name for i in np.unique(hits) if i >= 0}
    assert kinds == set(NAMES)
    wanted = np.where(hits <= 0, 0, hits)
    assert (np.asarray(numbers(seen_solids(), SIZE, VIEW)) == wanted).mean() > 0.998


@pytest.mark.slow
def test_each_kind_of_solid_is_lit_as_mujoco_lights_it() -> None:
    mine = np.asarray(picture(seen_solids())).astype(int)
    theirs = render(
        Appearance(asset=SOLIDS, qpos=load_model(SOLIDS, visual=True).qpos0), width=SIZE, height=SIZE, camera=VIEW
    ).astype(int)
    inside = (np.abs(mine - theirs).max(axis=-1) < 12).mean()  # the others are edges, which round differently
    assert np.abs(mine - theirs).mean() < 2.0 and inside > 0.97


@pytest.mark.slow
def test_camera_and_lights_may_be_arrays() -> None:
    fixed, traced = (np.asarray(picture(seen_solids(), traced=traced)).astype(int) for traced in (False, True))
    assert (np.abs(fixed - traced).max(axis=-1) <= 1).mean() > 0.995


def test_the_models_own_camera_is_the_default() -> None:
    camera = place_camera(SOLIDS, None, 1.0)
    data = mujoco.MjData(load_model(SOLIDS, visual=True))
    mujoco.mj_forward(load_model(SOLIDS, visual=True), data)
    axes = data.camera("main").xmat.reshape(3, 3)
    np.testing.assert_allclose(camera.eye, data.camera("main").xpos, atol=1e-6)
    frame = np.asarray(camera.frame)
    lengths = np.linalg.norm(frame, axis=0)
    np.testing.assert_allclose(frame / lengths, axes * np.array([1.0, 1.0, -1.0]), atol=1e-6)
    np.testing.assert_allclose(lengths, [np.tan(np.pi / 8), np.tan(np.pi / 8), 1.0], rtol=1e-6)


@pytest.mark.slow
def test_a_colour_of_the_state_replaces_the_models_and_alpha_0_hides() -> None:
    none = {"box": jnp.array([0.0, 0.0, 0.0, 0.0]), "sphere": jnp.array([0.0, 0.0, 1.0, 1.0])}
    usual = {"box": jnp.array([0.8, 0.1, 0.1, 1.0]), "sphere": jnp.array([0.1, 0.8, 0.1, 1.0])}
    batch = jax.tree.map(lambda *x: jnp.stack(x), seen_solids(rgba=none), seen_solids(rgba=usual))
    changed, same = np.asarray(jax.vmap(picture)(batch)).astype(int)
    plain = np.asarray(picture(seen_solids())).astype(int)
    assert (np.abs(same - plain).max(axis=-1) <= 1).mean() > 0.995
    hits = rays_hit(load_model(SOLIDS, visual=True), load_model(SOLIDS, visual=True).qpos0, SIZE, VIEW)
    sphere, box = hits == NAMES.index("sphere"), hits == NAMES.index("box")
    assert (changed[sphere][:, 2] > changed[sphere][:, 1]).mean() > 0.9
    assert (plain[box][:, 0] > plain[box][:, 2] + 20).all()
    assert (changed[box][:, 0] < changed[box][:, 2] + 20).all()  # floor and sphere
    with pytest.raises(ValueError, match="no geom ball is drawn; there is floor, box"):
        picture(seen_solids(rgba={"ball": jnp.ones(4)}))


@pytest.mark.slow
def test_what_is_no_primitive_is_refused_by_name() -> None:
    tetrahedron = '<asset><mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset><worldbody>'
    mesh = JOINTS.replace("<worldbody>", tetrahedron + '<geom name="bust" type="mesh" mesh="m"/>')
    refused(scenery, mesh, match=r"bust is a mesh. Draw this model with renderer: mujoco")
    lamp = JOINTS.replace("<worldbody>", '<worldbody><light name="lamp" pos="0 0 2"/>')
    refused(scenery, lamp, match="light 'lamp' is another")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "view"),
    [(PickPlaceRL(physics="mujoco"), pick_place.CAMERA), (PushCubeRL(physics="mujoco"), push_cube.CAMERA)],
    ids=["pick_place", "push_cube"],
)
def test_pictures_are_close_to_mujocos(env: Any, view: CameraView) -> None:
    size = 64
    state, _ = env.reset(jax.random.key(3))
    seen = env.appearance(state)
    mine = np.asarray(picture(seen, size, view)).astype(int)
    theirs = env.render(jax.tree.map(np.asarray, state), size, size, view).astype(int)
    assert np.abs(mine - theirs).mean() < 2.0

    model = load_model(seen.asset, visual=True)
    data = mujoco.MjData(model)
    data.qpos[:] = seen.qpos
    for name, position in seen.mocap_pos.items():
        data.mocap_pos[model.body(name).mocapid[0]] = position
    mujoco.mj_forward(model, data)
    wanted = _segmentation(model, data, size, view)
    assert (np.asarray(numbers(seen, size, view)) == wanted).mean() > 0.99


def _segmentation(model: mujoco.MjModel, data: mujoco.MjData, size: int, view: CameraView) -> NDArray[np.int64]:
    """[H, W]: the geom that MuJoCo draws in each pixel; 0 for what is none, and for the floor."""
    model = copy.copy(model)  # its field of view is changed
    with mujoco.Renderer(model, size, size) as renderer:
        renderer.enable_segmentation_rendering()
        model.vis.global_.fovy = view.fovy
        renderer.update_scene(data, camera=free_camera(view))
        drawn = renderer.render()
    is_geom = drawn[..., 1] == int(mujoco.mjtObj.mjOBJ_GEOM)
    return np.where(is_geom, drawn[..., 0], 0)
