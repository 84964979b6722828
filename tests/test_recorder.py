"""Films of evaluations: made beside the training, and never its end."""

import math
from pathlib import Path

import jax
import pytest

from ejax.config import ConfigError, parse_config
from ejax.envs.push_cube import PushCubeRL
from ejax.recorder import CameraConfig, EvaluationRecorder
from ejax.run import train
from ejax.types import CameraView

EVENT = {
    "func": "record_camera_data_async",
    "mode": "interval",
    "interval_step": 2,
    "params": {
        "name": "main_cam",
        "resolution": [64, 48],
        "eye": [-1.4, 1.4, 2.0],
        "target": [0, 0, 0],
        "up": [0, 0, 1],
        "intrinsics": [60, 60, 32, 24],
    },
}


def raw(tmp_path: Path, event: dict) -> dict:
    network = {"type": "mlp", "hidden_sizes": [8]}
    return {
        "trainer": {
            "exp_name": "film",
            "learning_env": {"name": "PushCubeRL", "cfg": {"episode_length": 6}},
            "num_envs": 2,
            "buffer_size": 4,
            "iterations": 1,
            "enable_eval": True,
            "eval_freq": 8,
            "num_eval_episodes": 1,
            "output_dir": str(tmp_path),
            "events": {"eval": {"cam": event}},
        },
        "policy": {"name": "actor_critic", "actor": network, "critic": network},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 8, "n_epochs": 1}},
    }


def test_an_evaluation_is_filmed_from_the_events_camera(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(parse_config(raw(tmp_path, EVENT)))
    film = result.run_dir / "videos" / "eval" / "ep1_main_cam_allenvs.mp4"
    assert film.stat().st_size > 0
    assert f"filmed {film}" in capfd.readouterr().out


def test_a_recorder_that_fails_is_told_of_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    event = {**EVENT, "params": {**EVENT["params"], "save_path": str(tmp_path / "file" / "videos")}}
    result = train(parse_config(raw(tmp_path, event)))
    assert result.finished
    assert "no film: " in capfd.readouterr().out


def test_intrinsics_become_a_field_of_view() -> None:
    camera = CameraConfig(resolution=(640, 480), intrinsics=(600.0, 600.0, 320.0, 240.0))
    assert camera.view.fovy == pytest.approx(math.degrees(2.0 * math.atan(240.0 / 600.0)))


def test_a_camera_sees_from_where_it_stands() -> None:
    env = PushCubeRL()
    state, _ = env.reset(jax.random.key(0))
    near = env.render(state, 64, 48, CameraView((-1.5, -1.0, 0.5), (-0.6, -0.4, 0.05), 30.0))
    away = env.render(state, 64, 48, CameraView((-1.5, -1.0, 0.5), (-3.0, -2.0, 0.5), 30.0))
    orange = [((p[..., 0] > 120) & (p[..., 2] < 90)).sum() for p in (near.astype(int), away.astype(int))]
    assert orange[0] > 20 and orange[1] == 0  # the cube, and no cube


def test_without_cameras_nothing_is_made(tmp_path: Path) -> None:
    with EvaluationRecorder(None, PushCubeRL(), (), tmp_path) as recorder:  # type: ignore[arg-type]
        recorder.record({}, jax.random.key(0), 0)
        assert recorder.reports() == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "reset"}, r"events\.eval\.cam\.mode: got 'reset'; a trainer event has mode interval"),
        ({"params": {"nam": "x"}}, r"trainer\.cameras\.0\.nam: unknown key"),
        ({"interval": 3}, r"trainer\.events\.eval\.cam: got .* must be \{func, mode"),
    ],
)
def test_a_wrong_event_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(raw(tmp_path, {**EVENT, **change}))
