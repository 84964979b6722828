"""Curricula of velocity tasks: stages by the run's steps, by success and by error."""

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from small_configs import BASE, make, trainer
from whole_runs import assert_goes_on_with_the_same_bits

from ejax.envs.locomotion.catalog import VelocityTask, change_task, robot_names, velocity_task
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.terms.curricula import Progress, Stages
from ejax.envs.wrappers.placing import for_evaluation
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.envs.wrappers.wrapper import innermost
from ejax.rollout import EnvCarry, reset, step
from ejax.runtime.sharding import make_mesh, sharded
from ejax.training.environments import build_env, evaluation_env
from ejax.types import Timestep

KEY = jax.random.key(0)
AXES = ("lin_vel_x", "lin_vel_y", "ang_vel_z")
TEACHING = {
    "wide": {"of": "command", "stages": [{"step": 5, "lin_vel_x": [2.0, 3.0], "resampling_time": [0.02, 0.02]}]},
    "strict": {"of": "rewards", "stages": [{"step": 3, "upright": 10.0}, {"step": 7, "upright": 0.0}]},
    "stop": {"of": "command", "by": "success", "stages": [{"standing": 1.0}]},
}
ENV = VelocityRL(physics="mujoco", max_episode_steps=4, command={"standing": 0.0, "forward": 0.0}, curriculum=TEACHING)
STEP = jax.jit(partial(step, ENV))


def play(num_steps: int, carry: EnvCarry, first: int = 0) -> tuple[EnvCarry, list[Timestep]]:
    steps = []
    for i in range(first, first + num_steps):
        carry, timestep = STEP(carry, jnp.zeros((carry.state.action.shape[0], 12)), jax.random.key(i))
        steps.append(timestep)
    return carry, steps


def task_files() -> list[Path]:
    """List the ``task.json`` of EmbodiChain's package; none where it is not installed."""
    spec = find_spec("embodichain_tasks")
    folders = (spec.submodule_search_locations or []) if spec else []
    return sorted(
        path for folder in folders for path in Path(folder).glob("configs/tasks/locomotion/velocity/*/task.json")
    )


@cases(
    "robot run_step x y yaw",
    ("go1", 0, (-1.0, 1.0), (-1.0, 1.0), (-0.5, 0.5)),
    ("go1", 119_999, (-1.0, 1.0), (-1.0, 1.0), (-0.5, 0.5)),
    ("go1", 120_000, (-1.5, 2.0), (-1.0, 1.0), (-0.7, 0.7)),
    ("go1", 240_000, (-2.0, 3.0), (-1.0, 1.0), (-0.5, 0.5)),  # a stage does not keep what the one before changed
    ("g1", 119_999, (-0.5, 1.0), (-0.5, 0.5), (-1.0, 1.0)),
    ("g1", 120_000, (-1.0, 2.0), (-1.0, 1.0), (-1.0, 1.0)),
    ("go2", 120_000, (-1.0, 2.0), (-1.0, 1.0), (-1.0, 1.0)),
    ("h1_2", 120_000, (-1.0, 2.0), (-1.0, 1.0), (-1.0, 1.0)),
    ("microduck", 119_999, (-0.2, 0.2), (-0.15, 0.15), (-0.5, 0.5)),
    ("microduck", 120_000, (-0.4, 0.4), (-0.3, 0.3), (-1.0, 1.0)),
    ("anymal_c", 10**6, (-1.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)),
    ("quadruped", 10**6, (-1.0, 1.0), (-1.0, 1.0), (-0.5, 0.5)),
)
def test_embodichains_stages_hold_from_their_control_step_on(
    robot: str, run_step: int, x: Any, y: Any, yaw: Any
) -> None:
    np.testing.assert_allclose(ranges_at(velocity_task(robot), run_step), [x, y, yaw], rtol=1e-6)


def ranges_at(task: VelocityTask, run_step: int) -> Any:
    progress = replace(Progress.begin(task.curriculum, KEY), run_step=jnp.array(run_step - 1)).count(task.curriculum)
    now = {**vars(task.command), **progress.numbers(task.curriculum, "command", task.numbers("command"))}
    return [now[name] for name in AXES]


