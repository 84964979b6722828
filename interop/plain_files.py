"""Read an export's files: regular ones of bounded size only. The standard library alone; a robot has no ``ejax``.

As ``ejax.schema.plain_files``, of which a robot's checkout needs no more than this.
"""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any
from zipfile import ZipFile

MAX_BYTES = 64 << 20
"""Bytes of a file of facts."""
MAX_ARTEFACT = 8 << 30
"""Bytes of weights or of a graph, and of arrays once they are unpacked."""
_MAX_DEPTH = 100


def check_plain(path: Path, most: int = MAX_ARTEFACT) -> None:
    """Refuse what is no regular file, or too large, before a library opens it itself.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is refused.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}: give a folder that python -m interop.export RUN --to DIR has written, with this "
            "format among its --formats"
        )
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    if found.st_size > most:
        raise ValueError(f"{path} has {found.st_size} bytes; at most {most} are read")


def open_plain(path: Path, most: int = MAX_ARTEFACT) -> BufferedReader:
    """Open a regular file of bounded size.

    Raises:
        FileNotFoundError, ValueError: as ``check_plain``.
    """
    check_plain(path, most)
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def check_unpacked(archive: ZipFile) -> None:
    """Refuse an archive that is too large once it is unpacked.

    Raises:
        ValueError: the archive is larger than an artefact may be, once it is unpacked.
    """
    if (size := sum(part.file_size for part in archive.infolist())) > MAX_ARTEFACT:
        raise ValueError(f"unpacked it has {size} bytes; at most {MAX_ARTEFACT} are read")


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of bounded size.

    Raises:
        FileNotFoundError, ValueError: as ``check_plain``.
    """
    with open_plain(path, most) as file:
        return file.read(most)


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8.

    Raises:
        FileNotFoundError, ValueError: as ``check_plain``; ValueError also where it is no UTF-8.
    """
    return read_bytes(path).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of bounded depth.

    Raises:
        ValueError: no JSON, or nested so deeply that who reads it would exhaust Python's stack.
    """
    deep = f"it is nested deeper than {_MAX_DEPTH} levels"
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(deep) from None
    level = [found]
    for _ in range(_MAX_DEPTH):
        parts = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for part in parts for x in part]
    if level:
        raise ValueError(deep)
    return found
