"""MuJoCo Warp on a CPU: the same pure function as the other engines, and what finds no room in its buffers is seen."""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from cube_sweep import assert_same_bits, sweep, trajectory
from tiny import tiny

from ejax.config import ConfigError, parse_config
from ejax.envs.mujoco.choice import how_to_install
from ejax.envs.mujoco.engine import Physics, PhysicsState, load_model
from ejax.envs.mujoco.engines.warp import make_step, max_num_constraints, max_num_contacts
from ejax.training.build import build
from ejax.types import Array

INSTALL = how_to_install("warp")
IS_ABSENT = pytest.mark.skipif(INSTALL is not None, reason=f"MuJoCo Warp is not installed: {INSTALL}")
ASSETS = Path(__file__).parents[2] / "ejax" / "envs" / "assets"


def needs_warp(test: Any) -> Any:
    """Mark a test of Warp, which compiles kernels for a minute where its cache has none."""
    return pytest.mark.slow(IS_ABSENT(test))


def converging() -> str:
    """PushCube's scene with a solver that may iterate until it is done.

    The 5 iterations of the task's own are too few in one of thirteen steps of a push, and each engine stops elsewhere.
    """
    spec = mujoco.MjSpec.from_file(str(ASSETS / "push_cube.xml"))
    spec.option.iterations = spec.option.ls_iterations = 20
    spec.compile()
    return str(spec.to_xml())


@pytest.fixture(scope="module")
def pushes() -> tuple[PhysicsState, Array, PhysicsState]:
    """States of two pushes, leaves [60, ...], the control of each, and the C engine's state one control step later."""
    state, ctrl = sweep(2)
    after = trajectory(Physics(converging(), engine="mujoco"), state, ctrl)
    before = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), state, after)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (before, ctrl, after))


@functools.cache
def batched() -> Any:
    """One control step of many rows, compiled once for each number of them."""
    physics = Physics(converging(), engine="warp")

    def step(qpos: Array, qvel: Array, ctrl: Array) -> tuple[Array, Array]:
        after = physics.step(PhysicsState(qpos=qpos, qvel=qvel), ctrl)
        return after.qpos, after.qvel

    return jax.jit(jax.vmap(step))


def stepped(state: PhysicsState, ctrl: Array) -> PhysicsState:
    qpos, qvel = batched()(state.qpos, state.qvel, ctrl)
    return PhysicsState(qpos=qpos, qvel=qvel)


def rows_of(tree: PhysicsState, rows: object) -> PhysicsState:
    return jax.tree.map(lambda x: x[rows], tree)


@needs_warp
def test_warp_follows_the_c_engine_through_contact(pushes: tuple[PhysicsState, Array, PhysicsState]) -> None:
    """Step by step and within the bounds of MJX (``test_mujoco``), for the same reasons: Warp computes in float32 too.
    Measured over 480 such steps, median and worst: 2e-7 and 4e-4 (m, rad), 2e-5 and 0.012 (m/s, rad/s).
    """
    before, ctrl, expected = pushes
    assert np.ptp(np.asarray(expected.qpos)[:, 6]) > 0.05  # the cube was pushed
    after = stepped(before, ctrl)
    np.testing.assert_allclose(after.qpos, expected.qpos, atol=1.2e-3)
    np.testing.assert_allclose(after.qvel, expected.qvel, atol=4e-2)


@needs_warp
def test_a_row_has_the_same_bits_wherever_it_stands_in_a_batch_of_any_size(pushes: tuple) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("on a GPU the contacts of all rows find their places in whichever order the threads come")
    before, ctrl, _ = pushes
    whole = stepped(before, ctrl)
    order = np.random.default_rng(0).permutation(60)
    assert_same_bits(stepped(rows_of(before, order), ctrl[order]), rows_of(whole, order))
    few = order[:6]
    nested = jax.tree.map(lambda x: x[few].reshape(2, 3, -1), (before.qpos, before.qvel, ctrl))
    qpos, qvel = jax.jit(jax.vmap(batched()))(*nested)  # and a batch of batches is one batch
    assert_same_bits(PhysicsState(qpos=qpos.reshape(6, -1), qvel=qvel.reshape(6, -1)), rows_of(whole, few))


