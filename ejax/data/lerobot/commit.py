"""Replace several files at once: after a crash all of them are old or, once repaired, all of them are new.

New versions are written under ``.staging`` and brought to the disk. Then the new list of digests is renamed into its
place: from here on the change counts. The other files follow, ``meta/info.json`` last. ``recover`` sets aside what was
cut off before that first rename, and finishes what was cut off after it, which shows in the list: it has the digest of
every file that is still staged.

So much is needed because an append replaces up to six files that only fit together: a video with an episode too many
cannot be cut without encoding it again, and the statistics of all episodes do not say which episodes they are of.
"""

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.inside import inside, open_inside
from ejax.data.lerobot.kept_files import DIGESTS, Digests, digests_file, load_digests, next_digests, sha256
from ejax.data.lerobot.metadata import may_have
from ejax.runtime.plain_files import kind_of

STAGING, ASIDE = ".staging", "incomplete"
_OF_BEFORE = ("commit.json", "episode")
"""Leftovers of an earlier ejax in the staging folder, which are not part of a change: its journal, parts of videos."""


class Staged:
    """One change of several files of ``folder``. A context manager: leaving it without ``commit`` drops the change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.committed = False
        """The change counts, even where ``commit`` raises; ``recover`` finishes it then."""
        self.scratch = folder / STAGING / "episode.mp4"
        """The path for a file that is needed, and removed, before the commit."""
        self._names: list[str] = []

    def write(self, name: str, data: bytes) -> None:
        """Write the new version of file ``name``, relative to the folder."""
        _write(self.path(name), data)

    def path(self, name: str) -> Path:
        """Return the path to which another program writes the new version of ``name``."""
        self._names.append(name)
        path = self.folder / STAGING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, before: Digests) -> Digests:
        """Put the new versions in place.

        Args:
            before: the digests of the folder's files.

        Returns:
            Those of its files now.

        Raises:
            OSError: as ``committed`` says, before or after the change counts.
        """
        staging, changed = self.folder / STAGING, {}
        for name in self._names:
            with open_inside(staging, name) as file:
                changed[name] = sha256(file)
        digests = next_digests(before, changed)
        self.write(DIGESTS, digests_file(digests))
        for name in self._names:
            inside(self.folder, name)
            _sync(staging / name)
        _sync_folders({(staging / name).parent for name in self._names})
        (self.folder / DIGESTS).parent.mkdir(exist_ok=True)
        self.committed = True  # before it does: an interrupt must not drop a change that counts
        try:
            os.replace(staging / DIGESTS, self.folder / DIGESTS)
        except OSError:
            self.committed = False
            raise
        _sync((self.folder / DIGESTS).parent)
        _put_in_place(self.folder, changed)
        return digests

    def __enter__(self) -> Self:
        (self.folder / STAGING).mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.committed:
            with suppress(OSError):  # the exception under way informs the writer
                shutil.rmtree(self.folder / STAGING)


def recover(folder: Path) -> Path | None:
    """Finish the change that counts, set aside one that does not.

    Returns:
        The folder that the files of an unfinished change were moved to; None: there was none.

    Raises:
        ValueError: as ``pending``; nothing was changed.
    """
    staging = folder / STAGING
    if not _is_folder(staging):
        return None
    names = pending(folder)
    if names or not any(path.is_file() for path in staging.rglob("*")):
        _put_in_place(folder, names)
        return None
    if not _is_folder(folder / ASIDE):
        (folder / ASIDE).mkdir()
    aside = folder / ASIDE / f"{len(list((folder / ASIDE).iterdir())):03d}"
    os.replace(staging, aside)
    return aside


def pending(folder: Path) -> list[str]:
    """List the files of a change that counts and was cut off; none if there is no such change.

    Raises:
        ValueError: the staging folder is no folder, or has links or other things that are no files; a damaged list of
            digests; a place of a file that leads out of ``folder``.
    """
    staging = folder / STAGING
    if not _is_folder(staging):
        return []
    digests, names = load_digests(folder) or {}, []
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if (path.is_dir() and not path.is_symlink()) or name.split("/")[0] in _OF_BEFORE:
            continue
        with open_inside(staging, name) as file:
            if not may_have(name) or sha256(file) not in digests.get(name, ())[:1]:
                return []
        names.append(name)
    for name in names:
        inside(folder, name)
    return names


def is_unfinished(folder: Path) -> bool:
    """Return whether a change is under way, or was cut off."""
    return (folder / STAGING).exists()


def _is_folder(path: Path) -> bool:
    """Return False where nothing is; a link to a folder, or anything else, raises ValueError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is {kind_of(mode)}, and must be a folder that a recording made; remove it")
    return True


def _put_in_place(folder: Path, names: Iterable[str]) -> None:
    """Do the renames that are left; may be cut off and repeated."""
    for name in sorted(names, key=lambda name: name == fmt.INFO):  # a reader begins there, and finds all that it names
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / STAGING / name, folder / name)
    parents = {parent for name in names for parent in (folder / name).parents}
    _sync_folders(parent for parent in parents if parent.is_relative_to(folder))
    shutil.rmtree(folder / STAGING)


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
