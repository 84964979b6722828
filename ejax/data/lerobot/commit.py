"""Replace several files at once: after a crash all of them are old or, once repaired, all of them are new.

New versions are written under ``.staging``; its renaming to ``.commit`` makes the change count. Then its files are put
in place, the list of digests first, ``meta/info.json`` last. ``recover`` sets aside what was cut off before that
rename, and finishes what was cut off after it.
"""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import DIGESTS, Digests, digests_file, inside, next_digests, open_inside, sha256
from ejax.data.lerobot.metadata import may_have
from ejax.schema.plain_files import kind_of

STAGING, COMMIT, ASIDE = ".staging", ".commit", "incomplete"


class Staged:
    """A change of several files of ``folder``. A context manager: leaving it without ``commit`` drops the change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.committed = False
        """True once the change counts, even if ``commit`` raises; ``recover`` finishes it then."""
        self.scratch = folder / STAGING / "episode.mp4"
        """A path for a file that is removed before the commit."""

    def write(self, name: str, data: bytes) -> None:
        """Write the new version of file ``name``, relative to the folder."""
        _write(self.path(name), data)

    def path(self, name: str) -> Path:
        """Return the path to which another program writes the new version of ``name``."""
        path = self.folder / STAGING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, before: Digests) -> Digests:
        """Put the new versions in place; from the digests ``before`` return those of the files now. Raises OSError if
        the disk is full, or fails; see ``committed``."""
        staging, changed = self.folder / STAGING, {}
        for name in _files_below(staging):
            with open_inside(staging, name) as file:
                changed[name] = sha256(file)
            inside(self.folder, name)
        digests = next_digests(before, changed)
        self.write(DIGESTS, digests_file(digests))
        for path in [*staging.rglob("*"), staging]:
            _sync(path)
        self.committed = True  # before it does: an interrupt must not drop a change that counts
        try:
            os.replace(staging, self.folder / COMMIT)
        except OSError:
            self.committed = False
            raise
        _sync(self.folder)
        _put_in_place(self.folder)
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
    """Finish the change that counts, set aside one that does not, and return the folder of its files, if any. Raises
    ValueError as ``pending``, with nothing changed."""
    pending(folder)
    staging, all_aside = folder / STAGING, folder / ASIDE
    is_staged, has_aside = _is_folder(staging), _is_folder(all_aside)
    if _is_folder(folder / COMMIT):
        _put_in_place(folder)
    if not is_staged:
        return None
    if not _files_below(staging):
        shutil.rmtree(staging)
        return None
    if not has_aside:
        all_aside.mkdir()
    aside = all_aside / f"{len(list(all_aside.iterdir())):03d}"
    os.replace(staging, aside)
    return aside


def pending(folder: Path) -> list[str]:
    """List the files of a change that counts and was cut off, if any. Raises ValueError if its folder is none, or has
    anything but plain files of a recording, or leads out of ``folder``."""
    names = _files_below(folder / COMMIT) if _is_folder(folder / COMMIT) else []
    for name in names:
        open_inside(folder / COMMIT, name).close()
        inside(folder, name)
        if not may_have(name):
            raise ValueError(f"{folder / COMMIT / name} is no file of a recording; remove it")
    return names


def is_unfinished(folder: Path) -> bool:
    """Return True if a change is under way, or was cut off."""
    return (folder / STAGING).exists() or (folder / COMMIT).exists()


def _files_below(folder: Path) -> list[str]:
    """List the files, and all else that is no folder, in the order in which they are put in place."""
    paths = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    # a reader begins at info.json, and finds all that it names; of any file that it finds, the list has the digest
    return sorted(names, key=lambda name: (name == fmt.INFO) - (name == DIGESTS))


def _is_folder(path: Path) -> bool:
    """Return False for nothing there; raise ValueError for a link to a folder, or anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is {kind_of(mode)}, and must be a folder that a recording made; remove it")
    return True


def _put_in_place(folder: Path) -> None:
    """Do the renames that are left; may be cut off and repeated."""
    parents = set()
    for name in _files_below(folder / COMMIT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / COMMIT / name, folder / name)
        parents |= {parent for parent in (folder / name).parents if parent.is_relative_to(folder)}
    for parent in sorted(parents, reverse=True):
        _sync(parent)
    shutil.rmtree(folder / COMMIT)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
