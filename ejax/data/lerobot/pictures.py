"""Pictures of a recording: PNGs, and videos that are joined without encoding again and read from the middle."""

import errno
import io
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ejax.runtime.video import write_video
from ejax.schema.messages import shorten
from ejax.schema.plain_files import HUGE, open_plain
from ejax.schema.writing import replace_file

KEYFRAME_EVERY = 2
"""Frames. LeRobot's choice: a single frame takes decoding two at most; the file is about twice as large."""
_FULL = "No space left on device"
_FILES_ONLY = ("-protocol_whitelist", "file")
_MAX_OUTPUT = 400  # characters: there is a line for each damaged frame
_TIMEOUT_S = 600.0


def encode_video(path: Path, frames: NDArray[np.uint8], fps: int) -> None:
    """Write frames [T, H, W, 3] as an H.264 file; OSError if the disk is full, else RuntimeError if ffmpeg failed."""
    try:
        write_video(path, frames, fps, keyframe_every=KEYFRAME_EVERY)
    except RuntimeError as error:
        _raise_if_full(path, str(error))
        raise


def join_videos(parts: Sequence[Path], path: Path) -> None:
    """Write one file of the frames of several that were encoded alike. Raises ValueError for a part that is no MP4
    file, OSError if the disk is full, else RuntimeError if ffmpeg failed."""
    for part in parts:
        _check_mp4(part)
    # ffmpeg's quoting: a quote ends the text, and begins it again
    script = "".join("file '{}'\n".format(str(part.resolve()).replace("'", r"'\''")) for part in parts)
    listed = path.with_suffix(".txt")
    replace_file(listed, script)
    source = [*_FILES_ONLY, "-f", "concat", "-safe", "0", "-i", f"file:{listed}"]
    _ffmpeg([*source, "-c", "copy", "-movflags", "+faststart", f"file:{path}"], path)
    listed.unlink()


def decode_video(path: Path, start: float, fps: float, shape: tuple[int, int, int], count: int) -> NDArray[np.uint8]:
    """Read frames [count, H, W, 3] from the one at ``start``, in s, on. Raises ValueError unless it is an MP4 file with
    so many frames of that size there; RuntimeError if ffmpeg failed."""
    _check_mp4(path)
    seek = max(0.0, start - 0.5 / fps)  # between two frames, so that rounding cannot take the one before
    source = [*_FILES_ONLY, "-f", "mp4", "-i", f"file:{path}"]
    options = ["-ss", f"{seek:.6f}", *source, "-frames:v", str(count), "-fps_mode", "passthrough"]
    raw = _ffmpeg([*options, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], path)
    expected = count * int(np.prod(shape))
    if len(raw) != expected:
        raise ValueError(
            f"{path} gives {len(raw)} bytes for {count} frames from {start:.3f} s on; frames of {list(shape)} need "
            f"{expected}: the file is cut off, or its frames have another size than in info.json; restore it from a "
            f"copy"
        )
    return np.frombuffer(raw, np.uint8).reshape(count, *shape)


def encode_png(frame: NDArray[np.uint8]) -> bytes:
    """Encode a frame [H, W, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG", compress_level=1)
    return file.getvalue()


def decode_image(data: bytes, shape: tuple[int, int, int], where: str = "an image") -> NDArray[np.uint8]:
    """Decode a frame [H, W, 3] of a PNG or JPEG file; ``where`` names it in messages. Pillow hands some other formats
    to other programs. They, damaged files and other sizes raise ValueError."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            found = [image.height, image.width, 3]
            if tuple(found) == shape:  # before anything of that size is decoded
                return np.asarray(image.convert("RGB"))
    except Exception as error:  # decoders raise all kinds of errors, even SyntaxError
        raise ValueError(f"{where}: not a PNG or JPEG image, cut off or damaged: {error}") from error
    raise ValueError(f"{where}: an image is {found}; in info.json it is {list(shape)}")


def _check_mp4(path: Path) -> None:
    """Raise ValueError unless the file begins as MP4: ffmpeg's guess may be a list of other files and URLs."""
    with open_plain(path, HUGE) as file:
        if file.read(8)[4:] != b"ftyp":
            raise ValueError(f"{path} is not an MP4 file, or is damaged; restore it from a copy")


def _ffmpeg(options: Sequence[str], path: Path) -> bytes:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-y", *options]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"ffmpeg took longer than {_TIMEOUT_S:.0f} s on {path} and was killed") from error
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        _raise_if_full(path, output)
        raise RuntimeError(
            f"ffmpeg failed on {path} (exit status {done.returncode}); if the file is damaged, restore it from a copy. "
            f"Its output: {shorten(output, _MAX_OUTPUT)}"
        )
    return done.stdout


def _raise_if_full(path: Path, output: str) -> None:
    if _FULL in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