def ranges_of_embodichain(data: dict[str, Any], run_step: int) -> Any:
    """Compute what its class does with the numbers of a file."""
    base = data["commands"]["twist"]["ranges"]
    stages = data.get("curriculum", {}).get("command_vel", {}).get("params", {}).get("velocity_stages", [])
    reached = [stage for stage in stages if stage["step"] <= run_step]
    return [(reached[-1] if reached else {}).get(name, base[name]) for name in AXES]


WITHOUT_NUMBERS = ("debug_vis", "entity_name", "viz")  # of a twist: what is drawn, and which robot it is for
ZERO = ("rel_world_envs", "init_velocity_prob", "rel_single_axis_envs")  # ours has not the first two


@pytest.mark.parametrize("path", task_files() or [None], ids=lambda path: path.parent.name if path else "none")
def test_each_key_of_embodichains_commands_and_curricula_is_in_ours(path: Path | None) -> None:
    if path is None:
        pytest.skip("the package embodichain is not installed")
    data, task = json.loads(path.read_text()), velocity_task(path.parent.name.removesuffix("_flat"))
    twist, command = data["commands"]["twist"], task.command
    assert command.resampling_time == tuple(twist.pop("resampling_time_range"))
    assert command.standing == twist.pop("rel_standing_envs")
    part, turns = twist.pop("rel_heading_envs"), twist.pop("heading_command")
    assert command.heading == (part if turns else 0.0)
    assert command.forward == twist.pop("rel_forward_envs", 0.0)
    assert twist.pop("heading_control_stiffness") in (command.heading_stiffness, *([] if command.heading else [0.0]))
    np.testing.assert_allclose(twist["ranges"].pop("heading", [-np.pi, np.pi]), [-np.pi, np.pi])
    assert not any(twist.pop(name, 0.0) for name in ZERO)
    assert twist.keys() - set(WITHOUT_NUMBERS) == {"ranges"}
    assert set(twist["ranges"]) == set(AXES)
    curriculum = data.get("curriculum", {})
    assert curriculum.keys() == task.curriculum.keys()
    assert curriculum.keys() <= {"command_vel"}
    for stage in (stage for each in curriculum.values() for stage in each["params"]["velocity_stages"]):
        assert set(stage) <= {"step", *AXES}
        for run_step in (stage["step"] - 1, stage["step"], stage["step"] + 1):
            np.testing.assert_allclose(
                ranges_at(task, max(run_step, 0)), ranges_of_embodichain(data, max(run_step, 0)), rtol=1e-6
            )


@pytest.mark.slow
def test_stages_outlive_episodes_and_change_commands_and_weights() -> None:
    carry, steps = play(9, reset(ENV, KEY, 2))
    metrics = {name: [float(each.info["metrics"][f"curriculum_{name}"][0]) for each in steps] for name in TEACHING}
    assert metrics["wide"] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert metrics["strict"] == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert metrics["stop"] == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    ratio = [float(each.info["rewards"]["upright"][0] / (each.info["terms"]["upright"][0] * 0.02)) for each in steps]
    np.testing.assert_allclose(ratio, [1, 1, 10, 10, 10, 10, 0, 0, 0], rtol=1e-5)
    # each row is judged alone: after its episode without a fall, here of four steps, it stands
    np.testing.assert_array_equal(carry.state.command.stands, True)
    np.testing.assert_array_equal(carry.obs["policy"][:, -3:], 0.0)


@pytest.mark.slow
def test_a_new_episode_begins_with_a_command_of_the_stage_and_sees_it() -> None:
    start = reset(ENV, KEY, 2)
    run_step, stage = jnp.array([4, 50]), {**start.state.progress.stage, "wide": jnp.array([0, 1])}
    ended = replace(start.state, progress=replace(start.state.progress, run_step=run_step, stage=stage))
    state, obs = jax.vmap(ENV.persist)(ended, start.state, start.obs)
    np.testing.assert_array_equal(state.progress.run_step, run_step)
    x = state.command.velocity[:, 0]
    assert abs(x[0]) <= 1.0
    assert 2.0 <= x[1] <= 3.0
    np.testing.assert_array_equal(obs["policy"][:, -3:], state.command.velocity)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start.state)


