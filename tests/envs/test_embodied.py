"""Gym configs as environments: dimensions, step order, purity, what is refused, and what `config check` says."""

import copy
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, keys_of, refusals, refused

from ejax.config import load_config
from ejax.config.__main__ import main
from ejax.config.embodichain.check import check
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.manager.manager_spec import ManagerSpec
from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.envs.task.terms import Outcome
from ejax.envs.task.world import SceneState, World
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.terms.registry import TERMS, register_functor
from ejax.envs.terms.terminations import scene_only
from ejax.policies.observations import flatten_observation
from ejax.rollout import reset, step
from ejax.types import Array, Timestep

KEY = jax.random.key(0)
FOLDER = Path(__file__).parents[1] / "gym_configs"
PUSH_CUBE = json.loads((FOLDER / "push_cube.json").read_text())
CART_POLE = json.loads((FOLDER / "cart_pole.json").read_text())
ENV = EmbodiedEnv(PUSH_CUBE, physics="mujoco")
CART = EmbodiedEnv(CART_POLE, physics="mujoco")
RESET, STEP = jax.jit(ENV.reset), jax.jit(ENV.step)


def changed(config: dict, key: str, value: object) -> dict:
    """Make a copy with one dotted key set, or deleted if the value is None."""
    config = copy.deepcopy(config)
    node = config
    *above, last = key.split(".")
    for name in above:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    if value is None:
        del node[last]
    else:
        node[last] = value
    return config


def newer(config: dict) -> dict:
    """PushCube as EmbodiChain 0.3 writes it."""
    config = copy.deepcopy(config)
    config["physics"] = "default"
    config["robot"]["joint_drive_props"] = config["robot"].pop("drive_pros")
    params = {"part_name": "arm", "scale": 0.1}
    config["env"]["actions"] = {"delta_qpos": {"func": "RelativeJointPositionAction", "params": params}}
    old = config["rigid_object"][0]["attrs"]
    config["rigid_object"][0]["attrs"] = {
        "mass_props": {"mass": old["mass"]},
        "rigid_props": {name: old[name] for name in ("linear_damping", "angular_damping")},
        "material_props": {name: old[name] for name in ("static_friction", "dynamic_friction", "restitution")},
    }
    return config


def push(key: str, value: object, config: dict = PUSH_CUBE) -> EmbodiedEnv:
    return EmbodiedEnv(changed(config, key, value), physics="mujoco")


def first_step(env: EmbodiedEnv, action: Array | None = None) -> tuple[SceneState, Timestep]:
    """Step once from a reset, by zeros unless an action is given."""
    chosen = jnp.zeros(env.action_space.shape) if action is None else action
    return env.step(env.reset(KEY)[0], chosen, KEY)


def status_of(spec: ManagerSpec) -> dict[str, str]:
    return {note.key: note.status for note in spec.notes}


def test_push_cube_has_59_observations_and_8_actions() -> None:
    _, obs = RESET(KEY)
    shapes = jax.tree.map(lambda leaf: leaf.shape, obs)
    assert shapes == {
        "object": {"cube_pos": (16,), "goal_pos": (3,)},
        "robot": {"ee_pos": (16,), "qf": (8,), "qpos": (8,), "qvel": (8,)},
    }
    flat = flatten_observation(obs)
    assert flat.shape == (59,)
    np.testing.assert_array_equal(flat[16:19], obs["object"]["goal_pos"])
    np.testing.assert_array_equal(flat[-16:-8], obs["robot"]["qpos"])
    assert ENV.action_space.shape == (8,)
    assert ENV.observation_space.contains(jax.tree.map(np.asarray, obs))
    assert gymnasium.spaces.flatdim(ENV.observation_space) == 59


@pytest.mark.slow
def test_the_newer_push_cube_drives_the_arm_only_and_is_the_same_scene() -> None:
    env = EmbodiedEnv(newer(PUSH_CUBE), physics="mujoco")
    assert env.action_space.shape == (6,)
    assert env.spec.scene == ENV.spec.scene
    state, timestep = jax.jit(env.step)(env.reset(KEY)[0], jnp.ones(6), KEY)
    np.testing.assert_allclose(state.target, [0.1, -1.47, 1.67, -1.47, -1.47, 0.1, 0.04, 0.04], atol=1e-6)
    assert flatten_observation(timestep.obs).shape == (59,)


def test_cart_pole_has_6_observations_and_2_actions() -> None:
    state, obs = CART.reset(KEY)
    assert flatten_observation(obs).shape == (6,) and CART.action_space.shape == (2,)
    np.testing.assert_allclose(state.physics.qpos, [-0.2, 0.07], atol=1e-7)
    np.testing.assert_allclose(obs["robot"]["qpos"], [14.8 / 30.0, (np.pi + 0.07) / (2 * np.pi)], atol=1e-6)


@pytest.mark.slow
def test_control_parts_choose_what_is_observed_and_driven() -> None:
    config = changed(PUSH_CUBE, "env.control_parts", ["hand"])
    env = EmbodiedEnv(changed(config, "env.observations.robot_qpos.params.joint_ids", [0, 1]), physics="mujoco")
    _, obs = env.reset(KEY)
    assert env.action_space.shape == (2,)
    np.testing.assert_allclose(obs["robot"]["qpos"], [1.0, 1.0], atol=1e-6)  # closed: 0.04 of 0.04 m


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ur3", "ur3e", "ur5", "ur5e", "ur10e"])
def test_every_arm_of_the_family_stands_and_holds_its_pose(model: str) -> None:
    config = changed(changed(PUSH_CUBE, "robot.robot_type", model), "env.rewards", {})
    env = EmbodiedEnv(config, physics="mujoco")
    state, _ = env.reset(KEY)
    after, _ = jax.jit(env.step)(state, jnp.zeros(8), KEY)
    np.testing.assert_allclose(after.physics.qpos[:8], state.physics.qpos[:8], atol=1e-3)


