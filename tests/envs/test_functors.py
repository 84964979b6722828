"""Each functor against its formula, with numbers computed by hand."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused

from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, quaternion_from_matrix
from ejax.envs.task.world import World
from ejax.envs.terms import actions, events, observations, rewards
from ejax.envs.terms.registry import TERMS, find_functor, register_functor
from ejax.envs.terms.vocabulary import CONTRACTS
from ejax.schema.trust import trust
from ejax.types import Array

KEY = jax.random.key(0)
CONFIG = json.loads((Path(__file__).parents[1] / "gym_configs" / "push_cube.json").read_text())
CONFIG["rigid_object"].append(
    {"uid": "post", "shape": {"shape_type": "Cylinder", "radius": 0.05, "height": 0.2}, "body_type": "static"}
    | {"init_pos": [0.5, 0.5, 0.1], "init_rot": [0.0, 0.0, 90.0]}
)
ENV = EmbodiedEnv(CONFIG, physics="mujoco")
SPEC = ENV.spec
CUBE, POST = {"uid": "cube"}, {"uid": "post"}
HOME = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0, 0.04, 0.04)


def make_world(
    *,
    qpos: tuple[float, ...] = HOME,
    qvel: tuple[float, ...] = (0.0,) * 8,
    cube: tuple[float, float, float] = (-0.6, -0.4, 0.05),
    goal: tuple[float, float, float] = (-0.3, 0.0, 0.05),
    step: int = 7,
    action: Array | None = None,
    active: tuple[int, ...] | None = None,
) -> World:
    """Make the world in a state of one's own; the cube is upright and at rest."""
    state = ENV.start(KEY)
    state = replace(
        state,
        physics=PhysicsState(
            qpos=jnp.array([*qpos, *cube, 1.0, 0.0, 0.0, 0.0]), qvel=jnp.array([*qvel, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        ),
        kept={"goal_pose": make_pose(jnp.array(goal), jnp.eye(3))},
        action=jnp.zeros(8) if action is None else action,
        episode_step=jnp.asarray(step, jnp.int32),
    )
    world = ENV.world(state)
    return replace(world, selected=active or SPEC.active, max_episode_steps=100)


def reward(name: str, given: dict, **params: object) -> float:
    """Compute a reward in the world of these arguments; ``before``: those of the world before, ``info``: the step's."""
    former, info = given.get("before"), given.get("info", {})
    world = make_world(**{key: x for key, x in given.items() if key not in ("before", "info")})
    world = replace(world, info=info, before=None if former is None else make_world(**former))
    return float(find_functor("rewards", name)(world, **params))


def test_joint_positions_are_normalized_in_the_chosen_columns() -> None:
    data = jnp.array([0.0, np.pi, -np.pi, 2 * np.pi, -2 * np.pi, 0.5, 0.04, 0.02])
    scaled = observations.normalize_robot_joint_data(make_world(), data, joint_ids=[0, 1, 2, 3, 4])
    np.testing.assert_allclose(scaled, [0.5, 0.75, 0.25, 1.0, 0.0, 0.5, 0.04, 0.02], atol=1e-6)
    fingers = observations.normalize_robot_joint_data(make_world(), data, control_parts=["hand"], range=[-1.0, 1.0])
    np.testing.assert_allclose(fingers[6:], [1.0, 0.0], atol=1e-6)


def test_normalization_counts_active_joints() -> None:
    world = make_world(active=(6, 7))
    scaled = observations.normalize_robot_joint_data(world, jnp.array([0.01, 0.03]), joint_ids=[1])
    np.testing.assert_allclose(scaled, [0.01, 0.75], atol=1e-6)  # of 0.04 m, although joint 1 is an arm's


def test_the_tool_pose_of_the_stretched_arm() -> None:
    """q = 0: the arm lies along −x, α = 90° turns the wrist: T = Tz(d1)·Rx(90)·Tx(a2 + a3)·Tz(d4)·Rx(90)·Tz(d5)·…"""
    pose = observations.get_robot_eef_pose(make_world(qpos=(0.0,) * 8), {}, "arm")
    expected = [-0.612 - 0.5723, -0.163941 - 0.0922 - 0.16, 0.1273 - 0.1157]
    np.testing.assert_allclose(pose[:3, 3], expected, atol=1e-5)
    np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-5)
    position = observations.get_robot_eef_pose(make_world(qpos=(0.0,) * 8), {}, position_only=True)
    np.testing.assert_allclose(position, expected, atol=1e-5)


def test_object_poses_and_zeros_for_missing_ones() -> None:
    world = make_world()
    pose = observations.get_rigid_object_pose(world, {}, CUBE)
    np.testing.assert_allclose(pose, make_pose(jnp.array([-0.6, -0.4, 0.05]), jnp.eye(3)), atol=1e-6)
    numbers = observations.get_rigid_object_pose(world, {}, POST, to_matrix=False)
    np.testing.assert_allclose(numbers, [0.5, 0.5, 0.1, np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)], atol=1e-6)
    assert observations.get_rigid_object_pose(world, {}, {"uid": "none"}).tolist() == np.zeros((4, 4)).tolist()
    assert observations.get_rigid_object_pose(world, {}, {"uid": "none"}, to_matrix=False).tolist() == [0.0] * 7
    assert observations.get_rigid_object_velocity(world, {}, {"uid": "none"}).tolist() == [0.0] * 6


