"""``ejax play``: the episodes are an evaluation's, a hand reaches into them, and somebody sees them."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases, refused
from flax import struct
from numpy.typing import NDArray
from tiny import EPISODE, tiny
from toy_tasks import Formula, Line, told

from ejax.config import parse_config
from ejax.envs.adapters.gymnasium import vectorize
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.mujoco import viewer
from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.terms.commands import Command, CommandRanges
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.wrapper import replace_parts
from ejax.evaluate import main as evaluate_main
from ejax.evaluation import evaluate, summarize
from ejax.play.__main__ import main
from ejax.play.saved_policy import film_host, filmed
from ejax.play.show import (
    HeldCommand,
    PlayStats,
    StepRecord,
    Viewer,
    _show,
    make_blows,
    play_episodes,
    play_run,
    take_until,
)
from ejax.run import train
from ejax.types import Array, HostEnv, Key, RenderableHostEnv, Timestep

SEED = 3
KEY = jax.random.key(SEED)


@struct.dataclass
class Place:
    x: Array
    lives: Array


class Drift(Line):
    """A number that drifts by itself and by the action; an episode lasts as long as its draw says."""

    def reset(self, key: Key) -> tuple[Place, Array]:
        state = Place(jax.random.normal(key), jax.random.randint(key, (), 2, 6))
        return state, state.x[None]

    def step(self, state: Place, action: Array, key: Key) -> tuple[Place, Timestep]:
        state = Place(state.x + action[0] + 0.1 * jax.random.normal(key), state.lives - 1)
        return state, told(state.x[None], state.x, state.lives <= 0, success=state.x > 0, metrics={"x": state.x})


HALVING = Formula(lambda obs: -0.5 * obs)
"""Takes half of what it sees away."""


def playing(**options: Any) -> Iterator[StepRecord]:
    return play_episodes(HALVING, Drift(), {}, SEED, **options)


@pytest.mark.slow
def test_the_episodes_are_those_of_an_evaluation_in_one_slot() -> None:
    lines: list[str] = []
    stats = PlayStats(lines.append)
    frames = list(take_until(playing(), stats, num_episodes=4))
    episodes = evaluate(HALVING, Drift(), {}, KEY, num_envs=1, num_episodes=4)
    expected = {name: float(x) for name, x in summarize(episodes).items()}
    assert {name: value for name, value in stats.summary().items() if name != "episodes"} == pytest.approx(expected)
    assert len(lines) == 4 and all("length=" in line and "success=" in line for line in lines)
    assert len(frames) == int(episodes["length"].sum()) + 4  # each episode's start too


def test_seconds_end_it_in_the_middle_of_an_episode() -> None:
    stats = PlayStats(print)
    assert len(list(take_until(playing(), stats, num_actions=1))) == 2
    (cut,) = stats.summary().keys() - {"episodes"}
    assert stats.summary() == {"episodes": 0, cut: stats.text} and "step 1, " in stats.text and "return" in stats.text


def test_samples_are_not_the_mode() -> None:
    mode, sample = (list(take_until(playing(samples=x), PlayStats(print), num_actions=1))[-1].x for x in (False, True))
    assert mode != sample


def test_every_action_of_a_chunk_is_seen() -> None:
    twice = Formula(lambda obs: jnp.concatenate([-0.5 * obs] * 2, axis=-1))
    steps = play_episodes(twice, ActionChunk(Drift(), 2), {}, SEED)
    start, decision = next(steps), next(steps)
    (before,), (first, second) = start.frames, decision.frames
    assert [int(each.lives) for each in (first, second)] == [int(before.lives) - 1, int(before.lives) - 2]
    assert decision.reward == pytest.approx(float(first.x + second.x))


def test_a_patch_changes_the_state_that_is_stepped() -> None:
    steps = playing(patch=lambda state: replace(state, x=state.x + 100.0))
    next(steps)
    assert next(steps).frames[0].x > 90.0


def test_a_command_holds_against_drawn_ones_until_a_key_changes_it() -> None:
    ranges, held = CommandRanges(resampling_time=(0.01, 0.01), standing=1.0), HeldCommand((1.0, 0.0, 0.5))
    state = {"inside": ranges.draw(KEY, 0.02)}
    assert HeldCommand()(state) is state
    commanded = held(state)["inside"]
    after = ranges.after(commanded, KEY, 0.02)
    assert isinstance(after, Command) and not after.stands and not after.follows_heading
    np.testing.assert_allclose(after.velocity, [1.0, 0.0, 0.5])
    for key in (265, ord("7"), 262, ord("Z")):  # up, 7, right; the last has no meaning
        held.press(key)
    np.testing.assert_allclose(held(state)["inside"].velocity, [1.1, 0.1, 0.4], rtol=1e-6)
    held.press(ord("8"))
    np.testing.assert_array_equal(held(state)["inside"].velocity, 0.0)


def test_a_blow_has_its_size_and_its_time() -> None:
    model = load_model("push_cube.xml")
    blow = make_blows(model, 2.0, 3, seed=0)
    state = PhysicsState(qpos=jnp.zeros((1, model.nq)), qvel=jnp.zeros((1, model.nv)))
    changes = [np.asarray(blow(state).qvel[0]) for _ in range(6)]
    assert [bool(change.any()) for change in changes] == [False, False, True] * 2
    assert np.linalg.norm(changes[2][6:8]) == pytest.approx(2.0) and not changes[2][8:].any()
    assert (changes[2] != changes[5]).any()
    with pytest.raises(ValueError, match="--push: nothing in this model moves freely"):
        make_blows(load_model("cart_pole.xml"), 2.0, 3, seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    return train(parse_config(tiny(folder, "PushCubeRL", iterations=1)), run_dir=folder / "run").run_dir


class FakeHandle:
    """A stand-in for the handle of ``launch_passive``, for ``ejax.envs.mujoco.viewer``; it keeps what it is shown."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData, on_key: Any) -> None:
        self.model, self.data, self.press = model, data, on_key
        self.cam, self.perturb = mujoco.MjvCamera(), mujoco.MjvPerturb()
        self.seen: list[NDArray[np.float64]] = []
        self.texts: list[str] = []
        self.closed = False

    def is_running(self) -> bool:
        return not self.closed

    def lock(self) -> Any:
        return contextlib.nullcontext()

    def sync(self) -> None:
        self.seen.append(self.data.qpos.copy())

    def set_texts(self, texts: tuple[Any, ...]) -> None:
        self.texts.append(texts[2])

    def close(self) -> None:
        self.closed = True


