"""Mirror images of legged robots: a mirrored state has the mirrored motion, observations and reward."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.mirror import Mirror, changed, make_mirror, mirror_joints
from ejax.envs.locomotion.robots import robot_file
from ejax.envs.locomotion.velocity import VelocityRL, VelocityState

KEY = jax.random.key(3)
_POLAR, _AXIAL = np.array([1.0, -1.0, 1.0]), np.array([-1.0, 1.0, -1.0])


def environment(robot: str) -> VelocityRL:
    task = velocity_task(robot)
    try:
        robot_file(task.robot.source or "")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return VelocityRL(robot=robot, noise=dict.fromkeys(task.noise, 0.0), push=None, physics="mujoco")


def image(env: VelocityRL) -> Mirror:
    assert env.mirror is not None
    return env.mirror


def mirrored(env: VelocityRL, state: VelocityState) -> VelocityState:
    """Return the state on the other side: by the robot's joints and feet, the base's by the law of mirrors."""
    made, qpos, qvel = image(env), state.physics.qpos, state.physics.qvel
    places, rates = jnp.array(env.legged.joint_qpos), jnp.array(env.legged.joint_qvel)
    turn = qpos[3:7] * jnp.array([1.0, -1.0, 1.0, -1.0])  # of the quaternion w x y z
    base, speed = jnp.concatenate([qpos[:3] * _POLAR, turn]), jnp.concatenate([qvel[:3] * _POLAR, qvel[3:6] * _AXIAL])
    feet = jnp.array(made.feet)
    return replace(
        state,
        physics=replace(
            state.physics,
            qpos=qpos.at[:7].set(base).at[places].set(made.acted(qpos[places])),
            qvel=qvel.at[:6].set(speed).at[rates].set(made.acted(qvel[rates])),
        ),
        command=replace(state.command, velocity=state.command.velocity * jnp.array([1.0, -1.0, -1.0])),
        action=made.acted(state.action),
        joint_vel=made.acted(state.joint_vel),
        encoder_bias=made.acted(state.encoder_bias),
        feet=jax.tree.map(lambda x: x[feet], state.feet),
        swing_peak=state.swing_peak[feet],
        # the gait's phase is half a period ahead on the other side
        episode_step=state.episode_step + round(env.task.phase_period / env.control_period / 2),
    )


@pytest.mark.slow
@cases("robot off", ("quadruped", 1e-6), ("go1", 0.05), ("g1", 0.05))
def test_a_mirrored_state_moves_in_the_mirrored_way(robot: str, off: float) -> None:
    env = environment(robot)
    made, step = image(env), jax.jit(env.step)
    state, _ = jax.jit(env.reset)(KEY)
    state = replace(state, command=replace(state.command, follows_heading=jnp.array(False), stands=jnp.array(False)))
    differences = list[dict[str, np.ndarray]]()
    for i in range(15):  # onto the ground, and into poses that are not their own mirror images
        action = jax.random.uniform(jax.random.fold_in(KEY, i), state.action.shape, minval=-0.6, maxval=0.6)
        ours, here = step(state, action, KEY)
        theirs, there = step(mirrored(env, state), made.acted(action), KEY)
        pairs = {part: (there.obs[part], x) for part, x in made.observed(here.obs).items()}
        pairs |= {"qpos": (theirs.physics.qpos, mirrored(env, ours).physics.qpos)}
        pairs |= {"reward": (there.reward[None], here.reward[None])}
        differences.append({name: np.abs(np.asarray(x - y)) for name, (x, y) in pairs.items()})
        state = ours
    # medians: where the two touch the ground in different physics steps, forces and speeds differ for a moment
    typical = {name: np.median([each[name] for each in differences], axis=0).max() for name in differences[0]}
    assert all(x <= off for x in typical.values()), typical
    assert typical["qpos"] <= off / 20, typical


def test_a_mirror_image_of_a_mirror_image_is_the_robot() -> None:
    env = VelocityRL(physics="mujoco")
    for group, change in {**image(env).obs, "action": image(env).action}.items():
        x = jnp.arange(1.0, 1.0 + len(change[0]))
        np.testing.assert_array_equal(changed(changed(x, change), change), x, err_msg=group)
        assert not np.array_equal(changed(x, change), x)


def test_a_robot_without_a_mirror_image_is_refused() -> None:
    env, task = VelocityRL(physics="mujoco"), velocity_task("quadruped")
    model = env.legged.model
    crooked = replace(task.robot, home=(0.1, *task.robot.home[1:3], 0.1, *task.robot.home[4:]))
    refused(mirror_joints, crooked, model, match="FR_hip_joint and FL_hip_joint are not mirror images")
    refused(
        lambda: make_mirror(replace(task, actor=("lidar",)), model), match="observation lidar has no known mirror image"
    )


def test_the_height_scan_changes_left_with_right() -> None:
    env = VelocityRL(physics="mujoco", terrain={"scan": [0.2, 0.4]})
    points, (numbers, signs) = env.ground.scanned, image(env).obs["critic"]
    own = np.array(numbers[-len(points) :]) - (len(numbers) - len(points))
    np.testing.assert_allclose(points[own], points * [1.0, -1.0])
    assert signs[-len(points) :] == (1.0,) * len(points)
