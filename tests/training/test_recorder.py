"""Videos: made beside the training, and never its end."""

import errno
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from numpy.typing import NDArray
from several_processes import Shown
from tiny import EPISODE, EVALUATED, STEPS, tiny
from toy_tasks import Formula, Line, told

from ejax.config import parse_config
from ejax.config.models import CameraConfig
from ejax.envs.mujoco.drawing import Appearance
from ejax.envs.mujoco.engine import render
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.episodes import record_episodes
from ejax.run import train
from ejax.schema.registry import ENVS
from ejax.training import recorder as module
from ejax.training.recorder import VideoRecorder, draw_episodes
from ejax.types import Array, CameraView, Env, Key, Phase, Timestep

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


DRAWN: list[tuple[float, CameraView | None]] = []
"""Brightness and camera of each picture."""


@dataclass(frozen=True)
class Lamp(Line):
    """Shines as brightly as its time; goes out after ``length`` steps. ``pause``: seconds that a picture takes."""

    length: int = 4
    pause: float = 0.0

    @property
    def max_episode_steps(self) -> int:
        return 2 * self.length

    def reset(self, key: Key) -> tuple[Array, Array]:
        del key
        return jnp.zeros(2), jnp.zeros(1)

    def step(self, state: Array, action: Array, key: Key) -> tuple[Array, Timestep]:
        del key
        state = jnp.stack([state[0] + 1.0, action[0]])
        return state, told(state[:1], 0.0, state[0] >= self.length)

    def render(
        self, state: Array, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        time.sleep(self.pause)
        DRAWN.append((float(state[0]), camera))
        return np.full((height, width, 3), int(state[0]), np.uint8)


STEADY = Formula(lambda obs: jnp.full_like(obs, 3.0))
"""Acts around 3 at any observation."""


@pytest.fixture(autouse=True)
def forget() -> None:
    DRAWN.clear()


def make_recorder(folder: Path, env: Any = None, **camera: Any) -> VideoRecorder:
    envs: dict[Phase, Env] = {"train": env or Lamp(), "eval": env or Lamp()}
    return VideoRecorder(STEADY, envs, (CameraConfig(resolution=(8, 8), **camera),), folder)


def record(recorder: VideoRecorder, count: int = 1) -> list[str]:
    """Record, and wait for it."""
    recorder.record({}, jax.random.key(0), count)
    assert recorder._video is not None
    recorder._video.exception(60.0)
    return recorder.reports()


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVS, "Shown", Shown)


def raw(tmp_path: Path, event: dict, env: str = "Shown") -> dict:
    trainer = EVALUATED | {"iterations": 1, "console": True, "events": {"eval": {"cam": event}}}
    return tiny(tmp_path, env, env_cfg={"max_episode_steps": EPISODE}, **trainer)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["eval", "train"])
def test_evaluations_are_recorded_or_without_any_the_training_where_it_saves(
    phase: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = raw(tmp_path, EVENT, "CartPoleRL" if phase == "eval" else "Shown")
    if phase == "train":
        data["trainer"] |= {"enable_eval": False, "save_freq": STEPS}
        data["trainer"]["events"]["train"] = {"cam": EVENT}
    result = train(parse_config(data))
    (video,) = (result.run_dir / "videos").rglob("*.mp4")
    assert video == result.run_dir / "videos" / phase / "ep1_main_cam_allenvs.mp4" and video.stat().st_size > 0
    assert f"recorded {video}" in capfd.readouterr().out


def test_in_a_folder_that_runs_share_no_video_replaces_another(tmp_path: Path) -> None:
    shared, names = tmp_path / "shared", ["ep1_cam_allenvs.mp4", "ep1_cam_allenvs_2.mp4", "ep1_cam_allenvs_3.mp4"]
    for run, name in enumerate(names):
        with make_recorder(tmp_path / f"run{run}" / "videos", save_path=str(shared)) as recorder:
            assert record(recorder) == [f"recorded {shared / name}"]
    assert sorted(path.name for path in shared.iterdir()) == sorted(names)


def fail(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_recorder_that_fails_is_told_of_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shown, "render", fail)
    result = train(parse_config(raw(tmp_path, EVENT)))
    assert result.finished and result.latest_checkpoint_path is not None
    assert "no video: " in capfd.readouterr().out


RENAME = os.replace


def no_room(*paths: Any, **at: Any) -> None:
    return fail() if str(paths[-1]).endswith(".mp4") else RENAME(*paths, **at)


@cases("owner name function", (Lamp, "render", fail), (os, "replace", no_room), ids=["the picture", "the disk"])
def test_what_went_wrong_is_told(
    owner: Any, name: str, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, function)
    with make_recorder(tmp_path) as recorder:
        (report,) = record(recorder)
    assert report.startswith("no video: ") and "No space left on device" in report


def test_a_file_in_the_way_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with make_recorder(tmp_path / "file" / "videos") as recorder:
        (report,) = record(recorder)
    assert report.startswith("no video: ") and "Not a directory" in report


def test_an_encoder_that_fails_is_told_of_with_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: "/bin/false")
    with make_recorder(tmp_path) as recorder:
        (report,) = record(recorder)
        assert report.startswith("no video: RuntimeError: ffmpeg could not write")
        assert record(recorder) == []  # the same again is not worth telling
        monkeypatch.undo()
        assert record(recorder) == [f"recorded {tmp_path / 'eval' / 'ep1_cam_allenvs.mp4'}"]