def test_object_velocities_are_in_the_frame_of_the_arena() -> None:
    world = make_world()
    quarter = quaternion_from_matrix(matrix_from_euler(jnp.array([0.0, 0.0, jnp.pi / 2])))
    physics = PhysicsState(
        qpos=world.state.physics.qpos.at[11:].set(quarter),
        qvel=world.state.physics.qvel.at[8:].set(jnp.array([1.0, 2.0, 3.0, 0.5, 0.0, 0.0])),
    )
    world = replace(world, state=replace(world.state, physics=physics))
    velocity = observations.get_rigid_object_velocity(world, {}, CUBE)
    np.testing.assert_allclose(velocity, [1.0, 2.0, 3.0, 0.0, 0.5, 0.0], atol=1e-6)  # its x axis points along y


def test_target_position() -> None:
    np.testing.assert_allclose(observations.target_position(make_world(), {}), [-0.3, 0.0, 0.05], atol=1e-7)
    assert observations.target_position(make_world(), {}, "another").tolist() == [0.0, 0.0, 0.0]


GOAL = {"source_entity_cfg": CUBE, "target_pose_key": "goal_pose"}
XY, GAUSS = {"use_xy_only": True}, {"exponential": True}
HIGH = {"cube": (0.0, 0.0, 0.35), "goal": (0.0, 0.4, 0.05)}
PAIR = {"source_entity_cfg": CUBE, "target_entity_cfg": POST}
NEAR_POST = {"cube": (0.5, 0.1, 0.4)}
MOVING = {"qvel": (3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 12.0)}
AT_LIMITS = {"qpos": (0.9 * 2 * np.pi, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.01)}
PROGRESS = {"positive_weight": 2.0, "negative_weight": 0.5, **GOAL}
ACTED = {"action": jnp.array([3.0] * 6 + [0.0, 0.0]), "before": {"action": jnp.array([1.0] * 6 + [0.0, 0.0])}}


def moved(before: float, after: float, step: int = 7) -> dict:
    """Arguments of a world whose cube was and is so far from the goal, m."""
    one, other = ({"cube": (0.0, x, 0.05), "goal": (0.0, 0.0, 0.05)} for x in (before, after))
    return {**other, "step": step, "before": one}


