"""Motion tracking: clips, the gaps between a robot and a clip, starts by failures, and the task."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import stick_robots
from case_tables import cases, refused
from small_configs import BASE
from whole_runs import assert_goes_on_with_the_same_bits

from ejax.envs.locomotion.clips import motion_file, read_clip
from ejax.envs.locomotion.motion import observe_motion
from ejax.envs.locomotion.tracking import Starts, TrackingRL
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.terms.legged import LeggedWorld
from ejax.envs.terms.tracking import TRACKING_REWARDS, TRACKING_TERMINATIONS, gaps
from ejax.envs.wrappers.placing import for_evaluation

KEY = jax.random.key(0)
CALM = {"by": "first", "noise": 0.0}
ENV = TrackingRL(physics="mujoco", starts=CALM, push=None, encoder_bias=0.0)
MODEL = ENV.legged.model
CLIP = ENV.clip


@pytest.mark.parametrize("name", ["quadruped_trot", "quadruped_bow"])
def test_a_shipped_clip_has_the_common_arrays_and_small_size(name: str) -> None:
    path = motion_file(name)
    assert path.stat().st_size < 100_000
    data, clip = np.load(path), read_clip(path, ENV.legged, 0.02)
    assert data["fps"] == [50]
    for key, x in {
        "body_pos_w": clip.link_pos,
        "body_lin_vel_w": clip.link_vel,
        "body_ang_vel_w": clip.link_ang_vel,
    }.items():
        np.testing.assert_allclose(data[key], x, atol=0.02 if "vel" in key else 1e-3)  # rounded to 2⁻¹⁴
    np.testing.assert_allclose(data["joint_vel"], clip.qvel[:, 6:], atol=0.01)
    turns = np.zeros(9)
    mujoco.mju_quat2Mat(turns, data["body_quat_w"][70, 5].astype(np.float64))
    np.testing.assert_allclose(turns.reshape(3, 3), clip.link_rotation[70, 5], atol=1e-3)


def rows_of(clip: Any) -> Any:
    """Make rows of a retargeted file: x, y, z, quaternion (x y z w), joints in the policy's order."""
    joints = clip.qpos[:, list(ENV.legged.joint_qpos)]
    return np.concatenate([clip.qpos[:, :3], clip.qpos[:, [4, 5, 6, 3]], joints], axis=1)


@pytest.mark.parametrize(("fps", "num_frames", "tolerance"), [(50.0, 200, 1e-5), (25.0, 199, 0.004)])
def test_a_retargeted_csv_is_read_and_brought_to_the_tasks_rate(
    tmp_path: Path, fps: float, num_frames: int, tolerance: float
) -> None:
    bow = read_clip(motion_file("quadruped_bow"), ENV.legged, 0.02)
    np.savetxt(tmp_path / "motion.csv", rows_of(bow)[:: round(50 / fps)], delimiter=",")
    clip = read_clip(tmp_path / "motion.csv", ENV.legged, 0.02, fps)
    assert len(clip.qpos) == num_frames
    np.testing.assert_allclose(clip.qpos, bow.qpos[:num_frames], atol=tolerance)
    np.testing.assert_allclose(clip.link_pos, bow.link_pos[:num_frames], atol=tolerance)


def test_velocities_are_those_of_a_constant_twist(tmp_path: Path) -> None:
    t = np.arange(6) * 0.02
    qpos = np.tile(CLIP.qpos[:1].astype(np.float64), (6, 1))
    for i, turn in enumerate(qpos[:, 3:7]):
        mujoco.mju_axisAngle2Quat(turn, np.array([0.0, 0.6, 0.8]), 2.0 * t[i])
    qpos[:, 0], qpos[:, 7] = 3.0 * t, qpos[0, 7] - 1.5 * t
    base: dict[str, Any] = {"body_pos_w": qpos[:, None, :3], "body_quat_w": qpos[:, None, 3:7]}
    np.savez(tmp_path / "own.npz", fps=[50], joint_pos=qpos[:, 7:], **base)
    clip = read_clip(tmp_path / "own.npz", ENV.legged, 0.02)
    np.testing.assert_allclose(clip.link_vel[:, 0], np.tile([3.0, 0.0, 0.0], (6, 1)), atol=1e-5)
    np.testing.assert_allclose(clip.link_ang_vel[:, 0], np.tile([0.0, 1.2, 1.6], (6, 1)), atol=1e-5)
    np.testing.assert_allclose(clip.qvel[:, 6], -1.5, atol=1e-5)


