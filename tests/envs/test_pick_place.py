"""PickPlaceRL: its reward, its endings, and that a grasp holds for physical reasons."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases

from ejax.envs.mujoco.choice import Engine, how_to_install
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.tasks.grasp_task import HALF_EDGE, WORKSPACE
from ejax.envs.tasks.pick_place import OBSERVATION, VELOCITIES, PickPlaceRL, PickPlaceState
from ejax.schema.registry import resolve
from ejax.types import Array, Timestep

KEY = jax.random.key(0)
ENV = PickPlaceRL(physics="mujoco")
STEP = jax.jit(ENV.step)
RESET = jax.jit(ENV.reset)
CONTROL = jax.jit(lambda state, action: ENV.control(ENV.world(state), action))
OBSERVE = jax.jit(lambda state: ENV.observe(ENV.world(state)))
MODEL = ENV.simulation.model

FINGERS, TOOL, CUBE, GOAL = slice(6, 8), slice(8, 11), slice(11, 14), slice(14, 17)
OPEN, CLOSED = -1.0, 1.0


def toward(obs: Array, target: Array, grip: float) -> Array:
    way = (np.asarray(target) - np.asarray(obs[TOOL])) / ENV.action_scale
    return jnp.append(jnp.asarray(np.clip(way, -1.0, 1.0)), grip)


def act(
    state: PickPlaceState, obs: Array, target: Callable[[Array], Array], grip: float, num_steps: int
) -> tuple[PickPlaceState, Array, list[Timestep]]:
    """Go to ``target(obs)`` for some control steps of 0.04 s."""
    steps = []
    for _ in range(num_steps):
        state, timestep = STEP(state, toward(obs, target(obs), grip), KEY)
        obs = timestep.obs
        steps.append(timestep)
    return state, obs, steps


def grasp() -> tuple[PickPlaceState, Array]:
    """Put the cube between the closed fingers, on the floor."""
    state, obs = RESET(KEY)
    state, obs, _ = act(state, obs, lambda obs: obs[CUBE] + jnp.array([0.0, 0.0, 0.1]), OPEN, 20)
    state, obs, _ = act(state, obs, lambda obs: obs[CUBE], OPEN, 15)
    state, obs, _ = act(state, obs, lambda obs: obs[CUBE], CLOSED, 8)
    return state, obs


def lift() -> tuple[PickPlaceState, Array]:
    state, obs = grasp()
    high = obs[TOOL] + jnp.array([0.0, 0.0, 0.15])
    state, obs, _ = act(state, obs, lambda _: high, CLOSED, 20)
    return state, obs


def in_the_hand(obs: Array) -> np.ndarray:
    """m: the cube as seen from the tool, which does not turn."""
    return np.asarray(obs[CUBE] - obs[TOOL])


def test_an_episode_starts_open_handed_above_the_floor() -> None:
    state, obs = RESET(KEY)
    assert obs.shape == (24,) == (len(OBSERVATION),) == ENV.observation_space.shape
    assert ENV.action_space.shape == (4,) and ENV.max_episode_steps == 100 and ENV.control_period == 0.04
    np.testing.assert_allclose(obs[TOOL], [-0.65, -0.15, 0.25], atol=1e-4)
    np.testing.assert_array_equal(obs[FINGERS], 0.0)
    np.testing.assert_allclose(obs[17:20], obs[CUBE] - obs[TOOL], atol=1e-7)
    np.testing.assert_allclose(obs[20:23], obs[GOAL] - obs[CUBE], atol=1e-7)
    assert float(obs[CUBE][2]) == pytest.approx(HALF_EDGE) and obs[23] == 0.0
    data = mujoco.MjData(MODEL)
    data.qpos[:] = state.physics.qpos
    mujoco.mj_kinematics(MODEL, data)
    np.testing.assert_allclose(data.site("tcp").xpos, obs[TOOL], atol=2e-6)
    np.testing.assert_allclose(data.site("tcp").xmat[6:], [0.0, 0.0, -1.0], atol=1e-4)  # it points down


def test_velocities_follow_the_numbers_of_the_observation() -> None:
    env = replace(ENV, velocities=True)
    assert env.observation_space.shape == (38,) == (24 + len(VELOCITIES),)
    names = [each.name for each in env.description.observation["obs"]]
    assert names[24:26] == ["shoulder_pan velocity", "shoulder_lift velocity"] and len({*names}) == 38
    state, obs = jax.jit(env.reset)(KEY)
    np.testing.assert_array_equal(obs, np.append(RESET(KEY)[1], np.zeros(14)))  # at rest
    action = jnp.array([1.0, 0.0, 0.0, 1.0])
    state, timestep = jax.jit(env.step)(state, action, KEY)
    np.testing.assert_array_equal(timestep.obs[24:], state.physics.qvel)
    assert np.abs(timestep.obs[24:32]).max() > 0.1


def test_resets_fill_their_ranges() -> None:
    state, obs = jax.jit(jax.vmap(ENV.reset))(jax.random.split(KEY, 200))
    for part, centre, bound in ((CUBE, (-0.65, 0.05), (0.1, 0.08)), (GOAL, (-0.65, -0.3), (0.15, 0.12))):
        offset = np.abs(np.asarray(obs[:, part])[:, :2] - centre)
        assert np.all(offset <= np.array(bound) + 1e-6) and np.all(offset.max(0) > 0.9 * np.array(bound))
    turn = 2.0 * np.arctan2(state.physics.qpos[:, 14], state.physics.qpos[:, 11])
    assert 0.18 < np.abs(turn).max() <= 0.2001


def test_no_action_leaves_the_tool_where_it_is() -> None:
    state, obs = RESET(KEY)
    _, after, _ = act(state, obs, lambda obs: obs[TOOL], OPEN, 25)
    np.testing.assert_allclose(after[TOOL], obs[TOOL], atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, 2], ids="xyz")
def test_an_action_moves_the_tool_along_its_axis_and_stays_upright(axis: int) -> None:
    state, obs = RESET(KEY)
    target = obs[TOOL].at[axis].add(-0.1)
    state, after, _ = act(state, obs, lambda _: target, OPEN, 25)
    np.testing.assert_allclose(after[TOOL], target, atol=2e-3)
    data = mujoco.MjData(MODEL)
    data.qpos[:] = state.physics.qpos
    mujoco.mj_kinematics(MODEL, data)
    assert data.site("tcp").xmat[8] < -0.999


def test_the_tool_stays_in_its_workspace() -> None:
    state, obs = RESET(KEY)
    _, obs, _ = act(state, obs, lambda _: jnp.array([-0.65, -0.15, -1.0]), OPEN, 40)
    assert abs(float(obs[TOOL][2]) - WORKSPACE[0][2]) < 2e-3  # m above the floor


def test_the_third_number_opens_and_closes_the_fingers() -> None:
    state, obs = RESET(KEY)
    for grip, travel in ((CLOSED, 0.04), (0.0, 0.02), (OPEN, 0.0)):
        state, obs, _ = act(state, obs, lambda obs: obs[TOOL], grip, 20)
        np.testing.assert_allclose(obs[FINGERS], travel, atol=1e-3)


def test_a_lifted_cube_does_not_slip_for_two_seconds() -> None:
    state, obs = lift()
    assert obs[CUBE][2] > 0.12 and obs[23] == 1.0
    before = in_the_hand(obs)
    _, obs, _ = act(state, obs, lambda obs: obs[TOOL], CLOSED, 50)
    np.testing.assert_allclose(in_the_hand(obs), before, atol=1e-3)
    assert np.linalg.norm(before) < 0.01
    assert obs[FINGERS].min() > 0.013  # half the cube short of the closed hand, and 2 mm deep at the most


def test_a_carried_cube_does_not_slide() -> None:
    """To and fro at full speed: the tool reverses at up to 5 m/s²."""
    state, obs = lift()
    before, start = in_the_hand(obs), obs[TOOL]
    for side in (-0.2, 0.0, -0.2, 0.0):
        target = start + jnp.array([0.0, side, 0.0])
        state, obs, _ = act(state, obs, lambda _, target=target: target, CLOSED, 12)
    np.testing.assert_allclose(in_the_hand(obs), before, atol=4e-3)


def test_the_fingers_press_with_no_more_than_their_limit() -> None:
    state, _ = grasp()
    data = mujoco.MjData(MODEL)
    data.qpos[:], data.qvel[:] = state.physics.qpos, state.physics.qvel
    data.ctrl[:] = CONTROL(state, jnp.array([0.0, 0.0, 0.0, CLOSED]))
    mujoco.mj_forward(MODEL, data)
    np.testing.assert_array_less(data.actuator_force[6:], 30.0)
    np.testing.assert_array_less(10.0, data.actuator_force[6:])


def test_the_drives_are_stable_all_over_the_workspace() -> None:
    """Semi-implicit Euler, v' = v − h·M⁻¹(K·q + D·v), q' = q + h·v': every mode decays, and none of them alternates."""
    h, data = MODEL.opt.timestep, mujoco.MjData(MODEL)
    low, high = np.array(WORKSPACE)
    stiffness = -MODEL.actuator_biasprm[:, 1]
    for corner in np.stack(np.meshgrid(*np.stack([low, high]).T), -1).reshape(-1, 3):
        state, _ = RESET(KEY)
        for _ in range(25):  # there in small steps of inverse kinematics, without physics
            control = CONTROL(state, toward(OBSERVE(state), corner, OPEN))
            qpos = state.physics.qpos.at[:6].set(control[:6] / stiffness[:6])
            state = state.replace(physics=state.physics.replace(qpos=qpos))
        np.testing.assert_allclose(OBSERVE(state)[TOOL], corner, atol=1e-3)
        data.qpos[:] = state.physics.qpos
        mujoco.mj_forward(MODEL, data)
        inverse = np.zeros((MODEL.nv, MODEL.nv))
        mujoco.mj_solveM(MODEL, data, inverse, np.eye(MODEL.nv))
        inverse = inverse[:8, :8]
        spring = inverse @ np.diag(stiffness)
        damper = np.eye(8) - h * inverse @ np.diag(MODEL.dof_damping[:8])
        modes = np.linalg.eigvals(np.block([[np.eye(8) - h * h * spring, h * damper], [-h * spring, damper]]))
        assert np.abs(modes).max() < 0.95 and modes.real.min() > -0.5, corner


