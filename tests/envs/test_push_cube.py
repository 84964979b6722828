"""PushCubeRL and PushCube: kinematics, reward, endings."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax.config import parse_config
from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.tasks.push import PushCube
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.terms.registry import register_functor
from ejax.play.saved_policy import evaluate_run
from ejax.run import train
from ejax.store.checkpoint import CheckpointError
from ejax.types import Array, Timestep

KEY = jax.random.key(0)
ENV = PushCubeRL(physics="mujoco")
STEP = jax.jit(ENV.step)

HOME = [0.0, -1.57, 1.57, -1.57, -1.57, 0.0]


def tool_position(q: np.ndarray) -> np.ndarray:
    """Compute the tool's place by the UR10's Denavit-Hartenberg table, and 0.16 m along the flange's z axis."""
    d = [0.1273, 0.0, 0.0, 0.163941, 0.1157, 0.0922]
    a = [0.0, -0.612, -0.5723, 0.0, 0.0, 0.0]
    alpha = [np.pi / 2, 0.0, 0.0, np.pi / 2, -np.pi / 2, 0.0]
    pose = np.eye(4)
    for i in range(6):
        c, s, ca, sa = np.cos(q[i]), np.sin(q[i]), np.cos(alpha[i]), np.sin(alpha[i])
        pose = pose @ np.array(
            [[c, -s * ca, s * sa, a[i] * c], [s, c * ca, -c * sa, a[i] * s], [0.0, sa, ca, d[i]], [0.0, 0.0, 0.0, 1.0]]
        )
    return (pose @ [0.0, 0.0, 0.16, 1.0])[:3]


@pytest.mark.parametrize("q", [[0.0] * 6, HOME, [0.5, -1.0, 1.2, -0.3, 0.8, -2.0], [-2.0, -2.2, -1.4, 2.5, 1.5, 3.0]])
def test_the_tool_is_where_the_dh_table_puts_it(q: list[float]) -> None:
    pose = site_pose(Physics("push_cube.xml").model, "tcp", jnp.array(q + [0.0] * 7))
    np.testing.assert_allclose(pose[:3, 3], tool_position(np.array(q)), atol=2e-6)


def test_an_episode_starts_at_home_with_cube_and_goal_in_place() -> None:
    _, obs = ENV.reset(KEY)
    expected = np.concatenate([HOME, tool_position(np.array(HOME)), [-0.6, -0.4, 0.05], [-0.9, -0.6, 0.05]])
    np.testing.assert_allclose(obs, expected, atol=1e-6)
    assert ENV.observation_space.contains(np.asarray(obs))
    assert obs[8] > 0.1  # the tool is above the floor


def numpy_rewards(obs: np.ndarray, next_obs: np.ndarray, action: np.ndarray) -> dict[str, float]:
    tool, cube, goal = np.split(next_obs[6:].astype(np.float64), 3)
    direction = (goal - cube) / (np.linalg.norm(goal - cube) + 1e-6)
    push = cube - 0.015 * direction + [0.0, 0.0, 0.015]
    before, after = np.linalg.norm((obs[9:12] - obs[12:15])[:2]), np.linalg.norm((cube - goal)[:2])
    return {
        "reaching_reward": 0.1 * (1.0 - np.tanh(5.0 * np.linalg.norm(tool - push))),
        "place_reward": (2.0 if before >= after else 0.5) * np.tanh(10.0 * (before - after)),
        "action_penalty": -0.01 * np.linalg.norm(np.clip(0.1 * action, -0.5, 0.5)),
        "success_bonus": 10.0 * (after < 0.1),
    }


@pytest.mark.parametrize("cube_velocity", [-0.5, 0.5, -3.0], ids=["nearer", "away", "there"])
def test_rewards_are_the_formula_and_sum_up(cube_velocity: float) -> None:
    state, obs = ENV.reset(KEY)
    if cube_velocity == -3.0:  # 0.06 m short of the threshold, fast enough to pass it
        state = state.replace(goal=jnp.array([-0.76, -0.4, 0.05]))
        obs = obs.at[12:15].set(state.goal)
    state = state.replace(physics=state.physics.replace(qvel=jnp.zeros(12).at[6].set(cube_velocity)))
    action = np.array([0.5, -0.2, 0.1, 9.0, 0.0, 0.3], np.float32)  # 0.1·9 is clipped to 0.5 rad
    _, timestep = STEP(state, action, KEY)
    expected = numpy_rewards(np.asarray(obs), np.asarray(timestep.obs), action)
    for name, value in timestep.info["rewards"].items():
        np.testing.assert_allclose(value, expected.pop(name), rtol=1e-4, atol=1e-5, err_msg=name)
    assert not expected
    np.testing.assert_allclose(timestep.reward, sum(timestep.info["rewards"].values()), rtol=1e-6)
    assert bool(timestep.terminated) == (cube_velocity == -3.0) == bool(timestep.info["success"])