def test_an_environment_that_cannot_be_drawn_is_told_of(tmp_path: Path) -> None:
    with make_recorder(tmp_path, object()) as recorder:
        assert record(recorder) == [
            "no video: ValueError: object cannot be recorded: it has no render(state, width=…, height=…)"
        ]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_video_after_the_end_is_broken_off_in_time(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_TIMEOUT_S", 600.0 if stopped else 0.2)
    with make_recorder(tmp_path, Lamp(length=1000, pause=0.1)) as recorder:
        recorder.record({}, jax.random.key(0), 1)
        while not DRAWN:
            time.sleep(0.01)
        began = time.monotonic()
        if stopped:  # not even waited for
            recorder.break_off()
            recorder.record({}, jax.random.key(0), 2)
    assert time.monotonic() - began < 90.0  # the video takes 100 s
    assert recorder.reports() == ["no video: TimeoutError: broken off at the end of the run"]
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


def test_while_a_video_is_made_no_other_one_is(tmp_path: Path) -> None:
    with make_recorder(tmp_path, Lamp(length=6, pause=0.05)) as recorder:
        for count in (1, 2, 3):
            recorder.record({}, jax.random.key(0), count)
        assert recorder.reports() == ["videos take longer than the time between them: some are not made"]
    assert recorder.reports() == [f"recorded {tmp_path / 'eval' / 'ep1_cam_allenvs.mp4'}"]


def test_videos_have_no_effects(tmp_path: Path) -> None:
    with make_recorder(tmp_path) as recorder:
        record(recorder)
    assert {camera.effects for _, camera in DRAWN if camera} == {False}


def test_training_is_recorded_with_samples_and_evaluation_with_the_mode() -> None:
    shapes = {"num_envs": 2}
    states, _ = record_episodes(STEADY, Lamp(), {}, jax.random.key(0), **shapes)
    np.testing.assert_array_equal(states[..., 1], 3.0)
    sampled, _ = record_episodes(STEADY, Lamp(), {}, jax.random.key(0), **shapes, samples=True)
    assert len(np.unique(sampled[..., 1])) == sampled[..., 1].size
    assert abs(float(sampled[..., 1].mean()) - 3.0) < 1.0  # 16 samples of deviation 1: 4 standard errors


def test_an_episode_that_ended_is_not_drawn_again() -> None:
    states = jnp.arange(8.0).reshape(8, 1, 1) + jnp.zeros((8, 2, 1))
    done = jnp.zeros((8, 2), bool).at[1, 0].set(True).at[5, 1].set(True)
    frames = list(draw_episodes(Lamp(), states, done, (4, 4), every=2))
    assert [(frame[0, 0, 0], frame[0, 4, 0]) for frame in frames] == [(0, 0), (1, 2), (1, 4)]
    assert len(DRAWN) == 5


def test_intrinsics_become_a_field_of_view() -> None:
    camera = CameraConfig(resolution=(640, 480), intrinsics=(600.0, 600.0, 320.0, 240.0))
    assert camera.view.fovy == pytest.approx(math.degrees(2.0 * math.atan(240.0 / 600.0)))
    assert camera.view == CameraConfig(resolution=(640, 480)).view


BALL = """
<mujoco>
  <option><flag warmstart="disable"/></option>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <geom type="sphere" size="0.05" pos="0.3 -0.2 0.4" rgba="1 0 0 1" contype="0" conaffinity="0"/>
    <body><joint type="slide"/><geom type="sphere" size="0.001" pos="0 0 -9" contype="0" conaffinity="0"/></body>
  </worldbody>
</mujoco>
"""


@cases(
    "up intrinsics",
    ([0.0, 0.0, 1.0], [200.0, 200.0, 80.0, 60.0]),
    ([0.0, 1.0, 0.3], [200.0, 200.0, 80.0, 60.0]),
    ([0.0, 0.0, -1.0], [150.0, 150.0, 80.0, 60.0]),
    ([0.0, 0.0, 1.0], [100.0, 200.0, 100.0, 40.0]),
)
def test_a_point_is_drawn_where_eye_target_up_and_intrinsics_project_it(up: list, intrinsics: list) -> None:
    eye, target, ball = np.array([-1.4, 1.0, 1.2]), np.array([0.2, 0.0, 0.2]), np.array([0.3, -0.2, 0.4])
    camera = CameraConfig(resolution=(160, 120), eye=tuple(eye), target=tuple(target), up=up, intrinsics=intrinsics)
    picture = render(Appearance(asset=BALL, qpos=np.zeros(1)), width=160, height=120, camera=camera.view).astype(int)
    rows, columns = np.nonzero(picture[..., 0] - picture[..., 1] > 100)

    ahead = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(ahead, up) / np.linalg.norm(np.cross(ahead, up))
    down = np.cross(ahead, right)
    fx, fy, cx, cy = intrinsics
    x, y, z = (ball - eye) @ np.stack([right, down, ahead], axis=1)
    assert columns.mean() + 0.5 == pytest.approx(cx + fx * x / z, abs=1.0)
    assert rows.mean() + 0.5 == pytest.approx(cy + fy * y / z, abs=1.0)


@refusals(
    ({"eye": (1.0, 0.0, 0.0), "target": (1.0, 0.0, 0.0)}, "eye", "both"),
    ({"intrinsics": (0.0, 600.0, 320.0, 240.0)}, "fx", "> 0"),
)
def test_a_camera_that_sees_nothing_is_refused(given: dict[str, Any], key: str, word: str) -> None:
    refused(CameraConfig, **given, key=key, word=word)


def test_a_camera_may_look_straight_down() -> None:
    view = CameraConfig(resolution=(160, 120), eye=(0.3, -0.2, 2.0), target=(0.3, -0.2, 0.0)).view
    assert render(Appearance(asset=BALL, qpos=np.zeros(1)), width=160, height=120, camera=view)[60, 80, 0] > 100


@pytest.mark.slow
def test_a_camera_sees_from_where_it_stands() -> None:
    env = PushCubeRL()
    state, _ = env.reset(jax.random.key(0))
    near = env.render(state, 64, 48, CameraView((-1.5, -1.0, 0.5), (-0.6, -0.4, 0.05), 30.0))
    away = env.render(state, 64, 48, CameraView((-1.5, -1.0, 0.5), (-3.0, -2.0, 0.5), 30.0))
    orange = [((p[..., 0] > 120) & (p[..., 2] < 90)).sum() for p in (near.astype(int), away.astype(int))]
    assert orange[0] > 20 and orange[1] == 0  # the cube, and no cube


def test_without_cameras_nothing_is_made(tmp_path: Path) -> None:
    with VideoRecorder(STEADY, {}, (), tmp_path) as recorder:
        recorder.record({}, jax.random.key(0), 0)
        assert recorder.reports() == []
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@refusals(
    ({"mode": "reset"}, "trainer.events.eval.cam", "{func, mode"),
    ({"params": {"nam": "x"}}, "trainer.events.eval.cam.params.nam", "'name'"),
    ({"interval_step": 0}, "trainer.events.eval.cam.interval_step", "got 0"),
    ({"interval": 3}, "trainer.events.eval.cam", "{func, mode"),
)
def test_a_wrong_event_is_refused(tmp_path: Path, given: dict[str, Any], key: str, word: str) -> None:
    refused(lambda: parse_config(raw(tmp_path, {**EVENT, **given})), key=key, word=word)
