"""VelocityRL: a robot that follows velocity commands."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.velocity import VelocityRL, VelocityState
from ejax.envs.task.world import World
from ejax.envs.terms.registry import TERMS, register_functor
from ejax.types import Timestep

QUADRUPED = velocity_task("quadruped").robot

ENV = VelocityRL(physics="mujoco", push={"interval": [0.05, 0.05], "x": [0.4, 0.4], "yaw": [0.7, 0.7]})
RESET, STEP = jax.jit(ENV.reset), jax.jit(ENV.step)
KEY = jax.random.key(0)


def start() -> VelocityState:
    return RESET(KEY)[0]


def act(state: VelocityState, action: Any = None) -> tuple[VelocityState, Timestep]:
    return STEP(state, jnp.zeros(12) if action is None else jnp.asarray(action, jnp.float32), KEY)


def with_base(state: VelocityState, **changes: Any) -> VelocityState:
    """qpos or qvel of the base changed."""
    physics = state.physics
    for name, value in changes.items():
        old = getattr(physics, name)
        physics = replace(physics, **{name: old.at[: len(value)].set(jnp.array(value, old.dtype))})
    return replace(state, physics=physics)


@pytest.mark.slow
def test_an_episode_starts_at_home_at_rest_above_the_ground() -> None:
    state, obs = RESET(KEY)
    legged, task = ENV.legged, ENV.task
    np.testing.assert_allclose(state.physics.qpos[jnp.array(legged.joint_qpos)], QUADRUPED.home)
    np.testing.assert_array_equal(state.physics.qvel, 0.0)
    assert (abs(state.physics.qpos[:2]) <= task.spread).all()
    assert 0.01 <= state.physics.qpos[2] - QUADRUPED.height <= 0.05
    np.testing.assert_allclose(jnp.linalg.norm(state.physics.qpos[3:7]), 1.0, rtol=1e-6)
    assert {name: each.shape for name, each in obs.items()} == {"policy": (48,), "critic": (72,)}
    assert all(ENV.observation_space[name].shape == each.shape for name, each in obs.items())


@pytest.mark.slow
def test_the_sum_of_the_rewards_is_the_reward() -> None:
    _, timestep = act(start(), np.linspace(-1.0, 1.0, 12))
    np.testing.assert_allclose(sum(timestep.info["rewards"].values()), timestep.reward, rtol=1e-6)
    assert set(timestep.info["rewards"]) == set(ENV.task.rewards)
    # 12 actions away from zeros, weight −0.01 per second, 0.02 s
    changed = np.sum(np.linspace(-1.0, 1.0, 12) ** 2)
    np.testing.assert_allclose(timestep.info["rewards"]["action_rate_l2"], -0.01 * 0.02 * changed, rtol=1e-5)


def test_actions_are_clipped_to_their_space() -> None:
    far, near = (act(start(), np.full(12, size))[0] for size in (7.0, 1.0))
    np.testing.assert_array_equal(far.physics.qpos, near.physics.qpos)
    np.testing.assert_array_equal(far.action, 1.0)


@pytest.mark.slow
def test_the_encoders_bias_shifts_the_joints_and_what_is_measured() -> None:
    """The drives bring the measured position to the target, so the true one is off by the bias; held in the air."""
    states = [with_base(replace(start(), encoder_bias=jnp.full(12, bias)), qpos=[0.0, 0.0, 5.0]) for bias in (0.0, 0.2)]
    free, biased = (act(state) for state in states)
    legged = ENV.legged
    moved = (biased[0].physics.qpos - free[0].physics.qpos)[jnp.array(legged.joint_qpos)]
    assert (moved < -0.01).all()
    measured = slice(9, 21)
    shown = biased[1].obs["policy"][measured] - free[1].obs["policy"][measured]  # the noise is the same
    np.testing.assert_allclose(shown, moved + 0.2, atol=1e-5)
    np.testing.assert_allclose(biased[1].obs["critic"][measured] - free[1].obs["critic"][measured], moved, atol=1e-5)


@pytest.mark.slow
def test_noise_is_within_its_bounds_and_on_the_actor_alone() -> None:
    clean = VelocityRL(physics="mujoco", noise=dict.fromkeys(ENV.task.noise, 0.0), encoder_bias=0.0, push=ENV.push)
    _, obs = jax.vmap(ENV.reset)(jax.random.split(KEY, 64))
    _, quiet = jax.vmap(clean.reset)(jax.random.split(KEY, 64))
    off = np.abs(obs["policy"] - quiet["policy"]).max(axis=0)
    bound = np.repeat([0.5, 0.2, 0.05, 0.01 + 0.015, 1.5, 0.0, 0.0], [3, 3, 3, 12, 12, 12, 3])
    assert (off <= bound + 1e-6).all()
    assert (off > 0.5 * bound - 1e-6).all()
    np.testing.assert_array_equal(obs["critic"], quiet["critic"])


def test_a_push_is_due_after_its_interval_and_in_the_worlds_frame() -> None:
    """0.05 s are 3 steps; turned by a quarter, the world's x is the base's −y."""
    quarter = [0.0, 0.0, 5.0, np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)]
    state = with_base(start(), qpos=quarter)
    assert state.push_in == 3
    speeds = []
    for _ in range(3):
        state, timestep = act(state)
        speeds.append(float(state.physics.qvel[0]))
    assert speeds[0] < 0.05 > speeds[1]
    np.testing.assert_allclose(speeds[2], 0.4, atol=0.05)
    np.testing.assert_allclose(timestep.obs["critic"][1], -0.4, atol=0.05)
    np.testing.assert_allclose(state.physics.qvel[5], 0.7, atol=0.1)
    assert state.push_in == 3


@pytest.mark.slow
@pytest.mark.parametrize(("angle", "fell"), [(69.0, False), (71.0, True)])
def test_a_tilt_beyond_seventy_degrees_ends_the_episode(angle: float, fell: bool) -> None:
    half = np.radians(angle) / 2.0
    state = with_base(start(), qpos=[0.0, 0.0, 5.0, np.cos(half), np.sin(half), 0.0, 0.0])
    _, timestep = act(replace(state, push_in=jnp.array(100)))
    assert bool(timestep.terminated) is fell
    assert not timestep.truncated


def test_a_trunk_on_the_ground_ends_the_episode() -> None:
    legs_up = [0.0, 3.1, -0.9] * 4
    _, timestep = act(with_base(start(), qpos=[0.0, 0.0, 0.054, 1.0, 0.0, 0.0, 0.0, *legs_up]))
    assert timestep.terminated
    assert not act(start())[1].terminated


@pytest.mark.parametrize(("thigh", "calf", "height", "kneels"), [(0.9, -1.8, 0.285, False), (0.5, -2.7, 0.205, True)])
def test_the_quadruped_falls_where_it_kneels(thigh: float, calf: float, height: float, kneels: bool) -> None:
    env = VelocityRL()
    state, _ = env.reset(jax.random.key(0))
    qpos = state.physics.qpos.at[2].set(height)
    legs = qpos[7:].reshape(4, 3).at[:, 1:].set(jnp.array([thigh, calf]))
    state = replace(state, physics=replace(state.physics, qpos=qpos.at[7:].set(legs.reshape(-1))))
    held = jnp.tile(jnp.array([0.0, thigh - 0.9, calf + 1.8]), 4) / jnp.asarray(env.task.robot.drives.action_scale)
    assert bool(jax.jit(env.step)(state, held, jax.random.key(1))[1].terminated) is kneels


def test_a_broken_robot_is_truncated() -> None:
    _, timestep = act(with_base(start(), qvel=[np.nan]))
    assert timestep.truncated


def test_rewards_are_for_the_command_that_was_acted_on_and_observations_for_the_next() -> None:
    state = start()
    last = replace(state.command, velocity=jnp.array([9.0, 0.0, 0.0]), steps_left=jnp.array(1, jnp.int32))
    after, timestep = act(replace(state, command=last))
    assert timestep.info["metrics"]["linear_velocity_error"] > 8.0
    np.testing.assert_array_equal(timestep.obs["policy"][-3:], after.command.velocity)
    assert abs(after.command.velocity[0]) <= 1.0


def test_the_greatest_height_of_a_flight_is_kept_until_it_lands() -> None:
    state = replace(with_base(start(), qpos=[0.0, 0.0, 0.40]), push_in=jnp.array(1000, jnp.int32))
    peaks, landings = [], []
    for _ in range(25):
        state, timestep = act(state)
        peaks.append(state.swing_peak)
        landings.append(timestep.info["rewards"]["foot_swing_height"])
    assert (peaks[0] > 0.1).all()
    assert (peaks[-1] < 0.1).all()
    assert min(landings) < 0.0 or float(jnp.linalg.norm(state.command.velocity)) == 0.0


@pytest.mark.slow
def test_a_robot_on_rough_ground_starts_above_it_and_ends_at_its_edge() -> None:
    env = VelocityRL(physics="mujoco", terrain={"kind": "rough", "half_size": 2.0}, push=None)
    state, _ = env.reset(KEY)
    assert state.physics.qpos[2] >= QUADRUPED.height + env.ground.height
    step = jax.jit(env.step)
    inside, outside = (step(with_base(state, qpos=[x, 0.0, 1.0]), jnp.zeros(12), KEY)[1] for x in (1.9, 2.1))
    assert not inside.truncated
    assert outside.truncated


@pytest.mark.slow
def test_a_reward_of_ones_own_is_one_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "rewards", dict(TERMS["rewards"]))

    @register_functor("rewards", "height")
    def height(world: World, obs: Any, action: Any, info: Any, times: float) -> Any:
        return times * world.legged.motion.position[2]

    env = VelocityRL(physics="mujoco", rewards={"height": {"weight": 0.5, "times": 2.0}}, push=None)
    state, timestep = env.step(start(), jnp.zeros(12), KEY)
    expected = 0.5 * 2.0 * state.physics.qpos[2] * env.control_period
    assert timestep.info["rewards"]["height"] == pytest.approx(float(expected), rel=1e-5)


def test_weights_of_zero_take_terms_out_and_others_stay() -> None:
    env = VelocityRL(rewards={"upright": {"weight": 0.0}, "pose": {"weight": 3.0}, "is_terminated": {"weight": -5.0}})
    own = velocity_task("quadruped").rewards
    assert set(env.task.rewards) == {*own, "is_terminated"} - {"upright"}
    assert env.task.rewards["pose"] == {**own["pose"], "weight": 3.0}


@cases(
    "cfg text",
    ({"robot": "cat"}, "robot must be one of anymal_c, g1, go1, go2, h1_2, microduck, quadruped, got 'cat'"),
    ({"robot": "h1_2"}, "no known package has a model of h1_2: set model to the path"),
    ({"robot": "go1", "model": "/nowhere/go1.xml"}, "the file /nowhere/go1.xml does not exist"),
    ({"model": 3}, "model must be the path of a file, got 3"),
    ({"command": {"lin_vel": [0, 1]}}, "command has no 'lin_vel'; there is lin_vel_x"),
    ({"command": {"lin_vel_x": 1.0}}, "command.lin_vel_x must be two numbers"),
    ({"command": {"standing": [0, 1]}}, "command.standing must be a number"),
    ({"rewards": {"walk": {"weight": 1.0}}}, "no rewards functor 'walk'"),
    ({"rewards": {"upright": 1.0}}, "rewards.upright must be {weight: …"),
    ({"rewards": {"upright": {"sdt": 1.0}}}, "rewards.upright has no 'sdt'; there is weight, std"),
    ({"rewards": {"foot_gait": {"weight": 1.0}}}, "rewards.foot_gait needs period, offset, threshold"),
    ({"rewards": {"pose": {"std_walking": {".*_hip_joint": 0.1}}}}, "std_walking must have a number > 0 for each"),
    ({"rewards": {"upright": {"weight": "much"}}}, "rewards.upright.weight must be a number, got 'much'"),
    ({"rewards": {"upright": {"std": "0.2"}}}, "rewards.upright.std must be a number, got '0.2'"),
    ({"noise": {"height": 0.1}}, "noise has no 'height'"),
    ({"noise": {"joint_vel": "0.5"}}, "noise.joint_vel must be a number, got '0.5'"),
    ({"noise": {"joint_vel": -0.5}}, "noise.joint_vel must be half the width of the noise, 0 or more, got -0.5"),
    ({"encoder_bias": -0.1}, "encoder_bias must be half the width of the noise, 0 or more, got -0.1"),
    ({"encoder_bias": True}, "encoder_bias must be a number, got True"),
    (
        {"curriculum": {"wide": {"of": "command", "by": "error", "below": "a", "stages": [{"standing": 0.1}]}}},
        "curriculum.wide: below must be a number, got 'a'",
    ),
    ({"push": {"up": [0, 1]}}, "push has no 'up'; there is interval, x, y"),
    ({"terrain": {"kind": "steep"}}, "terrain.kind must be 'flat', 'rough' or 'tiles'"),
    ({"terrain": {"hight": 0.1}}, "hight"),
    ({"max_episode_steps": 0}, "max_episode_steps must be > 0"),
    ({"physics": "bullet"}, "physics must be"),
    ids=str,
)
def test_what_cannot_be_is_refused_when_the_environment_is_made(cfg: Mapping[str, Any], text: str) -> None:
    refused(VelocityRL, **cfg, match=text)


@pytest.mark.slow
def test_the_camera_follows_the_robot() -> None:
    """The picture of a robot far away is that of one in the middle, but for the floor's pattern; it is in both."""
    pictures = [ENV.render(with_base(start(), qpos=[x, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0]), 64, 48) for x in (0.0, 40.0)]
    for picture in pictures:
        blue = (picture[..., 2].astype(int) - picture[..., 0] > 60)[12:36, 16:48]
        assert blue.any(), "the joints' covers, in the middle"


def test_whole_numbers_of_a_config_are_numbers() -> None:
    command = VelocityRL(command={"standing": 0, "lin_vel_x": [1, 1]}).task.command
    assert (command.standing, command.lin_vel_x) == (0.0, (1.0, 1.0))
    assert isinstance(command.standing, float)