@cases(
    "name given params expected",
    ("distance_to_target", {}, GOAL, -0.5),  # 0.3 and 0.4 m away
    ("distance_to_target", {}, {**GOAL, **XY}, -0.5),
    ("distance_to_target", {}, {**GOAL, **GAUSS, "sigma": 0.5}, np.exp(-0.5)),
    ("distance_to_target", {}, {**GOAL, **GAUSS, **XY, "sigma": 0.12}, np.exp(-0.25 / (2 * 0.12**2))),
    ("distance_to_target", HIGH, GOAL, -0.5),
    ("distance_to_target", HIGH, {**GOAL, **XY}, -0.4),
    ("incremental_distance_to_target", moved(0.5, 0.4), PROGRESS, 2.0 * np.tanh(1.0)),
    ("incremental_distance_to_target", moved(0.4, 0.5), PROGRESS, -0.5 * np.tanh(1.0)),
    # an episode's first step, for anything before it
    ("incremental_distance_to_target", moved(0.5, 0.4, step=1), PROGRESS, 0.0),
    ("action_smoothness_penalty", ACTED, {}, -np.sqrt(24.0)),  # of raw actions: Δ = 2 over 6 dimensions
    ("action_smoothness_penalty", {**ACTED, "step": 1}, {}, 0.0),
    ("success_reward", {"info": {"success": jnp.array(True)}}, {}, 1.0),
    ("success_reward", {"info": {"success": False}}, {}, 0.0),
    ("success_reward", {}, {}, 0.0),
    ("joint_velocity_penalty", MOVING, {}, -13.0),
    ("joint_velocity_penalty", MOVING, {"part_name": "arm"}, -3.0),
    ("joint_velocity_penalty", MOVING, {"part_name": "arm", "joint_ids": [0, 6]}, -5.0),
    # q̂ = 0.5 but for one joint at 0.95 and one finger at 0.25: −(0.3 − 0.05) − (0.3 − 0.25)
    ("joint_limit_penalty", AT_LIMITS, {"margin": 0.3}, -0.3),
    ("joint_limit_penalty", AT_LIMITS, {"joint_ids": [0], "margin": 0.1}, -0.05),
    ("distance_between_objects", NEAR_POST, PAIR, -0.5),
    ("distance_between_objects", NEAR_POST, {**PAIR, **GAUSS, "sigma": 0.2}, np.exp(-0.25 / (2 * 0.2**2))),
    # the cube is upright, the post a quarter turn about z: trace 1, so 0
    ("orientation_alignment", NEAR_POST, PAIR, 0.0),
    ("orientation_alignment", NEAR_POST, {**PAIR, "source_entity_cfg": POST}, 1.0),
)
def test_a_reward_is_its_formula(name: str, given: dict, params: dict, expected: float) -> None:
    assert reward(name, given, **params) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_reaching_behind_the_object() -> None:
    """û = (0.6, 0.8, 0): the place behind is (−0.6 − 0.018, −0.4 − 0.024, 0.065)."""
    tool = np.asarray(make_world().eef_pose("arm")[:3, 3])
    expected = 1.0 - np.tanh(8.0 * np.linalg.norm(tool - [-0.618, -0.424, 0.065]))
    params = {"object_cfg": CUBE, "behind_offset": 0.03, "height_offset": 0.015, "distance_scale": 8.0}
    assert reward("reaching_behind_object", {}, part_name="arm", **params) == pytest.approx(expected, abs=1e-5)


def positions(store_key: str, **params: object) -> np.ndarray:
    def draw(key: Array) -> Array:
        return events.randomize_target_pose(make_world(), key, store_key=store_key, **params).kept[store_key]

    return np.asarray(jax.vmap(draw)(jax.random.split(KEY, 500)))


def test_target_poses_fill_their_range() -> None:
    drawn = positions("there", position_range=[[-0.3, 0.0, 0.05], [0.3, 0.2, 0.05]])[:, :3, 3]
    assert drawn[:, 0].min() == pytest.approx(-0.3, abs=0.01) and drawn[:, 0].max() == pytest.approx(0.3, abs=0.01)
    assert drawn[:, 1].min() >= 0.0 and drawn[:, 1].mean() == pytest.approx(0.1, abs=0.01)
    np.testing.assert_allclose(drawn[:, 2], 0.05, atol=1e-7)


@pytest.mark.slow
def test_target_poses_relative_to_an_object() -> None:
    params = {"position_range": [[0.0, 0.0, 0.1], [0.0, 0.0, 0.1]], "reference_entity_cfg": POST}
    np.testing.assert_allclose(positions("a", relative_position=True, **params)[0, :3, 3], [0.5, 0.5, 0.2], atol=1e-6)
    quarter = matrix_from_euler(jnp.radians(jnp.array([0.0, 0.0, 90.0])))
    np.testing.assert_allclose(positions("a", relative_position=True, **params)[0, :3, :3], quarter, atol=1e-6)
    np.testing.assert_allclose(
        positions("a", **params)[0], make_pose(jnp.array([0.0, 0.0, 0.1]), jnp.eye(3)), atol=1e-6
    )
    turned = {**params, "rotation_range": [[0.0, 0.0, 30.0], [0.0, 0.0, 30.0]], "relative_rotation": True}
    expected = matrix_from_euler(jnp.radians(jnp.array([0.0, 0.0, 120.0])))
    np.testing.assert_allclose(positions("a", **turned)[0, :3, :3], expected, atol=1e-6)


