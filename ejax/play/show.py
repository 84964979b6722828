"""A saved policy shown: in MuJoCo's viewer in real time, or in a video. ``ejax play``."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.config import ConfigError, Problem
from ejax.envs.description import caption_of
from ejax.envs.host.calls import closing
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.mujoco.drawing import AppearingEnv, asset_of
from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.mujoco.scenery import film_view
from ejax.envs.mujoco.viewer import Window
from ejax.envs.terms.commands import Command, hold
from ejax.envs.wrappers.wrapper import parts_of, replace_parts
from ejax.episodes import episodes
from ejax.evaluation import summarize
from ejax.logs.console import followed
from ejax.play.saved_policy import filmed, opened_policy, restore_policy
from ejax.runtime.video import with_caption, write_video
from ejax.schema.writing import by_product
from ejax.training.environments import build_env
from ejax.types import ChunkedEnv, Env, HostEnv, Params, Phase, Policy, PyTree, RenderableEnv, RenderableHostEnv

StatePatch: TypeAlias = Callable[[PyTree], PyTree]

_STEP = 0.1
"""m/s or rad/s of one press of a key."""
_UP, _DOWN, _LEFT, _RIGHT = 265, 264, 263, 262
# the viewer takes letters and the digits to 5 for itself
_AXES = {_UP: (0, 1), _DOWN: (0, -1), _LEFT: (2, 1), _RIGHT: (2, -1), ord("7"): (1, 1), ord("9"): (1, -1)}
"""Key, by GLFW's number -> the velocity's part and its sign, in the robot's frame: forward, left, turning left."""
_STOP = ord("8")
_TRACKED = {
    "metrics/linear_velocity_error": "mean_linear_velocity_error",
    "metrics/yaw_rate_error": "mean_yaw_rate_error",
}
"""Metrics of following a command: at the last step, as every metric, and also over the whole episode."""


class StepRecord(NamedTuple):
    """The frames after a decision, or at the start of an episode, and the decision's outcome."""

    frames: tuple[PyTree, ...]
    """States of one environment after each of the decision's actions; outside JAX its picture. NumPy."""
    reward: float = 0.0
    starts: bool = False
    ended: bool = False
    finite: bool = True
    facts: Mapping[str, float] = {}
    """``success`` and ``metrics/<name>``, where the environment reports them."""
    obs: PyTree = None
    """In JAX: the observation before the decision, and ``action``, which the environment was given then. NumPy."""
    action: PyTree = None


def play_episodes(
    policy: Policy,
    env: Env | RenderableHostEnv,
    params: Params,
    seed: int,
    *,
    samples: bool = False,
    patch: Callable[[PyTree], PyTree] = lambda state: state,
) -> Iterator[StepRecord]:
    """Play one row, episode after episode, without an end: the episodes of ``ejax evaluate --num-envs 1`` by this seed.

    ``patch`` changes the state [1, ...] before each decision, in JAX: a command from the keys, a blow, the mouse.
    """
    for made in episodes(policy, env, params, seed, samples=samples, patch=patch):
        if isinstance(env, HostEnv):
            frames: tuple[PyTree, ...] = (env.pictures()[0],)
        else:
            states = jax.tree.map(lambda x: x[:, 0], jax.device_get(made.states))
            frames = tuple(jax.tree.map(lambda x, i=i: x[i], states) for i in range(len(jax.tree.leaves(states)[0])))
        if made.timestep is None or not made.played[0]:
            yield StepRecord(frames, starts=True)
            continue
        row = jax.tree.map(lambda x: x[0], jax.device_get(made._replace(states=(), timestep=())))
        timestep = jax.device_get(made.timestep)
        info = timestep.info
        facts = {f"metrics/{name}": x for name, x in info.get("metrics", {}).items() if jnp.ndim(x) == 1}
        if "success" in info and not np.isnan(info["success"]).any():
            facts["success"] = info["success"]
        yield StepRecord(
            frames,
            reward=float(timestep.reward[0]),
            ended=bool((timestep.terminated | timestep.truncated)[0]),
            finite=bool(row.finite),
            facts={name: float(x[0]) for name, x in facts.items()},
            obs=row.obs,
            action=row.action,
        )


