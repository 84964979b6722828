"""Videos read back with imageio_ffmpeg's ffmpeg, and the grid of tiles."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from ejax.runtime.video import tile_frames, write_video

_RAW_RGB = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-")


def _frames(num_frames: int, height: int, width: int) -> Iterator[np.ndarray]:
    for index in range(num_frames):
        yield np.full((height, width, 3), 20 * index, np.uint8)


def _read(path: Path) -> tuple[str, np.ndarray]:
    """ffmpeg's line about the video stream, and the decoded frames ``[T, H, W, 3]``."""
    # Not imageio_ffmpeg.read_frames: it leaves pipes unclosed, a ResourceWarning.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), *_RAW_RGB]
    done = subprocess.run(command, capture_output=True, check=True)
    stream = next(line for line in done.stderr.decode().splitlines() if "Video:" in line)
    width, height = map(int, re.search(r" (\d+)x(\d+)[, ]", stream).groups())
    return stream, np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


def test_a_generator_of_frames_becomes_an_h264_video_of_the_same_count_size_and_rate(tmp_path: Path) -> None:
    path = write_video(tmp_path / "videos" / "episode.mp4", _frames(10, 48, 64), fps=20)
    stream, frame = _read(path)
    assert all(fact in stream for fact in ("h264", "yuv420p", "64x48", "20 fps"))
    assert frame.shape == (10, 48, 64, 3)


def test_frames_keep_their_order_and_brightness(tmp_path: Path) -> None:
    _, frame = _read(write_video(tmp_path / "a.mp4", _frames(10, 32, 32), fps=10))
    np.testing.assert_allclose(frame.mean(axis=(1, 2, 3)), 20 * np.arange(10), atol=4)  # lossy: measured within 2


def test_odd_sizes_grow_to_even_ones(tmp_path: Path) -> None:
    _, frame = _read(write_video(tmp_path / "odd.mp4", _frames(3, 33, 47), fps=10))
    assert frame.shape == (3, 34, 48, 3)


def test_no_frames_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no frames"):
        write_video(tmp_path / "a.mp4", [], fps=10)


def test_a_frame_that_is_not_uint8_rgb_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"frame 0 is float32\[8, 8, 3\]"):
        write_video(tmp_path / "a.mp4", [np.zeros((8, 8, 3), np.float32)], fps=10)


def test_a_rate_that_is_not_positive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fps is 0"):
        write_video(tmp_path / "a.mp4", _frames(1, 8, 8), fps=0)


def test_an_error_among_the_frames_leaves_the_earlier_video_and_no_other_file(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", _frames(4, 16, 16), fps=10)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="frame 2 is uint8"):
        write_video(path, [*_frames(2, 16, 16), np.zeros((8, 8, 3), np.uint8)], fps=10)
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
        write_video(tmp_path / "a.unknown_format", _frames(200, 64, 64), fps=10)


@pytest.mark.parametrize(("num_frames", "grid_h", "grid_w"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (5, 2, 3), (16, 4, 4)])
def test_tiles_form_a_near_square_grid(num_frames: int, grid_h: int, grid_w: int) -> None:
    assert tile_frames(np.zeros((num_frames, 4, 6, 3), np.uint8)).shape == (grid_h * 4, grid_w * 6, 3)


def test_tiles_are_laid_out_row_by_row_and_the_rest_is_black() -> None:
    frame = np.stack([np.full((1, 2, 3), index, np.uint8) for index in (1, 2, 3)])
    np.testing.assert_array_equal(tile_frames(frame)[..., 0], [[1, 1, 2, 2], [3, 3, 0, 0]])


def test_tiling_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="K >= 1"):
        tile_frames(np.zeros((0, 4, 4, 3), np.uint8))
