"""Tasks that the data engine's worker runs in tests. It imports no test module: those import jax."""

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ejax.data import Episode, EpisodeSpec, Failure


class SimulationError(Exception):
    pass


class UnpicklableError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Toy:
    """Episodes whose every number is the attempt's seed, so that a mixture of two shows.

    Args:
        lengths: of the episodes, one after the other.
        segments: of equal length, per episode.
        at: what happens at an attempt, by its number: "raise", "emoji", "unpicklable", "exit", "hang", "crash", "deaf",
            "slow", "fail", "empty", "incomplete", "unsuccessful", "long", "wrong", "none".
        delay: s that an attempt takes.
        wide: numbers per frame.
        several: outcomes per attempt.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (20,),
        segments: int = 1,
        at: Mapping[Any, str] | None = None,
        delay: float = 0.0,
        wide: int = 10,
        several: int = 0,
        build: str = "",
        folder: Path | None = None,
    ) -> None:
        if build == "raise":
            raise SimulationError("no simulator")
        if build == "emoji":
            raise SimulationError("😀" * 9000)
        if build == "suspended":
            os.kill(os.getpid(), signal.SIGSTOP)
        if build == "deaf":
            be_deaf()
        if build == "exit":
            os._exit(17)
        if build == "hang":
            time.sleep(60.0)
        self.lengths, self.segments, self.delay, self.wide, self.several = lengths, segments, delay, wide, several
        self.at = {int(k): v for k, v in (at or {}).items()}
        self.folder, self.build = folder, build
        self.attempts = 0

    def spec(self) -> EpisodeSpec:
        if self.build == "no spec":
            return None
        return EpisodeSpec(
            {"obs/robot/qpos": ((self.wide,), "float32"), "actions": ((4,), "float32"), "rewards": ((), "float32")},
            {"instruction": ((), "S16"), "mark": ((), "int64")},
        )

    def generate(self, seed: int) -> Any:
        number, self.attempts = self.attempts, self.attempts + 1
        time.sleep(self.delay)
        if self.folder:
            Path(self.folder, "attempts").write_text(str(self.attempts))
        if number in self.at:
            return self.misbehave(self.at[number], seed)
        if self.several:
            return [self.episode(seed) for _ in range(self.several)]
        return self.episode(seed)

    def episode(self, seed: int, length: int | None = None, **kwargs: Any) -> Episode:
        length = length or self.lengths[self.attempts % len(self.lengths)]
        frames = {
            "obs": {"robot": {"qpos": np.full((length, self.wide), seed % 2**20, np.float32)}},
            "actions": np.full((length, 4), seed % 2**20, np.float32),
            "rewards": np.arange(length, dtype=np.float32),
        }
        segment_id = np.arange(length) * self.segments // length
        fields = {"instruction": b"push the cube", "mark": seed % 2**20}
        return Episode(frames, segment_id=segment_id, fields=fields, **kwargs)

    def misbehave(self, how: str, seed: int) -> Any:
        if how == "raise":
            raise SimulationError("the arm left the table")
        if how == "emoji":
            raise SimulationError("😀" * 9000)
        if how == "unpicklable":
            raise UnpicklableError("with a lock inside")
        if how == "exit":
            os._exit(17)
        if how == "hang":
            threading.Event().wait()
        if how == "slow":
            time.sleep(2.5)
            return self.episode(seed)
        if how == "crash":
            faulthandler._sigsegv()
        if how == "deaf":
            be_deaf()
        return {
            "fail": lambda: Failure("no way to the goal"),
            "empty": list,
            "incomplete": lambda: self.episode(seed, complete=False),
            "unsuccessful": lambda: self.episode(seed, success=False),
            "long": lambda: self.episode(seed, length=1000),
            "wrong": lambda: Episode({"actions": np.zeros((3, 4))}),
            "none": lambda: None,
        }[how]()


def be_deaf() -> None:
    """Hang, and hear no signal but SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60.0)


class Closing(Toy):
    """Notes that it was opened and closed; fails or hangs there on demand.

    Args:
        fail: closing raises.
        hang: where it goes deaf: "opened" or "closed"; or what keeps its process from ending: "thread" or "exit".
        speechless: its spec raises.
    """

    def __init__(self, fail: bool = False, hang: str = "", speechless: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fail, self.hang, self.speechless = fail, hang, speechless
        if hang == "thread":
            threading.Thread(target=time.sleep, args=(60.0,)).start()
        if hang == "exit":
            atexit.register(be_deaf)

    def spec(self) -> EpisodeSpec:
        if self.speechless:
            raise SimulationError("knows no spec")
        return super().spec()

    def __enter__(self) -> Self:
        Path(self.folder, "opened").touch()
        if self.hang == "opened":
            be_deaf()
        return self

    def __exit__(self, *raised: Any) -> None:
        Path(self.folder, "closed").touch()
        if self.hang == "closed":
            be_deaf()
        if self.fail:
            raise SimulationError("could not close")


class Importing(Toy):
    """Writes down which modules its process has."""

    def generate(self, seed: int) -> Any:
        Path(self.folder, "modules").write_text("\n".join(sorted(sys.modules)))
        return super().generate(seed)
