"""A simulation asked by name gives what MuJoCo's own kinematics give, and changed copies of itself."""

from typing import Any

import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.mujoco.world import TaskState, World, first_readings

MODEL = """<mujoco><worldbody>
  <body name="drone" pos="0 0 1"><freejoint/><geom size="0.1"/>
    <body name="arm" pos="0.1 0 0"><joint name="shoulder" type="ball"/><geom size="0.05" pos="0.1 0 0"/>
      <body name="hand" pos="0.2 0 0" euler="0 30 0"><joint name="wrist" axis="0 1 1"/>
        <joint name="reach" type="slide" axis="1 0 0"/><geom size="0.04"/>
        <site name="tip" pos="0.05 0 0.02" euler="0 0 40"/>
      </body></body></body>
  <body name="goal" mocap="true" pos="1 0 0"><geom size="0.02" contype="0" conaffinity="0"/></body>
  <body name="wall" mocap="true" pos="2 0 0"><geom size="0.02"/></body>
</worldbody><sensor>
  <jointpos name="wrist angle" joint="wrist"/><framepos name="hand place" objtype="body" objname="hand"/>
</sensor></mujoco>"""


def make_world(seed: int = 0) -> World:
    """Somewhere, and moving."""
    model, random = load_model(MODEL), np.random.default_rng(seed)
    qpos, qvel = random.normal(size=model.nq), random.normal(size=model.nv)
    for at in (3, 7):
        qpos[at : at + 4] /= np.linalg.norm(qpos[at : at + 4])
    state = TaskState(
        physics=PhysicsState(qpos=jnp.asarray(qpos, jnp.float32), qvel=jnp.asarray(qvel, jnp.float32)),
        markers={"goal": jnp.array([1.0, 0.0, 0.0]), "wall": jnp.array([2.0, 0.0, 0.0])},
        kept={},
        action=jnp.zeros(1),
        readings=jnp.asarray(first_readings(MODEL, tuple(model.qpos0.tolist()))),
        episode_step=jnp.asarray(3, jnp.int32),
    )
    return World(asset=MODEL, control_period=0.02, state=state)


def in_mujoco(world: World) -> mujoco.MjData:
    data = mujoco.MjData(world.model)
    data.qpos[:], data.qvel[:] = world.qpos, world.qvel
    mujoco.mj_forward(world.model, data)
    return data


@pytest.mark.parametrize(
    ("kind", "name"),
    [("body", "drone"), ("body", "arm"), ("body", "hand"), ("site", "tip")],
)
def test_a_frame_and_how_it_moves_are_mujocos(kind: str, name: str) -> None:
    world = make_world()
    data, frame = in_mujoco(world), getattr(world, kind)(name)
    mine = getattr(data, kind)(name)
    place, matrix = (mine.xpos, mine.xmat.reshape(3, 3))
    np.testing.assert_allclose(frame.position, place, atol=2e-6)
    np.testing.assert_allclose(frame.rotation, matrix, atol=2e-6)
    velocity = np.zeros(6)
    objects = {"body": mujoco.mjtObj.mjOBJ_XBODY, "site": mujoco.mjtObj.mjOBJ_SITE}
    mujoco.mj_objectVelocity(world.model, data, objects[kind], mine.id, velocity, 0)
    np.testing.assert_allclose(frame.angular_velocity, velocity[:3], atol=1e-5)
    np.testing.assert_allclose(frame.velocity, velocity[3:], atol=1e-5)


def test_joints_are_numbers_by_name_with_their_units() -> None:
    world = make_world()
    positions, velocities = world.joint_positions(), world.joint_velocities("reach", "wrist")
    assert {name: jnp.shape(x) for name, x in positions.items()} == {
        "drone position [m]": (3,),
        "drone quaternion [1]": (4,),
        "shoulder quaternion [1]": (4,),
        "wrist angle [rad]": (),
        "reach position [m]": (),
    }
    assert list(velocities) == ["reach velocity [m/s]", "wrist velocity [rad/s]"]
    assert velocities["reach velocity [m/s]"] == world.joint("reach").velocity == world.qvel[10]
    np.testing.assert_array_equal(positions["shoulder quaternion [1]"], world.joint("shoulder").position)


def test_a_sensor_at_an_episodes_start_reads_the_models_own_start() -> None:
    np.testing.assert_allclose(make_world().sensor("hand place"), [0.3, 0.0, 1.0], atol=1e-6)


def test_time_is_that_of_the_steps_done() -> None:
    assert make_world().time == pytest.approx(0.06)


