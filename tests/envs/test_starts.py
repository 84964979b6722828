"""Starts of a MuJoCo task's episodes: the whole keyframe, and no noise that breaks a constraint."""

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases, refused

from ejax import MuJoCoTask, World
from ejax.config import ConfigError
from ejax.envs.description import describe
from ejax.envs.mujoco.drawing import apply_appearance
from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.kinematics import body_poses
from ejax.envs.task.entities import constrained_joints
from ejax.envs.terms.events import randomize_rigid_object_pose, randomize_robot_qpos
from ejax.envs.wrappers.placing import add_events
from ejax.types import Array

KEY = jax.random.key(0)
TURN = "0.8 0.6 0 0"
MODEL = """<mujoco><option timestep="0.005"/><default><geom contype="0" conaffinity="0"/></default><worldbody>
  <body name="goal" mocap="true" pos="1 2 3" euler="0 0 90"><geom size="0.02"/>
    <site name="side" pos="0 0.1 0"/>
    <body name="flag" pos="0 0.2 0.1"><geom size="0.01"/><site name="top"/></body></body>
  <body name="still" mocap="true" pos="0 0 1" euler="0 90 0"><geom size="0.02"/></body>
  <body name="arm" pos="0 0 0.5"><joint name="shoulder" axis="0 1 0" damping="2" range="-180 180"/>
    <geom type="capsule" fromto="0 0 0 0.4 0 0" size="0.03" mass="2"/></body>
  <body name="cube" pos="0 1 0"><freejoint/><geom size="0.1"/></body>
</worldbody>
<actuator><position name="shoulder" joint="shoulder" kp="200" kv="10" ctrlrange="-3 3"/></actuator>
<sensor><actuatorfrc name="effort" actuator="shoulder"/><framepos name="side" objtype="site" objname="side"/>
  <framequat name="top" objtype="site" objname="top"/></sensor>
<keyframe><key qpos="0 0 0 0 1 0 0 0"/>
  <key name="home" time="3" qpos="1.2 1 2 3 1 0 0 0" qvel="0.5 0 0 0 0 0 0" ctrl="1.15" mpos="0.4 0.1 0.6 0 0 1"
    mquat="0.8 0.6 0 0 0.70710678 0 0.70710678 0"/></keyframe></mujoco>"""


class Arm(MuJoCoTask):
    model = MODEL
    control_period = 0.01
    start_noise = 0.0

    def rewards(self, world: World, before: World) -> dict[str, Array]:
        return {"one": jnp.ones(())}


@cases("engine", "mujoco", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mjx", "warp")))
def test_the_start_is_what_mujoco_itself_resets_to(engine: Any) -> None:
    if engine == "warp":
        pytest.importorskip("mujoco_warp")
    env = Arm(physics=engine)
    model = mujoco.MjModel.from_xml_string(MODEL)
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 1)
    mujoco.mj_forward(model, data)
    world = env.world(env.reset(KEY)[0])
    np.testing.assert_allclose(world.qpos, data.qpos, atol=1e-6)
    np.testing.assert_allclose(world.qvel, data.qvel, atol=1e-6)
    np.testing.assert_allclose(world.state.readings, data.sensordata, rtol=1e-5, atol=1e-4)
    for name in ("goal", "flag", "still"):
        np.testing.assert_allclose(world.body(name).rotation, data.body(name).xmat.reshape(3, 3), atol=1e-6)
        np.testing.assert_allclose(world.body(name).position, data.body(name).xpos, atol=1e-6)
    # a step later the targets stand where they stood
    state, _ = jax.jit(env.step)(world.state, jnp.zeros(1), KEY)
    np.testing.assert_allclose(state.readings[1:], data.sensordata[1:], atol=1e-5)


def test_pictures_and_poses_show_a_target_as_the_keyframe_turns_it() -> None:
    world = Arm().world(Arm().reset(KEY)[0])
    data = mujoco.MjData(world.model)
    apply_appearance(world.model, data, world.appearance())
    np.testing.assert_allclose(data.mocap_quat, [[0.8, 0.6, 0, 0], [0.5**0.5, 0, 0.5**0.5, 0]], atol=1e-6)
    pose = body_poses(world.model, world.qpos, world.markers)[1]
    np.testing.assert_allclose(pose, world.body_pose("goal"), atol=1e-6)
    moved = world.place("goal", [1.0, 1.0, 1.0])  # it stays turned
    np.testing.assert_allclose(moved.body("goal").rotation, world.body("goal").rotation)
    np.testing.assert_allclose(moved.body("goal").position, jnp.ones(3))