def test_the_reward_is_the_sum_of_weighted_terms() -> None:
    state, _ = RESET(KEY)
    for i in range(2):
        state, timestep = STEP(state, jnp.full(8, 0.5 * i), KEY)
    terms, rewards = timestep.info["terms"], timestep.info["rewards"]
    assert float(terms["smoothness"]) == pytest.approx(-np.sqrt(8 * 0.25))
    weights = {"reaching": 0.03, "goal": 0.8, "smoothness": 0.01, "success": 10.0}
    assert rewards == {name: pytest.approx(weight * float(terms[name])) for name, weight in weights.items()}
    assert float(timestep.reward) == pytest.approx(sum(map(float, rewards.values())))
    assert set(timestep.info) == {"success", "fail", "elapsed_steps", "metrics", "rewards", "terms"}
    assert int(timestep.info["elapsed_steps"]) == 2


@pytest.mark.slow
def test_smoothness_is_zero_in_the_first_step_only_and_forgets_other_episodes() -> None:
    start, _ = RESET(KEY)
    _, first = STEP(start, jnp.ones(8), KEY)
    assert first.info["rewards"]["smoothness"] == 0.0
    env = push("max_episode_steps", 2)
    carry = reset(env, KEY, 2)
    jitted_step = jax.jit(step, static_argnums=0)
    values = []
    for i in range(4):
        carry, timestep = jitted_step(env, carry, jnp.full((2, 8), float(i)), KEY)
        values.append(float(timestep.info["terms"]["smoothness"][0]))
    np.testing.assert_allclose(values, [0.0, -np.sqrt(8.0), 0.0, -np.sqrt(8.0)], rtol=1e-6)


def test_a_replacing_term_sets_the_total() -> None:
    env = push("env.rewards.last", {"func": "success_reward", "mode": "replace", "weight": 2.0})
    assert first_step(env, jnp.ones(8))[1].reward == 0.0


def test_success_terminates_with_the_goal_at_the_cube() -> None:
    state, _ = RESET(KEY)
    cube = state.physics.qpos[8:11]
    near = state.kept["goal_pose"].at[:3, 3].set(cube + jnp.array([0.09, 0.0, 0.0]))
    _, there = STEP(replace(state, kept={"goal_pose": near}), jnp.zeros(8), KEY)
    assert there.terminated and there.info["success"] and there.info["terms"]["success"] == 1.0
    assert float(there.info["metrics"]["distance_to_goal"]) == pytest.approx(0.09, abs=1e-3)
    _, away = STEP(state, jnp.zeros(8), KEY)
    assert not away.terminated and not away.truncated


def test_a_cube_that_fell_truncates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(self: Physics, state: PhysicsState, ctrl: Array) -> PhysicsState:
        del self, ctrl
        return state.replace(qpos=state.qpos.at[10].set(-0.11))

    monkeypatch.setattr(Physics, "step", fall)  # the floor is infinite: nothing falls by itself
    _, timestep = first_step(ENV)
    assert timestep.truncated and not timestep.terminated


def run_cart(step: int, angle: float = 0.0, env: EmbodiedEnv = CART) -> Timestep:
    """Step a pole at rest, after so many steps."""
    physics = PhysicsState(qpos=jnp.array([0.0, angle]), qvel=jnp.zeros(2))
    state = replace(env.reset(KEY)[0], physics=physics, episode_step=jnp.int32(step))
    return jax.jit(env.step)(state, jnp.zeros(2), KEY)[1]


def test_cart_pole_ends() -> None:
    upright = run_cart(499, 0.001)
    assert upright.terminated and upright.truncated and upright.info["success"]
    early = run_cart(498, 0.001)
    assert not early.terminated and not early.truncated
    tilted = run_cart(499, 0.3)
    assert tilted.truncated and not tilted.terminated
    fallen = run_cart(7, 1.7)
    assert fallen.truncated and fallen.terminated and fallen.info["fail"] and not fallen.info["success"]
    timestep = run_cart(7, 0.2)
    expected = 1.0 - timestep.info["metrics"]["distance_to_goal"] / np.pi
    assert float(timestep.reward) == pytest.approx(expected + 0.005 * timestep.info["terms"]["velocity_penalty"])


def test_an_observation_is_clipped_then_scaled_then_noisy() -> None:
    key, path = "env.observations.goal_pos", ("object", "goal_pos")
    shaped = changed(changed(PUSH_CUBE, f"{key}.clip", [-0.7, 0.0]), f"{key}.scale", 10.0)
    plain, sharp, noisy = (
        EmbodiedEnv(config, physics="mujoco").reset(KEY)[1][path[0]][path[1]]
        for config in (PUSH_CUBE, shaped, changed(shaped, f"{key}.noise", 0.1))
    )
    np.testing.assert_allclose(sharp, 10.0 * np.clip(plain, -0.7, 0.0))
    assert (np.abs(noisy - sharp) <= 0.1).all() and (noisy != sharp).all()


@pytest.mark.slow
def test_an_observation_has_its_history_and_forgets_it_with_the_episode() -> None:
    config = changed(PUSH_CUBE, "env.observations.eef", {"func": "get_robot_eef_pose", "name": "robot/eef"})
    config["env"]["observations"]["eef"] |= {"mode": "add", "scale": 2.0, "params": {"position_only": True}}
    now, past = (
        EmbodiedEnv(each, physics="mujoco")
        for each in (config, changed(config, "env.observations.eef.history_length", 3))
    )
    step = jax.jit(past.step)
    state, obs = past.reset(KEY)
    assert past.observation_space["robot"]["eef"].shape == obs["robot"]["eef"].shape == (9,)
    seen = [now.reset(KEY)[1]["robot"]["eef"]] * 3
    np.testing.assert_array_equal(obs["robot"]["eef"], np.concatenate(seen))  # the start stands for what was before
    for i in range(4):
        state, timestep = step(state, jnp.full(8, 0.5), KEY)
        seen = [*seen[1:], timestep.obs["robot"]["eef"][6:]]
        np.testing.assert_array_equal(timestep.obs["robot"]["eef"], np.concatenate(seen), err_msg=str(i))
    assert (seen[0] != seen[2]).any()
    np.testing.assert_array_equal(seen[2], 2.0 * past.world(state).eef_pose()[:3, 3])
    jax.tree.map(np.testing.assert_array_equal, past.reset(KEY)[1], obs)


