"""Rows of one batch whose models differ: what a step reads, what MuJoCo derives from it, and that engines agree."""

import sys
from copy import copy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from cube_sweep import C_ENGINE, assert_same_bits, sweep, trajectory
from numpy.typing import NDArray

from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.mujoco.choice import Engine, how_to_install
from ejax.envs.mujoco.engine import Physics, PhysicsState, load_model
from ejax.envs.mujoco.models import (
    FIELDS,
    ModelRows,
    derived_fields,
    load_accelerated_model,
    load_parametric_model,
    parameter,
)
from ejax.envs.tasks.grasp_task import make_grasp_model
from ejax.types import Array

SCENE = """<mujoco><option timestep="0.01" integrator="Euler" iterations="20" ls_iterations="20">
      <flag warmstart="disable"/></option>
    <worldbody><geom name="floor" type="plane" size="0 0 0.05" contype="0" conaffinity="0"/>
      <body name="ball" pos="0 0 0.1"><freejoint/>
        <geom name="ball" size="0.1" mass="1" contype="0" conaffinity="0"/></body>
      <body name="arm" pos="1 0 1"><joint name="arm" axis="0 1 0" damping="0.1" armature="0.01"/>
        <geom type="capsule" fromto="0 0 0 0.5 0 0" size="0.02" mass="0.5" contype="0" conaffinity="0"/>
      </body></worldbody>
    <contact><pair geom1="floor" geom2="ball" condim="3" friction="0.5 0.5"/></contact>
    <actuator><position joint="arm" kp="10" kv="1"/></actuator></mujoco>"""
BALL = Physics(SCENE, engine="mujoco", num_substeps=2)
INERTIAL = ("body_inertia", "body_ipos", "body_mass", "dof_armature")


def drawn(asset: str, names: tuple[str, ...], num_rows: int, seed: int = 0) -> dict[str, Array]:
    """Parameters that differ from row to row, leaves [N, ...]."""
    rng, model = np.random.default_rng(seed), load_model(asset)
    made: dict[str, NDArray[np.float64]] = {}
    for name in names:
        base = parameter(model, name)
        made[name] = base * rng.uniform(0.7, 1.5, (num_rows, *[1] * base.ndim))
        if name == "body_ipos":
            made[name] = base + rng.uniform(-0.01, 0.01, (num_rows, *base.shape)) * (model.body_mass > 0)[:, None]
        if name == "dof_frictionloss":
            made[name] = rng.uniform(0.0, 0.05, (num_rows, *base.shape))
    return {name: jnp.asarray(value, jnp.float32) for name, value in made.items()}


def rolling(num_rows: int, names: tuple[str, ...] = ()) -> tuple[PhysicsState, Array]:
    """Let the ball slide and the arm swing."""
    qpos = jnp.tile(jnp.array([0.0, 0.0, 0.1, 1.0, 0.0, 0.0, 0.0, 0.3]), (num_rows, 1))
    qvel = jnp.tile(jnp.array([1.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0]), (num_rows, 1))
    return PhysicsState(qpos=qpos, qvel=qvel, parameters=drawn(SCENE, names, num_rows)), jnp.full((num_rows, 1), -0.2)


def rows_of(tree: PhysicsState, rows: object) -> PhysicsState:
    return jax.tree.map(lambda x: x[rows], tree)


@pytest.mark.slow
def test_a_step_with_parameters_is_mj_step_of_a_model_with_them() -> None:
    state, ctrl = rolling(3, FIELDS)
    after = jax.vmap(BALL.step)(state, ctrl)
    for row in range(3):
        model = copy(load_parametric_model(SCENE, FIELDS))
        for name, value in state.parameters.items():
            parameter(model, name)[:] = value[row]
        data = mujoco.MjData(model)
        mujoco.mj_setConst(model, data)
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:], data.ctrl[:] = state.qpos[row], state.qvel[row], ctrl[row]
        mujoco.mj_step(model, data, 2)
        np.testing.assert_allclose(after.qpos[row], data.qpos, rtol=0, atol=1e-6)
        np.testing.assert_allclose(after.qvel[row], data.qvel, rtol=0, atol=1e-5)
    assert len(np.unique(after.qvel[:, 0])) == 3


