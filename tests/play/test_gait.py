"""The gait card: averages of what was seen, and the whole of it by ``ejax evaluate``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ejax.config import parse_config
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.evaluate import main
from ejax.play.gait import GRID, NAMED, card_text, make_card
from ejax.run import train

LEGS = VelocityRL(physics="mujoco", command={"lin_vel_x": [0.0, 1.0], "lin_vel_y": [0.0, 0.0]})
T, C, E = 400, len(GRID), 2
FORWARD, STANDING, LEFT, RIGHT = (
    GRID.index(NAMED[name]) for name in ("forward", "standing", "to the left", "to the right")
)


def seen() -> dict[str, Any]:
    """All feet down for 0.2 s of each 0.4 s, under every command, quiet and pushed; nobody falls."""
    shape = (T, C, 2, E)
    down = np.arange(T) // 10 % 2 == 0
    return {
        "touching": np.broadcast_to(down[:, None, None, None, None], (*shape, 4)).copy(),
        "slip": np.where(down, 4 * 0.1, 0.0)[:, None, None, None] * np.ones(shape),
        "torque": np.full(shape, 9.0),
        "action_rate": np.full(shape, 0.25),
        "velocity_error": np.full(shape, 0.3),
        "yaw_error": np.full(shape, 0.2),
        "counts": np.ones(shape, bool),
        "falls": np.zeros(shape, bool),
    }


def test_a_card_averages_what_was_seen_after_the_first_second() -> None:
    played = seen()
    played["velocity_error"][:50] = 99.0
    summary = make_card(LEGS, played)["summary"]
    wanted = {"velocity_error": 0.3, "yaw_error": 0.2, "slip": 0.1, "torque": 3.0, "action_rate": 0.5, "falls": 0.0}
    wanted |= {"asymmetry": 0.0, "all_down_standing": 0.5, "survive_pushes": 1.0}
    np.testing.assert_allclose([summary[name] for name in wanted], list(wanted.values()), atol=0.02)
    assert summary["air_time"] == pytest.approx(0.2, abs=0.02)


def test_a_limp_is_seen_beside_the_mirror_image_of_the_command() -> None:
    played = seen()
    played["touching"][:, FORWARD, 0, :, 0] = True  # FR never leaves the ground
    played["touching"][:, [LEFT], 0, :, 0] = played["touching"][:, [RIGHT], 0, :, 1] = True  # no limp: the other side's
    fast = GRID.index(NAMED["fast"])
    played["touching"][:, fast, 0, 0, 0] = played["touching"][:, fast, 0, 1, 1] = (
        True  # now on the right, now on the left
    )
    asymmetry = make_card(LEGS, played)["columns"]["asymmetry"]
    assert asymmetry[fast] == pytest.approx(0.5, abs=0.02)
    assert [asymmetry[i] for i in (FORWARD, LEFT, RIGHT, STANDING)] == pytest.approx([0.5, 0.0, 0.0, 0.0], abs=0.02)


def test_a_fall_ends_what_counts_and_only_pushed_ones_survive_pushes() -> None:
    played = seen()
    played["counts"][200:, FORWARD, 0] = False
    played["velocity_error"][200:, FORWARD, 0] = 99.0
    played["falls"][199, FORWARD, 0] = played["falls"][30, :15, 1] = True
    card = make_card(LEGS, played)
    assert card["columns"]["falls"][FORWARD] == 1.0 and card["summary"]["survive_pushes"] == pytest.approx(1 - 15 / C)
    assert card["columns"]["velocity_error"][FORWARD] == pytest.approx(0.3)
    assert card["summary"]["falls"] == pytest.approx(1 / C, abs=1e-4)


def test_a_robot_that_falls_at_once_has_no_gait() -> None:
    played = seen()
    played["counts"][:] = False
    card = make_card(LEGS, played)
    assert {card["summary"][name] for name in ("velocity_error", "asymmetry", "slip")} == {None}
    assert "–" in card_text(card)
    json.dumps(card, allow_nan=False)


def test_commands_that_the_task_draws_are_averaged_apart() -> None:
    played = seen()
    inside = [i for i, (x, y, _) in enumerate(GRID) if x >= 0.0 and y == 0.0]
    played["velocity_error"][:, inside] = 0.1
    card = make_card(LEGS, played)
    assert (card["in_range"], card["summary"]["velocity_error_in_range"]) == (len(inside), pytest.approx(0.1))


@pytest.mark.slow
def test_evaluate_prints_and_writes_the_card_of_a_legged_run_unless_it_is_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ejax.play.gait._EPISODES", 1)
    monkeypatch.setattr("ejax.play.gait._SECONDS", 3.0)
    cfg = {"max_episode_steps": 160, "physics": "mujoco", "command": {"single": 0.3}}
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "elu"}}
    trainer = {"num_envs": 2, "buffer_size": 4, "iterations": 1, "console": False, "output_dir": str(tmp_path)}
    groups = {"actor": ["policy"], "critic": ["critic"]}
    config = {
        "env": {"id": "VelocityRL", "cfg": cfg},
        "trainer": {**trainer, "exp_name": "legs"},
        "policy": {"name": "actor_critic", "obs_groups": groups, "actor": network, "critic": network},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 8, "n_epochs": 1, "mirror_coef": 1.0}},
    }
    run = train(parse_config(config)).run_dir
    given = [str(run), "--episodes", "2", "--num-envs", "2"]
    assert main(given) == 0
    (file,) = (run / "evaluations").glob("*step*.json")
    card = json.loads(file.read_text())["gait"]
    assert "turning left" in capsys.readouterr().out and len(card["duty"]) == C and card["episodes"]["pushed"] == C
    assert {len(steps) for rows in card["contacts"].values() for steps in rows} == {100}
    assert card["pushes"]["interval"] == [1.0, 3.0]
    assert main([*given, "--no-gait"]) == 0
    assert "turning left" not in capsys.readouterr().out
    assert "gait" not in json.loads(file.read_text())