@cases(
    "by fell error after",
    ("success", False, 9.0, [1, 2, 2]),
    ("success", True, 0.0, [0, 0, 1]),
    ("error", False, 0.2, [1, 2, 2]),
    ("error", False, 0.4, [0, 1, 2]),
    ("error", False, 0.6, [0, 0, 1]),
    ("error", True, 0.2, [0, 0, 1]),
)
def test_a_rows_episode_moves_it_up_or_down(by: Any, fell: bool, error: float, after: list[int]) -> None:
    stages = Stages(of="command", by=by, below=0.3, above=0.5, stages=({"single": 0.5}, {"single": 1.0}))
    moved = [int(stages.stage_after(jnp.array(i), jnp.array(fell), jnp.array(error))) for i in range(3)]
    assert moved == after


@pytest.mark.slow
def test_a_randomized_row_keeps_its_physics_and_its_stages() -> None:
    heavy = {
        "func": "randomize_rigid_object_mass",
        "params": {"entity_cfg": {"uid": "trunk"}, "mass_range": [9.0, 9.0]},
    }
    env = RandomizedEnv(ENV, {"heavy": heavy})
    carry = reset(env, KEY, 2)
    for i in range(5):
        carry, timestep = step(env, carry, jnp.zeros((2, 12)), jax.random.key(i))
    np.testing.assert_array_equal(timestep.info["metrics"]["curriculum_wide"], 1.0)
    np.testing.assert_array_equal(carry.state.env.progress.run_step, 5)
    np.testing.assert_array_equal(carry.state.env.physics.parameters["body_mass"][:, 1], 9.0)


@pytest.mark.slow
def test_eight_rows_on_several_devices_are_those_of_one() -> None:
    one, _ = play(6, reset(ENV, KEY, 8))
    mesh = make_mesh(jax.devices())
    with jax.set_mesh(mesh):
        carry = jax.device_put(reset(ENV, KEY, 8), sharded(mesh))
        for i in range(6):
            carry, _ = STEP(carry, jax.device_put(jnp.zeros((8, 12)), sharded(mesh)), jax.random.key(i))
    # XLA adds a row's squares in another order where a device has one row: the sum of errors, in its last bit
    errors = [each.state.progress.error for each in (carry, one)]
    np.testing.assert_array_max_ulp(*map(np.asarray, errors), maxulp=1)
    for name in ("progress", "command", "push_in"):
        for x, y in zip(*(jax.tree.leaves(getattr(each.state, name)) for each in (carry, one)), strict=True):
            if not any(x is error for error in errors):
                np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_run_with_a_curriculum_resumes_to_the_same_bits(tmp_path: Path) -> None:
    stages = [{"step": 3 * i, "lin_vel_x": [i, i + 1.0], "resampling_time": [0.02, 0.04]} for i in range(1, 6)]
    curriculum = {"faster": {"of": "command", "stages": stages}, "stop": TEACHING["stop"]}
    cfg = {"max_episode_steps": 5, "physics": "mujoco", "curriculum": curriculum}
    run = {"learning_env": {"name": "VelocityRL", "cfg": cfg}, "num_envs": 4, "buffer_size": 4, "iterations": 4}
    groups = {"obs_groups": {"actor": ["policy"], "critic": ["critic"]}}
    algorithm = {"name": "ppo", "cfg": {"batch_size": 8}}
    raw = {"trainer": run, "policy": {**BASE["policy"], **groups}, "algorithm": algorithm}
    end = assert_goes_on_with_the_same_bits(raw, tmp_path)
    np.testing.assert_array_equal(end.envs.state.progress.run_step, 16)
    np.testing.assert_array_equal(end.envs.state.progress.stage["faster"], 5)