def test_an_object_is_drawn_about_its_place_in_the_keyframe() -> None:
    world = Arm().world(Arm().reset(KEY)[0])
    drawn = randomize_rigid_object_pose(world, KEY, {"uid": "cube"}, [[0.0, 0.0, 1.0]] * 2)
    np.testing.assert_allclose(drawn.body("cube").position, [1.0, 2.0, 4.0], atol=1e-6)


@pytest.mark.parametrize(("keyframe", "angle"), [("", 1.2), ("home", 1.2), (1, 1.2), (0, 0.0), ("0", 0.0)])
def test_a_keyframe_is_chosen_by_name_or_number(keyframe: str | int, angle: float) -> None:
    task: Any = type("Chosen", (Arm,), {"keyframe": keyframe})()
    assert float(task.reset(KEY)[0].physics.qpos[0]) == pytest.approx(angle)


@cases(
    "changes message",
    ({"keyframe": 2}, "no keyframe '2'; there is 0, 1"),
    ({"model": MODEL.replace('key name="home"', 'key name="0"')}, "two keyframes are called '0'"),
    ({"model": MODEL.replace('name="still" mocap="true" pos="0 0 1"', 'mocap="true" pos="0 0 2"')}, "has no name"),
    ({"model": mujoco.MjSpec()}, "MjSpec, use its to_xml"),
    ({"model": MODEL.replace("<sensor>", '<sensor><clock name="now"/>')}, "'now'.*world.time"),
    ids=["number", "two", "nameless", "spec", "clock"],
)
def test_what_cannot_be_started_from_is_refused(changes: dict[str, Any], message: str) -> None:
    refused(lambda: type("Odd", (Arm,), changes)(), match=message)


def test_sensors_that_mjx_would_read_as_0_are_refused() -> None:
    free: Any = type("Free", (Arm,), {"model": MODEL.replace('range="-180 180"', "")})
    free(physics="mujoco")
    refused(free, physics="mjx", match="reads 0 from sensors of forces")


def test_what_is_left_out_is_said() -> None:
    assert "time of 3 s" in describe(Arm()).notes[-1]
    assert "start_noise leaves out left, top, right, one, two" in describe(Loops()).notes[-1]


LOOPS = """<mujoco><option timestep="0.002"/>
  <default><geom contype="0" conaffinity="0" size="0.02" type="capsule" mass="0.3" fromto="0 0 0 0 0 .1"/>
    <joint axis="0 1 0" damping="0.1"/>
    <default class="finger"><joint type="slide" axis="1 0 0" range="0 0.04"/></default>
  </default>
  <worldbody><body name="base" pos="0 0 1"><joint name="base" axis="0 0 1"/><geom/>
    <body name="left"><joint name="left"/><geom/><site name="a0" pos="0 0 .2"/>
      <body name="top" pos="0 0 0.5"><joint name="top"/><geom/><site name="a" pos="0.5 0 0"/>
        <body name="tip" pos="0.5 0 0"><joint name="tip"/><geom/></body></body></body>
    <body name="right" pos="0.5 0 0"><joint name="right"/><geom/><site name="b" pos="0 0 0.5"/></body></body>
    <body name="one" pos="1 0 0"><joint name="one" class="finger"/><geom/></body>
    <body name="two" pos="1.1 0 0"><joint name="two" class="finger"/><geom/></body>
    <site name="world"/>
  </worldbody>{}
  <actuator><motor name="left" joint="left" ctrlrange="-5 5"/></actuator></mujoco>"""
CONNECT = '<connect body1="top" body2="right" anchor="0.5 0 0" {}/>'
COUPLED = '<joint joint1="one" joint2="two"/>'
CABLE = '<tendon><{0} name="t" {1}>{2}</{0}></tendon>'


class Loops(Arm):
    model = LOOPS.format(f"<equality>{CONNECT.format('')}{COUPLED}</equality>")
    control_period = 0.02
    start_noise = 0.01