@pytest.mark.slow
def test_an_object_is_put_within_its_range_and_comes_to_rest() -> None:
    moving = make_world()
    physics = moving.state.physics
    moving = replace(moving, state=replace(moving.state, physics=physics.replace(qvel=jnp.ones(14))))

    def draw(key: Array) -> PhysicsState:
        ranges = {"position_range": [[-0.2, -0.2, 0.0], [0.2, 0.2, 0.0]], "rotation_range": [[0, 0, -90], [0, 0, 90]]}
        return events.randomize_rigid_object_pose(moving, key, CUBE, **ranges).physics

    drawn = jax.vmap(draw)(jax.random.split(KEY, 500))
    offset = np.asarray(drawn.qpos[:, 8:11]) - [-0.6, -0.4, 0.05]
    assert np.abs(offset[:, :2]).max() == pytest.approx(0.2, abs=0.005) and np.abs(offset[:, 2]).max() < 1e-6
    angle = 2.0 * np.arctan2(drawn.qpos[:, 14], drawn.qpos[:, 11])
    assert angle.min() == pytest.approx(-np.pi / 2, abs=0.05) and angle.max() == pytest.approx(np.pi / 2, abs=0.05)
    assert not np.any(drawn.qvel[:, 8:]) and np.all(drawn.qvel[:, :8] == 1.0)


def test_an_absolute_position_replaces_the_initial_one() -> None:
    ranges = {"position_range": [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], "relative_position": False}
    state = events.randomize_rigid_object_pose(make_world(), KEY, CUBE, **ranges)
    np.testing.assert_allclose(state.physics.qpos[8:11], [0.1, 0.2, 0.3], atol=1e-6)


def test_a_physics_update_lets_the_object_fall() -> None:
    lifted = {"position_range": [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]}
    state = events.randomize_rigid_object_pose(make_world(), KEY, CUBE, physics_update_step=10, **lifted)
    assert float(state.physics.qpos[10]) == pytest.approx(1.05 - 0.5 * 9.81 * 0.1**2, abs=0.01)


def test_joints_are_put_in_their_range_with_their_targets() -> None:
    bounds = {"qpos_range": [[-0.1], [0.1]], "joint_ids": [2]}
    state = events.randomize_robot_qpos(make_world(), KEY, **bounds)
    assert abs(float(state.physics.qpos[2]) - 1.57) <= 0.1 and float(state.physics.qpos[2]) != 1.57
    assert state.state.target[2] == state.physics.qpos[2]


def act(name: str, action: Array, world: World | None = None, **params: object) -> Array:
    """Return the drives' targets after a term acted."""
    world = world or make_world()
    term = find_functor("actions", name)(world.scene, world.active, **params)
    assert term.width == len(action)
    return term.apply(world, action).target


HAND = {"active": (6, 7)}
ARM_TENTH = {"part_name": "arm", "scale": 0.1}
BACKWARDS = {"joint_names": ["Joint3", "Joint1"], "preserve_order": True, "clip": 0.5}


@cases(
    "name action given params targets",
    # from where the joints are, and of active joints only
    (
        "DeltaQposTerm",
        [1.0] * 8,
        {"qpos": (0.3, *HOME[1:])},
        {"scale": 0.1},
        {0: 0.4, **dict(enumerate(np.add(HOME, 0.1)[1:], 1))},
    ),
    ("DeltaQposTerm", [1.0] * 2, {"active": (1, 6)}, {"scale": 0.1}, {1: -1.47, 6: 0.14}),
    ("QposTerm", range(8), {}, {"scale": 0.5}, dict(enumerate(0.5 * np.arange(8)))),
    ("JointPositionAction", [1.0] * 2, {}, {"part_name": "hand", "scale": 0.01, "offset": 0.02}, {6: 0.03, 7: 0.03}),
    # clipped to 1, but for the term of the first form
    ("DefaultJointPositionAction", [4.0] * 6, {}, ARM_TENTH, dict(enumerate(np.add(HOME[:6], 0.1)))),
    ("DefaultJointPositionTerm", [4.0] * 6, {}, ARM_TENTH, dict(enumerate(np.add(HOME[:6], 0.4)))),
    # columns count active joints
    ("QposDenormalizedTerm", [-1.0, 0.5], HAND, {}, {6: 0.0, 7: 0.03}),
    ("QposNormalizedTerm", [0.04, 0.01], HAND, {}, {6: 1.0, 7: 0.25}),
    ("QposDenormalizedTerm", [0.01, 1.0], HAND, {"joint_ids": [1]}, {6: 0.01, 7: 0.04}),
    ("JointPositionToLimitsAction", [0.0, 9.0], {}, {"part_name": "hand"}, {6: 0.02, 7: 0.04}),
    ("RelativeJointPositionAction", [1.0] * 6, {}, ARM_TENTH, dict(enumerate(np.add(HOME[:6], 0.1)))),
    ("RelativeJointPositionAction", [2.0, 0.25], {}, BACKWARDS, {0: 0.25, 2: 1.57 + 0.5}),
)
def test_an_action_sets_targets_by_its_formula(
    name: str, action: Any, given: dict, params: dict, targets: dict[int, float]
) -> None:
    target = act(name, jnp.asarray(list(action), jnp.float32), make_world(**given), **params)
    expected = np.array(HOME)  # the others keep theirs
    expected[list(targets)] = list(targets.values())
    np.testing.assert_allclose(target, expected, atol=1e-6)


