"""Each reward and each observation of the velocity tasks beside numbers worked out by hand or by NumPy."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.task.terms import Term
from ejax.envs.task.terms import observe_all as observe_terms
from ejax.envs.terms.legged import LEGGED_REWARDS, OBSERVATIONS, Contacts, LeggedState, LeggedWorld, Motion
from ejax.envs.terms.registry import TERMS

QUADRUPED = velocity_task("quadruped").robot

HOME = np.array(QUADRUPED.home, np.float32)
STILL = Motion(
    position=jnp.array([0.0, 0.0, 0.3]),
    rotation=jnp.eye(3),
    lin_vel_b=jnp.array([0.3, -0.4, 0.1]),
    ang_vel_b=jnp.array([0.2, -0.1, 0.5]),
    gravity_b=jnp.array([0.3, 0.4, -np.sqrt(0.75)]),
    joint_pos=jnp.array(HOME),
    joint_vel=jnp.arange(12.0),
    foot_pos=jnp.zeros((4, 3)),
    foot_vel=jnp.array([[3.0, 4.0, 9.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.6, 0.8, 0.0]]),
    upright_gravity=jnp.array([0.1, 0.2, -0.97]),
    upright_ang_vel=jnp.array([1.0, 2.0, 5.0]),
    link_pos=jnp.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]),
    link_vel=jnp.array([[0.0, 0.0, 0.0], [0.0, 3.0, 0.0]]),
    link_rotation=jnp.tile(jnp.eye(3), (2, 1, 1)),
    link_ang_vel=jnp.zeros((2, 3)),
    imu_lin_vel=jnp.array([0.7, 0.8, 0.9]),
    imu_ang_vel=jnp.array([-0.7, -0.8, -0.9]),
)
VIEW = LeggedState(
    joints=QUADRUPED.joints,
    home=QUADRUPED.home,
    motion=STILL,
    contacts=Contacts(
        found=jnp.array([True, False, False, True]),
        landed=jnp.array([True, False, False, False]),
        force=jnp.array([[3.0, 4.0, 12.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, -1.0]]),
        guarded_force=jnp.array(0.0),
        self_contacts=jnp.array(3.0),
        flight=jnp.array([0.7, 0.0, 0.0, 0.0]),
        unwanted_force=jnp.array([0.0, 0.9, 1.1, 30.0]),
    ),
    command=jnp.array([0.6, 0.0, 0.3]),
    action=jnp.full(12, 0.5),
    last_action=jnp.full(12, 0.25),
    joint_acc=jnp.full(12, 2.0),
    joint_torque=jnp.full(12, -3.0),
    base_height=jnp.array(0.3),
    scan=jnp.array([0.1, -0.2]),
    foot_height=jnp.array([0.02, 0.10, 0.15, 0.05]),
    swing_peak=jnp.array([0.05, 0.2, 0.2, 0.2]),
    air_time=jnp.array([0.0, 0.1, 0.6, 0.01]),
    encoder_bias=jnp.full(12, 0.01),
    time=jnp.array(0.75),
    phase_period=0.6,
    soft_limits=jnp.stack([jnp.array(HOME) - 0.1, jnp.array(HOME) + 0.1], axis=1),
    link_masses=jnp.array([1.0, 3.0]),
)
STOPPED = replace(VIEW, command=jnp.array([0.0, 0.02, 0.02]))
BENT = replace(VIEW, motion=replace(STILL, joint_pos=jnp.array(HOME + np.repeat([0.3, -0.2, 0.0], 4))))
STDS = {"std_standing": {".*": 0.1}, "std_walking": {".*": 0.2}, "std_running": {".*": 0.4}}
POSE = {**STDS, "walking_threshold": 0.05, "running_threshold": 1.5}
ON = {"command_threshold": 0.05}
MOVES = {"command_threshold": 0.1}
GAIT = {"period": 0.5, "offset": (0.0, 0.5, 0.2, 0.6), "threshold": 0.56, **ON}
MEAN_BENT = (4 * 0.3**2 + 4 * 0.2**2) / 12
FAST = replace(BENT, command=jnp.array([1.2, 0.9, 0.0]))


def world_of(legged: LeggedState, fail: bool = True) -> LeggedWorld:
    return LeggedWorld(asset="", control_period=0.02, state=None, legged=legged, info={"fail": jnp.array(fail)})


def observe(view: LeggedState, names: tuple[str, ...]) -> Any:
    return observe_terms([Term(name=name, func=OBSERVATIONS[name]) for name in names], world_of(view))


@cases(
    "name view params expected",
    ("track_linear_velocity", VIEW, {"std": 0.5}, np.exp(-(0.3**2 + 0.4**2 + 0.1**2) / 0.25)),
    ("track_linear_velocity", VIEW, {"std": 0.5, "vertical": 2.0}, np.exp(-(0.25 + 0.02) / 0.25)),
    ("track_angular_velocity", VIEW, {"std": 0.7}, np.exp(-(0.2**2 + 0.2**2 + 0.1**2) / 0.49)),
    ("track_angular_velocity", VIEW, {"std": 0.7, "tilting": 0.05}, np.exp(-(0.04 + 0.05 * 0.05) / 0.49)),
    ("upright", VIEW, {"std": 0.5}, np.exp(-0.25 / 0.25)),
    ("body_orientation_l2", VIEW, {}, 0.01 + 0.04),
    ("lin_vel_z_l2", VIEW, {}, 0.1**2),
    ("ang_vel_xy_l2", VIEW, {}, 0.2**2 + 0.1**2),
    ("joint_torques_l2", VIEW, {}, 12 * 3.0**2),
    ("flight_time", VIEW, {"threshold": 0.5, "command_threshold": 0.1}, 0.7 - 0.5),
    ("flight_time", VIEW, {"threshold": 1.0, "command_threshold": 0.1}, 0.7 - 1.0),
    # turning alone is no walking
    ("flight_time", replace(VIEW, command=jnp.array([0.0, 0.05, 0.9])), {"threshold": 0.5, **MOVES}, 0.0),
    ("unwanted_contacts", VIEW, {"threshold": 1.0}, 2.0),
    ("body_ang_vel", VIEW, {}, 1.0 + 4.0),
    # masses 1 and 3 at 0 and 2: the mean is at 1.5 and moves with 2.25; (−1.5)·1·(−2.25) + 0.5·3·0.75 = 4.5
    ("angular_momentum", VIEW, {}, 4.5**2),
    ("pose", BENT, POSE, np.exp(-MEAN_BENT / 0.2**2)),
    ("pose", replace(BENT, command=jnp.zeros(3)), POSE, np.exp(-MEAN_BENT / 0.1**2)),
    ("pose", FAST, POSE, np.exp(-MEAN_BENT / 0.4**2)),
    ("joint_pos_limits", BENT, {}, 4 * 0.2 + 4 * 0.1),
    ("joint_pos_limits", VIEW, {}, 0.0),
    ("joint_acc_l2", VIEW, {}, 12 * 4.0),
    ("action_rate_l2", VIEW, {}, 12 * 0.25**2),
    ("is_terminated", VIEW, {}, 1.0),
    ("feet_air_time", VIEW, {"threshold_min": 0.05, "threshold_max": 0.5, **ON}, 1.0),
    ("feet_air_time", STOPPED, {"threshold_min": 0.05, "threshold_max": 0.5, **ON}, 0.0),
    # 0.75 s are 1.5 periods: phases 0.5, 0.0, 0.7, 0.1, so that feet 0, 1 and 3 should touch; 1 does not
    ("foot_gait", VIEW, GAIT, 3.0 / 4.0),
    ("foot_gait", STOPPED, GAIT, 0.0),
    ("foot_clearance", VIEW, {"target_height": 0.1, **ON}, 0.08 * 5.0 + 0.0 * 1.0 + 0.05 * 0.0 + 0.05 * 1.0),
    ("foot_clearance", STOPPED, {"target_height": 0.1, **ON}, 0.0),
    ("foot_swing_height", VIEW, {"target_height": 0.1, **ON}, 0.5**2),
    ("foot_swing_height", STOPPED, {"target_height": 0.1, **ON}, 0.0),
    ("foot_slip", VIEW, ON, 25.0 + 1.0),
    ("foot_slip", STOPPED, ON, 0.0),
    ("soft_landing", VIEW, ON, 13.0),
    ("soft_landing", STOPPED, ON, 0.0),
    ("stand_still", BENT, ON, 0.0),
    ("stand_still", replace(BENT, command=STOPPED.command), ON, 12 * MEAN_BENT),
    ("feet_contact_without_cmd", VIEW, ON, 0.0),
    ("feet_contact_without_cmd", STOPPED, ON, 2.0),
    ("self_collisions", VIEW, {}, 3.0),
)
def test_a_reward_is_its_formula(name: str, view: LeggedState, params: dict[str, Any], expected: float) -> None:
    np.testing.assert_allclose(TERMS["rewards"][name](world_of(view), **params), expected, rtol=1e-5, atol=1e-6)


def test_only_a_failure_counts_as_terminated() -> None:
    assert TERMS["rewards"]["is_terminated"](world_of(VIEW, fail=False)) == 0.0


def test_every_reward_has_a_test() -> None:
    (cases,) = (mark.args[1] for mark in test_a_reward_is_its_formula.pytestmark if mark.name == "parametrize")
    assert {case[0] for case in cases} == {each.__name__ for each in LEGGED_REWARDS}


@cases(
    "name limit fails",
    ("bad_orientation", 0.52, True),  # cos⁻¹ √0.75 = 0.5236
    ("bad_orientation", 0.53, False),
    ("illegal_contact", 0.0, False),
    ("root_height_below_minimum", 0.31, True),
    ("root_height_below_minimum", 0.29, False),
)
def test_an_end_is_beyond_its_limit(name: str, limit: float, fails: bool) -> None:
    assert bool(TERMS["terminations"][name](world_of(VIEW), limit).fail) is fails


PHASE = 2.0 * np.pi * (0.75 / 0.6 - 1.0)
OBSERVED = {
    "base_lin_vel": [0.7, 0.8, 0.9],
    "base_ang_vel": [-0.7, -0.8, -0.9],
    "projected_gravity": [0.3, 0.4, -np.sqrt(0.75)],
    "joint_pos": [0.3] * 4 + [-0.2] * 4 + [0.0] * 4,
    "measured_joint_pos": [0.31] * 4 + [-0.19] * 4 + [0.01] * 4,
    "joint_vel": np.arange(12.0),
    "action": [0.5] * 12,
    "command": [0.6, 0.0, 0.3],
    "phase": [np.sin(PHASE), np.cos(PHASE)],
    "height_scan": [0.1, -0.2],
    "foot_height": [0.02, 0.10, 0.15, 0.05],
    "foot_air_time": [0.0, 0.1, 0.6, 0.01],
    "foot_contact": [1.0, 0.0, 0.0, 1.0],
    "foot_force": [*np.log([4.0, 5.0, 13.0]), *[0.0] * 8, -np.log(2.0)],
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_an_observation_is_its_formula(name: str) -> None:
    values = observe(BENT, (name,))
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, OBSERVED[name], rtol=1e-5, atol=1e-6)


def test_the_gait_has_no_phase_while_standing() -> None:
    np.testing.assert_array_equal(observe(STOPPED, ("phase",)), 0.0)


def test_observations_follow_each_other_in_their_order() -> None:
    both = observe(VIEW, ("command", "phase"))
    np.testing.assert_array_equal(both, jnp.concatenate([observe(VIEW, ("command",)), observe(VIEW, ("phase",))]))
