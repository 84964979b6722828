"""``ejax evaluate --engine``: intervals, shifts, the first difference from equal states, and a whole report."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from tiny import tiny
from toy_tasks import Formula

from ejax.config import parse_config
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.mujoco.engine import load_model
from ejax.envs.randomization.physics import PHYSICS
from ejax.envs.tasks.mujoco_task import MuJoCoTask
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.evaluate import main
from ejax.play.comparison import (
    AS_IT_IS,
    TOGETHER,
    as_markdown,
    average,
    check_engines,
    compare_run,
    conditions,
    differ,
    find_difference,
    first_difference,
    proportion,
)
from ejax.run import train
from ejax.training.environments import with_engine

TERMS = ["state/a", "observation b", "contact c", "reward/d"]


def walk(**changes: tuple[int, int, float]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make [6, 3, 4] numbers that each rise by 1, and the same with changes: term -> (step, row, change)."""
    x = np.broadcast_to(np.linspace(0.0, 1.0, 6, dtype=np.float32)[:, None, None], (6, 3, 4))
    y = x.copy()
    for name, (step, row, change) in changes.items():
        y[step, row, "abcd".index(name)] += change
    return x, y


ALL = np.ones((6, 3), bool)


LATER = walk(a=(3, 1, 0.02), b=(5, 0, 0.5))
TOGETHER_AT_2 = walk(a=(2, 2, 0.9), b=(2, 2, 0.1), c=(2, 2, 0.02), d=(2, 2, 0.3))
ENDED = ALL.copy()
ENDED[4:, 1] = False
STILL = np.zeros((6, 3, 4), np.float32)


@cases(
    "numbers valid tolerance expected",
    (LATER, ALL, 0.01, ("state/a", 3, 1, 0.02, [])),  # the earliest, though a later one differs more
    (LATER, ALL, 0.6, None),
    (TOGETHER_AT_2, ALL, 0.01, ("contact c", 2, 2, 0.02, ["observation b", "reward/d", "state/a"])),
    (walk(a=(4, 1, 0.5)), ENDED, 0.01, None),  # after an episode's end
    (walk(b=(1, 0, np.nan)), ALL, 0.01, ("observation b", 1, 0, np.inf, [])),  # breaks by one engine
    ((STILL, STILL + 9e-5), ALL, 0.01, None),  # hardly moves
    ((STILL, STILL + 2e-4), ALL, 0.01, ("contact c", 0, 0, 0.02, ["observation b", "reward/d", "state/a"])),
)
def test_a_difference_is_first_by_step_then_by_group(numbers: Any, valid: Any, tolerance: float, expected: Any) -> None:
    found = first_difference(TERMS, *numbers, valid, tolerance)
    if expected is None:
        assert found is None
        return
    assert found
    assert (found["term"], found["step"], found["episode"], found["beside"]) == (*expected[:3], expected[4])
    assert found["size"] == pytest.approx(expected[3])


DROP = """<mujoco><option timestep="0.01"/><worldbody><geom name="floor" type="plane" size="1 1 1"/>
<body name="ball" pos="0 0 0.3"><joint name="drop" type="slide" axis="0 0 1"/><joint name="arm" type="hinge"/>
<geom type="sphere" size="0.1" solref="{} 1"/><site name="pad" type="sphere" size="0.12"/></body></worldbody>
<actuator><motor joint="arm" ctrlrange="-1 1"/></actuator>
<sensor><touch name="pad" site="pad"/></sensor></mujoco>"""


class Hard(MuJoCoTask):
    """A ball falls to the floor, 0.2 m below it, after 0.2 s."""

    model = DROP.format(0.02)
    episode_length = 14
    start_noise = 0.0

    def rewards(self, world: Any, before: Any) -> Any:
        return {"height": world.joint("drop").position}


class Soft(Hard):
    model = DROP.format(0.2)


def idle(num_actuators: int = 1) -> Formula:
    """Make a policy that does nothing with its actuators."""
    return Formula(lambda obs: jnp.zeros((*obs.shape[:-1], num_actuators)))


def test_the_first_difference_of_two_floors_is_the_contact_in_the_step_of_the_impact() -> None:
    found = find_difference(idle(), {}, Hard(), Soft(), jax.random.key(0), num_envs=2, tolerance=0.01)
    assert found and (found["term"], found["step"]) == ("contact pad", 10)
    assert "state drop velocity [m/s]" in found["beside"] and found["touching"] == [["ball–world"], ["ball–world"]]
    assert find_difference(idle(), {}, Hard(), Hard(), jax.random.key(0), num_envs=2, tolerance=0.01) is None


class Swing(Hard):
    """A pendulum that falls from the side, without contacts, which take MJX long to compile."""

    model = """<mujoco><option gravity="0 -9.81 0"><flag constraint="disable"/></option><worldbody><body>
<joint name="hinge"/><geom size="0.1" pos="0.5 0 0"/></body></worldbody>
<actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator></mujoco>"""
    control_period = 0.002

    def rewards(self, world: Any, before: Any) -> Any:
        return {"angle": world.joint("hinge").position}


@pytest.mark.slow
def test_a_pendulum_swings_alike_by_mjx_up_to_rounding() -> None:
    pytest.importorskip("mujoco.mjx")
    engines = Swing(physics="mujoco"), Swing(physics="mjx")
    assert find_difference(idle(), {}, *engines, jax.random.key(0), num_envs=1, tolerance=1e-4) is None