def potential(obs: np.ndarray) -> float:
    obs = obs.astype(np.float64)
    height = 1.0 if obs[23] else np.clip((obs[CUBE][2] - 0.025) / 0.05, 0.0, 1.0)
    placed = obs[23] * (1.0 - np.tanh(5.0 * np.linalg.norm(obs[CUBE] - obs[GOAL])))
    return 1.0 - np.tanh(5.0 * np.linalg.norm(obs[TOOL] - obs[CUBE])) + height + 3.0 * placed


def test_rewards_are_the_formula_and_sum_to_a_difference_of_potentials() -> None:
    state, obs = grasp()
    action = jnp.array([0.5, -0.3, 3.0, 1.0])  # the third is clipped to 1
    start, shaped = potential(np.asarray(obs)), 0.0
    for _ in range(8):
        _, before = state, potential(np.asarray(obs))
        state, timestep = STEP(state, action, KEY)
        obs, rewards = timestep.obs, timestep.info["rewards"]
        terms = sum(float(rewards[name]) for name in ("reaching", "lifting", "placing"))
        np.testing.assert_allclose(terms, potential(np.asarray(obs)) - before, atol=1e-5)
        penalty = -0.05 * np.linalg.norm(0.04 * np.array([0.5, -0.3, 1.0]))
        np.testing.assert_allclose(rewards["action_penalty"], penalty, rtol=1e-5)
        np.testing.assert_allclose(timestep.reward, terms + penalty, atol=1e-5)
        shaped += terms
    assert obs[23] == 1.0  # lifted on the way
    np.testing.assert_allclose(shaped, potential(np.asarray(obs)) - start, atol=1e-4)