@pytest.mark.slow
def test_interval_events_fire_at_their_steps() -> None:
    event = {"func": "randomize_target_pose", "mode": "interval", "interval_step": 3}
    event["params"] = {"position_range": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], "store_key": "there"}
    env = push("env.events.push", event)
    state, _ = env.reset(KEY)
    there = []
    for _ in range(3):
        state, _ = jax.jit(env.step)(state, jnp.zeros(8), KEY)
        there.append(float(state.kept["there"][0, 3]))
    assert there == [0.0, 0.0, 1.0]


def test_startup_events_draw_the_same_in_every_environment() -> None:
    env = push("env.events.randomize_goal.mode", "startup")
    goals = reset(env, KEY, 3).obs["object"]["goal_pos"]
    np.testing.assert_array_equal(goals[0], goals[1])
    assert np.abs(goals[0, :2]).max() > 0.0


def test_resets_fill_the_configured_ranges() -> None:
    obs = reset(ENV, KEY, 512).obs["object"]
    cube, goal = np.asarray(obs["cube_pos"]).reshape(-1, 4, 4)[:, :3, 3], np.asarray(obs["goal_pos"])
    np.testing.assert_allclose(cube.min(0), [-0.8, -0.6, 0.05], atol=0.01)
    np.testing.assert_allclose(cube.max(0), [-0.4, -0.2, 0.05], atol=0.01)
    np.testing.assert_allclose(goal.min(0), [-0.3, -0.3, 0.05], atol=0.01)
    np.testing.assert_allclose(goal.max(0), [0.3, 0.3, 0.05], atol=0.01)
    assert abs(np.corrcoef(cube[:, 0], goal[:, 0])[0, 1]) < 0.15


@pytest.mark.slow
def test_a_reset_leaves_other_environments_alone() -> None:
    """EmbodiChain stops the objects of all environments, and moves time on in all, when one resets."""
    carry = reset(ENV, KEY, 2)
    moving = carry.state.physics.qvel.at[:, 8].set(0.5)
    state = replace(
        carry.state, physics=carry.state.physics.replace(qvel=moving), episode_step=jnp.array([99, 5], jnp.int32)
    )
    after, timestep = step(ENV, replace(carry, state=state), jnp.zeros((2, 8)), KEY)
    assert timestep.truncated.tolist() == [True, False]
    alone, _ = STEP(jax.tree.map(lambda leaf: leaf[1], state), jnp.zeros(8), KEY)
    kept = jax.tree.map(lambda leaf: leaf[1], after.state)
    np.testing.assert_array_equal(kept.physics.qvel, alone.physics.qvel)
    np.testing.assert_array_equal(kept.physics.qpos, alone.physics.qpos)
    assert abs(float(kept.physics.qvel[8])) > 0.1 and float(after.state.physics.qvel[0, 8]) == 0.0


def rollout(env: EmbodiedEnv, num_steps: int) -> Array:
    """Joint and cube positions [T, 15] under fixed actions."""

    def one(state: object, action: Array) -> tuple[object, Array]:
        state, _ = env.step(state, action, KEY)
        return state, state.physics.qpos

    actions = jax.random.normal(KEY, (num_steps, *env.action_space.shape))
    return jax.lax.scan(one, env.reset(KEY)[0], actions)[1]


def test_the_same_inputs_give_the_same_bits() -> None:
    twin = EmbodiedEnv(copy.deepcopy(PUSH_CUBE), physics="mujoco")
    assert twin == ENV and hash(twin) == hash(ENV)
    run = jax.jit(rollout, static_argnums=(0, 1))
    np.testing.assert_array_equal(run(ENV, 20), run(twin, 20))


