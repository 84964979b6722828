"""Go2 and ANYmal C, beside the numbers of EmbodiChain 0.3.2's task.json."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.robots import LeggedRobot, robot_file
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.task.entities import per_joint

ANYMAL_C = velocity_task("anymal_c").robot
ANYMAL_C_TASK = velocity_task("anymal_c")
GO2 = velocity_task("go2").robot
GO2_TASK = velocity_task("go2")

KEY = jax.random.key(0)


def needs(robot: LeggedRobot) -> None:
    try:
        robot_file(str(robot.source))
    except ModuleNotFoundError:
        pytest.skip(f"the package with the links of {robot.name} is not installed")


def test_go2_has_its_task() -> None:
    assert GO2.home == (-0.1, 0.9, -1.8, 0.1, 0.9, -1.8) * 2
    assert GO2.joints[::3] == ("FL_hip_joint", "FR_hip_joint", "RL_hip_joint", "RR_hip_joint")
    pose = GO2_TASK.rewards["pose"]
    assert per_joint(GO2.joints, pose["std_standing"]) == (0.05, 0.1, 0.15) * 4
    assert per_joint(GO2.joints, pose["std_walking"]) == (0.15, 0.35, 0.5) * 4
    assert GO2_TASK.rewards["foot_gait"]["offset"] == (0.0, 0.5, 0.5, 0.0)
    assert [foot.body for foot in GO2.feet] == ["FR_calf", "FL_calf", "RR_calf", "RL_calf"]


def test_anymal_c_has_its_task() -> None:
    assert ANYMAL_C.home == (0.0, 0.4, -0.8, 0.0, -0.4, 0.8) * 2
    assert ANYMAL_C.joints == tuple(
        f"{leg}_{part}" for leg in ("LF", "LH", "RF", "RH") for part in ("HAA", "HFE", "KFE")
    )
    assert {name: spec["weight"] for name, spec in ANYMAL_C_TASK.rewards.items()} == {
        "track_linear_velocity": 1.0,
        "track_angular_velocity": 0.5,
        "lin_vel_z_l2": -2.0,
        "ang_vel_xy_l2": -0.05,
        "joint_torques_l2": -2.5e-5,
        "joint_acc_l2": -2.5e-7,
        "action_rate_l2": -0.01,
        "flight_time": 0.5,
        "unwanted_contacts": -1.0,
        "body_orientation_l2": -5.0,
    }


def test_anymal_c_pays_for_torques_and_falls_on_its_belly() -> None:
    """τ = clip(40·(q⁰ + 0.5·a − q) − 5·q̇, ±80), after the step; legs that point up leave the belly to the ground."""
    needs(ANYMAL_C)
    env = VelocityRL(robot="anymal_c", physics="mujoco")
    state, obs = env.reset(KEY)
    assert {name: each.shape for name, each in obs.items()} == {"policy": (48,), "critic": (48,)}
    np.testing.assert_array_equal(obs["policy"], obs["critic"])
    np.testing.assert_allclose(state.physics.qpos[:7], [0.0, 0.0, 0.6, 1.0, 0.0, 0.0, 0.0], atol=1e-7)
    step = jax.jit(env.step)
    high = replace(state, physics=replace(state.physics, qpos=state.physics.qpos.at[2].set(5.0)))
    after, timestep = step(high, jnp.ones(12), KEY)
    names = [env.legged.model.joint(name) for name in ANYMAL_C.joints]
    position, velocity = (
        np.array([getattr(after.physics, kind)[int(address[0])] for address in addresses])
        for kind, addresses in (("qpos", [j.qposadr for j in names]), ("qvel", [j.dofadr for j in names]))
    )
    torque = np.clip(40.0 * (np.array(ANYMAL_C.home) + 0.5 - position) - 5.0 * velocity, -80.0, 80.0)
    cost = -2.5e-5 * 0.02 * np.sum(torque**2)
    np.testing.assert_allclose(timestep.info["rewards"]["joint_torques_l2"], cost, rtol=1e-4)
    assert not timestep.terminated
    belly = state.physics.qpos.at[2].set(0.085).at[7:].set(jnp.array([0.0, np.pi, 0.0] * 4))
    assert step(replace(state, physics=replace(state.physics, qpos=belly)), jnp.zeros(12), KEY)[1].terminated