def test_changed_copies_leave_the_world_as_it_was() -> None:
    world = make_world()
    changed = world.with_joint("wrist", 0.5, velocity=-1.0).place("drone", [0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0])
    changed = changed.place("goal", jnp.ones(3)).keep(count=2)
    assert (changed.joint("wrist").position, changed.joint("wrist").velocity) == (0.5, -1.0)
    np.testing.assert_array_equal(changed.qpos[:7], [0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(changed.body("goal").position, [1.0, 1.0, 1.0])
    assert changed.kept["count"] == 2
    np.testing.assert_array_equal(world.qpos, make_world().qpos)
    assert world.kept == {} and (world.body("goal").position[0], world.body("goal").position[1]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda world: world.site("tpi"), r"no site 'tpi'; there is tip\. Did you mean 'tip'\?"),
        (lambda world: world.sensor("touch"), "no sensor 'touch'; there is wrist angle, hand place"),
        (lambda world: world.joint_positions("wrsit"), r"Did you mean 'wrist'\?"),
        (
            lambda world: world.place("hand", [0.0] * 3),
            "'hand' neither moves freely nor is a marker .* drone, goal, wall",
        ),
        (lambda world: world.place("goal", [0.0] * 2), r"marker 'goal': got shape \(2,\); must be shape \(3,\)"),
        (lambda world: world.place("goal", [0.0] * 3, [1.0, 0, 0, 0]), "a position only; leave out the quaternion"),
        (lambda world: world.place("wall", [0.0] * 3), "the marker 'wall' collides"),
        (lambda world: world.with_joint("wrist", [0.0, 1.0]), r"got shape \(2,\); must be one number"),
    ],
)
def test_what_cannot_be_asked_is_told(ask: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ask(make_world())


SENSING = """<mujoco><worldbody>
  <body name="cart" pos="0 0 0.5"><joint name="rail" type="slide" axis="1 0 0"/><geom name="box" size="0.1"/>
    <site name="nose" pos="0.1 0 0" zaxis="1 0 0"/><camera name="look" zaxis="-1 0 0" resolution="2 2"/></body>
  <body name="goal" mocap="true" pos="5 0 0.5"><geom name="ball" size="0.1" contype="0" conaffinity="0"/>
    <site name="mark"/><camera name="back" resolution="2 2"/>
    <body name="flag" pos="0 0 1"><joint name="hinge"/><geom mass="1" size="0.1" contype="0" conaffinity="0"/></body>
  </body>
</worldbody>{joins}<sensor><{sensor} name="asked"/><distance geom1="box" geom2="ball" cutoff="9"/></sensor></mujoco>"""


def sensing(sensor: str, joins: str = "") -> World:
    asset = SENSING.format(sensor=sensor, joins=joins)
    model = load_model(asset)
    state = TaskState(
        physics=PhysicsState(qpos=jnp.asarray(model.qpos0, jnp.float32), qvel=jnp.zeros(model.nv)),
        markers={"goal": jnp.array([0.5, 0.0, 0.5])},
        kept={},
        action=jnp.zeros(1),
        readings=jnp.asarray(first_readings(asset, tuple(model.qpos0.tolist()))),
        episode_step=jnp.asarray(0, jnp.int32),
    )
    return World(asset=asset, control_period=0.02, state=state)


@pytest.mark.parametrize(
    "sensor",
    [
        *(f"{kind} objtype='body' objname='goal'" for kind in ("framepos", "framequat", "framexaxis", "frameyaxis")),
        *(f"{kind} objtype='body' objname='flag'" for kind in ("framezaxis", "framelinvel", "framelinacc")),
        "framepos objtype='xbody' objname='flag'",
        "framepos objtype='geom' objname='ball'",
        "framepos objtype='site' objname='mark'",
        "framepos objtype='camera' objname='back'",
        "framepos objtype='body' objname='cart' reftype='site' refname='mark'",
        *(f"{kind} geom1='box' geom2='ball' cutoff='9'" for kind in ("distance", "normal", "fromto")),
        "distance body1='cart' body2='goal' cutoff='9'",
        *(f"{kind} site='mark'" for kind in ("velocimeter", "accelerometer", "gyro", "force", "torque", "touch")),
        "magnetometer site='mark'",
        *("rangefinder site='mark'", "rangefinder site='nose'", "rangefinder camera='look'"),
        "insidesite objtype='body' objname='cart' site='mark'",
        *("camprojection site='mark' camera='look'", "camprojection site='nose' camera='back'"),
        *(f"{kind} body='goal'" for kind in ("subtreecom", "subtreelinvel", "subtreeangmom")),
        "subtreecom body='world'",
        "e_potential",
        "contact body1='goal' body2='cart' data='found'",
    ],
)
def test_a_sensor_that_reads_where_a_marker_is_is_refused(sensor: str) -> None:
    with pytest.raises(ValueError, match="the sensor 'asked' reads where the marker 'goal' is in the MJCF"):
        sensing(sensor).sensor("asked")


@pytest.mark.parametrize(
    "sensor",
    [
        "jointpos joint='hinge'",
        "jointvel joint='rail'",
        "framepos objtype='body' objname='cart'",
        "framepos objtype='body' objname='cart' reftype='body' refname='world'",
        "accelerometer site='nose'",
        "subtreecom body='cart'",
        *("e_kinetic", "clock"),
    ],
)
def test_a_sensor_that_a_marker_is_nothing_to_reads_what_mujoco_reads_with_it_elsewhere(sensor: str) -> None:
    world = sensing(sensor)
    data = mujoco.MjData(world.model)
    data.mocap_pos[0] = world.body("goal").position
    mujoco.mj_forward(world.model, data)
    np.testing.assert_allclose(world.sensor("asked"), data.sensor("asked").data, atol=1e-6)


@pytest.mark.parametrize(
    "joins",
    [
        "<tendon><spatial><site site='nose'/><site site='mark'/></spatial></tendon>",
        "<tendon><spatial><site site='nose'/><geom geom='ball'/><site site='nose'/></spatial></tendon>",
        "<actuator><general site='nose' refsite='mark'/></actuator>",
    ],
)
def test_a_marker_that_something_pulls_at_is_not_placed(joins: str) -> None:
    with pytest.raises(ValueError, match="a tendon or an actuator ends at a site of the marker 'goal'"):
        sensing("clock", joins).place("goal", [0.0, 0.0, 0.0])