@cases(
    "change text",
    ({"joint_pos": None}, "no fps, joint_pos, body_pos_w and body_quat_w"),
    ({"joint_pos": np.zeros((150, 29))}, "3 frames or more of this robot's 12 joints, finite; got 150 frames of 29"),
    ({"fps": np.array([0.0])}, "at fps 0"),
    ({"joint_pos": np.full((150, 12), np.nan)}, "finite"),
    ({"joint_pos": CLIP.qpos[:, 7:][:, ::-1]}, "in another order, such as Isaac Lab's"),
    ({"body_pos_w": CLIP.link_pos[:, :5]}, "the 13 links of this robot, but 5"),
)
def test_a_file_that_is_not_this_robots_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    data = {**np.load(motion_file("quadruped_trot")), **change}
    np.savez(tmp_path / "other.npz", **{name: x for name, x in data.items() if x is not None})
    error = refused(TrackingRL, motion=str(tmp_path / "other.npz"), physics="mujoco", match="motion: ")
    assert text in str(error)


@cases(
    "cfg text",
    ({"motion": "quadruped_trott"}, "one of ejax's: quadruped_bow, quadruped_trot. Did you mean"),
    ({"motion": "none.csv"}, "unknown clip none.csv"),
    ({"starts": {"by": "luck"}}, "starts.by must be adaptive, uniform or first, got 'luck'"),
    ({"starts": {"rate": 0.0}}, "0 < rate <= 1"),
    ({"starts": {"bins": 3}}, "starts has no 'bins'; there is by, bin"),
    ({"starts": {"kernel": 2.5}}, "starts.kernel must be a whole number, got 2.5"),
    ({"starts": {"rate": "slow"}}, "starts.rate must be a number, got 'slow'"),
    ({"rewards": {"motion_body_pos": {"sdt": 1.0}}}, "rewards.motion_body_pos has no 'sdt'"),
)
def test_a_task_that_cannot_be_is_refused(cfg: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="TrackingRL: ") as error:
        TrackingRL(**cfg)
    assert text in str(error.value)


def somewhere(seed: int) -> tuple[PhysicsState, Any]:
    """Draw a state of the quadruped; also as MuJoCo's own, with kinematics."""
    rng, data = np.random.default_rng(seed), mujoco.MjData(MODEL)
    data.qpos[:] = np.concatenate([rng.normal(size=7), CLIP.qpos[0, 7:] + 0.3 * rng.normal(size=12)])
    data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
    data.qvel[:] = rng.normal(size=MODEL.nv)
    mujoco.mj_forward(MODEL, data)
    return PhysicsState(qpos=jnp.asarray(data.qpos, jnp.float32), qvel=jnp.asarray(data.qvel, jnp.float32)), data


def test_links_turn_as_mujocos() -> None:
    physics, data = somewhere(3)
    motion = observe_motion(ENV.task.robot, ENV.legged, physics)
    np.testing.assert_allclose(motion.link_rotation, data.xmat[1:].reshape(-1, 3, 3), atol=1e-5)
    for link in range(1, MODEL.nbody):
        velocity = np.zeros(6)
        mujoco.mj_objectVelocity(MODEL, data, mujoco.mjtObj.mjOBJ_XBODY, link, velocity, 0)
        np.testing.assert_allclose(motion.link_ang_vel[link - 1], velocity[:3], atol=2e-5)
        np.testing.assert_allclose(motion.link_vel[link - 1], velocity[3:], atol=2e-5)


def test_gaps_are_those_of_quaternions() -> None:
    physics, data = somewhere(5)
    state = replace(ENV.start(KEY), physics=physics, frame=jnp.array(40))
    seen = gaps(ENV.observe_noisy(ENV.world(state), KEY))
    own, theirs = data.xpos[1:], CLIP.link_pos[40].astype(np.float64)
    quats = np.zeros((13, 4))
    for quat, matrix in zip(quats, CLIP.link_rotation[40].reshape(13, 9).astype(np.float64), strict=True):
        mujoco.mju_mat2Quat(quat, matrix)
    off, back = np.zeros(4), np.zeros(4)
    mujoco.mju_negQuat(back, quats[0])
    mujoco.mju_mulQuat(off, data.xquat[1], back)
    w, x, y, z = off
    yaw = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
    turn = np.array([np.cos(yaw / 2.0), 0.0, 0.0, np.sin(yaw / 2.0)])
    apart, angles, turned, place = np.zeros((13, 3)), np.zeros(13), np.zeros(4), np.zeros(3)
    for i in range(13):
        mujoco.mju_rotVecQuat(place, theirs[i] - theirs[0], turn)
        apart[i] = own[i] - (np.array([*own[0, :2], theirs[0, 2]]) + place)
        mujoco.mju_mulQuat(turned, turn, quats[i])
        angles[i] = 2.0 * np.arccos(min(1.0, abs(turned @ data.xquat[1 + i])))
    np.testing.assert_allclose(seen["motion_body_pos"], apart, atol=1e-5)
    np.testing.assert_allclose(seen["motion_body_ori"][:, 0], angles, atol=1e-4)
    np.testing.assert_allclose(seen["motion_global_root_pos"], (own - theirs)[:1], atol=1e-5)
    angle = 2.0 * np.arccos(min(1.0, abs(quats[0] @ data.xquat[1])))
    np.testing.assert_allclose(seen["motion_global_root_ori"], [[angle]], atol=1e-4)