def test_an_action_is_a_joint_step_from_where_the_arm_is() -> None:
    state, obs = ENV.reset(KEY)
    action = jnp.array([0.0, 0.0, 0.0, 0.5, -0.5, 0.25])  # the wrist follows within one step, the shoulder lags
    _, timestep = STEP(state, action, KEY)
    np.testing.assert_allclose(timestep.obs[:6] - obs[:6], 0.1 * action, atol=2e-3)


def test_a_cube_below_the_floor_truncates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(self: Physics, state: PhysicsState, ctrl: Array) -> PhysicsState:
        del self, ctrl
        return state.replace(qpos=state.qpos.at[8].set(-0.11))

    monkeypatch.setattr(Physics, "step", fall)  # the floor is infinite: nothing falls by itself
    _, timestep = ENV.step(ENV.reset(KEY)[0], jnp.zeros(6), KEY)
    assert timestep.truncated and not timestep.terminated


@pytest.mark.slow
def test_reset_ranges_move_cube_and_goal() -> None:
    env = PushCubeRL(
        cube_position_range=[[-0.2, -0.2, 0.0], [0.2, 0.2, 0.0]],  # type: ignore[arg-type]  # lists, as from a file
        goal_position_range=((-0.1, -0.1, 0.0), (0.1, 0.1, 0.0)),
    )
    _, obs = jax.vmap(env.reset)(jax.random.split(KEY, 200))
    cube, goal = np.asarray(obs[:, 9:12]), np.asarray(obs[:, 12:])
    assert np.all(np.abs(cube - [-0.6, -0.4, 0.05]) <= [0.2001, 0.2001, 1e-6])
    assert np.all(np.abs(goal - [-0.9, -0.6, 0.05]) <= [0.1001, 0.1001, 1e-6])
    assert np.all(cube[:, :2].std(0) > 0.1) and np.all(goal[:, :2].std(0) > 0.05)
    assert hash(env) == hash(env)


@pytest.mark.slow
def test_a_scan_of_a_batch_is_the_single_steps() -> None:
    action = jax.random.uniform(KEY, (5, 3, 6), minval=-0.5, maxval=0.5)
    keys = jax.random.split(KEY, 3)
    state, _ = jax.vmap(ENV.reset)(keys)

    @jax.jit
    def run(state: object, action: Array) -> Timestep:
        return jax.lax.scan(lambda state, action: jax.vmap(ENV.step)(state, action, keys), state, action)[1]

    batch = run(state, action)
    for row in range(3):
        one = jax.tree.map(lambda x, row=row: x[row], state)
        for t in range(5):
            one, timestep = STEP(one, action[t, row], KEY)
            np.testing.assert_allclose(batch.obs[t, row], timestep.obs, atol=1e-5)
            np.testing.assert_allclose(batch.reward[t, row], timestep.reward, atol=1e-5)


def push(position: Array, obs: Array) -> Array:
    """Act by damped least squares to one point after another; then push, steering the cube to the goal."""
    cube, goal = obs[9:11], obs[12:14]
    direction = (goal - cube) / jnp.linalg.norm(goal - cube)
    from_behind = obs[6:8] - (cube - 0.07 * direction)
    sideways = from_behind - direction * (from_behind @ direction)
    pushing = jnp.append(obs[6:8] + 0.05 * direction - sideways, 0.04)
    target = jnp.where(jnp.isnan(position), pushing, position)
    speed = jnp.where(jnp.isnan(position).any(), 0.02, 0.03)  # m per step

    def tool(q: Array) -> Array:
        pose = site_pose(Physics("push_cube.xml").model, "tcp", q)
        return jnp.concatenate([pose[:3, 3], pose[:3, 2]])

    qpos = jnp.concatenate([obs[:6], jnp.zeros(7)])
    now, jacobian = tool(qpos), jax.jacobian(tool)(qpos)[:, :6]
    way = target - now[:3]
    way = way * jnp.minimum(1.0, speed / (jnp.linalg.norm(way) + 1e-9))
    error = jnp.concatenate([way, jnp.array([0.0, 0.0, -1.0]) - now[3:]])
    delta = jacobian.T @ jnp.linalg.solve(jacobian @ jacobian.T + 1e-4 * jnp.eye(6), error)
    return jnp.clip(delta / ENV.action_scale, -0.5, 0.5)


