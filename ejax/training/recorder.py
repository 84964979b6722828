"""Videos of a run, made during the training: EmbodiChain's event ``record_camera_data_async``.

A thread plays, draws and encodes; a recorder that fails or is busy costs the video and nothing else. The thread is not
niced: that gains nothing, and what a starved thread holds of Python's lock makes single updates late.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.config.models import CameraConfig
from ejax.envs.description import caption_of
from ejax.episodes import record_episodes
from ejax.numerics.weight_average import acting_params
from ejax.runtime.sharding import local_copy
from ejax.schema.messages import explain
from ejax.training.callbacks import Callback, TrainingRun
from ejax.types import Array, CameraView, Env, Key, Params, Phase, Policy, PyTree, RenderableEnv

_FPS = 20
MAX_ENVS = 4
_CLOSE_TIMEOUT_S = 120.0
_LAST_TIMEOUT_S = 10.0
"""For a video that is broken off: one more frame, and ffmpeg's end."""


class VideoRecorder(Callback, AbstractContextManager["VideoRecorder"]):
    """Makes the videos of one run, one at a time, in ``folder``, and draws each phase's environment of ``envs``: after
    each evaluation; of a run without evaluations, at each checkpoint.

    A context manager: leaving it waits for the video under way, unless an exception ended the run. ``draws`` False: it
    only takes part in copying the parameters for another process, which records them.
    """

    def __init__(
        self,
        policy: Policy,
        envs: Mapping[Phase, Env],
        cameras: tuple[CameraConfig, ...],
        folder: Path,
        device: jax.Device | None = None,
        *,
        draws: bool = True,
    ) -> None:
        self._device = device or jax.devices()[0]
        self._policy, self._envs, self._cameras, self._folder = policy, envs, cameras, folder
        self._thread = ThreadPoolExecutor(1, "ejax-recorder") if cameras and draws else None
        self._video: Future[list[Path]] | None = None
        self._broken_off = threading.Event()
        self._reports: list[str] = []
        self._known: set[str] = set()
        """Reports of what goes wrong, each of which is made once."""

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self._record_run(run, run.cadence.video_number(run.update))

    def on_save(self, run: TrainingRun, path: Path | None) -> None:
        if not run.config.trainer.enable_eval:
            self._record_run(run, run.update)

    def _record_run(self, run: TrainingRun, number: int) -> None:
        if not self._cameras:
            return
        # learners may have the parameters on several devices, or across processes, of which all take part
        params = local_copy(acting_params(run.state.train), self._device)
        self.record(params, jax.random.key(run.config.trainer.eval_seed), number)

    def record(self, params: Params, key: Key, count: int) -> None:
        """Record the policy of this moment with all cameras, unless the last videos are still being made.

        Start states and samples follow from ``key``; ``count`` is part of the file's name.
        """
        if self._thread is None or self._broken_off.is_set():
            return
        self._collect()
        if self._video is None:
            self._video = self._thread.submit(self._make, params, key, count)
        else:
            self._report_once("videos take longer than the time between them: some are not made")

    def reports(self) -> list[str]:
        """Return the messages since the last call."""
        self._collect()
        messages, self._reports = self._reports, []
        return messages

    def break_off(self) -> None:
        """Give up the video under way, and make no more."""
        self._broken_off.set()

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self._thread is None:
            return
        videos = [self._video] if self._video is not None else []
        if kind is None and not self._broken_off.is_set():
            wait(videos, _CLOSE_TIMEOUT_S)
        self.break_off()
        wait(videos, _LAST_TIMEOUT_S)
        self._collect()
        if self._video is not None:
            self._reports.append("no video: still at work, and left alone")
        self._thread.shutdown(wait=False)  # one that hangs must not keep the run from ending

    def _collect(self) -> None:
        if self._video is None or not self._video.done():
            return
        video, self._video = self._video, None
        try:
            self._reports += [f"recorded {path}" for path in video.result()]
        except Exception as error:  # of any kind: the training is worth more than the video
            self._report_once(f"no video: {explain(error, typed=True)}")

    def _report_once(self, text: str) -> None:
        self._reports += [] if text in self._known else [text]
        self._known.add(text)

    def _make(self, params: Params, key: Key, count: int) -> list[Path]:
        from ejax.runtime.video import write_video  # with ffmpeg, for runs that film

        # as many as fit side by side in a picture
        num_envs = min(MAX_ENVS, *(camera.max_env_num for camera in self._cameras))
        paths = []
        for phase in sorted({camera.phase for camera in self._cameras}):
            env, samples = _drawable(self._envs[phase]), phase == "train"
            states, done = record_episodes(self._policy, env, params, key, num_envs=num_envs, samples=samples)
            for camera in [each for each in self._cameras if each.phase == phase]:
                frames = draw_episodes(env, states, done, camera.resolution, camera.view, every=camera.interval_step)
                path = self._path(camera, f"ep{count}_{camera.name}_allenvs")
                below = self._folder.parent if camera.save_path is None else None
                paths.append(write_video(path, self._unless_broken_off(frames), _FPS, below=below))
        return paths

    def _path(self, camera: CameraConfig, name: str) -> Path:
        if camera.save_path is None:
            return self._folder / camera.phase / f"{name}.mp4"
        # several runs may share that folder: a name that is not taken
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        paths = (Path(camera.save_path) / f"{each}.mp4" for each in names)
        return next(path for path in paths if not path.exists())

    def _unless_broken_off(self, frames: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        for frame in frames:
            if self._broken_off.is_set():
                raise TimeoutError("broken off at the end of the run")
            yield frame


def draw_episodes(
    env: Env,
    states: PyTree,
    done: Array,
    resolution: tuple[int, int],
    view: CameraView | None = None,
    *,
    every: int = 1,
) -> Iterator[NDArray[np.uint8]]:
    """Draw episodes side by side, with ``caption(state)`` if the environment has it; one that ended stands still.

    They end with the last episode. A view that is not placed is ``film_view``'s. ValueError: it cannot be drawn.
    """
    from ejax.runtime.video import tile_frames, with_caption  # with pillow, for runs that film

    env = _drawable(env)
    states, ended = jax.device_get((states, done))
    last = np.where(ended.any(axis=0), ended.argmax(axis=0), len(ended) - 1)
    views = [view] * len(last)
    if view is None or view[:2] == CameraConfig().view[:2]:  # eye and target, as nobody gave them
        from ejax.envs.mujoco.scenery import film_view  # with MuJoCo, which a run without videos need not wait for

        rows = [jax.tree.map(lambda x, i=i: x[: last[i] + 1, i], states) for i in range(len(last))]
        views = [film_view(env, row, resolution[0] / resolution[1], view) for row in rows]
    drawn_at = np.full(len(last), -1)
    pictures: dict[int, NDArray[np.uint8]] = {}
    for t in range(0, int(last.max()) + 1, every):
        for i, at in enumerate(np.minimum(t, last)):
            if at != drawn_at[i]:  # an episode that ended is drawn once
                state = jax.tree.map(lambda x, i=i, at=at: x[at, i], states)
                pictures[i], drawn_at[i] = env.render(state, *resolution, views[i]), at
                if text := caption_of(env, state):
                    pictures[i] = with_caption(pictures[i], text)
        yield tile_frames(np.stack([pictures[i] for i in range(len(last))]))


def _drawable(env: Env) -> RenderableEnv:
    if not isinstance(env, RenderableEnv):
        raise ValueError(f"{type(env).__name__} cannot be recorded: it has no render(state, width=…, height=…)")
    return env
