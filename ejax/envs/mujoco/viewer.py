"""MuJoCo's viewer for states that are simulated elsewhere: it shows copies, and passes mouse and keys on.

A force of the mouse becomes the velocity change of one decision, Δq̇ = M(q)⁻¹ Jᵀ f · Δt, for every engine.
"""

import copy
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.drawing import Appearance, apply_appearance
from ejax.envs.mujoco.models import load_model

SPACE = 32
_LATE = 0.1  # s: what is later than that is not caught up with
_PAUSED = 0.02  # s between looks at the keys
_CLOSING = 5.0  # s that the window may take to go away


class Window:
    """The viewer's window, a context manager that closes it.

    Args:
        period: s of simulated time from one ``show`` to the next.
        speed: simulated seconds in a second.
        on_key: called with GLFW's number of a key, in the viewer's thread. The space bar pauses.
    Raises RuntimeError: there is no display, or the viewer does not start there.
    """

    def __init__(self, asset: str, period: float, *, speed: float = 1.0, on_key: Callable[[int], None]) -> None:
        self._asset, self._period, self._speed, self._on_key = asset, period, speed, on_key
        self._model = copy.copy(load_model(asset, visual=True))
        self._data = mujoco.MjData(self._model)
        self._paused = False
        before = set(threading.enumerate())
        self._handle = _launch(self._model, self._data, self._key)
        self._drawing = set(threading.enumerate()) - before
        camera = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_CAMERA, "main")
        follows = mujoco.mjtCamLight.mjCAMLIGHT_TRACK, mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
        if camera >= 0 and any(self._model.cam_mode[camera] == mode for mode in follows):  # their enum has no ``in``
            with self._handle.lock():
                self._handle.cam.type = mujoco.mjtCamera.mjCAMERA_TRACKING
                self._handle.cam.trackbodyid = self._model.cam_bodyid[camera]
        self._due = time.monotonic()

    @property
    def is_open(self) -> bool:
        return bool(self._handle.is_running())

    def show(self, seen: Appearance, qvel: NDArray[Any] | None, text: str) -> None:
        """Show a state, in NumPy's arrays, at its time: wait until then, and while paused. ``qvel``: [nv], or None."""
        model, data = self._model, self._data
        with self._handle.lock():
            apply_appearance(model, data, seen)
            data.qvel[:] = 0.0 if qvel is None else qvel
            data.time += self._period
            mujoco.mj_forward(model, data)
        self._handle.set_texts((None, None, text, ""))
        self._handle.sync()
        self._due += self._period / self._speed
        late = time.monotonic() - self._due
        if late < 0.0:
            time.sleep(-late)
        elif late > _LATE:
            self._due = time.monotonic()
        while self._paused and self.is_open:
            self._handle.sync()
            time.sleep(_PAUSED)
            self._due = time.monotonic()

    def velocity_change(self, duration: float) -> NDArray[np.float64]:
        """Return what the mouse's force does to the shown state in so many s: [nv], zeros while nothing is pulled."""
        model, data = self._model, self._data
        change = np.zeros((1, model.nv))
        with self._handle.lock():
            data.xfrc_applied[:] = 0.0
            mujoco.mjv_applyPerturbForce(model, data, self._handle.perturb)
            if data.xfrc_applied.any():
                force = np.zeros(model.nv)
                for body in np.flatnonzero(data.xfrc_applied.any(axis=1)):
                    push, turn = data.xfrc_applied[body, :3], data.xfrc_applied[body, 3:]
                    mujoco.mj_applyFT(model, data, push, turn, data.xipos[body], int(body), force)
                mujoco.mj_solveM(model, data, change, force[None])
        return change[0] * duration

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.close()
        for thread in self._drawing:  # a process that ends while it still draws may crash
            thread.join(_CLOSING)

    def _key(self, key: int) -> None:
        if key == SPACE:
            self._paused = not self._paused
        else:
            self._on_key(key)


def _launch(model: mujoco.MjModel, data: mujoco.MjData, on_key: Callable[[int], None]) -> Any:
    remedy = "pass --video FILE for a video instead"
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise RuntimeError(f"the viewer needs a display (DISPLAY or WAYLAND_DISPLAY); {remedy}")
    import mujoco.viewer  # starts GLFW

    try:
        return mujoco.viewer.launch_passive(model, data, key_callback=on_key, show_left_ui=False, show_right_ui=False)
    except RuntimeError as error:  # macOS without mjpython
        raise RuntimeError(f"MuJoCo's viewer does not start: {error}; {remedy}") from error