def test_an_evaluation_judges_at_the_last_stage_on_all_levels() -> None:
    stages = [{"step": 3, "lin_vel_x": [-1.0, 1.0], "lin_vel_y": [0.0, 0.1]}, {"step": 5, "lin_vel_x": [-2.0, 2.0]}]
    curriculum = {
        "wide": {"of": "command", "stages": stages},
        "strict": {"of": "rewards", "by": "success", "stages": [{"upright": 3.0, "pose": 0.0}]},
        "kicks": {"of": "push", "by": "error", "stages": [{"x": [-2.0, 2.0]}]},
    }
    cfg = {"push": {"y": [0.0, 0.5]}, "curriculum": curriculum, "terrain": {"kind": "tiles", "level": [0, 1]}}
    events = {"noise": {"func": "add_action_noise", "mode": "reset", "params": {"noise": 0.1}}}
    env = {"name": "VelocityRL", "cfg": cfg | {"physics": "mujoco"}}
    own = velocity_task("quadruped").command.lin_vel_y
    for phases in ({"train": events}, {"train": events, "eval": events}):
        config = make(trainer=trainer(learning_env=env, events=phases))
        judged = innermost(evaluation_env(config, build_env(config)))
        task = judged.task
        assert judged == innermost(build_env(config, phase="eval"))
        assert (task.command.lin_vel_x, task.command.lin_vel_y) == ((-2.0, 2.0), own)
        assert (task.push.x, task.push.y) == ((-2.0, 2.0), (0.0, 0.5))
        assert task.rewards["upright"]["weight"] == 3.0
        assert "pose" not in task.rewards
        assert (judged.ground.level, judged.ground.promote) == ((0, 4), False)
    assert for_evaluation(judged) == judged
    plain = VelocityRL(physics="mujoco")
    assert for_evaluation(plain) is plain


@cases(
    "cfg names",
    ({}, ["command_vel"]),
    ({"command": {"standing": 0.2}, "rewards": {"upright": {"weight": 2.0}}}, ["command_vel"]),
    ({"command": {"lin_vel_x": [0.0, 1.0]}}, []),  # a command of the user's stays what it is
    ({"curriculum": None}, []),
    ({"curriculum": {"command_vel": None}}, []),
    ({"curriculum": {"calm": {"of": "rewards", "stages": [{"step": 9, "upright": 2}]}}}, ["calm", "command_vel"]),
    ({"push": None}, ["command_vel"]),
)
def test_the_tasks_own_curriculum_stays_unless_its_numbers_are_given(cfg: dict[str, Any], names: list[str]) -> None:
    given = {"command": {}, "rewards": {}, "noise": {}, "push": {}, "curriculum": {}, **cfg}
    assert sorted(change_task(velocity_task("go1"), **given).curriculum) == names


ONE = [{"step": 9, "lin_vel_x": [0.0, 1.0]}]


@cases(
    "table text",
    ({"of": "gravity", "stages": ONE}, "of must be command or push or rewards, got 'gravity'"),
    ({"of": "command", "by": "luck", "stages": ONE}, "by must be steps or success or error, got 'luck'"),
    ({"of": "command"}, "has no stages"),
    ({"of": "command", "stages": []}, "at least one"),
    ({"of": "command", "stages": [{"step": 3}]}, "each must change something"),
    ({"of": "command", "stages": [{"lin_vel_x": [0, 1]}]}, "step of each stage must be a whole number"),
    ({"of": "command", "stages": [*ONE, *ONE]}, "each above the one before, got [9, 9]"),
    ({"of": "command", "by": "error", "stages": ONE}, "leave step out"),
    ({"of": "command", "by": "error", "below": 0.5, "above": 0.1, "stages": [{"single": 1}]}, "0 < below <= above"),
    ({"of": "command", "stages": [{"step": 1, "lin_vel_z": [0, 1]}]}, "command has no 'lin_vel_z'"),
    ({"of": "command", "stages": [{"step": 1, "lin_vel_x": [1, 0]}]}, "[lowest, highest]"),
    ({"of": "rewards", "stages": [{"step": 1, "uprigt": 1}]}, "rewards has no 'uprigt'"),
    ({"of": "rewards", "stages": [{"step": 1, "upright": {"weight": 1}}]}, "are weights, which are numbers"),
    ({"of": "push", "stages": [{"step": 1, "x": [0, 1]}]}, "the task has no pushes; set push"),
    ({"of": "command", "every": 3, "stages": ONE}, "has no 'every'"),
    ids=str,
)
def test_stages_that_cannot_be_are_refused_by_name(table: dict[str, Any], text: str) -> None:
    error = refused(VelocityRL, curriculum={"mine": table}, match=r"curriculum\.mine: ")
    assert text in str(error)


def test_two_curricula_of_one_number_are_refused() -> None:
    two = {name: {"of": "command", "stages": ONE} for name in ("one", "other")}
    refused(VelocityRL, curriculum=two, match=r"curriculum\.other: lin_vel_x already changes in one")


def test_every_robots_curriculum_is_one_of_its_task() -> None:
    assert {name for name in robot_names() if velocity_task(name).curriculum} == {
        *("go1", "go2", "g1", "h1_2", "microduck")
    }
