"""H1-2 and MicroDuck, beside the numbers of EmbodiChain 0.3.2's task.json."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from stick_robots import h1_2_sticks, microduck_sticks

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.motion import observe_motion
from ejax.envs.locomotion.robots import JointDrives
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.task.entities import per_joint

H1_2 = velocity_task("h1_2").robot
H1_2_TASK = velocity_task("h1_2")
MICRODUCK = velocity_task("microduck").robot
MICRODUCK_TASK = velocity_task("microduck")

KEY = jax.random.key(0)


@pytest.fixture
def h1_2(tmp_path: Path) -> VelocityRL:
    (tmp_path / "h1_2.xml").write_text(h1_2_sticks())
    return VelocityRL(robot="h1_2", model=str(tmp_path / "h1_2.xml"), physics="mujoco")


def test_h1_2_has_the_drives_of_its_motors() -> None:
    """Six joints of each leg, the torso, seven of each arm: hips and torso, knee, ankles and shoulders, lower arm."""
    legs, arms = "hhhkaa" * 2 + "h", "aallll" + "l"
    motors = {"h": (98.7, 6.3, 0.025, 200.0), "k": (157.7, 10.1, 0.04, 300.0)}
    motors |= {"a": (19.7, 1.3, 0.005, 40.0), "l": (7.9, 0.5, 0.002, 18.0)}
    stiffness, damping, armature, effort = zip(*(motors[each] for each in legs + arms * 2), strict=True)
    scale = {"h": 0.5065856129685917, "k": 0.4755865567533291, "a": 0.5076142131979695, "l": 0.5696202531645569}
    np.testing.assert_allclose(H1_2.drives.action_scale, [scale[each] for each in legs + arms * 2], rtol=1e-12)
    assert H1_2.drives == JointDrives(
        action_scale=H1_2.drives.action_scale,
        stiffness=stiffness,
        damping=damping,
        armature=armature,
        max_effort=effort,
    )
    leg, arm = [0.0, -0.2, 0.0, 0.5, -0.3, 0.0], [0.28, 0.0, 0.0, 0.52, 0.0, 0.0, 0.0]
    assert H1_2.home == (*leg, *leg, 0.0, *arm, *arm)


def test_h1_2_may_stray_from_home_as_its_task_says() -> None:
    """hip yaw, pitch, roll, knee, ankle pitch, roll; torso; shoulder pitch, roll, yaw, elbow, wrists."""
    pose = H1_2_TASK.rewards["pose"]
    walking = [0.15, 0.5, 0.15, 0.5, 0.15, 0.1] * 2 + [0.15] + [0.15, *[0.1] * 6] * 2
    running = [0.25, 0.5, 0.25, 0.5, 0.25, 0.1] * 2 + [0.25] + [0.25, *[0.1] * 6] * 2
    np.testing.assert_allclose(per_joint(H1_2.joints, pose["std_walking"]), walking)
    np.testing.assert_allclose(per_joint(H1_2.joints, pose["std_running"]), running)


@pytest.mark.slow
def test_h1_2_observes_the_velocities_of_its_torsos_imu(h1_2: VelocityRL) -> None:
    legged, rng = h1_2.legged, np.random.default_rng(0)
    model, data = legged.model, mujoco.MjData(legged.model)
    data.qpos[:] = rng.normal(size=model.nq)
    data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
    data.qvel[:] = rng.normal(size=model.nv)
    mujoco.mj_forward(model, data)
    body, linear, angular = model.body("torso_link").id, np.zeros((3, model.nv)), np.zeros((3, model.nv))
    turn = data.xmat[body].reshape(3, 3)
    mujoco.mj_jac(model, data, linear, angular, data.xpos[body] + turn @ (-0.04452, -0.01891, 0.27756), body)
    motion = observe_motion(H1_2, legged, PhysicsState(qpos=jnp.array(data.qpos), qvel=jnp.array(data.qvel)))
    np.testing.assert_allclose(motion.imu_lin_vel, turn.T @ linear @ data.qvel, atol=1e-5)
    np.testing.assert_allclose(motion.imu_ang_vel, turn.T @ angular @ data.qvel, atol=1e-5)
    _, obs = jax.eval_shape(h1_2.reset, KEY)
    assert {name: each.shape for name, each in obs.items()} == {"policy": (92,), "critic": (92 + 3 + 2 + 2 + 2 + 6,)}


@pytest.mark.slow
def test_microduck_falls_when_its_trunk_is_low_or_its_body_drags(tmp_path: Path) -> None:
    """Its control steps are ten physics steps of 2 ms. In the air it falls 2 mm in one."""
    (tmp_path / "duck.xml").write_text(microduck_sticks())
    env = VelocityRL(robot="microduck", model=str(tmp_path / "duck.xml"), physics="mujoco", push=None)
    assert (env.num_substeps, env.legged.model.opt.timestep) == (10, 0.002)
    assert env.control_period == pytest.approx(0.02)
    state, obs = env.reset(KEY)
    assert {name: each.shape for name, each in obs.items()} == {"policy": (53,), "critic": (53 + 3 + 2 + 2 + 2 + 6,)}
    legs_up = {"left_hip_pitch": np.pi, "right_hip_pitch": np.pi}
    step = jax.jit(env.step)

    def fell(height: float, **joints: float) -> bool:
        qpos = state.physics.qpos.at[2].set(height)
        for name, angle in joints.items():
            qpos = qpos.at[int(env.legged.model.joint(name).qposadr[0])].set(angle)
        _, timestep = step(replace(state, physics=replace(state.physics, qpos=qpos)), jnp.zeros(14), KEY)
        assert bool(jnp.isfinite(timestep.reward))
        return bool(timestep.terminated)

    assert not fell(1.0)
    assert fell(0.059, **legs_up)
    assert not fell(0.085, **legs_up)
    assert fell(0.085, **legs_up, neck_pitch=np.pi), "the head on the ground"


@pytest.mark.slow
def test_microduck_has_its_task() -> None:
    rewards, pose = MICRODUCK_TASK.rewards, MICRODUCK_TASK.rewards["pose"]
    leg = ["left_hip_yaw", "left_hip_roll", "left_hip_pitch", "left_knee", "left_ankle"]
    standing, walking = (per_joint(MICRODUCK.joints, pose[name]) for name in ("std_standing", "std_walking"))
    assert MICRODUCK.joints[:5] == tuple(leg)
    assert standing == (0.1, 0.05, 0.15, 0.15, 0.1, *[0.15] * 4, 0.1, 0.05, 0.15, 0.15, 0.1)
    assert walking == (0.3, 0.05, 0.4, 0.4, 0.25, *[0.3] * 4, 0.3, 0.05, 0.4, 0.4, 0.25)
    assert {name: spec["weight"] for name, spec in rewards.items()} == {
        "track_linear_velocity": 2.0,
        "track_angular_velocity": 2.0,
        "body_orientation_l2": -0.5,
        "pose": 1.0,
        "body_ang_vel": -0.05,
        "angular_momentum": -0.02,
        "is_terminated": -200.0,
        "joint_acc_l2": -2.5e-7,
        "joint_pos_limits": -10.0,
        "action_rate_l2": -0.1,
        "foot_gait": 0.5,
        "foot_clearance": -1.0,
        "foot_slip": -0.1,
        "stand_still": -1.0,
    }
    assert (rewards["foot_gait"]["period"], MICRODUCK_TASK.phase_period) == (0.5, 0.5)
