"""Read files that a config, a run's folder or a command line names: regular files of bounded size only.

A named pipe, ``/dev/zero`` or 100,000 brackets are an ``OSError`` or a ``ValueError``, as a missing or damaged file is.
The standard library alone is needed.
"""

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import re
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

MAX_DIGITS = 100  # digits of an integer: the time to read one grows with their square, and nobody means more
HUGE = 1 << 40  # bytes of a file that is read piece by piece
MAX_DEPTH = 100  # mappings and lists inside each other
MAX_BYTES = 64 << 20  # bytes of a file, where the reader gives no other bound
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_SIDE_FILE = re.compile(
    r"\.DS_Store|\._.*|__MACOSX|\.(Spotlight-V100|Trashes|fseventsd|AppleDouble|localized)|Icon\r"  # of a Mac
    r"|(eh)?thumbs(_vista)?\.db|desktop\.ini|\$RECYCLE\.BIN|.*:Zone\.Identifier"  # of Windows
    r"|\.nfs[0-9a-f]+|\.fuse_hidden\w+|\.directory|@eaDir|\.Trash-\d+"  # of Linux and network drives
    r"|.+~|\.?#.*|\..*\.sw[a-z]|\.~lock\..*|\.(ipynb_checkpoints|idea|vscode)",  # of editors
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"(~[^/]*)|.*?(\$(?:\w+|\{[^}]*\}))")  # what os.path could not expand
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ExpansionError(argparse.ArgumentTypeError, ValueError):
    """A path with a part that means nothing here; argparse shows the text."""


def kind_of(mode: int) -> str:
    """Name the kind of a file for a message, by its ``st_mode``."""
    return _KINDS.get(stat.S_IFMT(mode), "another kind of thing")


def open_plain(path: str | Path, most: int = MAX_BYTES) -> BufferedReader:
    """Open a regular file for reading; never waits for a pipe's writer.

    OSError: it is not there, not a regular file, or has more than ``most`` bytes.
    """
    check_plain(path, most)  # before it is opened: that alone may do something to a device
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:  # again, of what is open now: another file may have taken its name
        check_found(os.fstat(file.fileno()), path, most)
    except BaseException:
        file.close()
        raise
    return file


def check_plain(path: str | Path, most: int = MAX_BYTES) -> None:
    """Refuse what ``open_plain`` does, with its errors, for a library that opens the file itself."""
    try:
        check_found(os.stat(path), path, most)
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file; errors as ``open_plain``."""
    with open_plain(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it grew meanwhile
        raise _too_large(path, len(data), most)
    return data


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """Read a regular file as UTF-8, without its byte order mark. As ``open_plain``; UnicodeDecodeError: other bytes."""
    return read_bytes(path, most).decode("utf-8-sig")


def sha256(source: bytes | IO[bytes]) -> str:
    """Return the digest of bytes, or of what is left to read of an open file, in hexadecimal digits."""
    made = hashlib.sha256(source) if isinstance(source, bytes) else hashlib.file_digest(cast(Any, source), "sha256")
    return made.hexdigest()


def read_json(path: str | Path) -> Any:
    """Read a JSON file; errors as ``open_plain`` and ``parse_json``."""
    return parse_json(read_bytes(path))


def to_json(value: Any, infinity: str = "1e999", **options: Any) -> str:
    """Write strict JSON, which has no NaN (null) and no infinity: a number that every reader takes for one, or null."""
    known = {"NaN": "null", "Infinity": infinity, "-Infinity": infinity if infinity == "null" else f"-{infinity}"}
    # texts are passed over as they are
    pattern = r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN'
    return re.sub(pattern, lambda found: known.get(found[0], found[0]), json.dumps(value, **options))


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Floats may be infinite or NaN, also those that are too large to be finite.

    ValueError: no JSON, nested deeper than ``MAX_DEPTH``, or an integer of more than ``MAX_DIGITS`` digits.
    """
    try:
        found = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [found]
    for _ in range(MAX_DEPTH):  # level by level: who recurses over what is left stays far from Python's own limit
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for part in parts for each in part]
    if level:
        raise ValueError(_TOO_DEEP)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits; allowed are {MAX_DIGITS}")
    return int(digits)


def check_found(found: os.stat_result, path: str | Path, most: int) -> None:
    """Refuse what ``open_plain`` does, with its errors, by the file's ``stat``."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"is {kind_of(found.st_mode)}, not a regular file", str(path))
    if found.st_size > most:
        raise _too_large(path, found.st_size, most)


def _too_large(path: str | Path, size: int, most: int) -> OSError:
    return OSError(errno.EFBIG, f"has {size} bytes; at most {most} are read", str(path))


def is_side_file(name: str) -> bool:
    """Return whether a name is that of a file that systems and editors leave next to others, and nobody reads."""
    return _SIDE_FILE.fullmatch(name) is not None


def expanded(path: str) -> str:
    """Put the home folder for ``~`` and variables of the environment for ``$NAME`` and ``${NAME}``.

    ExpansionError: there is no home folder, or no such variable, nor a file of that very name.
    """
    found = os.path.expandvars(os.path.expanduser(path))
    if (left := _UNKNOWN.match(found)) and (path[:1] == "~" or not os.path.lexists(path)):
        raise ExpansionError(f"got '{path}', and here {left[1] or left[2]} means nothing; write the path without it")
    return found


def a_path(text: str) -> Path:
    """Read a path of a command line, for argparse: a shell leaves the ``~`` of ``--to=~/file``, and what is quoted."""
    return Path(expanded(text))


def a_folder(text: str) -> Path:
    """Read the path of a folder to write into, as ``a_path``; argparse shows what is a file there, or above it."""
    return _in_folders(path := a_path(text), (path, *path.parents))


def a_target(text: str) -> Path:
    """Read the path of a file to write, as ``a_path``; argparse shows what is a file above it."""
    return _in_folders(path := a_path(text), path.parents)


def _in_folders(path: Path, folders: Iterable[Path]) -> Path:
    if file := next(filter(os.path.isfile, folders), None):
        raise ExpansionError(f"{file} is a file, where a folder must be; name another place")
    return path


def package_folder(name: str) -> Path | None:
    """Find the folder of an installed top-level package without importing it. None: it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # of a module that no file is the source of, such as __main__
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
