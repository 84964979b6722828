"""Replacing several files at once: after a crash all of them are old or, once repaired, all of them are new.

New versions are written under ``.staging`` and brought to the disk; then ``.staging/commit.json`` appears, by one
rename: from here on the change counts. Then each file is renamed into its place, in the order given. ``recover``
finishes what was cut off after that point, and sets aside what was cut off before. A journal is a file like any other,
and may come with a stranger's folder: it is acted on only if everything it names lies inside the folder and is allowed
there. Source: redo logging (Gray, Reuter, "Transaction Processing", 1992, chapter 10).
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ejax.data.lerobot.inside import inside, read_inside, shown
from ejax.data.lerobot.kept_files import parse_json, sha256
from ejax.runtime.plain_files import kind_of

STAGING, JOURNAL, ASIDE = ".staging", "commit.json", "incomplete"


class Staged:
    """One change of several files of ``folder``. A context manager: leaving it commits, or drops all after an error.

    Raises:
        OSError: on leaving. ``committed`` says whether the change counts all the same; ``recover`` finishes it then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.committed = folder, False
        self._names: list[str] = []

    def write(self, name: str, data: bytes) -> None:
        """The new version of file ``name``, relative to the folder."""
        _write(self.path(name), data)

    def write_first(self, name: str, data: bytes) -> None:
        """As ``write``; of all files of the change this one is put in place first."""
        self.write(name, data)
        self._names.insert(0, self._names.pop())

    def digests(self) -> dict[str, str]:
        """SHA-256 in hex of each new version so far, by name."""
        made = {}
        for name in self._names:
            with self.scratch(name).open("rb") as file:
                made[name] = sha256(file)
        return made

    def path(self, name: str) -> Path:
        """The path to which another program writes the new version of ``name``."""
        self._names.append(name)
        return self.scratch(name)

    def scratch(self, name: str) -> Path:
        """A path for a file that is needed only until the commit."""
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
            if not self.committed:  # the exception informs the writer
                with suppress(OSError):
                    shutil.rmtree(self.folder / STAGING)

    def _commit(self) -> None:
        staging = self.folder / STAGING
        for name in self._names:
            _sync(staging / name)
            inside(self.folder, name).parent.mkdir(parents=True, exist_ok=True)
        _sync_folders({(staging / name).parent for name in self._names})
        _write(staging / f"{JOURNAL}.new", json.dumps(self._names).encode())
        _sync(staging / f"{JOURNAL}.new")
        os.replace(staging / f"{JOURNAL}.new", staging / JOURNAL)
        self.committed = True
        _sync(staging)
        _redo(self.folder, self._names)


def recover(folder: Path, may_have: Callable[[str], object]) -> Path | None:
    """Finish the change that counts, set aside one that does not.

    Args:
        may_have: whether a file of this name may be put into the folder.

    Returns:
        The folder that the files of an unfinished change were moved to; None: there was none.

    Raises:
        ValueError: the staging folder is not a ``Staged``'s; nothing was changed.
    """
    staging = folder / STAGING
    if not _is_folder(staging):
        return None
    names = pending(folder, may_have)
    if names:
        _redo(folder, names)
        return None
    if not any(path.is_file() for path in staging.rglob("*")):
        shutil.rmtree(staging)
        return None
    if not _is_folder(folder / ASIDE):
        (folder / ASIDE).mkdir()
    aside = folder / ASIDE / f"{len(list((folder / ASIDE).iterdir())):03d}"
    os.replace(staging, aside)
    return aside


def pending(folder: Path, may_have: Callable[[str], object]) -> list[str]:
    """The files of a change that counts and was cut off, as its journal names them; none if there is no such change.

    Raises:
        ValueError: a journal that is not a ``Staged``'s: damaged, or it names a file that leads out of the folder, that
            ``may_have`` does not allow, or that is neither staged nor in place.
    """
    staging = folder / STAGING
    if not _is_folder(staging) or not os.path.lexists(staging / JOURNAL):
        return []
    names = parse_json(read_inside(staging, JOURNAL), staging / JOURNAL)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{staging / JOURNAL} is not a list of files: {shown(names)}; {_REMEDY}")
    for name in names:
        there = [inside(root, name).exists() for root in (staging, folder)]
        if not may_have(name):
            raise ValueError(
                f"{staging / JOURNAL} names {shown(name)}, which does not belong in such a folder; {_REMEDY}"
            )
        if not any(there):
            raise ValueError(f"{staging / JOURNAL} names {shown(name)}, which is not there; {_REMEDY}")
    return names


_REMEDY = f"no recording was cut off like that. If the folder is yours, move its {STAGING} elsewhere"


def is_unfinished(folder: Path) -> bool:
    """A change is under way, or was cut off."""
    return (folder / STAGING).exists()


def _is_folder(path: Path) -> bool:
    """True: a folder exists; False: nothing does. A link to one, or anything else, raises ValueError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is {kind_of(mode)}, and must be a folder that a recording made; remove it")
    return True


def _redo(folder: Path, names: Sequence[str]) -> None:
    """Do the renames that are left; may be cut off and repeated. The journal goes last: without one, the content of
    the staging folder does not count."""
    staging = folder / STAGING
    for name in names:
        if (staging / name).exists():
            os.replace(staging / name, folder / name)
    parents = {parent for name in names for parent in (folder / name).parents}
    _sync_folders(parent for parent in parents if parent.is_relative_to(folder))
    for left in staging.iterdir():
        if left.is_dir() and not left.is_symlink():
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