def test_velocities_and_efforts_reach_the_drives() -> None:
    world = make_world()
    stiffness, damping = SPEC.scene.drives.stiffness, SPEC.scene.drives.damping
    state = actions.qvel(world.scene, world.active, scale=0.5).apply(world, jnp.full(8, 2.0))
    ctrl = replace(world, state=state).ctrl
    np.testing.assert_allclose(ctrl, np.array(stiffness) * HOME + np.array(damping) * 1.0, rtol=1e-6)
    state = actions.qf(world.scene, world.active, scale=3.0).apply(world, jnp.ones(8))
    np.testing.assert_allclose(replace(world, state=state).ctrl, np.array(stiffness) * HOME + 3.0, rtol=1e-6)
    np.testing.assert_allclose(replace(world, state=state).qf, np.full(8, 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("pose_dim", [6, 7])
def test_the_tool_goes_to_a_pose(pose_dim: int) -> None:
    world = make_world()
    near = jnp.array(HOME) + jnp.array([0.1, -0.1, 0.15, 0.05, -0.1, 0.2, 0.0, 0.0])
    wanted = world.eef_pose("arm", qpos=near)
    turn = quaternion_from_matrix(wanted[:3, :3]) if pose_dim == 7 else euler(wanted[:3, :3])
    target = act("EefPoseTerm", jnp.concatenate([wanted[:3, 3], turn]), pose_dim=pose_dim)
    np.testing.assert_allclose(target, near, atol=5e-3)
    np.testing.assert_allclose(world.eef_pose("arm", qpos=target), wanted, atol=1e-3)
    far = jnp.concatenate([jnp.array([5.0, 0.0, 0.0]), turn])
    np.testing.assert_allclose(act("EefPoseTerm", far, pose_dim=pose_dim), HOME, atol=1e-6)  # out of reach: stays


def test_a_pose_is_a_position_and_a_quaternion_unless_told_otherwise() -> None:
    assert find_functor("actions", "EefPoseTerm")(SPEC.scene, SPEC.active).width == 7


BENT = (0.3, -1.2, 1.1, -0.9, -1.3, 0.4, 0.04, 0.04)
STRETCHED = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.04, 0.04)
ASKED = jnp.array([0.5, -2.0, 0.25, 0.1, -0.3, 0.8])
# Targets and joints: EmbodiChain 0.3.2's RelativeEefPoseAction in torch, with MuJoCo's pose and Jacobian of this arm.


def test_a_relative_pose_is_of_the_measured_tool_in_the_axes_of_the_arena() -> None:
    target = [
        [0.01792169, 0.77526313, 0.63138407, -0.64005685],
        [0.99942297, -0.03211435, 0.01106410, -0.47485554],
        [0.02885408, 0.63082147, -0.77539134, 0.49534425],
    ]
    world = make_world(qpos=BENT)
    params = {"part_name": "arm", "translation_scale": 0.03, "rotation_scale": 0.2}
    moved = act("RelativeEefPoseAction", ASKED, world, **params)
    np.testing.assert_allclose(world.eef_pose("arm", qpos=moved)[:3], target, atol=1e-3)
    np.testing.assert_allclose(moved[6:], HOME[6:], atol=1e-7)  # where the fingers' targets were


@pytest.mark.slow
def test_relative_poses_of_many_rows_are_those_of_each() -> None:
    term = find_functor("actions", "RelativeEefPoseAction")(SPEC.scene, SPEC.active, part_name="arm", ik_method="dls")
    asked = jnp.stack([ASKED, -ASKED])
    rows = jax.jit(jax.vmap(lambda action: term.apply(make_world(qpos=BENT), action).target))(asked)
    for row, action in zip(rows, asked, strict=True):
        np.testing.assert_allclose(row, term.apply(make_world(qpos=BENT), action).target, atol=1e-5)


@pytest.mark.parametrize("action", [[-1.0, -1.0, 0.0, 0.0, 0.0, 0.0], [np.nan] * 6], ids=["out of reach", "not finite"])
def test_the_arm_stays_without_a_solution(action: list[float]) -> None:
    world = make_world(qpos=STRETCHED)
    moved = act("RelativeEefPoseAction", jnp.array(action), world, part_name="arm", translation_scale=1.0)
    np.testing.assert_array_equal(moved[:6], STRETCHED[:6])


@cases(
    "qpos action params expected",
    (BENT, ASKED, {}, [0.33675829, -1.16965616, 1.05009639, -0.83915925, -1.32382739, 0.36280483]),
    (
        STRETCHED,
        jnp.array([1.0, 1.0, -1.0, 1.0, 1.0, -1.0]),
        {"dls_damping": 0.01, "max_joint_delta": 0.07},
        [-0.00231606, -0.00700156, 0.01931165, 0.04391795, 0.01143699, -0.07],
    ),
    (
        (0.1, -1.0, 1.2, -1.5, -1.5, 6.27, 0.04, 0.04),  # the last joint is at its limit, 2π
        jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, -1.0]),
        {"max_joint_delta": 0.5},
        [0.09309484, -1.00490403, 1.20893919, -1.51032197, -1.47511077, 6.28318548],
    ),
    ids=["free", "largest step", "joint limit"],
)
def test_one_damped_step_of_a_relative_pose(qpos: tuple, action: Array, params: dict, expected: list) -> None:
    moved = act("RelativeEefPoseAction", action, make_world(qpos=qpos), part_name="arm", ik_method="dls", **params)
    np.testing.assert_allclose(moved[:6], expected, atol=1e-5)