@cases(
    "added left_out",
    ("", ""),
    (f"<equality>{CONNECT.format('')}{COUPLED}</equality>", "left top right one two"),
    ("<equality>" + CONNECT.format('active="false"') + "</equality>", ""),
    (f'<option><flag equality="disable"/></option><equality>{COUPLED}</equality>', ""),
    ('<equality><weld body1="right" body2="two"/></equality>', "base right two"),
    ('<equality><connect site1="a" site2="b"/></equality>', "left top right"),
    ('<equality><joint joint1="tip"/></equality>', "tip"),
    (CABLE.format("fixed", 'range="-1 1" limited="true"', '<joint joint="one" coef="1"/>'), "one"),
    (CABLE.format("fixed", "", '<joint joint="one" coef="1"/>'), ""),
    (CABLE.format("spatial", 'range="0 2" limited="true"', '<site site="a0"/><site site="b"/>'), "left right"),
    (
        CABLE.format("spatial", "", '<site site="a0"/><site site="world"/>')
        + '<equality><tendon tendon1="t"/></equality>',
        "left",
    ),
    ids=["none", "loop", "inactive", "off", "weld", "sites", "fixed", "limits", "no limits", "cable", "tendon"],
)
def test_joints_under_a_constraint_start_without_noise(added: str, left_out: str) -> None:
    model = LOOPS.format(added)
    assert list(constrained_joints(load_model(model)).values()) == left_out.split()
    task: Any = type("Odd", (Loops,), {"model": model})()
    qpos = task.reset(KEY)[0].physics.qpos
    still = [task.world(task.reset(KEY)[0]).model.joint(int(i)).name for i in np.flatnonzero(qpos == 0.0)]
    # the fingers' range begins where they start
    assert [name for name in still if name not in ("one", "two")] == [
        name for name in left_out.split() if name not in ("one", "two")
    ]


def test_loops_are_closed_at_every_start() -> None:
    def gaps(key: Array) -> tuple[Array, Array]:
        world = Loops().world(Loops().reset(key)[0])
        loop = jnp.linalg.norm(world.site("a").position - world.site("b").position)
        return loop, jnp.abs(world.joint("one").position - world.joint("two").position)

    loop, fingers = jax.vmap(gaps)(jax.random.split(KEY, 32))
    assert loop.max() < 1e-5 and fingers.max() < 1e-6


WELDED = LOOPS.format(f"<equality>{COUPLED}<weld body1='cube' body2='base'/></equality>").replace(
    "</worldbody>", "<body name='cube' pos='0 2 1'><freejoint name='cube'/><geom/></body></worldbody>"
)


@cases(
    "func params held",
    ("randomize_robot_qpos", {"qpos_range": [[0.0] * 2] * 2, "joint_ids": [4, 5]}, "one"),
    ("randomize_rigid_object_pose", {"entity_cfg": {"uid": "cube"}, "position_range": [[0.0] * 3] * 2}, "cube"),
    ("push_joints_by_setting_velocity", {"entity_cfg": {"uid": "robot"}, "velocity_range": [-1.0, 1.0]}, "base"),
    ("push_rigid_object_by_setting_velocity", {"entity_cfg": {"uid": "cube"}, "velocity_range": {"x": [0, 1]}}, "cube"),
)
def test_events_that_would_break_a_constraint_are_refused_by_name(func: str, params: Any, held: str) -> None:
    model = WELDED.replace(
        "<motor ", f"<motor joint='{held}' name='other' ctrlrange='-1 1'/><motor " if held == "base" else "<motor "
    )
    task: Any = type("Odd", (Loops,), {"model": model})
    event = {"func": func, "mode": "interval", "params": params}
    with pytest.raises(ConfigError, match=f"equality or a tendon's limits at .*{held}"):
        add_events(task(start_noise=0.0), {"event": event})


def test_joints_are_drawn_within_their_limits() -> None:
    free: Any = type("Free", (Loops,), {"model": LOOPS.format("")})()
    world = free.world(free.reset(KEY)[0])
    drawn = randomize_robot_qpos(world, KEY, None, [[9.0, 9.0], [9.0, 9.0]], False, [4, 6])
    np.testing.assert_allclose(drawn.physics.qpos[jnp.array([4, 6])], [9.0, 0.04], atol=1e-7)
