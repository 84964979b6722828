"""Twenty steps of every environment on every engine have the numbers that ``golden/make_env_steps.py`` recorded.

A change that is meant to change numbers records its cases again, and says so.
"""

import env_steps
import pytest
from golden_pairs import load

from ejax.schema import registry

CASES = env_steps.cases()


MARKED = [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]


@pytest.mark.slow_cases(
    "[gymnax]",
    "gym config push_cube@mujoco",
    "anymal_c of sticks@mujoco",
    "randomized cart_pole@mujoco",
    "cart_pole@mjx",
    "gym config of many terms@mujoco",
    "go1 of sticks@mujoco",
    "g1 of sticks@mujoco",
    "gym config with EefPoseAction@mujoco",
    "gym config with a camera@mujoco",
    "instructed_place@mujoco",
    "quadruped pushed on rough ground@mujoco",
    "gym config of poses and a gripper@mujoco",
    "quadruped@mujoco",
    "tracking@mujoco",
    "microduck of sticks@mujoco",
    "gym config cart_pole@mjx",
    "raycast@mujoco",
    "randomized push_cube@mujoco",
    "own task@mujoco",
    "asymmetric@mujoco",
)
@pytest.mark.parametrize("name", MARKED)
def test_the_recorded_steps_are_ours(name: str) -> None:
    if why := env_steps.lacking(CASES[name]):
        pytest.skip(why)
    if name not in env_steps.recorded_cases(load(env_steps.FILE)):
        pytest.skip("nothing is recorded: python tests/golden/make_env_steps.py where it runs")
    if lines := env_steps.differences(name, env_steps.run(name), load(env_steps.FILE)):
        pytest.fail("\n".join(lines), pytrace=False)


def test_every_registered_environment_is_recorded() -> None:
    """On the C engine at least, where it has engines."""
    recorded = env_steps.recorded_cases(load(env_steps.FILE))
    assert recorded <= CASES.keys()
    ours = {name for name, place in registry.ENVS.items() if str(place).startswith("ejax.")}
    assert {CASES[name].env for name in recorded} >= ours
    assert {name for name, case in CASES.items() if case.engine == "mujoco" and not case.needs} <= recorded


def test_the_recorded_episodes_end_in_both_ways() -> None:
    recorded = load(env_steps.FILE)
    for flag in ("terminated", "truncated"):
        assert sum(env_steps.unpacked(name, recorded)[flag].any() for name in env_steps.recorded_cases(recorded)) > 5