class PlayStats:
    """Counts what is played, and reports each episode's line."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._episodes: list[dict[str, float]] = []
        self._steps: list[StepRecord] = []

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    @property
    def text(self) -> str:
        rewards = [0.0, *(each.reward for each in self._steps)]
        return f"step {len(rewards) - 1}, reward {rewards[-1]:.3g}, return {sum(rewards):.3g}"

    def add(self, step: StepRecord) -> None:
        """Count a step; at an episode's end, report its line."""
        # outside JAX an environment starts again in the step that ends
        if step.starts or (self._steps and self._steps[-1].ended):
            self._steps = []
        if not step.starts:
            # without the states, which would fill the memory in a long episode
            self._steps.append(step._replace(frames=(), obs=None, action=None))
        if step.ended:
            self._end(step.facts)

    def summary(self) -> dict[str, object]:
        """Summarize the episodes that ended, as ``ejax evaluate`` does, and the part of one that was cut off."""
        cut: dict[str, object] = {}
        if self._steps and not self._steps[-1].ended:
            cut["cut off, not counted"] = self.text
        if not self._episodes:
            return {"episodes": 0, **cut}
        columns = {name: np.array([each[name] for each in self._episodes], np.float32) for name in self._episodes[0]}
        means = {name: float(x) for name, x in sorted(summarize(columns).items())}
        return {**means, "episodes": self.num_episodes, **cut}

    def _end(self, facts: Mapping[str, float]) -> None:
        steps, finite = self._steps, all(each.finite for each in self._steps)
        total = sum((each.reward for each in steps), 0.0)
        episode = {"return": total, "length": len(steps), "nonfinite": not finite, **facts}
        if "success" in facts and not finite:
            # an episode with NaN is not a success, as in ``ejax.evaluation``
            episode["success"] = min(facts["success"], 0.0)
        for name, mean in _TRACKED.items():
            if values := [each.facts[name] for each in steps if name in each.facts]:
                episode[f"metrics/{mean}"] = float(np.mean(values))
        self._episodes.append(episode)
        shown = {name.removeprefix("metrics/"): x for name, x in episode.items() if name != "nonfinite" or not finite}
        text = " ".join(f"{name}={float(value):.4g}" for name, value in shown.items())
        self._report(f"[episode {self.num_episodes}] {text}")


def take_until(
    steps: Iterator[StepRecord], stats: PlayStats, *, num_episodes: int | None = None, num_actions: int | None = None
) -> Iterator[PyTree]:
    """Yield the frames, counted, until so many episodes have ended, or so many actions were taken."""
    left = num_actions
    for step in steps:
        stats.add(step)
        for frame in step.frames:
            yield frame
            # an episode's start is seen too, and is not an action
            left = left if left is None or step.starts else left - 1
            if left == 0:
                return
        if num_episodes is not None and stats.num_episodes >= num_episodes:
            return


class HeldCommand:
    """A velocity command that holds until a key changes it; None: the drawn ones.

    ``velocity``: forward, left (m/s), turning left (rad/s).
    """

    def __init__(self, velocity: tuple[float, float, float] | None = None) -> None:
        self._velocity = velocity

    def press(self, key: int) -> None:
        """Take a key of the viewer, by GLFW's number."""
        if key == _STOP:
            self._velocity = (0.0, 0.0, 0.0)
        elif key in _AXES:
            velocity, (axis, sign) = list(self._velocity or (0.0, 0.0, 0.0)), _AXES[key]
            # 0.1 + 0.2 would be shown with 17 digits
            velocity[axis] = round(velocity[axis] + sign * _STEP, 6)
            self._velocity = (velocity[0], velocity[1], velocity[2])

    def __call__(self, state: PyTree) -> PyTree:
        velocity = self._velocity
        if velocity is None:
            return state
        return replace_parts(state, Command, lambda command: hold(command, jnp.asarray(velocity)))


