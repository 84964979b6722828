"""Replacing several files at once: after a crash all of them are old or, once repaired, all of them are new.

New versions are written under ``.staging`` and brought to the disk; then ``.staging/commit.json`` appears, by one
rename: from here on the change counts. Then each file is renamed into its place, in the order given. ``recover``
finishes what was cut off after that point, and sets aside what was cut off before. Source: redo logging (Gray, Reuter,
"Transaction Processing", 1992, chapter 10).
"""

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

STAGING, JOURNAL, ASIDE = ".staging", "commit.json", "incomplete"


class Staged:
    """One change of several files of ``folder``. A context manager: leaving it commits, or drops all after an error.

    Raises:
        OSError: on leaving. ``committed`` tells whether the change counts all the same; ``recover`` finishes it then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.committed = folder, False
        self._names: list[str] = []

    def write(self, name: str, data: bytes) -> None:
        """The new version of file ``name``, relative to the folder."""
        _write(self.path(name), data)

    def path(self, name: str) -> Path:
        """Where another program writes the new version of ``name`` to."""
        self._names.append(name)
        return self.scratch(name)

    def scratch(self, name: str) -> Path:
        """A place for what is needed only until the commit."""
        path = self.folder / STAGING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def __enter__(self) -> Self:
        (self.folder / STAGING).mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._commit()
        finally:
            if not self.committed:  # whoever wrote is told by the exception
                with suppress(OSError):
                    shutil.rmtree(self.folder / STAGING)

    def _commit(self) -> None:
        staging = self.folder / STAGING
        for name in self._names:
            _sync(staging / name)
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        _sync_folders({(staging / name).parent for name in self._names})
        _write(staging / f"{JOURNAL}.new", json.dumps(self._names).encode())
        _sync(staging / f"{JOURNAL}.new")
        os.replace(staging / f"{JOURNAL}.new", staging / JOURNAL)
        self.committed = True
        _sync(staging)
        _redo(self.folder)


def recover(folder: Path) -> Path | None:
    """Finish the change that counts, set aside one that does not.

    Returns:
        Where the files of an unfinished change lie now; None: there was none.
    """
    staging = folder / STAGING
    if not staging.exists():
        return None
    if (staging / JOURNAL).exists():
        _redo(folder)
        return None
    if not any(path.is_file() for path in staging.rglob("*")):
        shutil.rmtree(staging)
        return None
    (folder / ASIDE).mkdir(exist_ok=True)
    aside = folder / ASIDE / f"{len(list((folder / ASIDE).iterdir())):03d}"
    os.replace(staging, aside)
    return aside


def is_unfinished(folder: Path) -> bool:
    """A change is under way, or was cut off."""
    return (folder / STAGING).exists()


def _redo(folder: Path) -> None:
    """Rename what is not renamed yet; may be cut off and done again. The journal goes last: without one, what lies in
    the staging folder does not count."""
    staging = folder / STAGING
    names: list[str] = json.loads((staging / JOURNAL).read_bytes())
    for name in names:
        if (staging / name).exists():
            os.replace(staging / name, folder / name)
    parents = {parent for name in names for parent in (folder / name).parents}
    _sync_folders(parent for parent in parents if parent.is_relative_to(folder))
    for left in staging.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != JOURNAL:
            left.unlink()
    (staging / JOURNAL).unlink()
    staging.rmdir()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folders(folders: Iterable[Path]) -> None:
    for folder in sorted(folders, reverse=True):
        _sync(folder)
