"""A robot's links from files of other people."""

from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
from case_tables import cases, refused
from stick_robots import h1_2_sticks, microduck_sticks

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.model import LeggedModel, make_legged_model, read_links
from ejax.envs.locomotion.robots import FILE, Foot, JointDrives, LeggedRobot, Shape, robot_file
from ejax.envs.locomotion.terrain import Terrain

H1_2 = velocity_task("h1_2").robot
MICRODUCK = velocity_task("microduck").robot
ANYMAL_C = velocity_task("anymal_c").robot
QUADRUPED = velocity_task("quadruped").robot

STICKS = {"h1_2": (H1_2, h1_2_sticks()), "microduck": (MICRODUCK, microduck_sticks())}
HOPPER = LeggedRobot(
    name="hopper",
    source=None,
    joints=("knee",),
    home=(0.0,),
    drives=JointDrives(action_scale=(1.0,), stiffness=(9.0,), damping=(1.0,), armature=(0.0,), max_effort=(5.0,)),
    base="trunk",
    upright="trunk",
    height=1.0,
    feet=(Foot(body="shank", offset=(0.0, 0.0, -0.4), geoms=r"foot_\d+_collision", contacts=1),),
    friction=0.7,
)
URDF = """<robot name="hopper">
  <link name="body"><inertial><mass value="2"/>
    <inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial></link>
  <link name="cover">
    <inertial><mass value="0.3"/><inertia ixx=".001" iyy=".001" izz=".004" ixy="0" ixz="0" iyz="0"/></inertial>
    <visual><geometry><mesh filename="package://nowhere/cover.dae"/></geometry></visual>
  </link>
  <link name="shank"><inertial><origin xyz="0 0 -.2"/><mass value="0.5"/>
    <inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial></link>
  <link name="foot"><collision><geometry><sphere radius="0.05"/></geometry></collision></link>
  <joint name="c" type="fixed"><parent link="body"/><child link="cover"/></joint>
  <joint name="knee" type="revolute"><parent link="body"/><child link="shank"/><axis xyz="0 1 0"/>
    <limit lower="-1" upper="1" effort="2" velocity="1"/></joint>
  <joint name="f" type="fixed"><parent link="shank"/><child link="foot"/><origin xyz="0 0 -.4"/></joint>
</robot>"""


def made(robot: LeggedRobot, folder: Path, text: str, name: str = "robot.xml") -> LeggedModel:
    path = folder / name
    path.write_text(text)
    return make_legged_model(replace(robot, source=f"{FILE}{path}", shapes=()), Terrain(), 0.005)


def test_our_own_file_read_as_any_other_makes_the_same_robot(tmp_path: Path) -> None:
    """After 0.2 s, to the digits that MuJoCo writes. Alone our file has no unit of angles, which is the scene's."""
    text = robot_file("quadruped.xml").read_text().replace("<default>", '<compiler angle="radian"/><default>', 1)
    positions = []
    for legged in (make_legged_model(QUADRUPED, Terrain(), 0.005), made(QUADRUPED, tmp_path, text)):
        data = mujoco.MjData(legged.model)
        data.qpos[2] = QUADRUPED.height
        data.qpos[list(legged.joint_qpos)] = data.ctrl[:] = QUADRUPED.home
        for _ in range(40):
            mujoco.mj_step(legged.model, data)
        assert data.ncon == 4
        positions.append(data.qpos)
    np.testing.assert_allclose(*positions, atol=1e-4)


@pytest.mark.parametrize("name", STICKS)
def test_a_users_file_has_the_drives_feet_and_contacts_of_the_robot(name: str, tmp_path: Path) -> None:
    robot, text = STICKS[name]
    legged = made(robot, tmp_path, text)
    model = legged.model
    assert [model.actuator(i).name for i in range(model.nu)] == list(robot.joints)
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], robot.drives.stiffness)
    np.testing.assert_allclose(model.actuator_forcerange[:, 1], robot.drives.max_effort)
    assert [model.body(i).name for i in legged.feet] == [foot.body for foot in robot.feet]
    assert all(len(places) >= 1 for places in legged.foot_sensors)
    assert model.nq == 7 + len(robot.joints)
    assert len(legged.guarded_sensors) == (13 if robot is MICRODUCK else 0), "all links but the feet"
    assert len(legged.self_sensors) == (2 if robot is H1_2 else 0)


@cases(
    "old new text",
    ('"left_knee_joint"', '"left_knee"', "has no joint left_knee_joint, which h1_2 needs; it has left_hip_yaw_joint"),
    ('"torso_link"', '"torso"', "has no body torso_link, which h1_2 needs; it has pelvis"),
    (
        "</worldbody>",
        '<body><joint name="finger"/><geom size="1"/></body></worldbody>',
        "has joints that no drive of h1_2 moves: finger",
    ),
    ('<geom type="sphere"', '<geom contype="0" conaffinity="0" type="sphere"', "it has none but meshes"),
    ('name="left_knee_link"', 'name="left_kne_link"', r"no collision geom matches 'left_\(shin"),
    ("<worldbody>", "<world>", "MuJoCo cannot read"),
    ('range="-2 2"', "", "has joints that are not hinges with a range: left_hip_yaw_joint, left_hip_pitch_joint"),
    ('type="sphere"', 'type="sphere" material="steel"', "MuJoCo cannot"),
    (
        "</worldbody>",
        '</worldbody><equality><joint name="both" joint1="left_knee_joint" joint2="right_knee_joint"/></equality>',
        "has both: equalities and tendons are not supported",
    ),
)
def test_a_file_that_lacks_something_is_refused_with_what_it_has(old: str, new: str, text: str, tmp_path: Path) -> None:
    assert old in h1_2_sticks()
    error = refused(lambda: made(H1_2, tmp_path, h1_2_sticks().replace(old, new)), match=text)
    assert str(error).startswith("model: ")