@pytest.mark.parametrize("names", [("body_mass", "pair_friction"), ("dof_damping", "gravity")])
def test_parameters_that_are_the_models_own_change_no_bit(names: tuple[str, ...]) -> None:
    state, ctrl = sweep(3)
    own = {
        name: jnp.tile(parameter(C_ENGINE.model, name), (3, *[1] * parameter(C_ENGINE.model, name).ndim))
        for name in names
    }
    plain, same = (trajectory(C_ENGINE, replace(state, parameters=each), ctrl[:5]) for each in ({}, own))
    assert_same_bits(plain, same)


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_order_and_batch_whatever_was_stepped_before() -> None:
    names = ("body_inertia", "body_mass", "gravity", "pair_friction")
    state, ctrl = rolling(16, names)
    whole = trajectory(BALL, state, jnp.tile(ctrl, (5, 1, 1)))
    order = np.random.default_rng(0).permutation(16)
    for rows in (order, order[:5], order[:1], np.array([3, 3, 7])):
        part = trajectory(BALL, rows_of(state, rows), jnp.tile(ctrl[rows], (5, 1, 1)))
        assert_same_bits(part, jax.tree.map(lambda x, rows=rows: x[:, rows], whole))


def test_a_row_keeps_its_model_which_is_rewritten_where_its_parameters_change(monkeypatch: pytest.MonkeyPatch) -> None:
    names, written = ("body_mass",), []
    models = ModelRows(load_model(SCENE), names)
    write = models._write
    monkeypatch.setattr(models, "_write", lambda model, row: (written.append(id(model)), write(model, row)))
    masses = np.array(drawn(SCENE, names, 4, seed=0)["body_mass"])
    first, _ = models.of(masses)
    for changed in ([], [1, 3], [2]):
        written.clear()
        masses[changed] = np.asarray(drawn(SCENE, names, 4, seed=len(changed))["body_mass"])[changed]
        made, _ = models.of(masses)
        assert [id(model) for model in made] == [id(model) for model in first]
        assert written == [id(first[i]) for i in changed]
        for model, mass in zip(made, masses, strict=True):
            np.testing.assert_array_equal(model.body_mass.astype(np.float32), mass)
    assert models.of(masses[:2])[0] == first[:2]


@pytest.mark.parametrize("wrong", [float("nan"), 0.0, -1.0])
def test_a_row_with_a_mass_that_is_none_is_broken_and_the_others_are_not(wrong: float) -> None:
    state, ctrl = rolling(3, ("body_mass",))
    broken = replace(state, parameters={"body_mass": state.parameters["body_mass"].at[1, 1].set(wrong)})
    after, sound = jax.vmap(BALL.step)(broken, ctrl), jax.vmap(BALL.step)(state, ctrl)
    assert np.isnan(after.qpos[1]).all() and np.isnan(after.qvel[1]).all()
    assert_same_bits(rows_of(after, np.array([0, 2])), rows_of(sound, np.array([0, 2])))


def test_a_field_that_no_row_may_have_is_refused_by_name() -> None:
    state, ctrl = rolling(1)
    state, ctrl = rows_of(state, 0), ctrl[0]
    with pytest.raises(ValueError, match=r"no parameter 'body_maas'.*Did you mean 'body_mass'"):
        BALL.step(replace(state, parameters={"body_maas": jnp.ones(3)}), ctrl)
    with pytest.raises(ValueError, match=r"body_mass has the shape \(3,\), got \(2,\)"):
        BALL.step(replace(state, parameters={"body_mass": jnp.ones(2)}), ctrl)


