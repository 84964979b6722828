"""A simulation asked by name gives what MuJoCo's own kinematics give, and changed copies of itself."""

from typing import Any

import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.randomization.physics import PHYSICS
from ejax.envs.task.entities import joint_dofs
from ejax.envs.task.terms import Outcome, join_outcomes
from ejax.envs.task.world import TaskState, World

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
        readings=jnp.zeros(model.nsensordata),
        episode_step=jnp.asarray(3, jnp.int32),
    )
    return World(asset=MODEL, control_period=0.02, state=state)


def in_mujoco(world: World) -> mujoco.MjData:
    data = mujoco.MjData(world.model)
    data.qpos[:], data.qvel[:] = world.qpos, world.qvel
    mujoco.mj_forward(world.model, data)
    return data


@pytest.mark.parametrize(("kind", "name"), [("body", "drone"), ("body", "arm"), ("body", "hand"), ("site", "tip")])
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


@cases(
    "ask told",
    (lambda world: world.site("tpi"), r"no site 'tpi'; there is tip\. Did you mean 'tip'\?"),
    (lambda world: world.sensor("touch"), "no sensor 'touch'; there is wrist angle, hand place"),
    (lambda world: world.joint_positions("wrsit"), r"Did you mean 'wrist'\?"),
    (lambda world: world.place("hand", [0.0] * 3), "'hand' neither moves freely nor is a marker .* drone, goal, wall"),
    (lambda world: world.place("goal", [0.0] * 2), r"marker 'goal': got shape \(2,\); must be shape \(3,\)"),
    (lambda world: world.place("goal", [0.0] * 3, [1.0, 0, 0, 0]), "a position only; leave out the quaternion"),
    (lambda world: world.with_joint("wrist", [0.0, 1.0]), r"got shape \(2,\); must be one number"),
)
def test_what_cannot_be_asked_is_told(ask: Any, told: str) -> None:
    refused(lambda: ask(make_world()), match=told)


def test_links_and_joints_without_names_are_all_randomized() -> None:
    part = '<body><joint axis="0 1 0"/><geom size="0.1" pos="0.3 0 0"/>{}</body>'
    drive = '<actuator><motor name="a" joint="first"/></actuator>'
    first = '<body><joint name="first" axis="0 1 0"/><geom size="0.1"/>{}</body>'.format(part.format(part.format("")))
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{first}</worldbody>{drive}</mujoco>")
    robot = {"uid": "robot"}
    assert joint_dofs(model, robot, None).tolist() == [0, 1, 2]
    change = PHYSICS["randomize_articulation_mass"](model, robot, mass_range=(2.0, 2.0))
    assert (change.writes["body_mass"].nonzero()[0] == [1, 2, 3]).all()


def test_terms_that_measure_the_same_are_both_logged() -> None:
    ends = [Outcome(metrics={"gap": jnp.full((), float(i))}) for i in range(3)]
    assert [float(x) for x in join_outcomes(ends).metrics.values()] == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="two metrics are called 'gap_1'"):
        join_outcomes([Outcome(metrics={"gap": jnp.zeros(()), "gap_1": jnp.ones(())}), ends[0]])