def standing(was_lifted: bool = True, offset: float = 0.0, speed: float = 0.0, travel: float = 0.0) -> PickPlaceState:
    """Put the cube at the goal, the tool at home."""
    state, _ = RESET(KEY)
    place = state.goal + jnp.array([offset, 0.0, 0.0])
    qpos = state.physics.qpos.at[8:11].set(place).at[6:8].set(travel)
    physics = PhysicsState(qpos=qpos, qvel=state.physics.qvel.at[8].set(speed))
    return state.replace(physics=physics, was_lifted=jnp.array(was_lifted))


@cases(
    "state expected",
    ({}, True),
    ({"offset": 0.025}, True),
    ({"offset": 0.035}, False),
    ({"was_lifted": False}, False),
    ({"speed": 1.0}, False),
    ({"travel": 0.016}, False),
    ids=["there", "within 3 cm", "beyond 3 cm", "pushed, not lifted", "moving", "held"],
)
def test_success_is_a_lifted_cube_at_rest_and_released_at_the_goal(state: dict[str, float], expected: bool) -> None:
    grip = CLOSED if "travel" in state else OPEN
    _, timestep = STEP(standing(**state), jnp.array([0.0, 0.0, 0.0, grip]), KEY)  # type: ignore[arg-type]
    assert bool(timestep.terminated) == bool(timestep.info["success"]) == expected
    assert float(timestep.info["rewards"]["success"]) == 10.0 * expected


def test_it_is_registered_and_hashable() -> None:
    env = resolve("env", "PickPlaceRL")(goal_position_range=[0.0, 0.0])  # a list, as from a file
    assert hash(env) == hash(PickPlaceRL(goal_position_range=(0.0, 0.0))) and env.goal_position_range == (0.0, 0.0)


@pytest.mark.slow_cases("mjx", "warp")
@pytest.mark.parametrize("engine", ["mjx", "warp"])
def test_the_engines_follow_the_c_engine_through_a_grasp(engine: Engine) -> None:
    """Held together step by step, as in ``test_mujoco.py``: closing, lifting and holding. Both compute in float32."""
    if how := how_to_install(engine):
        pytest.skip(f"{engine} is not installed: {how}")
    state, _ = grasp()
    states, controls = [], []
    for _ in range(8):
        action = jnp.array([0.2, 0.0, 1.0, CLOSED])
        states.append(state.physics)
        controls.append(CONTROL(state, action))
        state, _ = STEP(state, action, KEY)
    before, ctrl = jax.tree.map(lambda *x: jnp.stack(x), *states), jnp.stack(controls)
    expected = jax.vmap(ENV.simulation.step)(before, ctrl)
    after = jax.jit(jax.vmap(replace(ENV.simulation, engine=engine).step))(before, ctrl)
    assert np.ptp(expected.qpos[:, 10]) > 0.05  # it rises
    np.testing.assert_allclose(after.qpos, expected.qpos, atol=1e-3)
    np.testing.assert_allclose(after.qvel, expected.qvel, atol=4e-2)