def test_rewards_are_one_on_the_reference_and_fall_by_the_gap() -> None:
    state = ENV.start(KEY)
    world = ENV.observe_noisy(ENV.world(state), KEY)
    for reward in TRACKING_REWARDS:
        np.testing.assert_allclose(reward(world, std=0.1), 1.0, atol=1e-4)
    moved = replace(state.physics, qpos=state.physics.qpos.at[0].add(0.03))
    world = ENV.observe_noisy(ENV.world(replace(state, physics=moved)), KEY)
    np.testing.assert_allclose(TRACKING_REWARDS[0](world, std=0.1), np.exp(-0.09), rtol=1e-4)
    # links are compared after moving the reference to the robot
    np.testing.assert_allclose(TRACKING_REWARDS[2](world, std=0.1), 1.0, atol=1e-4)


@cases(
    "slot change fails",
    (2, 0.05, [False, False, False]),
    (2, 0.12, [True, False, True]),
    (8, -1.5, [False, False, True]),  # a leg that is lifted
    (4, 1.2, [False, True, True]),  # x of the quaternion: tilted
)
def test_an_episode_ends_where_the_robot_leaves_the_clip(slot: int, change: float, fails: list[bool]) -> None:
    state = ENV.start(KEY)
    physics = replace(state.physics, qpos=state.physics.qpos.at[slot].add(change))
    world = ENV.observe_noisy(ENV.world(replace(state, physics=physics)), KEY)
    limits = ENV.task.terminations
    found = [bool(term(world, **limits[term.__name__]).fail) for term in TRACKING_TERMINATIONS]
    assert found == fails


def test_starts_are_drawn_before_failures_and_evenly_without_any() -> None:
    starts, failures = Starts(kernel=3, decay=0.5, uniform=0.3), np.array([0.0, 0.0, 0.0, 0.4, 0.0])
    np.testing.assert_allclose(starts.probabilities(jnp.zeros(5)), 0.2, rtol=1e-6)
    values = [*(failures + 0.3 / 5), 0.06, 0.06]
    wanted = np.array([sum(0.5**u * values[b + u] for u in range(3)) for b in range(5)])
    np.testing.assert_allclose(starts.probabilities(jnp.asarray(failures)), wanted / wanted.sum(), rtol=1e-5)
    after = starts.after(jnp.asarray(failures), jnp.array(1), jnp.array(True))
    np.testing.assert_allclose(after, [0.0, 0.05, 0.0, 0.38, 0.0], rtol=1e-5)
    np.testing.assert_allclose(starts.after(after, jnp.array(1), jnp.array(False)), 0.95 * after, rtol=1e-6)


@pytest.mark.slow
def test_a_rows_failures_decide_where_its_next_episode_starts() -> None:
    env = TrackingRL(physics="mujoco", starts={"bin": 0.5, "kernel": 1, "uniform": 1e-6}, push=None)
    assert env.num_bins == 7
    state, obs = jax.vmap(env.reset)(jax.random.split(KEY, 16))
    assert len(np.unique(state.frame)) > 8
    failures = jnp.zeros((16, 7)).at[:, 4].set(0.5)
    started, shown = jax.jit(jax.vmap(env.persist))(replace(state, failures=failures), state, obs)
    assert ((started.frame >= 4 / 7 * 149 - 1) & (started.frame <= 5 / 7 * 149)).all()
    np.testing.assert_array_equal(started.failures, failures)
    # the observation is of the new start
    command = shown["critic"][:, :12]
    joints = list(env.legged.joint_qpos)
    np.testing.assert_allclose(command, env.clip.qpos[np.asarray(started.frame) + 1][:, joints], atol=1e-6)
    assert jax.tree.map(jnp.shape, started) == jax.tree.map(jnp.shape, state)
    # an evaluation plays the whole clip
    assert for_evaluation(env).sampling.by == "first"
    np.testing.assert_array_equal(for_evaluation(env).reset(KEY)[0].frame, 0)


