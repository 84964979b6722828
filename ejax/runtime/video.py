"""H.264 videos from frames, streamed to ffmpeg, so memory stays bounded however long the video is."""

import itertools
import math
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from ejax.schema.writing import replacing

_LAST_FRAMES_S = 600.0  # for the encoder to write what it holds back, once the last frame is there
_SMALLEST_TEXT = 8  # pixels; smaller letters cannot be read


def write_video(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],
    fps: float,
    *,
    keyframe_every: int | None = None,
    below: Path | None = None,
) -> Path:
    """Write ``frames`` as H.264, yuv420p: what browsers and players can show.

    The file appears under ``path`` only when it is complete. yuv420p needs even sizes: an odd side grows by
    one pixel, a copy of the edge.

    Args:
        path: ends in ``.mp4`` (or another container of ffmpeg's that holds H.264); its folder is made.
        frames: each ``[H, W, 3]`` uint8 RGB, all of one size; may be a generator.
        keyframe_every: frames from one that stands alone to the next, and all in order: for random access, and for
            videos that are joined later. None: as few as the encoder likes, which gives the smallest file.
        below: see ``ejax.schema.writing``.

    ValueError: no frames, a frame of another shape or dtype, or ``fps`` not positive. RuntimeError: ffmpeg failed; the
    message carries its output.
    """
    path = Path(path)
    if not fps > 0:
        raise ValueError(f"fps is {fps}; use a positive number of frames per second.")
    stream = _checked(frames)
    first = next(stream, None)
    if first is None:
        raise ValueError(f"no frames to write to {path}; pass at least one.")
    with replacing(path, below) as file, _encoder(path, file.name, first.shape[:2], fps, keyframe_every) as sink:
        for frame in itertools.chain([first], stream):
            sink.write(frame.tobytes())
    return path


def with_caption(frame: NDArray[np.uint8], text: str) -> NDArray[np.uint8]:
    """Write a line of text at the foot of a frame [H, W, 3], as small as it must be to fit."""
    from PIL import Image, ImageDraw, ImageFont  # few runs have a caption

    picture = Image.fromarray(frame)
    pen, (width, height) = ImageDraw.Draw(picture), picture.size
    size = max(height // 16, _SMALLEST_TEXT)
    while size > _SMALLEST_TEXT and pen.textlength(text, font=ImageFont.load_default(size)) > 0.96 * width:
        size -= 1
    font = ImageFont.load_default(size)
    pen.rectangle((0, height - 1.6 * size, width, height), fill=(20, 22, 26))
    pen.text((width / 2, height - 0.8 * size), text, font=font, fill=(240, 240, 240), anchor="mm")
    return np.asarray(picture)


def tile_frames(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Lay K ≥ 1 frames ``[K, H, W, 3]`` out in a near-square grid ``[grid_h·H, grid_w·W, 3]``, row by row.

    grid_w = ⌈√K⌉, grid_h = ⌈K / grid_w⌉, as EmbodiChain's camera recorder does; cells without a frame are black.
    ValueError: another shape.
    """
    if frame.ndim != 4 or frame.shape[0] == 0 or frame.shape[3] != 3:
        raise ValueError(f"frames to tile have shape {frame.shape}; pass [K, H, W, 3] with K >= 1.")
    num_frames, height, width, _ = frame.shape
    grid_w = math.ceil(math.sqrt(num_frames))
    grid_h = math.ceil(num_frames / grid_w)
    grid = np.zeros((grid_h * grid_w, height, width, 3), frame.dtype)
    grid[:num_frames] = frame
    rows = grid.reshape(grid_h, grid_w, height, width, 3).swapaxes(1, 2)
    return rows.reshape(grid_h * height, grid_w * width, 3)


def _checked(frames: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Pad frames to even sizes; ValueError for one that is not RGB, or not of the first one's size."""
    shape: tuple[int, ...] | None = None
    for index, frame in enumerate(frames):
        shape = shape or frame.shape
        if frame.ndim != 3 or frame.shape != (*shape[:2], 3) or frame.dtype != np.uint8:
            text = f"frame {index} is {frame.dtype}{list(frame.shape)}, and the first one has shape {list(shape)}"
            raise ValueError(f"{text}; pass uint8 [H, W, 3], RGB, all of one size.")
        height, width, _ = shape
        yield np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


@contextmanager
def _encoder(path: Path, partial: str, size: tuple[int, ...], fps: float, every: int | None) -> Iterator[IO[bytes]]:
    """Run ffmpeg on raw RGB frames; imageio_ffmpeg's ``write_frames`` drops its exit status and resizes odd frames."""
    import imageio_ffmpeg  # here: a run without videos needs no ffmpeg

    height, width = size
    source = f"-f rawvideo -pix_fmt rgb24 -video_size {width}x{height} -framerate {fps} -i -"
    target = "-an -c:v libx264 -preset veryfast -pix_fmt yuv420p -crf 20 -movflags +faststart"
    keyframes = "" if every is None else f"-g {every} -bf 0"
    options = f"-loglevel error -y {source} {target} {keyframes}".split()
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *options, partial]
    with tempfile.TemporaryFile() as log:
        # Its own session: ctrl-C in the terminal is for the training loop to handle.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, start_new_session=True)
        try:
            with cast(IO[bytes], process.stdin) as sink:
                yield sink
        except BrokenPipeError:
            pass  # ffmpeg ended early; its exit status gives the reason
        except BaseException:
            process.kill()
            raise
        finally:
            try:
                status = process.wait(_LAST_FRAMES_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()  # of what is killed, the kernel's work alone
        if status != 0:
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
            raise RuntimeError(f"ffmpeg could not write {path} (exit status {status}): {output}")
