"""Sensors read what the world shows: markers and bodies where ``place`` put them, on every engine."""

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from ejax import MuJoCoTask, World
from ejax.envs.mujoco.choice import how_to_install
from ejax.envs.mujoco.engine import Physics, load_model
from ejax.types import Array, Key

KEY = jax.random.key(0)
PLACE = [0.3, 0.0, 0.5]
MODEL = """<mujoco><option timestep="0.01"/><worldbody>
  <camera name="eye" pos="0 0 1"/>
  <body name="cart" pos="0 0 0.5"><joint name="rail" type="slide" axis="1 0 0"/>
    <geom name="box" type="box" size="0.1 0.1 0.05" mass="1"/><site name="nose" pos="0.1 0 0" zaxis="1 0 0"/></body>
  <body name="goal" mocap="true" pos="5 0 0.5" euler="0 0 30">
    <geom name="ball" size="0.1" contype="0" conaffinity="0"/><site name="mark" pos="0 0 0.2" size="0.9"/>
    <body name="flag" pos="0 0 0.5"><geom name="cloth" size="0.05" contype="0" conaffinity="0"/></body></body>
  <body name="puck" pos="0 3 0.5"><freejoint/><geom name="puck" size="0.05"/></body>
</worldbody><actuator><motor name="push" joint="rail" ctrlrange="-1 1" ctrllimited="true"/></actuator>
<sensor>{}</sensor></mujoco>"""
EVERYWHERE = (
    '<framepos objtype="body" objname="goal"/>',
    '<framepos objtype="geom" objname="cloth"/>',
    '<framepos objtype="site" objname="mark" reftype="site" refname="nose"/>',
    '<framepos objtype="body" objname="puck"/>',
    '<framequat objtype="body" objname="flag"/>',
    '<framexaxis objtype="geom" objname="ball"/>',
    '<framelinvel objtype="body" objname="goal" reftype="body" refname="cart"/>',
    '<subtreecom body="goal"/>',
    '<camprojection site="mark" camera="eye"/>',
    '<rangefinder site="nose"/>',
    '<touch site="nose"/>',
    '<contact geom1="box" data="found"/>',
)
NOT_IN_MJX = (
    '<distance body1="cart" body2="goal" cutoff="9"/>',
    '<distance geom1="box" geom2="ball" cutoff="9"/>',
    '<normal geom1="box" geom2="ball" cutoff="9"/>',
    '<fromto geom1="box" geom2="ball" cutoff="9"/>',
    '<insidesite site="mark" objtype="body" objname="cart"/>',
    "<e_potential/>",
)
ENGINES = ["mujoco", *(name for name in ("mjx", "warp") if how_to_install(name) is None)]  # type: ignore[arg-type]


def task(sensors: str, engine: Any = "mujoco", xml: str = MODEL) -> MuJoCoTask:
    """Make a task that places the marker and the puck, and sees its sensors."""

    class Seeing(MuJoCoTask):
        model = xml.format(sensors)
        start_noise = 0.0

        def start(self, key: Key, world: World) -> World:
            return world.place("goal", PLACE).place("puck", [0.0, 2.0, 0.7])

        def observe(self, world: World) -> Array:
            return world.state.readings

        def rewards(self, world: World, before: World) -> dict[str, Array]:
            return {"none": jnp.zeros(())}

    return Seeing(physics=engine)


def in_mujoco(asset: str, qpos: Any, qvel: Any) -> np.ndarray:
    """Compute readings of the whole model by MuJoCo itself."""
    model = mujoco.MjModel.from_xml_string(asset)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:], data.mocap_pos[0] = qpos, qvel, PLACE
    mujoco.mj_forward(model, data)
    return np.array(data.sensordata)


@pytest.mark.slow_cases("mjx")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_of_sensor_reads_what_was_placed_at_the_start_and_after_a_step(engine: str) -> None:
    sensors = "".join(EVERYWHERE + NOT_IN_MJX if engine == "mujoco" else EVERYWHERE)
    env = task(sensors, engine)
    state, obs = jax.jit(env.reset)(KEY)
    np.testing.assert_allclose(obs, in_mujoco(env.asset, state.physics.qpos, state.physics.qvel), atol=2e-4, rtol=1e-5)
    before = Physics(env.asset, engine, 1).step(state.physics, jnp.zeros(1))  # type: ignore[arg-type]
    _, timestep = jax.jit(env.step)(state, jnp.zeros(1), KEY)
    wanted = in_mujoco(env.asset, before.qpos, before.qvel)
    np.testing.assert_allclose(timestep.obs, wanted, atol=2e-4, rtol=1e-5)


@pytest.mark.skipif("mjx" not in ENGINES, reason="MuJoCo XLA is not installed")
@pytest.mark.parametrize("sensor", [*NOT_IN_MJX, '<rangefinder site="nose" data="dist point"/>'])
def test_what_mjx_does_not_sense_is_refused_by_name(sensor: str) -> None:
    with pytest.raises(ValueError, match=r"physics 'mjx' does not simulate all .*mjSENS_|rangefinder 0 reads more"):
        jax.eval_shape(task(sensor, "mjx").reset, KEY)


@pytest.mark.slow_cases("mjx")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_marker_that_collides_is_an_obstacle_where_it_was_placed(engine: str) -> None:
    solid = MODEL.replace(' contype="0" conaffinity="0"', "").replace(
        '<body name="flag"', '<body name="flag" gravcomp="0"'
    )
    env = task("", engine, solid)
    physics = Physics(env.asset, engine, 30)  # type: ignore[arg-type]
    state = jax.jit(lambda: env.first_world(KEY).state)().physics
    moving = state.replace(qvel=state.qvel.at[0].set(1.0))  # type: ignore[attr-defined]
    for place, stops in ((PLACE, True), ([5.0, 0.0, 0.5], False)):
        after, _ = jax.jit(physics.step_sensing)(moving, jnp.zeros(1), {"goal": jnp.asarray(place)})
        assert (after.qpos[0] < 0.15) == stops


def test_rows_have_markers_of_their_own_and_leave_none_behind() -> None:
    asset = MODEL.format(EVERYWHERE[0])
    physics, model = Physics(asset, "mujoco", 1), load_model(asset)
    states = jax.vmap(lambda _: task(EVERYWHERE[0]).first_world(KEY).state.physics)(jnp.arange(3))
    places = jnp.arange(9.0).reshape(3, 3)
    _, readings = jax.vmap(physics.step_sensing)(states, jnp.zeros((3, 1)), {"goal": places})
    np.testing.assert_allclose(readings[:, 0], places)
    _, readings = jax.vmap(physics.step_sensing)(states, jnp.zeros((3, 1)))
    np.testing.assert_allclose(readings[:, 0], np.tile(model.body("goal").pos, (3, 1)))
