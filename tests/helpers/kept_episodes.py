"""Episodes whose numbers identify them, and a process that keeps them and crashes. It imports no jax."""

import itertools
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ejax.data import Episode, EpisodeSpec
from ejax.data.lerobot.read import EpisodeReader
from ejax.data.lerobot.write import EpisodeWriter

SPEC = EpisodeSpec(
    {
        "obs/robot/qpos": ((7,), "float32"),
        "obs/map": ((2, 3, 4), "float64"),
        "obs/gripper": ((), "bool"),
        "obs/mode": ((1,), "int8"),
        "actions": ((4,), "float32"),
        "rewards": ((), "float32"),
        "note": ((), "S12"),
        "word": ((), "U6"),
    },
    {"instruction": ((), "S32"), "mark": ((), "int64"), "goal": ((3,), "float32"), "tags": ((2,), "U4")},
)
CAMERA = EpisodeSpec({"obs/camera": ((16, 24, 3), "uint8"), "actions": ((2,), "float32")})


def length(number: int) -> int:
    return 6 + number % 5


def instruction(number: int) -> str:
    return f"push the {('cube', 'ball', 'ünïcode')[number % 3]}"


def episode(number: int) -> Episode:
    """Make an episode of SPEC: no two frames of any episodes are alike."""
    num_frames = length(number)
    step = np.arange(num_frames)
    frames = {
        "obs": {
            "robot": {"qpos": np.float32(number + 0.01 * step)[:, None] * np.ones(7, np.float32)},
            "map": number + np.random.default_rng(number).uniform(size=(num_frames, 2, 3, 4)),
            "gripper": step % 2 == 0,
            "mode": np.full((num_frames, 1), number % 100, np.int8),
        },
        "actions": np.random.default_rng(number).normal(size=(num_frames, 4)).astype(np.float32),
        "rewards": step.astype(np.float32),
        "note": np.array([f"é{number}-{i}".encode() for i in step], "S12"),
        "word": np.array([f"w{i}" for i in step], "U6"),
    }
    fields = {
        "instruction": instruction(number).encode(),
        "mark": number,
        "goal": np.full(3, number, np.float32),
        "tags": np.array(["a", f"n{number}"]),
    }
    return Episode(frames, segment_id=step * 2 // num_frames, fields=fields, terminated=number % 2 == 0)


def pictures(number: int, num_frames: int) -> np.ndarray:
    """[T, 16, 24, 3]: left the episode's grey, right the frame's, 8 apart: what a video loses is less."""
    made = np.zeros((num_frames, 16, 24, 3), np.uint8)
    made[:, :, :12] = 8 * number % 240
    made[:, :, 12:] = (8 * np.arange(num_frames) % 240)[:, None, None, None]
    return made


def camera_episode(number: int) -> Episode:
    """Make an episode of CAMERA."""
    num_frames = length(number)
    return Episode(
        {"obs/camera": pictures(number, num_frames), "actions": np.full((num_frames, 2), number, np.float32)}
    )


def keep(folder: Path, numbers: list[int] | range, **options: Any) -> None:
    with EpisodeWriter(folder, SPEC, fps=20, **options) as writer:
        for number in numbers:
            writer.append(episode(number), instruction(number), seed=number)


def check_numbers(folder: Path) -> int:
    """Check that all that is kept is whole: episode i is episode i. Returns how many there are."""
    reader = EpisodeReader(folder)
    for number, kept in enumerate(reader):
        np.testing.assert_array_equal(kept.frames["actions"], episode(number).frames["actions"])
        assert reader.instruction(number) == instruction(number)
    return len(reader)


def copied(folder: Path, tmp_path: Path) -> Path:
    """Copy below ``tmp_path``, for a test to damage."""
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


class Countdown:
    """Does something at the n-th step that writing an episode takes on the disk; ``os`` and ``Path`` are patched."""

    def __init__(self, steps: int, act: Any) -> None:
        self.left, self.act = steps, act

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.act()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """``patch(object, name, function)`` replaces an attribute."""
        steps = (
            (os, "replace"),
            (os, "fsync"),
            (os, "mkdir"),
            (Path, "unlink"),
            (Path, "rmdir"),
            (Path, "write_bytes"),
        )
        for module, name in steps:
            patch(module, name, self._stepping(getattr(module, name)))

    def _stepping(self, function: Callable[..., Any]) -> Any:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return function(*args, **kwargs)

        return stepped


def crash_at_every_step(folder: Path) -> None:
    """End the writing process at the first, second, ... step of an append, and continue each time, so that the next one
    finds what it left, and ends there too. Print how often, and how many episodes were lost."""
    os.fsync = lambda descriptor: None  # a process that ends loses nothing that the system has; only the disk would
    keep(folder, [0])
    lost = 0
    for steps in itertools.count():
        there = check_numbers(folder)
        child = os.fork()
        if not child:
            countdown = Countdown(steps, lambda: os._exit(9))
            warnings.simplefilter("ignore")
            options = {"file_size_mb": 16.0 if steps % 2 else 1e-6}  # a file that grows, or the next one
            writer = EpisodeWriter(folder, SPEC, fps=20, append=True, **options)
            countdown.patch(setattr)
            writer.append(episode(there), instruction(there))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            left = check_numbers(folder)
            assert left in (there, there + 1)
            EpisodeWriter(folder, SPEC, fps=20, append=True).close()
            lost += left == there
            assert any("was cut off" in str(each.message) for each in caught) == (folder / ".staging").exists()
        if not status:
            break
        assert status == 9
    frames = pq.read_table(folder / "data", columns=["index"])["index"].to_numpy()
    np.testing.assert_array_equal(frames, np.arange(len(frames)))  # as LeRobot reads them: no file has a lost episode's
    print(steps, lost, check_numbers(folder))


def keep_on(folder: Path) -> None:
    """Append for ever, and print what is kept."""
    with EpisodeWriter(folder, SPEC, fps=20, append=True) as writer:
        while True:
            number = writer.num_episodes
            print(writer.append(episode(number), instruction(number)), flush=True)


if __name__ == "__main__":
    {"crash": crash_at_every_step, "keep": keep_on}[sys.argv[1]](Path(sys.argv[2]))
