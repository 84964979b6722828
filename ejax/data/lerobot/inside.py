"""Files named by a folder's own files: only inside that folder, and only plain ones.

The names in a stranger's data set are claims. A path with ``..``, an absolute one or a link would lead out of
the folder; opening a named pipe blocks for ever; a URL would be fetched by a decoder.
"""

import errno
import re
import stat
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ejax.runtime.plain_files import HUGE, MAX_BYTES, kind_of, open_plain

_MAX_CHARS = 1000
"""Longest path below the folder, in characters."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


def inside(folder: Path, name: Any) -> Path:
    """Return the path of file ``name`` of ``folder``, which need not exist.

    Args:
        folder: as the user named it; may be a link itself.
        name: as a file of the folder gives it: relative, with slashes.

    Raises:
        ValueError: ``name`` leads out of the folder, by itself or by links, or is something other than a plain file.
    """
    if problem := path_problem(name):
        raise ValueError(
            f"{folder} has a file that names {shown(name)}, which {problem}; files of a data set are named by their "
            f"path below its folder. Do not use this folder unless you know who made it"
        )
    path = folder / name
    try:
        real, root = path.resolve(), folder.resolve()
        mode = path.stat().st_mode if real.is_relative_to(root) else None
    except FileNotFoundError:
        mode = None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, up to Python 3.12
        if isinstance(error, OSError) and error.errno not in _NO_PATH:
            raise
        raise ValueError(f"{folder} has no file {shown(name)}: {error}") from error
    if not real.is_relative_to(root):
        raise ValueError(
            f"{path} leads out of {folder}, to {real}; files of a data set lie in its folder. If you trust what the "
            f"link leads to, copy it into place (cp -rL)"
        )
    if mode is not None and not stat.S_ISREG(mode):
        raise ValueError(
            f"{path} is {kind_of(mode)}, where a data set has a file; remove it, or do not use this folder"
        )
    return path


def open_inside(folder: Path, name: Any, most: int = HUGE) -> IO[bytes]:
    """Open file ``name`` of ``folder`` for reading; never waits for a pipe's writer.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: as ``inside``, or it has more than ``most`` bytes.
    """
    path = inside(folder, name)
    try:
        return open_plain(path, most)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, "a file of the data set is missing; restore it", str(path)) from error
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EISDIR):
            raise
        raise ValueError(f"{path} {error.strerror}; restore it from a copy") from error


def read_inside(folder: Path, name: Any) -> bytes:
    """The whole content of a small file ``name`` of ``folder``; arguments and errors as ``open_inside``."""
    with open_inside(folder, name, MAX_BYTES) as file:
        return file.read(MAX_BYTES)


def path_problem(name: Any) -> str | None:
    """The reason that ``name`` is not the path of a file below a folder, by its text alone; None: it is."""
    if not isinstance(name, str) or not name:
        return "is not a path"
    if len(name) > _MAX_CHARS:
        return f"has {len(name)} characters, more than {_MAX_CHARS}"
    if not name.isprintable():
        return "has characters that cannot be printed"
    if _URL.match(name):
        return "is a URL"
    path = PurePosixPath(name)
    if path.is_absolute():
        return "is an absolute path"
    return "leads out of the folder by '..'" if ".." in path.parts else None


def shown(value: Any, limit: int = 80) -> str:
    """``value`` as a message shows it, shortened."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 20]}… ({len(text)} characters)"
