"""The two physics engines: they are pure functions, they agree, and forward kinematics agrees with both."""

import copy
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases, refused
from cube_sweep import C_ENGINE, CUBE, assert_same_bits, sweep, trajectory
from numpy.typing import NDArray

from ejax.envs.mujoco.drawing import Appearance, default_view
from ejax.envs.mujoco.engine import Physics, PhysicsState, render
from ejax.envs.mujoco.engines.mjx import load_mjx
from ejax.envs.mujoco.engines.mujoco import _HostStepper
from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.mujoco.models import settings_changed
from ejax.envs.mujoco.scenery import place_camera
from ejax.types import Array


def test_a_step_is_mj_step_from_the_same_state() -> None:
    state, ctrl = sweep(3)
    after = jax.vmap(C_ENGINE.step)(state, ctrl[0])
    data = mujoco.MjData(C_ENGINE.model)
    for row in range(3):
        mujoco.mj_resetData(C_ENGINE.model, data)
        data.qpos[:], data.ctrl[:] = state.qpos[row], ctrl[0, row]
        mujoco.mj_step(C_ENGINE.model, data, 4)
        np.testing.assert_array_equal(after.qpos[row], data.qpos.astype(np.float32))
        np.testing.assert_array_equal(after.qvel[row], data.qvel.astype(np.float32))


def nested(state: PhysicsState, ctrl: Array) -> PhysicsState:
    rows = jax.tree.map(lambda x: x.reshape(2, 3, -1), state)
    after = jax.vmap(jax.vmap(C_ENGINE.step))(rows, ctrl[0].reshape(2, 3, 6))
    return jax.tree.map(lambda x: x.reshape(1, 6, -1), after)


@cases(
    "again",
    lambda state, ctrl: trajectory(C_ENGINE, state, ctrl),
    lambda state, ctrl: trajectory(Physics("push_cube.xml"), state, ctrl),
    nested,
    ids=["once more", "auto, on a CPU", "a batch of batches"],
)
def test_the_same_inputs_give_the_same_bits(again: Callable[..., PhysicsState]) -> None:
    state, ctrl = sweep(6)
    found, expected = again(state, ctrl), trajectory(C_ENGINE, state, ctrl)
    assert_same_bits(found, jax.tree.map(lambda x, like: x[: len(like)], expected, found))


def test_threads_do_not_disturb_each_other() -> None:
    state, ctrl = sweep(8)
    expected = trajectory(C_ENGINE, state, ctrl)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: trajectory(C_ENGINE, state, ctrl), range(4)):
            assert_same_bits(result, expected)


def test_a_wrong_sparse_solver_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo 4.0.0's, whose accelerations are off by up to their size (docs/install.md)."""
    sparse = mujoco.mjtJacobian.mjJAC_SPARSE
    for release, solver in (("4.0.0", mujoco.mjtJacobian.mjJAC_DENSE), ("4.0.1", sparse), ("3.17.0", sparse)):
        monkeypatch.setattr(mujoco, "__version__", release)
        model = copy.copy(C_ENGINE.model)
        model.opt.jacobian = sparse
        assert _HostStepper(model, 1)._model.opt.jacobian == solver


@pytest.mark.slow
def test_a_row_has_the_same_bits_wherever_it_stands_in_a_batch_of_any_size() -> None:
    state, ctrl = sweep(33)
    whole = trajectory(C_ENGINE, state, ctrl)
    order = np.random.default_rng(0).permutation(33)
    for rows in (order, order[:7], order[:1]):
        part = trajectory(C_ENGINE, jax.tree.map(lambda x, rows=rows: x[rows], state), ctrl[:, rows])
        assert_same_bits(part, jax.tree.map(lambda x, rows=rows: x[:, rows], whole))


def test_four_steps_of_one_substep_are_one_step_of_four() -> None:
    state, ctrl = sweep(2)
    once = trajectory(C_ENGINE, state, ctrl[:1])
    single = trajectory(replace(C_ENGINE, num_substeps=1), state, jnp.repeat(ctrl[:1], 4, axis=0))
    # Not bitwise: between control steps the state is rounded to float32. 1e-4 m/s is 1e-6 m in one substep.
    np.testing.assert_allclose(single.qpos[-1], once.qpos[0], atol=1e-6)
    np.testing.assert_allclose(single.qvel[-1], once.qvel[0], atol=1e-4)


def test_the_drives_reach_their_target() -> None:
    state, _ = sweep(1)
    start = jnp.array([[0.0, -1.57, 1.57, -1.57, -1.57, 0.0, *CUBE]])
    target = start[:, :6] + jnp.array([[0.3, -0.2, 0.25, 0.4, -0.4, 0.5]])
    reached = trajectory(C_ENGINE, state.replace(qpos=start), jnp.tile(target, (25, 1, 1)))
    np.testing.assert_allclose(reached.qpos[-1, :, :6], target, atol=1e-3)
    np.testing.assert_allclose(reached.qvel[-1, :, :6], 0.0, atol=1e-2)