def test_an_episode_ends_with_the_clip_and_its_errors_are_means() -> None:
    state, _ = ENV.reset(KEY)
    np.testing.assert_allclose(state.physics.qpos, CLIP.qpos[0], atol=1e-6)
    robot, step = ENV.task.robot, jax.jit(ENV.step)
    joints, total = list(ENV.legged.joint_qpos), np.zeros(12)
    state = replace(state, frame=jnp.array(146), physics=replace(state.physics, qpos=jnp.asarray(CLIP.qpos[146])))
    for i in range(3):
        target = CLIP.qpos[147 + i, joints]
        action = (target - np.array(robot.home)) / np.array(robot.drives.action_scale)
        state, timestep = step(state, jnp.asarray(action, jnp.float32), KEY)
        total += np.abs(np.asarray(state.physics.qpos)[joints] - target)
    assert bool(timestep.truncated) and int(state.frame) == 149
    metrics = timestep.info["metrics"]
    found = [metrics[f"joint_error_{name}"] for name in robot.joints]
    np.testing.assert_allclose(found, total / 3, atol=1e-5)
    np.testing.assert_allclose(metrics["joint_error"], total.mean() / 3, atol=1e-5)
    assert not ENV.clips_actions and not bool(timestep.terminated)


def test_a_failure_is_counted_in_its_bin() -> None:
    env = TrackingRL(physics="mujoco", push=None)
    state, _ = env.reset(KEY)
    fallen = replace(state.physics, qpos=state.physics.qpos.at[2].set(0.05))
    after, timestep = jax.jit(env.step)(replace(state, frame=jnp.array(70), physics=fallen), jnp.zeros(12), KEY)
    assert bool(timestep.terminated)
    np.testing.assert_allclose(after.failures, 0.05 * np.eye(4)[71 * 4 // 150], rtol=1e-6)


def test_g1s_links_and_ends_are_mjlabs(tmp_path: Path) -> None:
    model = tmp_path / "g1.xml"
    model.write_text(stick_robots.g1_sticks())
    robot = stick_robots.G1
    rows = np.tile([0.0, 0.0, robot.height, 0.0, 0.0, 0.0, 1.0, *robot.home], (9, 1))
    np.savetxt(tmp_path / "stand.csv", rows, delimiter=",")
    cfg: dict[str, Any] = {
        "robot": "g1",
        "model": str(model),
        "motion": str(tmp_path / "stand.csv"),
        "physics": "mujoco",
    }
    env = TrackingRL(**cfg, starts=CALM)
    reference = env.reference(jnp.array(2))
    names = [env.legged.model.body(1 + i).name for i in (reference.anchor, *(link for link, _ in reference.ends))]
    assert names == [
        "torso_link",
        *(f"{side}_{end}_link" for end in ("ankle_roll", "wrist_yaw") for side in ("left", "right")),
    ]
    assert len(reference.bodies) == 14
    assert env.task.rewards["motion_body_pos"]["std"] == 0.3  # mjlab's own for its height
    np.testing.assert_allclose(reference.joint_pos, robot.home, atol=1e-6)
    _, timestep = jax.eval_shape(env.step, env.start(KEY), jnp.zeros(29), KEY)
    assert timestep.obs["policy"].shape == (58 + 3 + 6 + 6 + 3 * 29,)


@pytest.mark.slow
def test_a_run_resumes_with_its_failures_to_the_same_bits(tmp_path: Path) -> None:
    cfg = {"max_episode_steps": 5, "physics": "mujoco", "starts": {"bin": 0.3, "noise": 4.0}}
    run = {"learning_env": {"name": "TrackingRL", "cfg": cfg}, "num_envs": 4, "buffer_size": 4, "iterations": 4}
    groups = {"obs_groups": {"actor": ["policy"], "critic": ["critic"]}}
    raw = {
        "trainer": run,
        "policy": {**BASE["policy"], **groups},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 8}},
    }
    end = assert_goes_on_with_the_same_bits(raw, tmp_path)
    assert float(end.envs.state.failures.sum()) > 0.0


def test_terms_of_a_reference_are_refused_elsewhere() -> None:
    world = ENV.observe_noisy(ENV.world(ENV.start(KEY)), KEY)
    bare: LeggedWorld = replace(world, legged=replace(world.legged, reference=None))
    refused(TRACKING_REWARDS[0], bare, std=1.0, match="only TrackingRL supports")