def test_building_an_environment_starts_no_jax_backend() -> None:
    """``--device cpu`` must still be able to hide an accelerator after a config is read."""
    code = """
import json, sys
from jax._src import xla_bridge
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.manager.manager_spec import ManagerSpec
EmbodiedEnv(json.load(open(sys.argv[1])))
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code, str(FOLDER / "push_cube.json")], check=True)


@pytest.mark.slow
def test_mjx_follows_the_c_engine_in_push_cube() -> None:
    fast = rollout(ENV, 5)
    slow = jax.jit(rollout, static_argnums=(0, 1))(replace(ENV, physics="mjx"), 5)
    np.testing.assert_allclose(fast, slow, atol=2e-3)


@pytest.mark.slow
def test_mjx_follows_the_c_engine_in_cart_pole() -> None:
    slow = jax.jit(rollout, static_argnums=(0, 1))(replace(CART, physics="mjx"), 10)
    np.testing.assert_allclose(rollout(CART, 10), slow, atol=1e-4)


@refusals(
    (("env.rewards.goal.func", "distance_to_targt"), "", "'distance_to_target'"),
    (("env.rewards.goal.params.sigm", 1), "", "Did you mean 'sigma'"),
    (("env.rewards.goal.params.source_entity_cfg", None), "", "is missing"),
    (("env.rewards.goal.params.source_entity_cfg", {"uid": "ball"}), "env.rewards.goal", "no rigid object 'ball';"),
    (("env.rewards.goal.params.target_pose_key", "x"), "env.rewards.goal", "no target pose 'x' is stored;"),
    (("env.rewards.goal.mode", "ad"), "", "got 'ad'; allowed: add, replace"),
    (("env.events.randomize_cube.params.entity_cfg", {"uid": "c"}), "env.events.randomize_cube", "no rigid object"),
    (("env.events.randomize_cube.mode", "step"), "", "reset, startup, interval"),
    (("env.observations.robot_qpos.name", "robot/qpo"), "env.observations.robot_qpos", "cannot modify observation"),
    (("env.observations.goal_pos.name", "robot/qpos"), "env.observations.goal_pos", "it is there already"),
    (("env.observations.robot_ee_pos.params.part_name", "leg"), "env.observations.robot_ee_pos", "no control part"),
    (("env.actions", {}), "", "is missing; add an action term"),
    (("robot.robot_type", "Franka"), "", "ejax has no model of 'Franka'; its robots: URRobot"),
    (("robot", None), "", "is missing; set it to {robot_type: …}; ejax's robots: URRobot"),
    (("robot", {"uid": "arm"}), "robot.robot_type", "is missing; ejax's robots: URRobot"),
    (("robot", {"urdf_cfg": {"components": []}}), "robot.urdf_cfg", "names no arm of ejax's robots: URRobot"),
    (("robot.fpath", "arm.urdf"), "", "ejax reads no robot files; leave it out for ejax's model"),
    (("robot.init_qpos", [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]), "", "must be a list of 8 numbers"),
    (("robot.drive_pros.stiffness", {"knee": 1.0}), "robot.drive_pros.stiffness.knee", "no such joint or"),
    (("robot.drive_pros.max_velocity", 0), "", "got 0; must be a number > 0"),
    (("env.observations.robot_ee_pos.params.part_name", {}), "env.observations.robot_ee_pos", "no control part"),
    (("robot.colour", "red"), "", "unknown key"),
    (("sensor", {"uid": "cam"}), "", "; must be a list"),
    (
        ("rigid_object.0.shape", {"shape_type": "Mesh", "fpath": "a.obj"}),
        "rigid_object[0].shape.shape_type",
        "got 'Mesh';",
    ),
    (("rigid_object.0.body_type", "kinematic"), "", "got 'kinematic'"),
    (("rigid_object.0.attrs.masss", 1.0), "", "Did you mean 'mass'"),
    (("env.target_control_frequency", 30), "", "got 30 Hz; one period must be"),
    (("robot.control_parts", {"arm": ["("]}), "robot.control_parts.arm", "no joints (; there is Joint1"),
    (("robot.control_parts", {"arm": "Joint1"}), "robot.control_parts.arm", "got 'Joint1'; must be a list of joints"),
    (("env.control_parts", []), "", "got (); must be a list of the robot's parts, or null for all"),
    (("env.actions.delta_qpos.params.scale", "a"), "env.actions.delta_qpos", "scale must be a number, or a list of"),
    (("env.actions.delta_qpos.params.scale", [0.1, 0.2]), "env.actions.delta_qpos", "scale must be a number"),
    (("env.observations.robot_qpos.params.joint_ids", "x"), "env.observations.robot_qpos", "joint_ids must be"),
    (("env.events.randomize_cube.params.position_range", 5), "env.events.randomize_cube", "a range is two lists"),
    (("background", [{"uid": "cube", "shape": {"shape_type": "Sphere"}}]), "rigid_object", "the uid 'cube' is taken"),
    (("rigid_object.0.uid", "wrist_1"), "rigid_object", "the uid 'wrist_1' is taken; every body, background too, n"),
    (("rigid_object.0.shape.size", [0.1, 0.1, 0]), "", "; edges must be > 0"),
    (("rigid_object.0.attrs.enable_collision", 1), "", "must be true or false"),
    (("rigid_object.0.init_local_pose", [[1]]), "", "use init_pos and init_rot"),
    (("robot.qpos_limits", [[0, 1]]), "", "joints have the limits of ejax's model"),
    (("robot.urdf_cfg.components.0.transform", [[1, 2]]), "", "ejax mounts the gripper"),
    (("env.sim_steps_per_control", 2.5), "", "got 2.5; must be an integer >= 1"),
    (("max_episode_steps", 99.5), "", "got 99.5; must be an integer"),
    (("env.observations.cube_pos.params.entity_cfg", {"uid": "cub"}), "", "Did you mean 'cube'?"),
    (("env.control_parts", ["leg"]), "", "no control part 'leg'"),
    (("env.actions.delta_qpos.contract", "joint_velocity@1"), "", "means a functor"),
    (("env.actions.arm", {"contract": "joint_velocty@1"}), "env.actions.arm.contract", "'joint_velocity@1'"),
    (
        (
            "env.actions.hand",
            {"func": "ParallelGripperAction", "params": {"part_name": "hand", "use_joint_limits": True}},
        ),
        "",
        "sets qpos of",
    ),
    (("env.terminations.late", {"func": "upright"}), "env.terminations.late.func", "no terminations functor"),
    (("env.terminations.tilt", {"func": "bad_orientation", "params": {"limit": 1.0}}), "", "only VelocityRL has"),
    (("env.observations.goal_pos.clip", [1.0, 0.0]), "env.observations.goal_pos", "must be [lowest, highest]"),
    (("env.observations.goal_pos.history_length", 0), "env.observations.goal_pos", "must be an integer >= 1"),
    (("id", "PushCubRL"), "", "Did you mean 'PushCubeRL'?"),
    (("id", 5), "", "got 5; must name a task"),
    (("id", "EmbodiedEnv"), "", "no task 'EmbodiedEnv'"),
    # extensions that EmbodiChain takes for settings
    (("env.extensions.sim_steps_per_control", 2), "", "env.sim_steps_per_control"),
    (("env.extensions.active_joint_ids", [0]), "", "set env.control_parts"),
    (("env.extensions.num_envs", 4), "", "set trainer.num_envs"),
    (("env.extensions.max_episode_steps", 7), "", "is 7, but max_episode_steps is 100"),
    (("env.extensions.ignore_terminations", "yes"), "", "must be true or false"),
    (("env.extensions.success_threshold", -0.1), "", "got -0.1; must be a number > 0"),
    (("env.extensions.success_threshold", "0.1 m"), "", "must be a number > 0"),
    # numbers beyond 32 bits
    (("env.rewards.goal.weight", float("nan")), "", "got nan"),
    (("env.rewards.goal.params.sigma", float("inf")), "", "got inf"),
    (("rigid_object.0.init_pos", [0.0, 1e39, 0.0]), "rigid_object[0].init_pos[1]", "got 1e+39"),
    (("robot.init_pos", [0, 0, 10**1000]), "robot.init_pos[2]", "got an integer of more than"),
    (("max_episode_steps", 2**31), "", "got 2147483648"),
    (("env.events.randomize_cube.interval_step", -(2**40)), "", "got -1"),
)
def test_what_cannot_be_had_is_refused_by_name(given: tuple[str, object], key: str, word: str) -> None:
    """An empty ``key``: the one that was changed."""
    key = key or re.sub(r"\.(\d+)", r"[\1]", given[0])
    refused(EmbodiedEnv, changed(PUSH_CUBE, *given), key=key, word=word)


def test_all_refusals_are_in_one_error() -> None:
    config = changed(changed(PUSH_CUBE, "robot.colour", "red"), "env.rewards.goal.func", "nothing")
    assert {"robot.colour", "env.rewards.goal.func"} <= set(keys_of(refused(EmbodiedEnv, config)))


def test_options_of_physx_and_of_meshes_are_told_and_have_no_effect() -> None:
    config = changed(PUSH_CUBE, "physics_config", {"bounce_threshold": 0.2, "gravity": [0.0, 0.0, -9.81]})
    config = changed(config, "rigid_object.0.max_convex_hull_num", 1)
    config = changed(config, "robot.urdf_cfg.name_case", {"joint": "upper"})
    spec = EmbodiedEnv(config).spec
    keys = ("physics_config.bounce_threshold", "rigid_object[0].max_convex_hull_num", "robot.urdf_cfg.name_case")
    assert {status_of(spec)[key] for key in keys} == {"without effect"} and spec.scene.xml == ENV.spec.scene.xml


def test_a_body_without_collisions_meets_nothing() -> None:
    env = push("rigid_object.0.attrs.enable_collision", False)
    state, _ = env.reset(KEY)
    for _ in range(10):
        state, timestep = env.step(state, jnp.zeros(8), KEY)
    assert state.physics.qpos[10] < -0.1 and timestep.truncated  # through the floor
    assert env.spec.scene.xml.count("<pair") < ENV.spec.scene.xml.count("<pair")


def test_frequency_and_substeps_give_the_number_of_physics_steps() -> None:
    env = push("env.target_control_frequency", 50)
    assert env.spec.num_substeps == 2 and env.control_period == pytest.approx(0.02)
    # Newton's divide a physics step
    spec = push("physics_config", {"physics_dt": 0.01, "num_substeps": 2, "solver_cfg": {"njmax": 8}}).spec
    assert spec.timestep == 0.005 and spec.num_substeps == 2 * ENV.spec.num_substeps
    assert status_of(spec)["physics_config.solver_cfg"] == "without effect"


@pytest.mark.slow
def test_a_contract_stands_for_its_functor_and_both_parts_move() -> None:
    arm = {"contract": "eef_pose.relative@1", "params": {"part_name": "arm"}}
    hand = {"contract": "gripper.parallel@1", "params": {"part_name": "hand", "use_joint_limits": True}}
    env = push("env.actions", {"arm": arm, "hand": hand})
    note = next(note for note in env.spec.notes if note.key == "env.actions.arm.contract")
    assert note.status == "used" and note.text == "RelativeEefPoseAction"
    assert env.action_space == gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
    start = env.reset(KEY)[0]
    state, _ = env.step(start, jnp.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), KEY)
    moved = [env.world(each).eef_pose("arm", qpos=each.target)[:3, 3] for each in (start, state)]
    np.testing.assert_allclose(moved[1] - moved[0], [0.02, 0.0, 0.0], atol=2e-3)
    np.testing.assert_array_equal(state.target[6:], [0.0, 0.0])


def test_drives_keep_their_damping_ratio_and_reach_their_velocity() -> None:
    """1e5, 1e3, 500 N·m, 2 rad/s: s = 500/(2·1000) = 1/4."""
    drives = ENV.spec.scene.drives
    assert drives.stiffness[0] == pytest.approx(1e5 / 16) and drives.damping[0] == pytest.approx(250.0)
    assert drives.damping[0] / np.sqrt(drives.stiffness[0]) == pytest.approx(1e3 / np.sqrt(1e5))
    assert drives.max_effort[0] / drives.damping[0] == pytest.approx(2.0)
    assert CART.spec.scene.drives.stiffness == (10.0, 0.01) and CART.spec.scene.drives.damping == (1.0, 0.001)


def first_form(config: dict, **extensions: object) -> dict:
    """As 0.1.0 and 0.1.1 write it: the action and the episode's length are extensions."""
    config = copy.deepcopy(config)
    del config["max_episode_steps"], config["env"]["actions"]
    config["env"]["extensions"] = {"action_type": "delta_qpos", "action_scale": 0.1, **extensions}
    return config