@pytest.mark.slow
def test_mjx_follows_the_c_engine_through_contact() -> None:
    """MJX computes in float32 and detects contacts with its own code; a contact at the edge of touching, as the cube's
    at the start, may be seen by one engine a substep earlier. Measured over single control steps of 16 such pushes,
    median and worst: 2e-7 and 4e-4 (m, rad), 3e-5 and 0.012 (m/s, rad/s). The bounds are three times the worst.

    Held together step by step, not along a whole push: contact is chaotic, after 30 steps the cubes are 0.03 m apart.
    """
    pytest.importorskip("mujoco.mjx")
    state, ctrl = sweep(2)
    expected = trajectory(C_ENGINE, state, ctrl)
    pushed = np.linalg.norm(expected.qpos[-1, :, 6:8] - state.qpos[:, 6:8], axis=-1)
    assert (pushed > 0.05).all()

    before = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), state, expected)
    step = jax.jit(jax.vmap(replace(C_ENGINE, engine="mjx").step))
    flat = step(jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), before), ctrl.reshape(-1, 6))
    np.testing.assert_allclose(flat.qpos, expected.qpos.reshape(-1, 13), atol=1.2e-3)
    np.testing.assert_allclose(flat.qvel, expected.qvel.reshape(-1, 12), atol=4e-2)


def test_asking_for_mjx_without_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco.mjx", None)
    monkeypatch.delattr(mujoco, "mjx", raising=False)
    load_mjx.cache_clear()  # another test may have used MJX already
    state, ctrl = sweep(1)
    physics = Physics("cart_pole.xml", engine="mjx")
    with pytest.raises(ImportError, match=r"pip install -e '\.\[mjx\]'"):
        physics.step(jax.tree.map(lambda x: x[0], state), ctrl[0, 0])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'auto', 'mujoco', 'mjx' or 'warp', got 'bullet'"):
        Physics("push_cube.xml", engine="bullet")  # type: ignore[arg-type]
    refused(Physics, "push_cube.xml", num_substeps=0, match="must be >= 1, got 0")


def test_a_warm_start_is_switched_off_and_told() -> None:
    xml = "<mujoco><option>{}</option><worldbody/></mujoco>"
    flags = Physics(xml.format("")).model.opt.disableflags
    assert flags & mujoco.mjtDisableBit.mjDSBL_WARMSTART
    (told,) = settings_changed(xml.format(""))
    assert "warm start is off" in told
    assert settings_changed(xml.format("<flag warmstart='disable'/>")) == ()
    assert "sleep" in settings_changed(xml.format("<flag warmstart='disable' sleep='enable'/>"))[0]


def test_a_model_that_remembers_is_refused_with_the_element_that_does() -> None:
    xml = """<mujoco><worldbody><body><joint name="hip"/><geom size="0.1"/></body></worldbody><actuator>
    <motor joint="hip"/><general name="slow" joint="hip" dyntype="filter" dynprm="0.1"/></actuator></mujoco>"""
    with pytest.raises(ValueError, match=r"actuator 'slow' has an activation; use motor"):
        _ = Physics(xml).model
    with pytest.raises(ValueError, match=r"delay of an actuator or sensor; .* delay_action"):
        _ = Physics(xml.replace('dyntype="filter" dynprm="0.1"', 'nsample="3" delay="0.004"')).model


def test_site_pose_is_what_mujoco_computes() -> None:
    model = C_ENGINE.model
    qpos = np.random.default_rng(0).uniform(-3.0, 3.0, (20, 13))
    qpos[:, 9:] = (1.0, 0.0, 0.0, 0.0)
    pose = jax.jit(jax.vmap(lambda q: site_pose(model, "tcp", q)))(jnp.asarray(qpos, jnp.float32))
    data = mujoco.MjData(model)
    for row in range(20):
        data.qpos[:] = qpos[row]
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(pose[row, :3, 3], data.site("tcp").xpos, atol=2e-6)
        np.testing.assert_allclose(pose[row, :3, :3], data.site("tcp").xmat.reshape(3, 3), atol=2e-6)
        np.testing.assert_array_equal(pose[row, 3], [0.0, 0.0, 0.0, 1.0])


def test_site_pose_follows_slides_and_offset_anchors() -> None:
    model = mujoco.MjModel.from_xml_string("""<mujoco><worldbody>
        <body pos="0.1 0.2 0.3" euler="10 20 30"><geom size="0.1"/><joint type="slide" axis="1 2 0"/>
          <body pos="0.3 0 0"><geom size="0.1"/><joint axis="0 1 1" pos="0.1 0.2 -0.1"/><joint axis="1 0 0" ref="20"/>
            <site name="tip" pos="0 0 0.5" euler="0 30 0"/></body></body></worldbody></mujoco>""")
    data = mujoco.MjData(model)
    data.qpos[:] = (0.4, -0.7, 1.1)
    mujoco.mj_kinematics(model, data)
    pose = site_pose(model, "tip", jnp.array([0.4, -0.7, 1.1]))
    np.testing.assert_allclose(pose[:3, 3], data.site("tip").xpos, atol=1e-6)
    np.testing.assert_allclose(pose[:3, :3], data.site("tip").xmat.reshape(3, 3), atol=1e-6)


