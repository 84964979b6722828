"""The files of a folder of kept episodes, safe to read: inside the folder, and exactly the bytes that were written.

    meta/ejax_digests.json    {"version": 1, "sha256": {"meta/info.json": [digest, the one before], ...}}

Of each file that an append replaces, the list has the digest of the new version and of the one before. It is the first
file that an append puts in place: any file that a reader finds during an append, or after a crash, is in the list. A
file is compared with it once, when a reader first opens it. A digest finds damage, not forgery: anyone who can write to
the folder can write the list too.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from ejax.data.lerobot.inside import inside, open_inside, read_inside, shown
from ejax.runtime.plain_files import HUGE, MAX_BYTES

DIGESTS = "meta/ejax_digests.json"
_VERSION = 1
_TRIES = 5
"""Attempts at reading a file and the list, each of which an append may replace meanwhile."""

Digests: TypeAlias = Mapping[str, tuple[str, ...]]
"""SHA-256 in hex by name: of the file's current version, and of the one before."""


class KeptFiles:
    """A folder's files. May be pickled; threads may share it.

    Raises:
        ValueError: a list of digests that is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests = load_digests(folder)
        """None: the folder has none, so damage cannot be noticed."""
        self._seen: dict[str, tuple[int, ...]] = {}
        """``stat`` of each file that was compared with its digest."""

    def has(self, name: str) -> bool:
        """Return True where the folder has the file, or must have it."""
        return name in (self.digests or {}) or inside(self.folder, name).exists()

    def open(self, name: str, most: int = HUGE) -> IO[bytes]:
        """Open a file for reading, after checking that its content is what was written.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is damaged, not in the list, no file of the folder, or has more than ``most`` bytes.
        """
        for _ in range(_TRIES):
            file = open_inside(self.folder, name, most)
            try:
                if self.digests is None or self._is_known(name, file):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()
            self.digests = load_digests(self.folder)  # an append may have replaced both
        path = self.folder / name
        if name not in (self.digests or {}):
            raise ValueError(
                f"{path} is not among the files that {DIGESTS} lists; no EpisodeWriter wrote it. Remove it, or restore "
                f"the folder from a copy"
            )
        raise ValueError(
            f"{path} is damaged: it is not what was written, its SHA-256 differs from the one in {DIGESTS}. Restore it "
            f"from a copy; if another program changed it on purpose, remove {DIGESTS}"
        )

    def read(self, name: str) -> bytes:
        """The whole content of a small file, checked as by ``open``."""
        with self.open(name, MAX_BYTES) as file:
            return file.read(MAX_BYTES)

    def check(self, name: str) -> Path:
        """The path of a file, checked as by ``open``: for a program that opens it itself."""
        self.open(name).close()
        return self.folder / name

    def _is_known(self, name: str, file: IO[bytes]) -> bool:
        found = os.fstat(file.fileno())
        stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if self._seen.get(name) == stamp:
            return True
        digest = sha256(file)
        file.seek(0)
        if digest not in (self.digests or {}).get(name, ()):
            return False
        self._seen[name] = stamp
        return True


def load_digests(folder: Path) -> Digests | None:
    """The list of a folder; None: it has none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        made = parse_json(read_inside(folder, DIGESTS), folder / DIGESTS)
    except FileNotFoundError:
        return None
    entries = made.get("sha256") if isinstance(made, dict) and made.get("version") == _VERSION else None
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        raise ValueError(
            f"{folder / DIGESTS} is damaged, or of another version than {_VERSION}: it must have SHA-256 digests by "
            f"file name. Restore it from a copy, or remove it: then damage of the other files goes unnoticed"
        )
    return {name: tuple(digests) for name, digests in entries.items()}


def next_digests(before: Digests, changed: Mapping[str, str]) -> Digests:
    """The list once the files in ``changed``, which has their new digests by name, are replaced."""
    kept = {name: digests[:1] for name, digests in before.items()}
    return kept | {name: (digest, *kept.get(name, ())) for name, digest in changed.items()}


def digests_file(digests: Digests) -> bytes:
    """The list as stored."""
    return json.dumps({"version": _VERSION, "sha256": dict(sorted(digests.items()))}, indent=1).encode()


def sha256(file: IO[bytes]) -> str:
    """The digest of an open file's content."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # any file of bytes will do


def parse_json(data: bytes, where: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: it is not JSON, with its name; non-finite numbers are not JSON either.
    """
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # also bytes that are not text, and integers of too many digits
        raise ValueError(
            f"{where} is damaged or cut off: it is not JSON ({shown(str(error), 120)}). Restore it from a copy"
        ) from error


def _is_entry(digests: Any) -> bool:
    return isinstance(digests, list) and 1 <= len(digests) <= 2 and all(isinstance(each, str) for each in digests)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