def last_steps(env: EmbodiedEnv, *steps: int) -> list[bool]:
    """Return which steps of these numbers are truncated, from the state after a reset."""
    state, _ = env.reset(KEY)
    step, action = jax.jit(env.step), jnp.zeros(env.action_space.shape)
    return [bool(step(replace(state, episode_step=jnp.int32(i - 1)), action, KEY)[1].truncated) for i in steps]


@pytest.mark.parametrize(("config", "length"), [(PUSH_CUBE, 100), (CART_POLE, 500)])
def test_episodes_of_0_1_1_are_as_long_as_their_extension_says(config: dict, length: int) -> None:
    """v0.1.0, v0.1.1: ``check_truncated`` is ``elapsed >= episode_length``; its configs say 100 and 500."""
    env = EmbodiedEnv(first_form(config, episode_length=length), physics="mujoco")
    assert env.max_episode_steps == length and last_steps(env, length - 1, length) == [False, True]
    assert status_of(env.spec)["env.extensions.episode_length"] == "used"


def test_episodes_without_a_length_have_1000_steps_in_the_first_form_and_300_later() -> None:
    """v0.1.1: ``RLEnv.episode_length`` is 1000 by default. v0.1.2 to 0.3.2: ``EnvCfg.max_episode_steps`` is 300."""
    first = EmbodiedEnv(first_form(CART_POLE), physics="mujoco")
    assert first.max_episode_steps == 1000
    assert "is not given: 1000" in next(note.text for note in first.spec.notes if note.key == "max_episode_steps")
    assert push("max_episode_steps", None, CART_POLE).max_episode_steps == 300


