"""Videos read back with imageio_ffmpeg's ffmpeg, and the grid of tiles."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from case_tables import refusals, refused

from ejax.runtime.video import tile_frames, write_video


def frames(num_frames: int, height: int, width: int) -> Iterator[np.ndarray]:
    for index in range(num_frames):
        yield np.full((height, width, 3), 20 * index, np.uint8)


def read(path: Path) -> tuple[str, np.ndarray]:
    """ffmpeg's line about the video stream, and the decoded frames ``[T, H, W, 3]``."""
    # Not imageio_ffmpeg.read_frames: it leaves pipes unclosed, a ResourceWarning.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    stream = next(line for line in done.stderr.decode().splitlines() if "Video:" in line)
    width, height = map(int, re.search(r" (\d+)x(\d+)[, ]", stream).groups())
    return stream, np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.parametrize(("size", "seen"), [((48, 64), (48, 64)), ((33, 47), (34, 48))], ids=["even", "odd"])
def test_frames_become_an_h264_video_in_their_order_of_an_even_size(tmp_path: Path, size: Any, seen: Any) -> None:
    stream, frame = read(write_video(tmp_path / "videos" / "episode.mp4", frames(10, *size), fps=20))
    assert all(fact in stream for fact in ("h264", "yuv420p", f"{seen[1]}x{seen[0]}", "20 fps"))
    assert frame.shape == (10, *seen, 3)
    np.testing.assert_allclose(frame[:, :32, :32].mean(axis=(1, 2, 3)), 20 * np.arange(10), atol=4)  # measured within 2


@refusals(
    (([], 10), "no frames", ""),
    (([np.zeros((8, 8, 3), np.float32)], 10), "frame 0", "float32[8, 8, 3]"),
    ((list(frames(1, 8, 8)), 0), "fps", "0"),
)
def test_what_makes_no_video_is_refused(tmp_path: Path, given: Any, key: str, word: str) -> None:
    refused(write_video, tmp_path / "a.mp4", given[0], fps=given[1], key=key, word=word)


def test_an_error_among_the_frames_leaves_the_earlier_video_and_no_other_file(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", frames(4, 16, 16), fps=10)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="frame 2 is uint8"):
        write_video(path, [*frames(2, 16, 16), np.zeros((8, 8, 3), np.uint8)], fps=10)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_encoder_that_hangs_is_killed_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (encoder := tmp_path / "ffmpeg").write_text("#!/bin/sh\nexec sleep 1000\n")
    encoder.chmod(0o700)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(encoder))
    monkeypatch.setattr("ejax.runtime.video._LAST_FRAMES_S", 0.1)
    with pytest.raises(RuntimeError, match=r"could not write .* \(exit status -9\)"):
        write_video(tmp_path / "video.mp4", np.zeros((2, 8, 8, 3), np.uint8), fps=10)


def test_what_ffmpeg_says_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ffmpeg could not write .*unknown_format"):
        write_video(tmp_path / "a.unknown_format", frames(200, 64, 64), fps=10)


@pytest.mark.parametrize(("num_frames", "grid_h", "grid_w"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (5, 2, 3), (16, 4, 4)])
def test_tiles_form_a_near_square_grid(num_frames: int, grid_h: int, grid_w: int) -> None:
    assert tile_frames(np.zeros((num_frames, 4, 6, 3), np.uint8)).shape == (grid_h * 4, grid_w * 6, 3)


def test_tiles_are_laid_out_row_by_row_and_the_rest_is_black() -> None:
    frame = np.stack([np.full((1, 2, 3), index, np.uint8) for index in (1, 2, 3)])
    np.testing.assert_array_equal(tile_frames(frame)[..., 0], [[1, 1, 2, 2], [3, 3, 0, 0]])


def test_tiling_nothing_is_an_error() -> None:
    refused(tile_frames, np.zeros((0, 4, 4, 3), np.uint8), key="K >= 1")