def test_moving_things_keeps_their_parameters() -> None:
    from test_events import CART_POLE

    env = EmbodiedEnv(CART_POLE, "mujoco")
    state, _ = env.reset(jax.random.key(0))
    state = replace(state, physics=replace(state.physics, parameters={"gravity": jnp.ones(3)}))
    assert env.world(state).with_qpos((0,), jnp.ones(1)).physics.parameters["gravity"].sum() == 3.0


def test_a_body_falls_with_its_rows_gravity() -> None:
    state, ctrl = rolling(2)
    gravity = jnp.array([[0.0, 0.0, -9.81], [0.0, 0.0, -1.62]])
    state = replace(state, qpos=state.qpos.at[:, 2].set(5.0), parameters={"gravity": gravity})
    after = jax.vmap(BALL.step)(state, ctrl)
    np.testing.assert_allclose(after.qvel[:, 2], gravity[:, 2] * 0.02, rtol=1e-6)


def test_friction_slows_a_sliding_ball_by_mu_g_until_it_rolls() -> None:
    state, ctrl = rolling(2)
    pair = jnp.asarray(np.tile(parameter(load_model(SCENE), "pair_friction"), (2, 1, 1)), jnp.float32)
    state = replace(state, parameters={"pair_friction": pair.at[:, 0, :2].set(jnp.array([[0.02], [0.04]]))})
    velocity = trajectory(BALL, state, jnp.tile(ctrl, (20, 1, 1))).qvel[:, :, :2]
    speed = np.linalg.norm(velocity, axis=-1)
    np.testing.assert_allclose((speed[9] - speed[19]) / 0.2, [0.02 * 9.81, 0.04 * 9.81], rtol=0.1)  # friction is soft


@pytest.mark.parametrize("asset", [SCENE, "push_cube.xml", "cart_pole.xml", make_grasp_model()], ids=lambda x: x[:13])
def test_what_follows_from_masses_is_what_mj_set_const_derives(asset: str) -> None:
    values = {name: value[0] for name, value in drawn(asset, INERTIAL, 1).items()}
    flat = np.concatenate([np.asarray(values[name]).ravel() for name in INERTIAL])
    rows, _ = ModelRows(load_parametric_model(asset, INERTIAL), INERTIAL).of(flat[None])
    derived = jax.jit(partial(derived_fields, load_accelerated_model(asset, INERTIAL)))(values)
    for name, value in derived.items():
        expected = getattr(rows[0], name)
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow_cases("mjx", "warp")
@pytest.mark.parametrize("engine", ["mjx", "warp"])
def test_an_accelerated_engine_follows_the_c_engine_with_every_parameter(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how := how_to_install(engine):
        pytest.skip(f"{engine} is not installed: {how}")
    if engine == "warp":
        monkeypatch.setitem(sys.modules, "mujoco.mjx", None)  # it does without
    names = tuple(name for name in FIELDS if name not in ("geom_size", "geom_rbound", "geom_aabb", "geom_pos"))
    state, ctrl = rolling(4, names)
    expected = jax.vmap(BALL.step)(state, ctrl)
    found = jax.jit(jax.vmap(replace(BALL, engine=engine).step))(state, ctrl)
    np.testing.assert_allclose(found.qpos, expected.qpos, atol=2e-6)
    np.testing.assert_allclose(found.qvel, expected.qvel, atol=2e-4)
    assert found.parameters.keys() == expected.parameters.keys() == set(names)


def test_the_models_own_inertial_constants_survive_displacement() -> None:
    for asset in (SCENE, "push_cube.xml"):
        plain, displaced = load_model(asset), load_parametric_model(asset, ("body_ipos",))
        assert (displaced.body_simple == 0)[plain.body_mass > 0].all()
        for name in ("body_mass", "body_inertia", "body_ipos", "body_iquat"):
            np.testing.assert_array_equal(getattr(displaced, name), getattr(plain, name))
        for name in ("dof_invweight0", "body_invweight0", "dof_M0", "body_subtreemass"):
            np.testing.assert_allclose(getattr(displaced, name), getattr(plain, name), rtol=1e-9)