def test_a_length_beside_the_time_limit_must_be_the_same() -> None:
    config = first_form(CART_POLE, episode_length=500)
    assert EmbodiedEnv({**config, "max_episode_steps": 500}, physics="mujoco").max_episode_steps == 500
    text = "is 500, but max_episode_steps is 300; keep one"
    refused(EmbodiedEnv, {**config, "max_episode_steps": 300}, key="env.extensions.episode_length", word=text)


def test_a_length_beside_actions_is_read_by_nobody_as_since_0_1_2() -> None:
    env = push("env.extensions", {"episode_length": 7, "action_scale": 9.0}, CART_POLE)
    assert env.max_episode_steps == 500
    notes = {note.key: note for note in env.spec.notes}
    assert notes["env.extensions.episode_length"].status == "without effect"
    assert "max_episode_steps decides, 500 here" in notes["env.extensions.episode_length"].text
    assert "set the scale in its params" in notes["env.extensions.action_scale"].text


@cases(
    "extensions target",
    ({"action_type": "delta_qpos", "action_scale": 0.2}, [0.2, -1.37]),
    ({"action_scale": 0.2}, [0.2, -1.37]),
    ({}, [1.0, -0.57]),
)
def test_a_scale_without_a_type_means_joint_steps(extensions: dict, target: list[float]) -> None:
    """v0.1.0, v0.1.1: ``action_type`` is delta_qpos by default, ``action_scale`` 1.0."""
    config = first_form(PUSH_CUBE)
    config["env"]["extensions"] = {"episode_length": 100, **extensions}
    state, _ = first_step(EmbodiedEnv(config, physics="mujoco"), jnp.ones(8))
    np.testing.assert_allclose(state.target[:2], target, atol=1e-6)


def test_joint_limits_without_a_type_bound_the_steps_of_the_arm() -> None:
    """Between the first release and 0.1.0: q*[:6] = q + clip(action_scale·a, ±joint_limits)."""
    config = first_form(PUSH_CUBE, joint_limits=0.5, episode_length=100)
    del config["env"]["extensions"]["action_type"]
    env = EmbodiedEnv(config, physics="mujoco")
    assert env.action_space.shape == (6,)
    state, _ = first_step(env, jnp.array([1.0, 9.0, -9.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(state.target[:3], [0.1, -1.07, 1.07], atol=1e-6)
    typed = EmbodiedEnv(first_form(PUSH_CUBE, joint_limits=0.5), physics="mujoco")
    assert typed.action_space.shape == (8,)
    assert status_of(typed.spec)["env.extensions.joint_limits"] == "without effect"


def test_a_pose_in_the_first_form_has_six_numbers_as_the_arm_has_joints() -> None:
    config = changed(first_form(PUSH_CUBE, action_type="eef_pose"), "robot.urdf_cfg", {"components": []})
    config = changed(changed(config, "robot.init_qpos", [0.0, -1.57, 1.57, -1.57, -1.57, 0.0]), "env.rewards", {})
    assert EmbodiedEnv(config, physics="mujoco").action_space.shape == (6,)


def test_the_cart_pole_of_0_1_1_succeeds_in_any_step_and_later_ones_in_the_last() -> None:
    """v0.1.1: success is |θ| < 0.02 and |θ̇| < 0.05. From 0.1.2 on it also asks for ``elapsed >= max − 1``."""
    first = EmbodiedEnv(first_form(CART_POLE, episode_length=500), physics="mujoco")
    between = EmbodiedEnv({**first_form(CART_POLE), "max_episode_steps": 500}, physics="mujoco")
    early = run_cart(6, env=first)
    assert early.info["success"] and early.terminated and not early.truncated
    for env in (between, CART):
        assert not run_cart(498, env=env).info["success"] and run_cart(499, env=env).info["success"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "uid"), [("PushBallRL", "soccer_ball"), ("PushTRL", "t")])
def test_other_bodies_that_are_pushed(name: str, uid: str) -> None:
    config = json.loads(json.dumps(PUSH_CUBE).replace('"cube"', f'"{uid}"').replace("PushCubeRL", name))
    env = EmbodiedEnv(config, physics="mujoco")
    state, _ = env.reset(KEY)
    near = state.kept["goal_pose"].at[:3, 3].set(state.physics.qpos[8:11])
    step = jax.jit(env.step)
    assert step(replace(state, kept={"goal_pose": near}), jnp.zeros(8), KEY)[1].terminated
    assert not step(state, jnp.zeros(8), KEY)[1].terminated
    below = replace(
        state, kept={"goal_pose": near}, physics=state.physics.replace(qpos=state.physics.qpos.at[10].add(-0.1))
    )
    higher = EmbodiedEnv(changed(config, "env.extensions.table_height", 0.2), physics="mujoco")
    assert bool(higher.step(below, jnp.zeros(8), KEY)[1].info["success"]) is (name == "PushBallRL")


def test_a_task_of_ones_own_has_its_id_and_its_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "terminations", dict(TERMS["terminations"]))

    @register_functor("terminations", "PushFar")
    def far(world: World, reach: float = 1.0) -> Outcome:
        return replace(scene_only(world), success=jnp.array(reach > 1.5))

    env = push("env.extensions.reach", 2.0, {**PUSH_CUBE, "id": "PushFar"})
    assert first_step(env)[1].terminated
    assert status_of(env.spec)["env.extensions.reach"] == "used"


def test_a_config_may_name_ends_besides_those_of_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "terminations", dict(TERMS["terminations"]))

    @register_functor("terminations", "late")
    def late(world: World, after: float) -> Outcome:
        return Outcome(fail=world.time > after)

    env = push("env.terminations.late", {"func": "late", "params": {"after": 0.05}})
    step = jax.jit(env.step)
    state, first = step(env.reset(KEY)[0], jnp.zeros(8), KEY)
    _, second = step(state, jnp.zeros(8), KEY)
    assert not first.terminated and second.terminated and second.info["fail"]


