"""The files of a folder of kept episodes, safe to read: they lie in the folder, and are regular files.

Names in a stranger's data set may lead out of the folder, to a named pipe or to a URL.
"""

import errno
import re
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ejax.schema.messages import short_repr
from ejax.schema.plain_files import HUGE, MAX_BYTES, open_plain, parse_json

_MAX_CHARS = 1000
"""Longest path below the folder, in characters."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def inside(folder: Path, name: str) -> Path:
    """Return the path of file ``name``, relative with slashes, of ``folder``, which may be a link; it need not exist.
    Raises ValueError if it leads out of the folder, alone or by links."""
    path = folder / name
    try:
        real = path.resolve()
        is_inside = real.is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, up to Python 3.12
        raise ValueError(f"{folder} has no file {short_repr(name)}: {error}") from error
    if not is_inside:
        raise ValueError(
            f"{path} leads out of {folder}, to {real}; files of a data set lie in its folder. If you trust what the "
            f"link leads to, copy it into place (cp -rL)"
        )
    return path


def open_inside(folder: Path, name: str, most: int = HUGE) -> IO[bytes]:
    """Open file ``name`` of ``folder`` for reading; never waits for a pipe's writer. Raises FileNotFoundError;
    ValueError as ``inside``, for what is not a regular file, or has more than ``most`` bytes."""
    path = inside(folder, name)
    try:
        return open_plain(path, most)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, "a file of the data set is missing; restore it", str(path)) from error
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ELOOP):
            raise
        raise ValueError(f"{path} {error.strerror}; restore it from a copy") from error


def read_meta(folder: Path, name: str) -> Any:
    """Parse a small JSON file; errors as of ``open_inside``, and ValueError where it is damaged."""
    with open_inside(folder, name, MAX_BYTES) as file:
        try:
            return parse_json(file.read(MAX_BYTES))
        except ValueError as error:  # also bytes that are not text
            raise ValueError(
                f"{folder / name} is damaged or cut off: it is not JSON ({short_repr(str(error))}). Restore it from a "
                f"copy"
            ) from error


def path_problem(name: Any) -> str | None:
    """Find why the text ``name`` cannot be the path of a file below a folder; None: it can."""
    if not isinstance(name, str) or not name:
        return "is not a path"
    if len(name) > _MAX_CHARS:
        return f"has {len(name)} characters, more than {_MAX_CHARS}"
    path = PurePosixPath(name)
    problems = {
        "has characters that cannot be printed": not name.isprintable(),
        "is a URL": _URL.match(name),
        "is an absolute path": path.is_absolute(),
        "leads out of the folder by '..'": ".." in path.parts,
    }
    return next((problem for problem, holds in problems.items() if holds), None)
