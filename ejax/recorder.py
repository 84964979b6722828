"""Films of evaluations, made beside the training: EmbodiChain's event ``record_camera_data_async``.

The episodes are played on the device; drawing and encoding happen in a thread of their own. A recorder that fails, or
is still busy, costs the film and nothing else: what happened is told by ``reports``.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import jax
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt

from ejax.types import Array, CameraView, Env, Key, Params, Policy, PyTree, RenderableEnv
from ejax.video import tile_frames, write_video

_FPS = 20
_MOST_ENVS = 4
_CLOSE_TIMEOUT_S = 120.0
_UNLIMITED = 1000
"""Steps filmed of an environment without a time limit."""

Vector = tuple[float, float, float]


class CameraConfig(BaseModel):
    """``params`` of ``record_camera_data_async``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "cam"
    resolution: tuple[PositiveInt, PositiveInt] = (640, 480)
    """(width, height) of one environment's picture."""
    eye: Vector = (-1.4, 1.4, 2.0)
    target: Vector = (0.0, 0.0, 0.0)
    up: Vector = (0.0, 0.0, 1.0)
    """Only z up."""
    intrinsics: tuple[float, float, float, float] | None = None
    """(fx, fy, cx, cy) in pixels; the principal point is taken to be the centre. None: (600, 600, w/2, h/2)."""
    max_env_num: PositiveInt = 16
    save_path: str | None = None
    """Folder. None: ``videos/eval`` in the run's folder."""
    interval_step: PositiveInt = 1
    """Every how many steps a frame is taken; the event's key of this name."""

    @property
    def view(self) -> CameraView:
        fy = 600.0 if self.intrinsics is None else self.intrinsics[1]
        return CameraView(self.eye, self.target, float(np.degrees(2.0 * np.arctan(self.resolution[1] / (2.0 * fy)))))


class EvaluationRecorder:
    """Films the evaluations of one run. A context manager: leaving it waits for the film under way."""

    def __init__(self, policy: Policy, env: Env, cameras: tuple[CameraConfig, ...], folder: Path) -> None:
        self._policy, self._env, self._cameras, self._folder = policy, env, cameras, folder
        self._thread = ThreadPoolExecutor(1, "ejax-recorder") if cameras else None
        self._film: Future[list[Path]] | None = None
        self._reports: list[str] = []
        self._skipped = False

    def record(self, params: Params, key: Key, count: int) -> None:
        """Film one evaluation, unless the last film is still being made.

        Args:
            count: number of the film, part of its file's name.
        """
        if self._thread is None:
            return
        if not isinstance(self._env, RenderableEnv):
            self._reports.append(f"no film: {type(self._env).__name__} cannot be drawn")
            self._cameras = ()
            self._thread = None
            return
        self._collect(timeout=None)
        if self._film is not None:
            if not self._skipped:
                self._reports.append("films take longer than evaluations come: some are not filmed")
            self._skipped = True
            return
        num_envs = min(_MOST_ENVS, *(camera.max_env_num for camera in self._cameras))
        episodes = play(self._policy, self._env, params, key, num_envs=num_envs)  # dispatched, not waited for
        self._film = self._thread.submit(self._make, episodes, count)

    def reports(self) -> list[str]:
        """What there is to tell since the last call."""
        self._collect(timeout=None)
        told, self._reports = self._reports, []
        return told

    def __enter__(self) -> "EvaluationRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._collect(timeout=_CLOSE_TIMEOUT_S)
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _collect(self, timeout: float | None) -> None:
        if self._film is None or (timeout is None and not self._film.done()):
            return
        film, self._film = self._film, None
        try:
            self._reports += [f"filmed {path}" for path in film.result(timeout)]
        except Exception as error:  # whatever it was, the training is worth more than the film
            self._reports.append(f"no film: {type(error).__name__}: {error}")

    def _make(self, episodes: tuple[PyTree, Array], count: int) -> list[Path]:
        paths = []
        for camera in self._cameras:
            folder = self._folder if camera.save_path is None else Path(camera.save_path)
            path = folder / f"ep{count}_{camera.name}_allenvs.mp4"
            frames = draw(self._env, *episodes, camera.resolution, camera.view, every=camera.interval_step)
            paths.append(write_video(path, frames, _FPS))
        return paths


@partial(jax.jit, static_argnames=("policy", "env", "num_envs"))
def play(policy: Policy, env: Env, params: Params, key: Key, *, num_envs: int) -> tuple[PyTree, Array]:
    """States [T, N, ...] and ends [T, N] of one episode each with the distribution's mode, played on past its end."""
    key_reset, key_steps = jax.random.split(key)
    state, obs = jax.vmap(env.reset)(jax.random.split(key_reset, num_envs))

    def one_step(carry: tuple[PyTree, PyTree], key: Key) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, Array]]:
        state, obs = carry
        action = policy.apply(params, obs)[0].mode()
        state, timestep = jax.vmap(env.step)(state, action, jax.random.split(key, num_envs))
        return (state, timestep.obs), (state, timestep.terminated | timestep.truncated)

    keys = jax.random.split(key_steps, env.max_episode_steps or _UNLIMITED)
    return jax.lax.scan(one_step, (state, obs), keys)[1]


def draw(
    env: Env,
    states: PyTree,
    done: Array,
    resolution: tuple[int, int],
    view: CameraView | None = None,
    *,
    every: int = 1,
) -> Iterator[NDArray[np.uint8]]:
    """Frames of episodes side by side, until the last of them has ended; one that ended stands still.

    Raises:
        ValueError: the environment cannot be drawn.
    """
    if not isinstance(env, RenderableEnv):
        raise ValueError(f"{type(env).__name__} cannot be filmed: it has no render(state, width=…, height=…)")
    states, ended = jax.device_get((states, done))
    last = np.where(ended.any(axis=0), ended.argmax(axis=0), len(ended) - 1)
    width, height = resolution
    for t in range(0, int(last.max()) + 1, every):
        shown = [jax.tree.map(lambda x, i=i, t=t: x[min(t, last[i]), i], states) for i in range(len(last))]
        yield tile_frames(np.stack([env.render(state, width, height, view) for state in shown]))