class Pulling(FakeHandle):
    """Somebody pulls the cube up."""

    def sync(self) -> None:
        super().sync()
        cube = self.model.body("cube").id
        self.perturb.select, self.perturb.active = cube, int(mujoco.mjtPertBit.mjPERT_TRANSLATE)
        self.perturb.localmass = self.model.body_mass[cube]
        self.perturb.refpos[:] = self.perturb.refselpos[:] = self.data.xpos[cube] + np.array([0.0, 0.0, 1.0])


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """``Fake``: what is launched; ``handle``: what was launched last."""
    made = SimpleNamespace(Fake=FakeHandle)

    def launch(*args: Any) -> FakeHandle:
        made.handle = made.Fake(*args)
        return made.handle

    monkeypatch.setattr(viewer, "_launch", launch)
    monkeypatch.setattr(viewer.time, "sleep", lambda _: None)
    yield made
    assert made.handle.closed


@pytest.mark.slow
def test_the_viewer_is_shown_every_step_and_the_numbers(run: Path, window: SimpleNamespace) -> None:
    lines: list[str] = []
    facts = play_run(run, viewer=Viewer(episodes=1), report=lines.append)
    assert len(window.handle.seen) == EPISODE + 1 and facts["episodes"] == 1
    assert window.handle.texts[0].startswith("step 0") and window.handle.texts[-1].startswith(f"step {EPISODE}, ")
    assert lines[0].startswith("[episode 1] return=") and facts["checkpoint"]
    np.testing.assert_allclose(window.handle.data.mocap_pos[0], (-0.9, -0.6, 0.05), atol=0.2)


def test_the_viewer_goes_with_a_robot_that_walks(window: SimpleNamespace) -> None:
    asset = VelocityRL().legged.xml
    with viewer.Window(asset, 0.02, on_key=lambda key: None):
        camera, model = window.handle.cam, window.handle.model
        assert camera.type == mujoco.mjtCamera.mjCAMERA_TRACKING
        assert model.body(camera.trackbodyid).name == model.body(1).name


def test_a_held_command_is_written_on_the_first_picture_too(window: SimpleNamespace) -> None:
    env = VelocityRL(physics="mujoco")
    start = jax.jit(env.reset)(KEY)[0]
    stats, viewed = PlayStats(print), Viewer(command=(1.0, 0.0, 0.5))
    _show("VelocityRL", env, lambda patch: iter([StepRecord((start,), starts=True)]), SEED, viewed, stats)
    (text,) = window.handle.texts
    assert text.startswith("command: +1.0 m/s forward, +0.0 m/s left, +0.5 rad/s   step 0")


@pytest.mark.slow
def test_a_force_of_the_mouse_reaches_the_physics(run: Path, window: SimpleNamespace) -> None:
    heights = []
    for window.Fake in (FakeHandle, Pulling):
        play_run(run, viewer=Viewer(seconds=0.16, samples=False), report=print)
        heights.append(window.handle.seen[-1][8])
    assert heights[1] > heights[0] + 0.01


@pytest.mark.slow
def test_closing_the_window_ends_it(run: Path, window: SimpleNamespace) -> None:
    class Closing(FakeHandle):
        def sync(self) -> None:
            super().sync()
            self.closed = len(self.seen) == 3

    window.Fake = Closing
    assert play_run(run)["episodes"] == 0 and len(window.handle.seen) == 3