def test_a_class_that_only_embodichain_has_is_named_without_advice_that_would_not_help() -> None:
    humanoid = changed(changed(CART_POLE, "id", "HumanoidRun-v1"), "env.actions", {})
    text = str(refused(EmbodiedEnv, humanoid, key="id", word="is a class of EmbodiChain's, which ejax does not have"))
    assert "its actions" in text and "DeltaQposTerm" not in text and "env.actions" not in text


def test_the_scene_without_a_task_never_succeeds_and_says_so(tmp_path: Path) -> None:
    config = load_config(train_file(tmp_path, changed(PUSH_CUBE, "id", "EmbodiedEnv-v1")))
    (notice,) = (each for each in config.notices if each.key.endswith("gym_config.json:id"))
    assert notice.status == "used" and "success is always 0" in notice.text
    env = EmbodiedEnv(config.env.cfg["gym_config"], physics="mujoco")
    assert not first_step(env)[1].info["success"]


def test_terminations_can_be_ignored_as_an_extension_says() -> None:
    """EmbodiChain sets each extension on its environment's config, ``ignore_terminations`` among them."""
    env = push("env.extensions.ignore_terminations", True, CART_POLE)
    last = run_cart(499, env=env)
    assert last.info["success"] and not last.terminated and last.truncated


