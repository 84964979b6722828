"""A lock on a run's folder: one process at a time writes there; readers need none.

The kernel's lock on ``<run>/.lock`` ends with its process, and no child inherits it. The file names the owner.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ejax.schema.plain_files import parse_json
from ejax.schema.writing import append_file, make_folder
from ejax.store.checkpoint import CheckpointError

LOCK = ".lock"
_HELD: set[tuple[int, int]] = set()
"""Device and inode of the locks that this process has: the kernel knows processes only, not their threads."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""
_MAX_OWNER_BYTES = 4096


class RunInUseError(CheckpointError):
    """Another process writes in the run's folder; the text names it and the remedy."""


@contextmanager
def run_lock(folder: Path) -> Iterator[str]:
    """Hold the lock of a run's folder, which is made if need be.

    Yields one line about an owner that ended without giving it back, or "".

    Raises:
        RunInUseError: another process, or another call in this one, has it.
        CheckpointError: its file is a link, or no regular file.
        OSError: the folder cannot be made or written.
    """
    if "\0" in str(folder):
        raise NotADirectoryError(f"{str(folder)!r} holds a null character: no folder has such a name")
    make_folder(folder)
    path = folder / LOCK
    if path.is_symlink() or (path.exists() and not path.is_file()):  # what it leads to would be written over
        raise CheckpointError(f"{path} is not a regular file, as a lock is; remove it, or do not use this run")
    # before opening it: closing any descriptor of a file gives up the process's lock
    if path.exists() and _identity(path.stat()) in _HELD:
        raise RunInUseError(_refusal(folder, "another call in this process"))
    with append_file(path, folder) as file:  # never truncated before the lock is held
        identity, former = _identity(os.fstat(file.fileno())), dict[str, Any]()
        file.seek(0)
        with suppress(ValueError):  # of a damaged file nothing is known
            owner = parse_json(file.read(_MAX_OWNER_BYTES) or b"{}")
            former = owner if isinstance(owner, dict) else {}
        _take(file, folder, former)
        if not path.exists() or _identity(path.stat()) != identity:  # its owner took the folder back meanwhile
            raise RunInUseError(_refusal(folder, "a process that has just given it up"))
        _HELD.add(identity)
        try:
            _write_owner(file, {"host": socket.gethostname(), "pid": os.getpid(), "boot_ticks": _started(os.getpid())})
            yield f"{_name(former)} ended without giving {folder} back; this process continues there" if former else ""
            with suppress(OSError):  # given back in order: the next owner has nothing to report
                _write_owner(file, {})
        finally:
            _HELD.discard(identity)


def _take(file: IO[bytes], folder: Path, former: dict[str, Any]) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunInUseError(_refusal(folder, _name(former))) from None
        if error.errno not in _UNSUPPORTED:
            raise
        pid, here = former.get("pid"), former.get("host") == socket.gethostname()
        # its number may be another process's by now
        if former and not (here and isinstance(pid, int) and former.get("boot_ticks") != _started(pid)):
            remedy = f"; the file system has no locks: if that process has ended, remove {folder / LOCK}"
            raise RunInUseError(_refusal(folder, _name(former)) + remedy) from None


def _refusal(folder: Path, owner: str) -> str:
    return f"run {folder} is in use by {owner}; wait until it ends, stop it, or use another folder"


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _started(pid: int) -> int | None:
    """Return the clock ticks between boot and a process's start; None: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _write_owner(file: IO[bytes], owner: dict[str, Any]) -> None:
    file.truncate(0)
    file.write(json.dumps(owner).encode() if owner else b"")