def test_a_scripted_push_within_the_action_bounds_succeeds() -> None:
    policy = jax.jit(push)
    state, obs = ENV.reset(KEY)
    behind = np.array([-0.6, -0.4]) + 0.16 * np.array([0.3, 0.2]) / np.hypot(0.3, 0.2)
    ways = [jnp.array([*behind, 0.3]), jnp.array([*behind, 0.04]), jnp.full(3, jnp.nan)]
    score = 0.0
    for _ in range(ENV.max_episode_steps):
        if np.linalg.norm(ways[0] - obs[6:9]) < 0.03:
            ways.pop(0)
        state, timestep = STEP(state, policy(ways[0], obs), KEY)
        obs, score = timestep.obs, score + float(timestep.reward)
        if timestep.terminated | timestep.truncated:
            break
    assert timestep.terminated and timestep.info["success"]
    assert score > 15.0  # 10 for success, about 5 for 0.26 m of way, about 2 for being near


APART = {"source_entity_cfg": {"uid": "cube"}, "target_entity_cfg": {"uid": "goal"}}
REWARDS = {
    "reaching_reward": {"weight": 0.2},
    "near": {"func": "distance_between_objects", "weight": 0.5, "params": APART},
}


def test_a_config_changes_weights_and_adds_terms() -> None:
    changed = PushCubeRL(physics="mujoco", rewards=REWARDS)
    state, _ = ENV.reset(KEY)
    before, after = (jax.jit(env.step)(state, jnp.full(6, 0.3), KEY)[1].info for env in (ENV, changed))
    assert after["terms"] == {**before["terms"], "near": after["terms"]["near"]}
    reaching, near = 0.2 * after["terms"]["reaching_reward"], 0.5 * after["terms"]["near"]
    assert after["rewards"] == {**before["rewards"], "reaching_reward": reaching, "near": near}
    assert PushCubeRL(action_penalty_weight=0.1).own_weights == {**ENV.own_weights, "action_penalty": 0.1}


@pytest.mark.slow
def test_rewards_of_a_config_last_through_a_run(tmp_path: Path) -> None:
    cfg = {"episode_length": 11, "physics": "mujoco", "rewards": REWARDS}
    start = tiny(tmp_path, "PushCubeRL", env_cfg=cfg)
    assert {"rewards/near", "terms/near"} <= train(parse_config(start), run_dir=tmp_path).last_train_metrics.keys()
    assert evaluate_run(tmp_path, checkpoint="latest", num_episodes=2, num_envs=2)["eval/avg_reward"] < 0.0
    assert train(
        parse_config({**start, "trainer": {**start["trainer"], "iterations": 3}}), resume="latest", run_dir=tmp_path
    ).finished
    start["env"]["cfg"]["rewards"]["near"]["weight"] = 0.7
    with pytest.raises(CheckpointError, match=r"env\.cfg\.rewards\.near\.weight is 0\.5 in the run and 0\.7 now"):
        train(parse_config(start), resume="latest", run_dir=tmp_path)


def test_a_term_of_ones_own_sees_the_action_that_was_done() -> None:
    @register_functor("rewards", "small_action", override=True)
    def small_action(world: Any, obs: Any, action: Any, info: Any) -> Array:
        return -jnp.sum(action**2)

    env = PushCubeRL(physics="mujoco", rewards={"small": {"func": "small_action"}})
    _, timestep = env.step(env.reset(KEY)[0], jnp.full(6, 0.5), KEY)
    assert timestep.info["rewards"]["small"] == -1.5


def test_the_former_hook_of_rewards_is_refused_with_the_new_one() -> None:
    with pytest.raises(TypeError, match=r"Mine\.rewards .* name the method reward_terms"):
        type("Mine", (PushCubeRL,), {"rewards": lambda self, world, before: {}})


