"""A legged robot and its task are one TOML file."""

from pathlib import Path

import pytest
from case_tables import cases, refused

from ejax.envs.locomotion.catalog import Push, read_task, robot_names, velocity_task
from ejax.envs.locomotion.robots import Foot
from ejax.envs.terms.commands import CommandRanges

HOPPER = """
source = "hopper.xml"
joints = ["hip", "knee"]
base = "trunk"
upright = "trunk"
height = 0.5
friction = 0.8
feet = [{body = "shin", offset = [0.0, 0.0, -0.2], geoms = "foot_collision", contacts = 1}]
home = {hip = 0.4, knee = -0.8}
motors = {inertia = 0.001, effort = {".*" = 10.0, knee = 20.0}}

[task]
actor = ["joint_pos", "action", "command"]
critic = ["joint_pos"]
noise = {joint_pos = 0.1}
encoder_bias = 0.0
terminations = {}
command = {standing = 0.5}
push = {}

[task.rewards]
upright = {weight = 1.0, std = 0.5}
action_rate_l2 = {weight = -0.1}
"""
SISTER = HOPPER[: HOPPER.index("[task]")]


def written(folder: Path, text: str, name: str = "hopper") -> Path:
    (path := folder / f"{name}.toml").write_text(text)
    return path


def test_all_robots_are_read() -> None:
    assert robot_names() == ("anymal_c", "g1", "go1", "go2", "h1_2", "microduck", "quadruped")
    for name in robot_names():
        task = velocity_task(name)
        assert task.robot.name == name
        assert len(task.robot.home) == len(task.robot.drives.stiffness) == len(task.robot.joints)
        assert hash(task) == hash(velocity_task(name))


def test_one_file_makes_a_robot_and_its_task(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, HOPPER))
    robot = task.robot
    assert (robot.name, robot.source, robot.home) == ("hopper", "hopper.xml", (0.4, -0.8))
    assert robot.feet == (Foot(body="shin", offset=(0.0, 0.0, -0.2), geoms="foot_collision", contacts=1),)
    assert robot.drives.max_effort == (10.0, 20.0)
    assert robot.drives.stiffness == pytest.approx((3.9478417604357432,) * 2)  # 0.001·(20π)²
    assert robot.drives.damping == pytest.approx((0.25132741228718347,) * 2)  # 4·0.001·20π
    assert robot.drives.action_scale == pytest.approx(
        (10.0 / (4 * 3.9478417604357432), 20.0 / (4 * 3.9478417604357432))
    )
    assert (task.command, task.push, task.terminations) == (CommandRanges(standing=0.5), Push(), {})
    assert task.actor == ("joint_pos", "action", "command")


def test_a_task_can_be_like_another_one(tmp_path: Path) -> None:
    """Terms are changed one by one, and left out by weight 0; tables by joints are replaced as a whole."""
    written(tmp_path, HOPPER)
    text = SISTER + "[task]\nlike = 'hopper'\npush = false\ncommand = {heading = 0.1}\n[task.rewards]\n"
    task = read_task(written(tmp_path, text + "upright.weight = 2.0\naction_rate_l2.weight = 0.0\n", "sister"))
    assert task.robot.name == "sister"
    assert task.rewards == {"upright": {"weight": 2.0, "std": 0.5}}
    assert (task.push, task.command) == (None, CommandRanges(standing=0.5, heading=0.1))


@cases(
    "old new text",
    ('base = "trunk"', 'basis = "trunk"', "hopper.toml has no 'basis'; there is name, source, .*Did you mean 'base'"),
    ("height = 0.5", "", "hopper.toml has no height"),
    ('body = "shin"', 'bdy = "shin"', "hopper.toml: feet has no 'bdy'; there is body, offset, geoms, contacts"),
    ("encoder_bias = 0.0", "", "hopper.toml: task has no encoder_bias"),
    ("standing = 0.5", "stands = 0.5", "hopper.toml: task.command has no 'stands'"),
    ("standing = 0.5", "standing = 1.5", "command.standing must be a share, from 0 to 1, got 1.5"),
    ("knee = 20.0", "ankle = 20.0", "no joint matches 'ankle'; there is hip, knee"),
    ("[task]", "[task]\nlike = 'nobody'", "task.like must name a robot that has a file next to it, got 'nobody'"),
    ("[task]", "[task", "hopper.toml is not TOML: "),
)
def test_wrong_files_are_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    refused(lambda: read_task(written(tmp_path, HOPPER.replace(old, new))), match=text)


def test_an_unknown_robot_is_refused() -> None:
    refused(velocity_task, "spot", match=r"robot must be one of anymal_c, .*, got 'spot'")