def train_file(tmp_path: Path, gym_config: dict, **trainer: object) -> Path:
    """Write a train config next to its gym config, which it names from the root of a repository."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "relu"}}
    data = {
        "trainer": {"gym_config": "some/where/gym_config.json", "num_envs": 2, "buffer_size": 8, **trainer},
        "policy": {"name": "actor_critic", "actor": network, "critic": network},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 8}},
    }
    (tmp_path / "gym_config.json").write_text(json.dumps(gym_config))
    (tmp_path / "train.json").write_text(json.dumps(data))
    return tmp_path / "train.json"


def test_a_gym_config_named_from_elsewhere_is_found_next_to_the_train_file(tmp_path: Path) -> None:
    config = load_config(train_file(tmp_path, PUSH_CUBE))
    assert config.env.id == "EmbodiedEnv"
    notice = next(each for each in config.notices if each.key == "trainer.gym_config")
    assert notice.text.endswith(f"read {tmp_path / 'gym_config.json'} instead")


def test_the_longest_tail_of_the_path_wins(tmp_path: Path) -> None:
    (tmp_path / "where").mkdir()
    (tmp_path / "agents").mkdir()
    (tmp_path / "where" / "gym_config.json").write_text(json.dumps(CART_POLE))
    config = load_config(train_file(tmp_path / "agents", PUSH_CUBE))
    assert config.env.cfg["gym_config"]["id"] == "CartPoleRL"


def test_the_bound_of_a_first_releases_steps_is_its_own(tmp_path: Path) -> None:
    """0.0.1: ``clamp(action·action_scale, ±joint_limits)``; its config says 0.5."""
    extensions = {"obs_mode": "state", "episode_length": 100, "joint_limits": 0.05}
    gym_config = {"id": "PushCubeRL", "env": {"extensions": extensions}}
    env = PushCubeRL(**load_config(train_file(tmp_path, gym_config)).env.cfg)
    assert env.joint_limits == 0.05 and env.action_space.high[0] == np.float32(0.05)
    state, _ = env.reset(KEY)
    _, timestep = env.step(state, jnp.array([9.0, 0.0, 0.0, 0.0, 0.0, 0.0]), KEY)
    assert float(timestep.info["rewards"]["action_penalty"]) == pytest.approx(-0.01 * 0.05)
    file = train_file(tmp_path, changed(gym_config, "env.extensions.action_type", "qpos"))
    refused(load_config, file, word="got 'qpos'; the task class PushCubeRL acts by joint steps")


def test_the_seed_form_stays_the_seed_task(tmp_path: Path) -> None:
    config = load_config(train_file(tmp_path, {"id": "PushCubeRL", "env": {"extensions": {"obs_mode": "state"}}}))
    assert config.env.id == "PushCubeRL" and PushCubeRL(**config.env.cfg) == PushCubeRL()


def test_the_first_release_with_its_scene_and_event_is_its_task(tmp_path: Path) -> None:
    weights = {"reaching_reward_weight": 0.2, "place_reward_weight": 3.0, "place_penalty_weight": 0.4}
    weights |= {"action_penalty_weight": 0.02, "success_bonus_weight": 5.0}
    event = changed(PUSH_CUBE, "env.events.randomize_goal", None)["env"]["events"]
    gym_config = {
        "id": "PushCubeRL",
        "env": {
            "num_envs": 4,
            "events": event,
            "observations": {},
            "extensions": {"obs_mode": "state", "episode_length": 30, **weights},
        },
        "robot": PUSH_CUBE["robot"],
        "background": [{"uid": "goal_sphere", "body_type": "kinematic", "init_pos": [-0.8, -0.5, 0.05]}],
        "rigid_object": [{**PUSH_CUBE["rigid_object"][0], "init_pos": [-0.5, -0.4, 0.05]}],
    }
    path = train_file(tmp_path, gym_config)
    env = PushCubeRL(**load_config(path).env.cfg)
    assert env == PushCubeRL(
        episode_length=30,
        reaching_weight=0.2,
        place_weight=3.0,
        place_penalty_weight=0.4,
        action_penalty_weight=0.02,
        success_weight=5.0,
        cube_position=(-0.5, -0.4, 0.05),
        cube_position_range=((-0.2, -0.2, 0.0), (0.2, 0.2, 0.0)),
        goal_position=(-0.8, -0.5, 0.05),
    )
    status = {note.key.partition(":")[2]: note.status for note in check(path)}
    assert status["env.events.randomize_cube.func"] == status["env.extensions.place_reward_weight"] == "renamed"
    assert status["robot.uid"] == "without effect"
    file = train_file(tmp_path, changed(gym_config, "env.events.randomize_cube.mode", "interval"))
    refused(load_config, file, word="the task class PushCubeRL takes only randomize_rigid_object_pose")


def test_joints_are_named_in_any_case() -> None:
    upper = changed(PUSH_CUBE, "robot.control_parts", {"arm": ["JOINT[1-6]"]})
    upper = changed(upper, "robot.drive_pros.stiffness", {"JOINT1": 5.0})
    scene = EmbodiedEnv(upper).spec.scene
    assert scene.part("arm") == ENV.spec.scene.part("arm")
    assert scene.drives.stiffness[0] < scene.drives.stiffness[1]


def test_problems_carry_the_gym_configs_own_keys(tmp_path: Path) -> None:
    file = train_file(tmp_path, changed(PUSH_CUBE, "env.rewards.goal.func", "nothing"))
    refused(load_config, file, key="some/where/gym_config.json:env.rewards.goal.func", word="no rewards functor")


def test_overrides_reach_a_gym_configs_keys(tmp_path: Path) -> None:
    override = "env.cfg.gym_config.env.extensions.success_threshold=0.05"
    config = load_config(train_file(tmp_path, PUSH_CUBE), [override, "env.cfg.physics=mujoco"])
    env = EmbodiedEnv(**config.env.cfg)
    assert env.spec.extensions["success_threshold"] == 0.05 and env.physics == "mujoco"
    assert env.of("rewards") == ENV.of("rewards")


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_starts_no_foreign_functor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\ndef half(world, obs, action, info): return jnp.array(0.5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = train_file(tmp_path, changed(PUSH_CUBE, "env.rewards.mine", {"func": "mine:half", "mode": "add"}))
    key = "env.cfg.gym_config.env.rewards.mine.func"
    refused(load_config, path, word="add --trust mine:half")
    env = EmbodiedEnv(**load_config(path, [f"{key}=mine:half", "env.cfg.physics=mujoco"]).env.cfg)
    assert first_step(env)[1].info["rewards"]["mine"] == 0.5


def test_a_run_without_wandb_installed_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(train_file(tmp_path, PUSH_CUBE, use_wandb=True))
    assert not config.trainer.use_wandb
    assert "trainer.use_wandb" in [notice.key for notice in config.notices]


def test_check_lists_every_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = train_file(tmp_path, PUSH_CUBE, headless=True, device="cuda:3")
    status = {note.key: note.status for note in check(path)}
    assert status["trainer.num_envs"] == "used" and status["trainer.headless"] == "without effect"
    assert status["trainer.device"] == "used"  # --device replaces it
    prefix = "some/where/gym_config.json:"
    assert status[f"{prefix}env.rewards.goal.params.sigma"] == "used"
    assert status[f"{prefix}rigid_object[0].attrs.restitution"] == "without effect"
    assert set(status.values()) == {"used", "without effect"}
    assert main(["check", str(path)]) == 0
    assert "0 unsupported" in capsys.readouterr().out


def test_check_lists_the_keys_of_a_gym_config_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    path.write_text(json.dumps(changed(PUSH_CUBE, "env.rewards.goal.params.target_pose_key", "x")))
    notes = {note.key: note for note in check(path)}
    assert notes["env.json:rigid_object[0].attrs.restitution"].status == "without effect"
    refused = [note for key, note in notes.items() if key.startswith("env.json:env.rewards.goal.")]
    assert {note.text.partition(";")[0] for note in refused} == {"no target pose 'x' is stored"}
    assert {note.status for note in notes.values()} == {"used", "without effect", "unsupported"}
    path.write_text(json.dumps(PUSH_CUBE))
    assert {note.status for note in check(path)} == {"used", "without effect"}
    assert [note.status for note in check(path, ["trainer.seed=3"])].count("unsupported") == 1


@cases(
    "data text",
    ({"task_key": "t", "deployments": {}}, "a catalogue's entry"),
    ({"id": "A-v1", "environment": {"component": "env.yaml"}}, "a task put together from files"),
    ({"id": "A-v1", "robot": {}}, "not a config: it has none of the sections trainer, policy, algorithm"),
)
def test_check_says_what_another_file_is(tmp_path: Path, data: dict, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(data))
    [note] = check(path)
    assert (note.key, note.status) == ("file.json", "unsupported") and text in note.text


def test_check_exits_with_2_where_something_is_unsupported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = train_file(tmp_path, changed(PUSH_CUBE, "env.rewards.goal.func", "nothing"), rollout_step=3)
    assert main(["check", str(path), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    unsupported = {each["key"]: each["text"] for each in report["keys"] if each["status"] == "unsupported"}
    assert "Did you mean 'rollout_steps'" in unsupported["trainer.rollout_step"]
    assert "no rewards functor 'nothing'" in unsupported["some/where/gym_config.json:env.rewards.goal.func"]
    assert report["counts"]["unsupported"] == len(unsupported)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "num_actions"), [(1, 8), (2, 16)])
def test_check_tells_an_action_dim_that_is_not_the_environments(tmp_path: Path, chunk: int, num_actions: int) -> None:
    overrides = [f"policy.action_dim={num_actions}", f"env.cfg.action_chunk={chunk}"]
    path = train_file(tmp_path, PUSH_CUBE)
    assert not any(note.status == "unsupported" for note in check(path, overrides))
    (wrong,) = (note for note in check(path, [*overrides, "policy.action_dim=7"]) if note.status == "unsupported")
    assert wrong.key == "policy.action_dim (override)"
    assert wrong.text == f"got 7, but the env's actions have {num_actions}; use {num_actions}, or leave it out"