def test_a_joint_further_beyond_its_limit_than_a_step_stays() -> None:
    beyond = (*BENT[:5], 6.6, *BENT[6:])
    moved = act("RelativeEefPoseAction", ASKED, make_world(qpos=beyond), part_name="arm", ik_method="dls")
    np.testing.assert_array_equal(moved[:6], jnp.array(beyond[:6]))


OPEN, CLOSED = {".*": 0.01}, {".*": 0.03}


@pytest.mark.slow
@cases(
    "action params expected",
    (-0.5, {"lower_command": {"gripper_finger.*": 0.005}, "upper_command": {".*1_joint_1": 0.035}}, 0.0125),
    (3.0, {"use_joint_limits": True}, 0.04),
    (0.25, {"use_joint_limits": True}, 0.025),
    (0.0, {"command_mode": "binary", "open_command": OPEN, "close_command": CLOSED}, 0.01),
    (-0.001, {"command_mode": "binary", "open_command": OPEN, "close_command": CLOSED}, 0.03),
)
def test_one_number_moves_both_fingers(action: float, params: dict, expected: float) -> None:
    moved = act("ParallelGripperAction", jnp.array([action]), part_name="hand", **params)
    np.testing.assert_allclose(moved, [*HOME[:6], expected, expected], atol=1e-7)


LOWER, UPPER = {"lower_command": {".*": 0.0}}, {"upper_command": {".*": 0.0}}
RELATIVE, GRIPPER = ("RelativeEefPoseAction", 6), ("ParallelGripperAction", 1)