def make_blows(model: mujoco.MjModel, size: float, every: int, seed: int) -> StatePatch:
    """Make a patch: every so many decisions the first free body gets ``size`` m/s more, in a random level direction.

    ValueError: nothing moves freely.
    """
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    if not len(free):
        raise ValueError(
            "--push: nothing in this model moves freely; push_joints_by_setting_velocity, of the run's "
            "trainer.events (--randomize), pushes joints"
        )
    start, random, waiting = int(model.jnt_dofadr[free[0]]), np.random.default_rng(seed), every

    def patch(state: PyTree) -> PyTree:
        nonlocal waiting
        # counted in decisions: a show at another speed gets the same blows
        waiting -= 1
        if waiting > 0:
            return state
        waiting, angle = every, random.uniform(-math.pi, math.pi)
        change = np.zeros(model.nv)
        # the first two of a free joint's six velocities are level: a blow upwards would only lift it
        change[start : start + 2] = size * math.cos(angle), size * math.sin(angle)
        return add_velocity(state, change)

    return patch


def add_velocity(state: PyTree, change: NDArray[np.float64]) -> PyTree:
    """Add ``change`` [nv] to the velocities of the simulation."""
    if not change.any():
        return state

    return replace_parts(state, PhysicsState, lambda x: replace(x, qvel=x.qvel + change.astype(x.qvel.dtype)[None]))