def test_without_a_file_the_joints_are_told_that_it_must_have() -> None:
    with pytest.raises(ValueError, match=r"no known package.*microduck.*left_hip_yaw, left_hip_roll"):
        make_legged_model(MICRODUCK, Terrain(), 0.002)


def test_a_urdf_becomes_a_floating_base_with_what_is_fixed_to_it(tmp_path: Path) -> None:
    """The cover's inertia, which no body can have, becomes a ball's, (0.001 + 0.001 + 0.004) / 3; the foot has none."""
    model = made(HOPPER, tmp_path, URDF, "hopper.urdf").model
    assert [model.body(i).name for i in range(1, model.nbody)] == ["trunk", "shank"]
    assert model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
    np.testing.assert_allclose(model.body_mass[1:], [2.3, 0.5])
    np.testing.assert_allclose(model.body("trunk").inertia, 1.002, rtol=1e-5)
    np.testing.assert_allclose(model.geom("foot_0_collision").pos, [0.0, 0.0, -0.4], atol=1e-6)
    np.testing.assert_allclose(model.geom("foot_0_collision").friction[0], 0.7)
    np.testing.assert_allclose(model.jnt_range[1], [-1.0, 1.0], rtol=1e-6)
    assert not model.jnt_actfrclimited.any(), "the drives have the limits"


def test_a_part_that_is_fixed_to_another_is_no_body_of_its_own(tmp_path: Path) -> None:
    robot = replace(HOPPER, feet=(replace(HOPPER.feet[0], body="foot"),))
    with pytest.raises(ValueError, match="has as a part of another link foot, which hopper needs; it has trunk, shank"):
        made(robot, tmp_path, URDF, "hopper.urdf")


def test_shapes_stand_for_meshes(tmp_path: Path) -> None:
    mesh = URDF.replace('<sphere radius="0.05"/>', '<mesh filename="package://nowhere/foot.stl"/>')
    (tmp_path / "hopper.urdf").write_text(mesh)
    shape = Shape(body="shank", name="foot", kind="sphere", size=(0.06,), place=(0.0, 0.0, -0.4))
    links = read_links(tmp_path / "hopper.urdf", replace(HOPPER, shapes=(shape,)))
    (geom,) = links.iter("geom")
    assert (geom.get("name"), geom.get("size")) == ("foot_0_collision", "0.06")


def test_all_but_the_links_is_left_out(tmp_path: Path) -> None:
    """A scene with pictures and meshes that are not there; its default range of joints stays with its own links."""
    text = """<mujoco><compiler angle="radian"/>
      <default><joint range="-0.3 0.3" damping="0.2"/><position kp="3" ctrlrange="0 0.1"/>
        <default class="seen"><geom contype="0" conaffinity="0" material="paint" mass="0"/></default></default>
      <asset><texture name="t" type="2d" file="no.png"/><material name="paint" texture="t"/><mesh file="m.stl"/></asset>
      <worldbody><geom name="ground" type="plane" size="1 1 1"/><light/><camera/>
        <body name="root"><geom size="0.1" mass="2"/><geom class="seen" type="mesh" mesh="m"/><site name="here"/>
          <geom class="seen" type="box" size="0.2 0.1 0.1"/>
          <body name="shank"><joint name="knee" axis="0 1 0"/>
            <geom name="foot_1_collision" size="0.05" pos="0 0 -0.4"/></body></body></worldbody>
      <actuator><motor joint="knee"/></actuator><sensor><gyro site="here"/></sensor>
      <keyframe><key qpos="0.1"/></keyframe></mujoco>"""
    model = made(HOPPER, tmp_path, text).model
    assert (model.nbody, model.nu, model.nkey, model.nmesh, model.ncam) == (3, 1, 0, 0, 1)
    assert [model.geom(i).name for i in range(model.ngeom)] == ["floor", "trunk_0_collision", "foot_1_collision"]
    np.testing.assert_allclose([*model.jnt_range[1], model.dof_damping[6]], [-0.3, 0.3, 0.2])
    assert not model.actuator_ctrllimited.any()


def test_mass_that_meshes_would_have_is_asked_for(tmp_path: Path) -> None:
    mjcf = (
        '<mujoco><asset><mesh name="m" file="m.stl"/></asset><worldbody><body name="trunk"><geom size="1"/>'
        '<body name="shank"><joint name="knee" range="-9 9"/><geom type="mesh" mesh="m"/></body></body>'
        "</worldbody></mujoco>"
    )
    with pytest.raises(ValueError, match="whose mass comes from meshes, which are left out: shank; add an inertial"):
        made(HOPPER, tmp_path, mjcf)


def test_anymal_c_weighs_what_its_urdf_says() -> None:
    try:
        legged = make_legged_model(ANYMAL_C, Terrain(), 0.005)
    except ModuleNotFoundError:
        pytest.skip("the package with the links of anymal_c is not installed")
    np.testing.assert_allclose(legged.model.body_mass.sum(), 52.135, atol=1e-3)
    assert [len(places) for places in legged.unwanted_sensors] == [3, 3, 3, 3]
