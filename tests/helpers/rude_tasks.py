"""Environments that do what no environment should: end the process, hang, leave threads behind."""

import ctypes
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from host_tasks import Drift
from numpy.typing import NDArray

from ejax.envs.host.pure_host import PureHostEnv


class Stop(BaseException):
    """An exception that a library may use to end a program."""


def end(how: str) -> None:
    """End in one of several ways; ``sleep`` and ``stuck`` never come back."""
    if how == "exit":
        sys.exit(0)
    if how == "generator_exit":
        raise GeneratorExit
    if how == "keyboard_interrupt":
        raise KeyboardInterrupt
    if how == "stop":
        raise Stop("that is it")
    if how == "sleep":
        while True:
            try:
                time.sleep(600)
            except Exception:  # as environments do that try again
                continue
    if how == "stuck":
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # in C, where no handler of Python's runs and no exception arrives
    if how == "native_exit":
        ctypes.CDLL(None)._exit(0)
    raise ValueError(f"no such way to end: {how}")


class Rude(gymnasium.Env[Any, Any]):
    """Ends ``how`` at ``where``: make, reset, step, close; there at the ``at``-th call, but not in an environment that
    was only made to be looked at.

    Args:
        mark: a file that is made when it happens.
        once: a file; where it exists it does not happen, and it is made when it happens.
        rows: only where so many environments are made at a time; 0: wherever.
        thread: leave a thread behind that never ends.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(
        self,
        where: str = "",
        how: str = "exit",
        at: int = 1,
        mark: str | None = None,
        once: str | None = None,
        rows: int = 0,
        thread: bool = False,
        num_envs: int = 0,
    ) -> None:
        if rows and num_envs != rows:
            where = ""
        self.once = once
        self.where, self.how, self.at, self.mark = where, how, at, mark
        self.count = {"make": 0, "reset": 0, "step": 0, "close": 0}
        self._came("make")
        if thread:
            threading.Thread(target=time.sleep, args=(600,), name="telemetry").start()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._came("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._came("step")
        return np.full(2, 0.5, np.float32), 1.0, False, self.count["step"] % 5 == 0, {}

    def close(self) -> None:
        self._came("close")

    def _came(self, where: str) -> None:
        self.count[where] += 1
        used = where != "close" or self.count["step"] > 0
        if where == self.where and self.count[where] == self.at and used:
            if self.once and Path(self.once).exists():
                return
            for file in (self.mark, self.once):
                if file:
                    Path(file).touch()
            end(self.how)


class Miscounted(PureHostEnv):
    """Has a row more than was asked for, and does not close."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(Drift(), num_envs + 1)

    def close(self) -> None:
        end("sleep")