@refusals(
    ((("EefPoseTerm", 5), {"pose_dim": 5}), "", "6 numbers (Euler angles) or 7"),
    ((("RelativeJointPositionAction", 1), {"joint_names": ["Joint9"]}), "", "no joints Joint9; there is Joint1"),
    ((("RelativeJointPositionAction", 1), {}), "", "either part_name or joint_names"),
    ((RELATIVE, {"part_name": "hand"}), "", "'hand' has no tool centre point"),
    ((RELATIVE, {"part_name": "arm", "ik_method": "DLS"}), "", "'DLS'; allowed: solver, dls"),
    ((RELATIVE, {"part_name": "arm", "rotation_scale": 0.0}), "", "rotation_scale 0.0; must be a number > 0"),
    ((RELATIVE, {"part_name": "arm", "dls_damping": float("inf")}), "", "dls_damping inf; must be a number > 0"),
    ((GRIPPER, {"command_mode": "on"}), "", "command_mode 'on'; allowed: continuous, binary"),
    ((GRIPPER, LOWER), "", "upper_command must have a position for each of gripper_finger1_joint_1"),
    ((GRIPPER, {**LOWER, "upper_command": {}}), "", "gives no position for gripper_finger1_joint_1"),
    ((GRIPPER, {**LOWER, "upper_command": {".*": 0.0, "gripper_finger2_joint_1": 0.0}}), "", "the joints to command"),
    ((GRIPPER, {"lower_command": {".*": 0.0, ".*1": 0.0}, **UPPER}), "", "gripper_finger1_joint_1 twice"),
    ((GRIPPER, {"use_joint_limits": True, "open_command": OPEN}), "", "open_command is not read"),
    ((GRIPPER, {"command_mode": "binary", "open_command": OPEN, **LOWER}), "", "lower_command is not read"),
)
def test_actions_that_do_not_fit_are_refused(given: Any, key: str, word: str) -> None:
    (name, width), params = given
    part = {"part_name": "hand"} if name == "ParallelGripperAction" else {}
    refused(act, name, jnp.zeros(width), key=key, word=word, **part, **params)


@refusals(
    (lambda: observations.normalize_robot_joint_data(make_world(), jnp.zeros(8), joint_ids=[8]), "[8]", "8 joints"),
    (lambda: observations.normalize_robot_joint_data(make_world(), jnp.zeros(8)), "", "either joint_ids or control"),
    (lambda: events.randomize_rigid_object_pose(make_world(), KEY, POST), "", "'post' is static"),
    (lambda: events.randomize_robot_qpos(make_world(), KEY, qpos_range=[[-0.1], [0.1]]), "", "but moves 8 joints"),
    (lambda: find_functor("rewards", "succes_reward"), "'succes_reward'", "Did you mean 'success_reward'"),
    (lambda: find_functor("events", "DeltaQposTerm"), "", "it belongs under env.actions"),
    *(
        (partial(reward, name, {"before": {}}, source_entity_cfg=CUBE), "target_pose", "is stored; there is goal_pose")
        for name in ("distance_to_target", "incremental_distance_to_target")
    ),
    (partial(reward, "joint_velocity_penalty", {}, part_name="leg"), "'leg'", "there is arm, hand"),
    (partial(reward, "joint_limit_penalty", {}, joint_ids=[9]), "", "the robot has 8 joints"),
    (
        partial(reward, "distance_between_objects", {}, **{**PAIR, "target_entity_cfg": {"uid": "ball"}}),
        "'ball'",
        "cube, post",
    ),
)
def test_calls_that_do_not_fit_are_refused(given: Any, key: str, word: str) -> None:
    refused(given, key=key, word=word)


def euler(rotation: Array) -> Array:
    """Angles of Rx·Ry·Rz."""
    return jnp.array(
        [
            jnp.arctan2(-rotation[1, 2], rotation[2, 2]),
            jnp.arcsin(rotation[0, 2]),
            jnp.arctan2(-rotation[0, 1], rotation[0, 0]),
        ]
    )


def test_names_are_those_of_embodichain_and_custom_ones() -> None:
    assert find_functor("rewards", "success_reward") is rewards.success_reward
    trust("ejax.envs.terms.rewards:success_reward", "json:nothing")
    assert find_functor("rewards", "ejax.envs.terms.rewards:success_reward") is rewards.success_reward
    refused(find_functor, "events", "json:nothing", match="module 'json' has no 'nothing'", error=ImportError)


def test_each_contract_is_a_functor_of_actions() -> None:
    assert len(CONTRACTS) == 9
    assert set(CONTRACTS.values()) <= set(TERMS["actions"])


def test_a_functor_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "rewards", dict(TERMS["rewards"]))

    @register_functor("rewards", "one")
    def one(*given: object) -> Array:
        return jnp.ones(())

    assert find_functor("rewards", "one") is one
    refused(lambda: register_functor("rewards", "one")(one), match="'one' is registered already")
