"""Legged robots: models, motion, contacts, commands, ground; beside MuJoCo's own numbers and NumPy."""

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.envs.locomotion.catalog import robot_names, velocity_task
from ejax.envs.locomotion.model import PLACE_WIDTH, LeggedModel, make_legged_model
from ejax.envs.locomotion.motion import FootTimers, follow_contacts, heading, observe_motion, start_timers
from ejax.envs.locomotion.robots import FILE, LeggedRobot, robot_file
from ejax.envs.locomotion.terrain import Terrain, height_below
from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.envs.task.entities import per_joint
from ejax.envs.terms.commands import Command, CommandRanges
from ejax.types import Array

QUADRUPED = velocity_task("quadruped").robot

ROBOTS = {name: velocity_task(name).robot for name in robot_names() if velocity_task(name).robot.source}
FLAT = Terrain()
ROUGH = Terrain(kind="rough", height=0.1, cell=0.5, half_size=2.0)


def installed(robot: LeggedRobot) -> bool:
    try:
        return robot.source is not None and robot_file(robot.source).is_file()
    except ModuleNotFoundError:
        return False


def made(robot: LeggedRobot, terrain: Terrain = FLAT) -> LeggedModel:
    if not installed(robot):
        pytest.skip(f"the package with the links of {robot.name} is not installed")
    return make_legged_model(robot, terrain, 0.005)


def at_home(robot: LeggedRobot, legged: LeggedModel) -> mujoco.MjData:
    data = mujoco.MjData(legged.model)
    data.qpos[2] = robot.height
    data.qpos[list(legged.joint_qpos)] = robot.home
    data.ctrl[:] = robot.home
    mujoco.mj_forward(legged.model, data)
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", ROBOTS)
def test_motion_is_what_mujoco_computes_from_jacobians(name: str) -> None:
    robot = ROBOTS[name]
    legged = made(robot)
    model, data, rng = legged.model, at_home(robot, legged), np.random.default_rng(0)
    data.qpos[3:7] = rng.normal(size=4)
    data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
    data.qpos[7:] += 0.3 * rng.normal(size=model.nq - 7)
    data.qvel[:] = rng.normal(size=model.nv)
    mujoco.mj_forward(model, data)

    motion = observe_motion(robot, legged, PhysicsState(qpos=jnp.array(data.qpos), qvel=jnp.array(data.qvel)))
    for i, foot in enumerate(robot.feet):
        body = model.body(foot.body).id
        point = data.xpos[body] + data.xmat[body].reshape(3, 3) @ np.array(foot.offset)
        jacobian = np.zeros((3, model.nv))
        mujoco.mj_jac(model, data, jacobian, None, point, body)
        np.testing.assert_allclose(motion.foot_pos[i], point, atol=1e-5)
        np.testing.assert_allclose(motion.foot_vel[i], jacobian @ data.qvel, atol=1e-5)
    body, turning = model.body(robot.upright).id, np.zeros((3, model.nv))
    mujoco.mj_jacBody(model, data, None, turning, body)
    np.testing.assert_allclose(motion.upright_ang_vel, turning @ data.qvel, atol=1e-5)
    np.testing.assert_allclose(motion.upright_gravity, -data.xmat[body].reshape(3, 3)[2], atol=1e-5)
    base = data.xmat[model.body(robot.base).id].reshape(3, 3)
    np.testing.assert_allclose(motion.lin_vel_b, base.T @ data.qvel[:3], atol=1e-5)
    np.testing.assert_allclose(motion.ang_vel_b, data.qvel[3:6], atol=1e-6)
    np.testing.assert_allclose(motion.gravity_b, -base[2], atol=1e-6)
    np.testing.assert_allclose(heading(motion), np.arctan2(base[1, 0], base[0, 0]), atol=1e-6)


@pytest.mark.parametrize("name", ROBOTS)
def test_drives_are_the_actuator_model(name: str) -> None:
    """τ = clip(k·(q* − q) − c·q̇, ±F), and the armature is on the joint."""
    robot = ROBOTS[name]
    legged = made(robot)
    model, data = legged.model, at_home(robot, legged)
    rng = np.random.default_rng(1)
    error, velocity = 0.5 * rng.normal(size=model.nu), rng.normal(size=model.nu)
    data.ctrl[:] = np.array(robot.home) + error
    data.qvel[list(legged.joint_qvel)] = velocity
    mujoco.mj_forward(model, data)
    limit = np.array(robot.drives.max_effort)
    torque = np.clip(
        np.array(robot.drives.stiffness) * error - np.array(robot.drives.damping) * velocity, -limit, limit
    )
    np.testing.assert_allclose(data.qfrc_actuator[list(legged.joint_qvel)], torque, rtol=1e-5)
    np.testing.assert_allclose(model.dof_armature[list(legged.joint_qvel)], robot.drives.armature)