_SIZE = (640, 480)


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """Options of a show; those of the same name are as in ``evaluate_run``."""

    video: Path | None = None
    """None: the viewer."""
    member: int | None = None
    checkpoint: str | None = None
    device: str = "cpu"
    seed: int | None = None
    episodes: int | None = None
    """None: until ``seconds`` are over; without those too one in a video, in the viewer until it is closed."""
    seconds: float | None = None
    speed: float = 1.0
    samples: bool = False
    randomize: bool = False
    command: tuple[float, float, float] | None = None
    """Command of a legged robot: forward, left (m/s), turning left (rad/s)."""
    push: float | None = None
    """m/s of a blow."""
    push_every: float = 3.0
    """s from one to the next."""

    def __post_init__(self) -> None:
        for name in ("episodes", "seconds", "speed", "push", "push_every"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be > 0, got {value}")


def play_run(
    run: Path, overrides: Sequence[str] = (), viewer: Viewer = Viewer(), report: Callable[[str], None] = print
) -> dict[str, object]:
    """Play a checkpoint of a run to somebody who looks.

    Args:
        overrides: ``env.key=value``: another environment than that of the training.
        report: gets a line for each episode.

    Returns:
        The metrics of the episodes that ended, as ``evaluate_run`` has them, the checkpoint and what was written.

    Raises:
        FileNotFoundError, CheckpointError, ConfigError: as ``evaluate_run``.
        ValueError: an environment that cannot be drawn so, or something to happen that it does not have.
        RuntimeError: there is no display.
    """
    stats = PlayStats(report)
    opened = opened_policy(
        run, overrides, member=viewer.member, checkpoint=viewer.checkpoint, device=viewer.device, command="ejax play"
    )
    with opened as (directory, config, path):
        if viewer.randomize and not config.trainer.events.train:
            text = "is empty, so --randomize has nothing to switch on"
            raise ConfigError([Problem("trainer.events.train", text)])
        phase: Phase = "train" if viewer.randomize else "eval"
        quarantine = directory.results / "quarantine" / "play"
        env: Any = build_env(filmed(config), phase=phase, num_envs=1, quarantine=quarantine)
        seed = config.trainer.eval_seed if viewer.seed is None else viewer.seed
        with closing(env) if isinstance(env, GuardedEnv) else nullcontext():
            policy, params = restore_policy(config, env, path)
            begin = partial(play_episodes, policy, env, params, seed, samples=viewer.samples)
            if isinstance(env, GuardedEnv):
                facts = _film_outside(config.env.id, env, begin, viewer, stats)
            else:
                facts = _show(config.env.id, env, begin, seed, viewer, stats)
    return {**stats.summary(), "checkpoint": str(path), **facts}


def _film_outside(
    name: str, env: GuardedEnv, begin: Callable[..., Iterator[StepRecord]], viewer: Viewer, stats: PlayStats
) -> dict[str, object]:
    for option in ("command", "push"):
        if getattr(viewer, option) is not None:
            raise ValueError(f"--{option}: {name} is stepped outside JAX, where ejax cannot change its state")
    if viewer.video is None:
        raise ValueError(f"{name} is stepped outside JAX and draws itself; pass --video FILE")
    fps = env.frames_per_second
    frames = (with_caption(frame, stats.text) for frame in _until(begin(), stats, viewer, 1.0 / fps))
    shown = followed(frames, f"filming {viewer.video}", env.max_episode_steps)
    return _film(viewer.video, shown, fps * viewer.speed)


def _show(
    name: str, env: Any, begin: Callable[..., Iterator[StepRecord]], seed: int, viewer: Viewer, stats: PlayStats
) -> dict[str, object]:
    asset = asset_of(env)
    if not isinstance(env, RenderableEnv) or (asset is None and viewer.video is None):
        raise ValueError(f"{name} cannot be shown: it has no MuJoCo model; ejax evaluate gives its numbers")
    state = jax.eval_shape(env.reset, jax.random.key(0))[0]
    if viewer.command is not None and not parts_of(state, Command):
        raise ValueError(f"--command: {name} has no commands; VelocityRL has (docs/locomotion.md)")
    patches: list[StatePatch] = [command := HeldCommand(viewer.command)]
    period = env.control_period
    if viewer.push is not None:
        if asset is None or not parts_of(state, PhysicsState):
            raise ValueError(f"--push: {name} has no MuJoCo physics")
        every = max(1, round(viewer.push_every / period))
        patches.append(make_blows(load_model(asset), viewer.push, every, seed))
    steps = begin(patch=lambda state: reduce(lambda state, patch: patch(state), patches, state))
    period_of_action = period / (env.actions_per_decision if isinstance(env, ChunkedEnv) else 1)
    seen = _until(steps, stats, viewer, period_of_action)
    # an episode's first frame comes before its first decision, which is when a held command enters the state
    held = map(command, seen)
    frames = ((frame, "   ".join(filter(None, (caption_of(env, frame), stats.text)))) for frame in held)
    if viewer.video is not None:
        most = env.max_episode_steps and env.max_episode_steps * (viewer.episodes or 1)
        # all of them first: the camera is to show all that moves
        shown = list(followed(frames, f"playing {name}", most))
        states = jax.tree.map(lambda *x: jnp.stack(x), *(frame for frame, _ in shown))
        view = film_view(env, states, _SIZE[0] / _SIZE[1])
        pictures = (with_caption(env.render(frame, *_SIZE, view), text) for frame, text in shown)
        drawn = followed(pictures, f"drawing {viewer.video}", len(shown))
        return _film(viewer.video, drawn, viewer.speed / period_of_action)
    with Window(str(asset), period_of_action, speed=viewer.speed, on_key=command.press) as window:
        # the mouse comes last, over the command and the blows
        patches.append(lambda state: add_velocity(state, window.velocity_change(period)))
        began, num_frames = time.monotonic(), -2  # the start, and the first action, which compiles
        for frame, text in frames:
            physics = parts_of(frame, PhysicsState)
            appearance = jax.device_get(cast(AppearingEnv, env).appearance(frame))
            window.show(appearance, physics[0].qvel if physics else None, text)
            num_frames += 1
            if num_frames == 0:
                began = time.monotonic()
            if not window.is_open:
                break
    if num_frames <= 0:
        return {}
    return {"simulated seconds in a second": num_frames * period_of_action / (time.monotonic() - began)}


def _film(path: Path, frames: Iterator[Any], fps: float) -> dict[str, object]:
    with by_product(str(path)):  # the episodes' numbers are there
        return {"video": write_video(path, frames, fps)}
    return {}


def _until(steps: Iterator[StepRecord], stats: PlayStats, viewer: Viewer, period: float) -> Iterator[PyTree]:
    num_actions = None if viewer.seconds is None else max(1, round(viewer.seconds / period))
    endless = viewer.video is None or num_actions is not None
    num_episodes = viewer.episodes or (None if endless else 1)
    return take_until(steps, stats, num_episodes=num_episodes, num_actions=num_actions)