@pytest.mark.slow
def test_without_a_display_the_remedy_is_a_video(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(viewer.sys, "platform", "linux")
    assert main([str(run)]) == 2
    assert "the viewer needs a display" in (error := capsys.readouterr().err) and "--video FILE" in error


@pytest.mark.slow
def test_a_video_is_written_with_blows_and_a_summary(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = tmp_path / "push.mp4"
    assert main([str(run), "--video", str(video), "--push", "1", "--push-every", "0.1", "--seed", "2"]) == 0
    assert video.stat().st_size > 0
    output = capsys.readouterr().out
    assert (
        "[episode 1] return=" in output and "[summary] eval/avg_reward:" in output and "[summary] episodes: 1" in output
    )


@pytest.mark.slow
@cases(
    "options text",
    (["--command", "1,0,0"], "--command: PushCubeRL has no commands"),
    (["--randomize"], "trainer.events.train: is empty"),
    (["--speed", "0"], "--speed must be > 0, got 0.0"),
    (["trainer.seed=3"], "can change env.… only"),
)
def test_what_the_run_does_not_have_is_refused(
    run: Path, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--video", "never.mp4", *options]) == 2
    assert text in capsys.readouterr().err


def test_an_export_is_told_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parity.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "it is an export: name the run that it was made from" in capsys.readouterr().err


@pytest.mark.slow
def test_a_video_that_fails_costs_the_video_and_not_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(parse_config(tiny(tmp_path, iterations=1)), run_dir=tmp_path / "run").run_dir
    assert evaluate_main([str(run), "--episodes", "2", "--num-envs", "2", "--video", str(tmp_path / "a.mp4")]) == 1
    output = capsys.readouterr().out
    assert "[summary] eval/avg_reward:" in output and "no video: ValueError: PointMassRL cannot be recorded" in output
    assert main([str(run), "--video", str(tmp_path / "a.mp4")]) == 2
    assert "PointMassRL cannot be shown" in (error := capsys.readouterr().err) and "ejax evaluate gives" in error


class Glowing(gymnasium.Env[Any, Any]):
    """An environment that is drawn as bright as its time, and lasts as many steps as its seed says, two or four."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 as Gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.length = 0, 2 + 2 * ((seed or 0) % 2)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(1, self.time, np.float32), 1.0, self.time >= self.length, False, {}

    def render(self) -> Any:
        return None if self.render_mode is None else np.full((4, 4, 3), 10 * self.time, np.uint8)


def glowing(num_envs: int = 1, render_mode: str | None = "rgb_array") -> Any:
    def make() -> Glowing:
        return Glowing(render_mode)

    return vectorize(make(), make, num_envs)


def test_gymnasiums_environments_are_played_in_their_own_pictures() -> None:
    env = glowing()
    assert isinstance(env, RenderableHostEnv) and isinstance(env, HostEnv) and env.frames_per_second == 10.0
    stats = PlayStats(print)
    frames = list(take_until(play_episodes(HALVING, env, {}, seed=0), stats, num_episodes=2))
    assert frames[0].shape == (4, 4, 3) and [int(each[0, 0, 0]) for each in frames[:2]] == [0, 10]
    assert stats.summary()["episodes"] == 2 and len(frames) == 1 + 2 * float(str(stats.summary()["eval/avg_length"]))


def test_rows_are_filmed_until_the_last_episode_has_ended() -> None:
    frames = list(film_host(HALVING, glowing(4), {}, seed=0))
    assert frames[0].shape == (8, 8, 3) and 2 <= len(frames) <= 4
    assert frames[-1].max() == 10 * (len(frames) - 1)


def test_an_environment_that_draws_nothing_says_what_it_needs() -> None:
    refused(lambda: glowing(render_mode=None).pictures(), match=r"it needs env\.cfg\.render_mode rgb_array")


def test_pictures_that_need_a_missing_package_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: Glowing) -> Any:
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr(Glowing, "render", render)
    with pytest.raises(ImportError, match="pygame is not installed"):  # which every command says in a line
        glowing().pictures()


def test_gymnasium_is_told_to_draw_before_it_is_made() -> None:
    config = parse_config(tiny(env="gymnasium:Pendulum-v1"))
    assert filmed(config).env.cfg["render_mode"] == "rgb_array"
    chosen = parse_config(config.to_dict(), ["env.cfg.render_mode=human"])
    assert filmed(chosen) == chosen
    pure = parse_config(tiny())
    assert filmed(pure) == pure


def test_parts_are_found_inside_wrappers() -> None:
    inside = PhysicsState(qpos=jnp.zeros(1), qvel=jnp.zeros(1))
    changed = replace_parts({"env": (inside, jnp.ones(2))}, PhysicsState, lambda x: replace(x, qvel=x.qvel + 1.0))
    assert changed["env"][0].qvel == 1.0 and (changed["env"][1] == 1.0).all()