def test_intervals_are_wilsons_and_the_normal_one() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20
    assert [round(x, 4) for x in proportion(81, 263).values()] == [0.308, 0.2553, 0.3662]
    assert [round(x, 4) for x in proportion(0, 20).values()] == [0.0, 0.0, 0.1611]
    assert average(np.array([1.0, 3.0])) == pytest.approx({"mean": 2.0, "low": 2.0 - 1.959964, "high": 2.0 + 1.959964})


def test_results_differ_where_newcombes_interval_leaves_out_0() -> None:
    # Newcombe 1998, table II: the difference of 56/70 and 48/80 is from 0.0524 to 0.3339
    assert differ(proportion(56, 70), proportion(48, 80)) and differ(proportion(48, 80), proportion(56, 70))
    assert not differ(proportion(56, 70), proportion(52, 70)) and not differ(proportion(5, 5), proportion(5, 5))
    assert differ(average(np.array([1.0, 1.1])), average(np.array([np.nan, 1.0])))


def test_all_shifts_together_are_one_more_condition_unless_one_has_two_values() -> None:
    names = [AS_IT_IS, "latency 1", "noise 0.1"]
    assert list(conditions(Hard(), {"latency": [1.0], "noise": [0.1]})) == [*names, TOGETHER]
    assert list(conditions(Hard(), {"latency": [1.0, 2.0], "noise": []})) == [AS_IT_IS, "latency 1", "latency 2"]


def test_masses_are_those_of_all_that_moves() -> None:
    events = conditions(PushCubeRL(), {"mass": [2.0], "friction": [0.5]})
    assert [event["func"] for event in events["mass 2"].values()] == [
        "randomize_rigid_object_mass",
        "randomize_articulation_mass",
    ]
    assert [event["params"]["entity_cfg"] for event in events["friction 0.5"].values()] == [{"uid": "cube"}]


def test_noise_is_on_every_part_that_is_numbers_and_friction_on_a_robot_without_objects() -> None:
    env = VelocityRL()
    events = conditions(env, {"noise": [0.1], "friction": [0.5]})
    assert [event["params"]["part"] for event in events["noise 0.1"].values()] == ["critic", "policy"]
    model, params = load_model(env.asset), events["friction 0.5"]["transfer_friction_0"]["params"]
    written = PHYSICS["randomize_rigid_object_friction"](model, **params).writes["geom_friction"][:, 0]
    assert (written == (model.geom_bodyid > 0)).all()


@pytest.mark.slow
def test_a_report_has_a_row_for_each_condition(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    config = parse_config(tiny(env="CartPoleRL", env_cfg={"max_episode_steps": 3}))
    monkeypatch.setattr(
        "ejax.play.comparison.opened_policy", lambda *_, **__: contextlib.nullcontext((None, config, tmp_path))
    )
    monkeypatch.setattr("ejax.play.comparison.restore_policy", lambda *_: (idle(2), {}))
    words = ["RUN", "--engine", "c", "--episodes", "2"]
    assert main([*words, "--mass", "1.5", "--json", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["engine"], row["condition"]) for row in rows] == [("mujoco", AS_IT_IS), ("mujoco", "mass 1.5")]
    # the same starts: 3 steps differ by the masses alone
    assert rows[0]["return"]["mean"] == pytest.approx(rows[1]["return"]["mean"], rel=0.1)
    assert rows[0]["return"] != rows[1]["return"] and "| mujoco | as it is  | 0.000" in capsys.readouterr().out
    for wrong, text in (
        (["--friction", "2"], "touches nothing in this model"),
        (["--latency", "-1"], "ejax evaluate: --latency -1: got [-1.0, -1.0]; must be >= 0"),
        (["--tolerance", "0"], "--tolerance must be > 0"),
        (["--video", "a.mp4"], "--video does not go with --engine"),
        (["--sample"], "--sample does not go with --engine"),
    ):
        assert main([*words, *wrong]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_policy_does_the_same_by_mjx(tmp_path: Path) -> None:
    pytest.importorskip("mujoco.mjx")
    run = train(parse_config(tiny(tmp_path, "CartPoleRL", iterations=1)), run_dir=tmp_path / "run").run_dir
    result = compare_run(run, engines=["c", "mjx"], num_episodes=2, explain=True)
    one, other = (row["return"]["mean"] for row in result["rows"])
    assert one == pytest.approx(other, rel=1e-4)
    expected = {
        "engine": "mjx",
        "condition": AS_IT_IS,
        "reference": "mujoco",
        "of": "success",
        "beyond": False,
        "first": None,
    }
    assert result["differences"] == [expected]


def test_options_of_a_comparison_alone_are_refused(capsys: Any) -> None:
    for option in (["--explain"], ["--tolerance", "0"]):
        assert main(["RUN", *option]) == 2
        assert f"{option[0]} belongs to a comparison: pass --engine A,B" in capsys.readouterr().err


@refusals((["c", "bullet"], "--engine", "'bullet'"), (["c", "mujoco"], "--engine", "once"))
def test_what_cannot_be_compared_is_named(given: list[str], key: str, word: str) -> None:
    refused(check_engines, given, key=key, word=word)


def test_an_engine_that_is_not_there_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(with_engine, parse_config(tiny()), "mjx", key="env", word="physics")
    monkeypatch.setattr("ejax.play.comparison.how_to_install", {"warp": "pip install -e '.[warp]'"}.get)
    refused(check_engines, ["c", "warp"], key="warp is not installed", word="pip install -e '.[warp]'")
    assert check_engines(["all"]) == ["mujoco", "mjx"]
    made = {"checkpoint": "x", "seed": 0, "episodes": 2, "tolerance": 0.01, "rows": [], "differences": []}
    assert "warp is left out: not installed (pip" in as_markdown({**made, "left_out": {"warp": "pip install x"}})