@pytest.mark.slow
def test_environments_can_be_drawn_without_a_display() -> None:
    """In a process of its own: MUJOCO_GL is read when MuJoCo is imported."""
    program = """
        import sys
        import jax
        import mujoco
        try:
            mujoco.GLContext(64, 64)
        except Exception as error:
            print(error)
            sys.exit(77)
        from ejax.envs.tasks.cart_pole import CartPoleRL
        from ejax.envs.tasks.push_cube import PushCubeRL
        for env in (CartPoleRL(), PushCubeRL()):
            frame = env.render(env.reset(jax.random.key(0))[0], width=96, height=64)
            assert frame.shape == (64, 96, 3) and frame.dtype == "uint8" and frame.std() > 20, frame.std()
    """
    variables = {**os.environ, "MUJOCO_GL": "egl"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=variables, capture_output=True, text=True, timeout=120
    )
    if result.returncode == 77:
        pytest.skip(f"no OpenGL: {result.stdout}")
    assert result.returncode == 0, result.stderr
    assert "Exception ignored" not in result.stderr  # canvases are freed before EGL is


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_draws_many_sizes_leaves_the_canvas_of_another_alone() -> None:
    """More sizes than a thread keeps, while another thread holds one: each is drawn as if it were alone."""
    sizes = [(32, 24), (40, 30), (48, 36), (56, 42), (64, 48), (72, 54)]

    def draw(size: tuple[int, int]) -> NDArray[np.int_]:
        return render(
            Appearance(asset="push_cube.xml", qpos=np.zeros(physics.nq)), width=size[0], height=size[1]
        ).astype(int)

    physics = Physics("push_cube.xml").model
    alone = {size: draw(size) for size in sizes}
    with ThreadPoolExecutor(1) as idle:
        idle.submit(draw, sizes[0]).result()  # and keeps its context, the current one of a thread that lives
        for size in sizes[1:] + sizes:
            np.testing.assert_allclose(draw(size), alone[size], atol=3)  # software rendering rounds by the thread
        np.testing.assert_allclose(idle.submit(draw, sizes[0]).result(), alone[sizes[0]], atol=3)
    gc.collect()


@pytest.mark.slow
def test_a_picture_does_not_depend_on_the_one_before() -> None:
    """MuJoCo lays an endless floor around the camera of the last scene."""
    xml = """<mujoco><option><flag warmstart="disable"/></option><asset>
        <texture name="grid" type="2d" builtin="checker" rgb1="1 1 1" rgb2="0 0 0" width="64" height="64"/>
        <material name="grid" texture="grid" texrepeat="3 3"/></asset><worldbody><light pos="0 0 3"/>
        <geom type="plane" size="0 0 1" material="grid"/><camera name="main" pos="7 5 2"/>
        <body><freejoint/><geom type="box" size="0.1 0.1 0.1" rgba="1 0 0 1"/></body></worldbody></mujoco>"""
    seen = Appearance(asset=xml, qpos=np.array([7.0, 5, 0, 1, 0, 0, 0]))
    first, again = (render(seen, width=64, height=48) for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.slow
def test_a_model_without_a_camera_main_is_seen_whole() -> None:
    xml = """<mujoco><option><flag warmstart="disable"/></option><worldbody><light pos="5 0 3"/>
        <body pos="5 0 0"><freejoint/><geom type="box" size="0.1 0.1 0.1" rgba="1 0 0 1"/></body>
        </worldbody></mujoco>"""
    picture = render(Appearance(asset=xml, qpos=np.array([5.0, 0, 0, 1, 0, 0, 0])), width=64, height=48)
    red = np.argwhere(picture[..., 0] > picture[..., 1] + 40)
    np.testing.assert_allclose(red.mean(axis=0), (23.5, 31.5), atol=3.0)  # in the middle
    view = default_view(xml)
    assert view is not None and view.target == pytest.approx((5.0, 0.0, 0.0), abs=1e-6)
    assert place_camera(xml, None, 4 / 3).eye == pytest.approx(np.array(view.eye))
    assert default_view("push_cube.xml") is None


@pytest.mark.slow
def test_a_camera_that_tracks_a_body_goes_with_it() -> None:
    xml = """<mujoco><option><flag warmstart="disable"/></option><worldbody>
        <body name="box"><freejoint/><geom type="box" size="0.1 0.1 0.1" rgba="1 0 0 1"/>
        <camera name="main" mode="trackcom" pos="-1 0 0" xyaxes="0 -1 0 0 0 1"/></body></worldbody></mujoco>"""
    places = [Appearance(asset=xml, qpos=np.array([x, 0, 0, 1, 0, 0, 0])) for x in (0.0, 5.0)]
    near, far = (render(each, width=32, height=24) for each in places)
    assert near[12, 16, 0] > near[12, 16, 1] + 40
    np.testing.assert_array_equal(far[12, 16], near[12, 16])