@cases(
    "rewards text",
    ({"reaching_rewerd": {"weight": 0.2}}, r"rewards\.reaching_rewerd: .*Did you mean 'reaching_reward'\?"),
    ({"reaching_reward": {"wait": 0.2}}, r"rewards\.reaching_reward\.wait: unknown key; allowed: weight"),
    ({"reaching_reward": "much"}, r"rewards\.reaching_reward\.weight: got 'much'; must be a number"),
    ({"reaching_reward": {"func": "success_reward"}}, r"rewards\.reaching_reward: is already a term of the task"),
    ({"new": {"func": "sucess_reward"}}, r"rewards\.new\.func: .*Did you mean 'success_reward'\?"),
    ({"new": {"func": "joint_limit_penalty"}}, r"rewards\.new: .*only a gym config has control parts"),
    (["reaching_reward"], r"rewards: got .*; must be a mapping"),
)
def test_what_rewards_cannot_be_is_refused_by_its_key(rewards: Any, text: str) -> None:
    refused(PushCubeRL, physics="mujoco", rewards=rewards, match=text)


PUSH = PushCube(physics="mujoco")


def placed(cube: list[float], velocity: list[float], quat: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)) -> Any:
    """Return the world of a cube at this place (m), with this velocity (m/s); the goal is at (−0.9, −0.6) m."""
    state = PUSH.reset(KEY)[0]
    qpos = state.physics.qpos.at[6:13].set(jnp.array([*cube, *quat]))
    qvel = state.physics.qvel.at[6:9].set(jnp.array(velocity))
    return PUSH.world(state.replace(physics=state.physics.replace(qpos=qpos, qvel=qvel)))


@cases(
    "cube velocity arrived",
    ([-0.85, -0.55, 0.05], [0.0, 0.0, 0.0], True),
    ([-0.85, -0.55, 0.05], [0.09, 0.0, 0.0], True),
    ([-0.85, -0.55, 0.05], [0.11, 0.0, 0.0], False),  # it slides through
    ([-0.85, -0.55, 0.05], [0.0, 0.0, -0.2], False),
    ([-0.85, -0.55, 0.065], [0.0, 0.0, 0.0], False),  # it stands on an edge, or flies
    ([-0.82, -0.53, 0.05], [0.0, 0.0, 0.0], False),  # 0.106 m away
)
def test_a_cube_has_arrived_where_it_lies_at_the_goal(cube: list[float], velocity: list[float], arrived: bool) -> None:
    world = placed(cube, velocity)
    assert bool(PUSH.succeeds(world)) == arrived
    near = float(np.hypot(cube[0] + 0.9, cube[1] + 0.6)) < 0.1
    assert bool(ENV.succeeds(world)) == near  # EmbodiChain's does not ask how


def test_the_potential_is_the_formula() -> None:
    cube = np.array([-0.7, -0.3, 0.05])
    world = placed(cube.tolist(), [0.0, 0.0, 0.0])
    way = np.array([-0.9, -0.6]) - cube[:2]
    behind = np.append(cube[:2] - 0.1 * way / np.linalg.norm(way), 0.02)
    potential = PUSH.potential(world)
    np.testing.assert_allclose(potential["place"], -np.linalg.norm(way), rtol=1e-5)
    tool = tool_position(np.asarray(world.qpos[:6]))
    np.testing.assert_allclose(potential["reaching"], -np.linalg.norm(tool - behind), rtol=1e-4)


def test_what_a_pushing_policy_sees() -> None:
    state, obs = PUSH.reset(KEY)
    tool, cube, goal = np.split(np.asarray(obs[6:15]), 3)
    np.testing.assert_array_equal(obs[15:31], jnp.concatenate([state.physics.qpos[9:13], state.physics.qvel]))
    np.testing.assert_allclose(obs[31:], [*(cube - tool), *(goal - cube)[:2]], atol=1e-6)


def test_an_action_of_a_pushing_policy_is_a_small_joint_step() -> None:
    state, _ = PUSH.reset(KEY)
    world = PUSH.world(state)
    for action in (1.0, 9.0):
        target = PUSH.control(world, PUSH.clip_action(jnp.full(6, action)))
        np.testing.assert_allclose(target - state.physics.qpos[:6], 0.04, atol=1e-6)


@pytest.mark.parametrize(("start_range", "ends"), [((0.0, 0.0), (0.48, 0.49)), ((1.0, 1.0), (0.07, 0.09))])
def test_the_arm_starts_between_home_and_behind_the_cube(start_range: tuple, ends: tuple) -> None:
    _, obs = PushCube(physics="mujoco", start_range=start_range).reset(KEY)
    assert ends[0] < obs[8] < ends[1]  # the tool's height, m
