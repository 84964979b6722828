"""The files of a folder of kept episodes, safe to read: inside the folder, and exactly the bytes that were written.

    meta/ejax_digests.json    {"version": 1, "sha256": {"meta/info.json": [digest, the one before], ...}}

Names in a stranger's data set may lead out of the folder, to a named pipe or to a URL. An append puts the list in place
first, so it has every file that a reader finds; each is compared with it when first opened. A digest finds damage, not
forgery: anyone who can write to the folder can write the list too.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

from ejax.schema.plain_files import HUGE, MAX_BYTES, kind_of, open_plain, parse_json, sha256

DIGESTS = "meta/ejax_digests.json"
_VERSION = 1
_TRIES = 5
_MAX_CHARS = 1000
"""Longest path below the folder, in characters."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")

Digests: TypeAlias = Mapping[str, tuple[str, ...]]
"""SHA-256 in hex by name: of the latest version, and of earlier ones that a crash may have left in its place."""


class KeptFiles:
    """A folder's files. May be pickled; threads may share it. A damaged list of digests raises ValueError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests = load_digests(folder)
        """None: the folder has none, so damage goes unnoticed."""
        self._seen: dict[str, tuple[int, ...]] = {}
        """``stat`` of each file that was compared with its digest."""

    def has(self, name: str) -> bool:
        """Return True if the folder has the file, or must have it."""
        return name in (self.digests or {}) or inside(self.folder, name).exists()

    def open(self, name: str, most: int = HUGE) -> IO[bytes]:
        """Open a file for reading, after checking its content. Raises FileNotFoundError; ValueError if it is damaged,
        not in the list, outside the folder, or has more than ``most`` bytes."""
        for _ in range(_TRIES):
            file = open_inside(self.folder, name, most)
            try:
                if self.digests is None or self._is_known(name, file):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # what is open is the replaced file
            self.digests = load_digests(self.folder)  # an append may have replaced both
        raise ValueError(
            f"{self.folder / name} is damaged, or no file of the recording: its SHA-256 is not in {DIGESTS}. Restore "
            f"it from a copy, or remove it if the recording never had it; if another program changed it on purpose, "
            f"remove {DIGESTS}"
        )

    def read_json(self, name: str) -> Any:
        """Parse a small JSON file, checked as by ``open``."""
        with self.open(name, MAX_BYTES) as file:
            return _parse(file.read(MAX_BYTES), self.folder / name)

    def check(self, name: str) -> Path:
        """Return the path of a file, checked as by ``open``, for a program that opens it itself."""
        self.open(name).close()
        return self.folder / name

    def digest(self, name: str) -> tuple[str]:
        """Return the digest of the version that is in place, checked as by ``open``."""
        with self.open(name) as file:
            return (sha256(file),)

    def _is_known(self, name: str, file: IO[bytes]) -> bool:
        found = os.fstat(file.fileno())
        # a file that is replaced has another inode, one that is changed another time
        stamp = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if self._seen.get(name) == stamp:
            return True
        digest = sha256(file)
        file.seek(0)  # the caller reads it from the start
        if digest not in (self.digests or {}).get(name, ()):
            return False
        self._seen[name] = stamp
        return True


def load_digests(folder: Path) -> Digests | None:
    """Read the list of a folder; None: it has none. A damaged list raises ValueError."""
    try:
        with open_inside(folder, DIGESTS, MAX_BYTES) as file:
            made = _parse(file.read(MAX_BYTES), folder / DIGESTS)
    except FileNotFoundError:
        return None
    entries = made.get("sha256") if isinstance(made, dict) and made.get("version") == _VERSION else None
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        raise ValueError(
            f"{folder / DIGESTS} is damaged, or of another version than {_VERSION}: it must have SHA-256 digests by "
            f"file name. Restore it from a copy, or remove it: then damage of the other files goes unnoticed"
        )
    return {name: tuple(digests) for name, digests in entries.items()}


def digests_file(digests: Digests) -> bytes:
    """Encode the list as stored."""
    return json.dumps({"version": _VERSION, "sha256": dict(sorted(digests.items()))}, indent=1).encode()


def inside(folder: Path, name: str) -> Path:
    """Return the path of file ``name``, relative with slashes, of ``folder``, which may be a link; it need not exist.
    Raises ValueError if it leads out of the folder, by itself or by links, or is something other than a plain file."""
    path, mode = folder / name, stat.S_IFREG
    try:
        real = path.resolve()
        is_inside = real.is_relative_to(folder.resolve())
        if is_inside:  # not of what lies outside: to look at some devices is to use them
            with suppress(FileNotFoundError, NotADirectoryError):
                mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, up to Python 3.12
        raise ValueError(f"{folder} has no file {shown(name)}: {error}") from error
    if not is_inside:
        raise ValueError(
            f"{path} leads out of {folder}, to {real}; files of a data set lie in its folder. If you trust what the "
            f"link leads to, copy it into place (cp -rL)"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"{path} is {kind_of(mode)}, where a data set has a file; remove it, or do not use this folder"
        )
    return path


def open_inside(folder: Path, name: str, most: int = HUGE) -> IO[bytes]:
    """Open file ``name`` of ``folder`` for reading; never waits for a pipe's writer. Raises FileNotFoundError;
    ValueError as ``inside``, or for more than ``most`` bytes."""
    path = inside(folder, name)
    try:
        return open_plain(path, most)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, "a file of the data set is missing; restore it", str(path)) from error
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EISDIR):
            raise
        raise ValueError(f"{path} {error.strerror}; restore it from a copy") from error


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


def shown(value: Any, limit: int = 80) -> str:
    """Shorten ``value`` for a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 20]}… ({len(text)} characters)"


def _parse(data: bytes, where: Path) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:  # also bytes that are not text
        raise ValueError(
            f"{where} is damaged or cut off: it is not JSON ({shown(str(error), 120)}). Restore it from a copy"
        ) from error


def _is_entry(digests: Any) -> bool:
    return isinstance(digests, list) and len(digests) > 0 and all(isinstance(each, str) for each in digests)