@pytest.mark.parametrize("name", ROBOTS)
def test_forces_on_the_feet_are_those_of_the_contacts(name: str) -> None:
    robot = ROBOTS[name]
    legged = made(robot)
    model, data = legged.model, at_home(robot, legged)
    for _ in range(40):  # Go2 and ANYmal C start some centimetres above the ground
        mujoco.mj_step(model, data)
    mujoco.mj_forward(model, data)
    _, contacts = follow_contacts(start_timers(len(robot.feet)), legged, jnp.array(data.sensordata)[None], 0.005)
    expected = np.zeros((len(robot.feet), 3))
    for i, contact in enumerate(data.contact):
        force, frame = np.zeros(6), np.array(contact.frame).reshape(3, 3)
        mujoco.mj_contactForce(model, data, i, force)
        touching = {model.geom(int(geom)).bodyid[0] for geom in contact.geom}
        for foot, body in enumerate(legged.feet):
            expected[foot] += frame.T @ force[:3] if body in touching else 0.0
    assert expected[:, 2].min() > 1.0, "each foot bears something"
    np.testing.assert_allclose(contacts.force, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow_cases("mjx", "warp")
@pytest.mark.parametrize("engine", ["mjx", "warp"])
def test_all_engines_sense_the_same_contacts(engine: str) -> None:
    if engine == "warp":
        pytest.importorskip("mujoco_warp")
    legged = made(QUADRUPED)
    data = at_home(QUADRUPED, legged)
    state = PhysicsState(qpos=jnp.array(data.qpos, jnp.float32), qvel=jnp.zeros(legged.model.nv))
    ctrl = jnp.array(QUADRUPED.home)

    def forces(engine: str) -> tuple[Array, Array]:
        _, readings = Physics(legged.xml, engine, 3).step_sensing(state, ctrl)  # type: ignore[arg-type]
        _, contacts = follow_contacts(start_timers(4), legged, readings, 0.005)
        return contacts.found, contacts.force

    (found, force), (expected_found, expected) = (
        jax.jit(functools.partial(forces, each))() for each in (engine, "mujoco")
    )
    assert expected_found.all()
    np.testing.assert_array_equal(found, expected_found)
    np.testing.assert_allclose(force, expected, rtol=0.02, atol=0.5)


def sensed(*feet: tuple[int, ...], **sensors: tuple) -> LeggedModel:
    """Make a model that is its contact sensors alone: where the places of each foot's begin, and of others'."""
    nothing: dict = {"xml": "", "joint_qpos": (), "joint_qvel": (), "upright": 0, "feet": tuple(range(len(feet)))}
    return LeggedModel(**nothing, foot_sensors=feet, **{"guarded_sensors": (), "self_sensors": (), **sensors})


def test_a_flight_and_its_landing_are_timed() -> None:
    """Two feet, 4 steps of 0.01 s: one lands in the third, one lifts off in the second and is up for three of them."""
    legged = sensed((0,), (PLACE_WIDTH,))
    readings = np.zeros((4, 2 * PLACE_WIDTH))
    readings[2:, 0], readings[2:, 1], readings[:, 6], readings[:, 7] = 1.0, (5.0, 9.0), 1.0, 1.0
    readings[0, PLACE_WIDTH] = 1.0
    timers = FootTimers(touching=jnp.array([False, True]), air_time=jnp.array([0.3, 0.0]))
    timers, contacts = follow_contacts(timers, legged, jnp.array(readings), 0.01)
    np.testing.assert_array_equal(contacts.found, [True, True])
    np.testing.assert_array_equal(contacts.landed, [True, False])
    np.testing.assert_array_equal(timers.touching, [True, False])
    np.testing.assert_allclose(timers.air_time, [0.0, 0.03], atol=1e-7)
    np.testing.assert_allclose(contacts.force, [[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])  # normal z, the stronger of two
    assert contacts.guarded_force == contacts.self_contacts == 0.0
    np.testing.assert_allclose(
        contacts.flight, [0.33, 0.0], atol=1e-6
    )  # 0.3 s and three steps, that of the landing too


def test_self_contacts_count_physics_steps_above_the_threshold() -> None:
    legged = sensed((0,), guarded_sensors=(PLACE_WIDTH,), self_sensors=(2 * PLACE_WIDTH, 3 * PLACE_WIDTH))
    readings = np.zeros((4, 4 * PLACE_WIDTH))
    readings[:, PLACE_WIDTH + 1] = [0.0, 3.0, 7.0, 1.0]
    readings[:, 2 * PLACE_WIDTH + 1] = [11.0, 9.0, 0.0, 0.0]
    readings[:, 3 * PLACE_WIDTH + 1] = [50.0, 0.0, 12.0, 0.0]
    _, contacts = follow_contacts(start_timers(1), legged, jnp.array(readings), 0.005)
    assert contacts.guarded_force == 7.0
    assert contacts.self_contacts == 2.0


@pytest.mark.slow
def test_commands_are_drawn_within_their_ranges_and_shares() -> None:
    ranges = CommandRanges(lin_vel_x=(-1.0, 2.0), standing=0.1, heading=0.3, forward=0.2)
    draw = jax.vmap(lambda key: ranges.draw(key, 0.02))
    command = draw(jax.random.split(jax.random.key(0), 4000))
    for axis, (low, high) in enumerate((ranges.lin_vel_x, ranges.lin_vel_y, ranges.ang_vel_z)):
        assert low <= command.velocity[:, axis].min() < command.velocity[:, axis].max() <= high
    assert 150 <= command.steps_left.min() < command.steps_left.max() <= 400  # 3 to 8 s
    straight = (command.velocity[:, 1:] == 0.0).all(axis=1)
    assert command.velocity[straight, 0].min() >= 0.3 - 1e-6
    for drawn, share in ((command.stands, 0.1), (command.follows_heading, 0.3), (straight, 0.2)):
        assert abs(drawn.mean() - share) < 0.03


@pytest.mark.parametrize("single", [0.0, 0.4, 1.0])
def test_a_part_of_commands_is_along_or_about_one_axis(single: float) -> None:
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: CommandRanges(forward=0.0, heading=1.0, single=single).draw(key, 0.02))(keys)
    alone = (drawn.velocity != 0.0).sum(axis=1) == 1
    assert abs(alone.mean() - single) < 0.03
    np.testing.assert_array_equal(drawn.follows_heading, ~alone)
    if single:
        axis = (drawn.velocity[alone] != 0.0).mean(axis=0)
        np.testing.assert_allclose(axis, 1.0 / 3.0, atol=0.05)
    # the others are those without it
    plain = jax.vmap(lambda key: CommandRanges(forward=0.0).draw(key, 0.02))(keys)
    np.testing.assert_array_equal(drawn.velocity[~alone], plain.velocity[~alone])


@pytest.mark.parametrize("now", [False, True], ids=["of the task", "of a curriculum"])
def test_each_part_of_a_command_is_zero_with_its_own_probability(now: bool) -> None:
    shares = {"zero_x": 0.2, "zero_y": 0.7, "zero_yaw": 0.5}
    keys, given = jax.random.split(jax.random.key(0), 4000), {name: jnp.array(share) for name, share in shares.items()}
    ranges = CommandRanges(forward=0.0, heading=1.0, **({} if now else shares))
    drawn = jax.vmap(lambda key: ranges.draw(key, 0.02, given if now else {}))(keys)
    zero = np.asarray(drawn.velocity == 0.0)
    np.testing.assert_allclose(zero.mean(axis=0), list(shares.values()), atol=0.03)
    assert abs(zero.all(axis=1).mean() - 0.2 * 0.7 * 0.5) < 0.02  # one knows nothing of the others
    np.testing.assert_array_equal(drawn.follows_heading, ~zero[:, 2])  # which would turn the robot after all
    plain = jax.vmap(lambda key: CommandRanges(forward=0.0).draw(key, 0.02))(keys)
    np.testing.assert_array_equal(drawn.velocity, np.where(zero, 0.0, plain.velocity))


def test_a_command_that_is_hardly_one_stands() -> None:
    for speed, stands in ((0.19, True), (0.21, False)):
        command = command_of(velocity=jnp.array([0.0, -speed, 0.0]))
        steered = CommandRanges(least_speed=0.2).steer(command, jnp.zeros(()))
        assert (steered.velocity == 0.0).all() == stands
    refused(CommandRanges, least_speed=-1.0, match="least_speed must be a number of at least 0, got -1")


def test_parts_that_shall_not_touch_the_ground_are_weighed_one_by_one() -> None:
    legged = sensed((0,), unwanted_sensors=((PLACE_WIDTH, 2 * PLACE_WIDTH), (3 * PLACE_WIDTH,)))
    readings = np.zeros((4, 4 * PLACE_WIDTH))
    readings[1, PLACE_WIDTH + 1], readings[2, 2 * PLACE_WIDTH + 2], readings[3, 3 * PLACE_WIDTH + 1] = 3.0, 4.0, 7.0
    _, contacts = follow_contacts(start_timers(1), legged, jnp.array(readings), 0.005)
    np.testing.assert_allclose(contacts.unwanted_force, [4.0, 7.0])


def command_of(**changes: object) -> Command:
    values = {"velocity": jnp.array([0.5, 0.1, 0.2]), "heading": jnp.array(3.0), "follows_heading": jnp.array(False)}
    return Command(**{**values, "stands": jnp.array(False), "steps_left": jnp.array(2), **changes})  # type: ignore[arg-type]


def test_a_command_turns_towards_its_heading_the_short_way_and_within_its_range() -> None:
    """ψ* = 3, ψ = −3: the way is −0.283 rad, and 0.5/s of it −0.142 rad/s; at ψ = 0 the rate is cut to 0.5."""
    ranges = CommandRanges()
    follows = command_of(follows_heading=jnp.array(True))
    turned = ranges.steer(follows, jnp.array(-3.0))
    np.testing.assert_allclose(turned.velocity, [0.5, 0.1, 0.5 * (6.0 - 2.0 * np.pi)], atol=1e-6)
    np.testing.assert_allclose(ranges.steer(follows, jnp.array(0.0)).velocity, [0.5, 0.1, 0.5], atol=1e-6)
    np.testing.assert_allclose(ranges.steer(command_of(), jnp.array(0.0)).velocity, [0.5, 0.1, 0.2], atol=1e-6)
    standing = ranges.steer(command_of(stands=jnp.array(True)), jnp.array(0.0))
    np.testing.assert_array_equal(standing.velocity, 0.0)


def test_a_command_is_replaced_when_its_time_is_up() -> None:
    ranges, key = CommandRanges(), jax.random.key(3)
    kept = ranges.after(command_of(), key, 0.02)
    np.testing.assert_allclose(kept.velocity, [0.5, 0.1, 0.2])
    assert kept.steps_left == 1
    new = ranges.after(kept, key, 0.02)
    np.testing.assert_array_equal(new.velocity, ranges.draw(key, 0.02).velocity)
    assert new.steps_left > 1


@cases("changes", {"lin_vel_x": (1.0, 0.0)}, {"standing": 1.5}, {"resampling_time": (0.0, 1.0)}, ids=str)
def test_ranges_that_cannot_be_are_refused(changes: dict) -> None:
    refused(CommandRanges, **changes, match=next(iter(changes)))


def test_the_rough_ground_is_where_rays_hit_it() -> None:
    """At corners exactly, between them within a quarter of the height."""
    legged = made(QUADRUPED, ROUGH)
    data = mujoco.MjData(legged.model)
    data.qpos[2] = 5.0
    mujoco.mj_forward(legged.model, data)
    corners = np.stack(np.meshgrid([-1.5, 0.0, 1.0], [-1.0, 0.5, 1.5]), axis=-1).reshape(-1, 2)
    for offset, tolerance in ((0.0, 1e-4), (0.2, 0.25 * ROUGH.height)):
        for x, y in corners + offset:
            geom = np.zeros(1, np.int32)
            way = mujoco.mj_ray(
                legged.model, data, np.array([x, y, 2.0]), np.array([0.0, 0.0, -1.0]), None, 1, -1, geom
            )
            np.testing.assert_allclose(height_below(ROUGH, jnp.array([x, y])), 2.0 - way, atol=tolerance)
    assert height_below(Terrain(), jnp.ones((4, 3))).tolist() == [0.0] * 4


def test_what_no_joint_is_called_is_refused() -> None:
    assert per_joint(("a_hip", "b_knee"), {".*": 1.0, ".*_knee": 2.0}) == (1.0, 2.0)
    refused(per_joint, ("a_hip",), {"elbow": 1.0}, match="no joint matches 'elbow'")


def test_a_missing_file_is_named() -> None:
    refused(robot_file, f"{FILE}/nowhere/duck.xml", match="model: the file /nowhere/duck")


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no_such_package"):
        robot_file("no_such_package:robot.xml")