@needs_warp
def test_a_broken_row_is_nan_and_leaves_the_others_alone(pushes: tuple[PhysicsState, Array, PhysicsState]) -> None:
    before, ctrl, _ = pushes
    whole = stepped(before, ctrl)
    qvel = before.qvel.at[4, 0].set(jnp.inf).at[8].set(9e9)  # the latter is NaN within the step
    broken = PhysicsState(qpos=before.qpos.at[2, 6].set(jnp.nan).at[10, 0].set(2e10), qvel=qvel)
    after = stepped(broken, ctrl.at[6, 1].set(jnp.nan))
    lost = np.isnan(after.qpos).all(axis=1) & np.isnan(after.qvel).all(axis=1)
    assert np.flatnonzero(lost).tolist() == [2, 4, 6, 8, 10]
    assert_same_bits(rows_of(after, ~lost), rows_of(whole, ~lost))
    assert_same_bits(stepped(before, ctrl), whole)  # nothing is left of it in what Warp computes in


@needs_warp
def test_contacts_without_a_place_break_all_rows_and_constraints_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Four contacts of a cube that lies on the floor, 16 constraints; another cube hangs in the air."""
    state, ctrl = sweep(3)
    state = state.replace(qpos=state.qpos.at[1, 8].set(5.0))
    model = load_model("push_cube.xml")

    def broken(**limits: int) -> list[bool]:
        step = jax.jit(jax.vmap(make_step(model, 1, **limits)))
        return np.isnan(step(state.qpos, state.qvel, ctrl[0], {})[0]).all(axis=1).tolist()

    assert broken(max_contacts=2, max_constraints=16) == [True] * 3
    assert broken(max_contacts=4, max_constraints=15) == [True, False, True]
    assert "overflow" not in "".join(capfd.readouterr())


@needs_warp
def test_warp_has_no_derivatives_and_algorithms_that_need_them_refuse_it() -> None:
    state, ctrl = sweep(2)
    with pytest.raises(ValueError, match='physics "warp" has no derivatives'):
        jax.grad(lambda qvel: batched()(state.qpos, qvel, ctrl[0])[0].sum())(state.qvel)
    config = tiny(env="CartPoleRL", env_cfg={"physics": "warp"})
    config["algorithm"] = {"name": "apg", "cfg": {"segment_length": 8}}
    config["policy"] = {"name": "actor_only", "actor": config["policy"]["actor"]}
    with pytest.raises(ConfigError, match=r"warp.*has no derivatives.*others train with ppo, grpo or model_shac"):
        build(parse_config(config))


def test_places_for_contacts_and_constraints_come_from_the_model() -> None:
    """Eleven pairs of geoms, each with a sphere in it: one contact each, and four constraints for each contact."""
    model = load_model("push_cube.xml")
    pairs = np.stack([model.pair_geom1, model.pair_geom2], axis=1)
    assert max_num_contacts(model, pairs) == 11
    assert max_num_constraints(model, 11) == 11 * 4 + 6  # and joint limits
    assert max_num_contacts(model, np.zeros((0, 2))) == 1
    assert max_num_contacts(model, np.tile(pairs, (20, 1))) == 128


def test_a_height_field_may_touch_in_fifty_places() -> None:
    model = mujoco.MjModel.from_xml_string("""<mujoco><option cone="elliptic"/>
        <asset><hfield name="h" nrow="2" ncol="2" size="1 1 1 1"/></asset>
        <worldbody><geom type="hfield" hfield="h"/>
          <body><joint range="0 1" limited="true" frictionloss="1"/><geom type="capsule" size="1 1" condim="4"/></body>
          <body><freejoint/><geom type="capsule" size="1 1"/></body></worldbody></mujoco>""")
    assert max_num_contacts(model, np.array([[1, 0]])) == 50
    assert max_num_contacts(model, np.array([[1, 2]])) == 2
    assert max_num_constraints(model, 2) == 2 * 4 + 1 + 1


def test_asking_for_warp_without_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[warp\]'"):
        make_step(load_model("cart_pole.xml"), 1)
