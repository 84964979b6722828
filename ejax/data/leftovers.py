"""Names that identify the owner of a run's shared memory and folder, and the removal of orphaned ones.

    ejax-data-<namespace>-<pid>-<start>-<random>

A run removes both when it ends. If its owner, its worker and Python's resource tracker are killed at once, none is
left to do so; the next engine of the same user does. A process is identified by its number and its start time, in ticks
since the system's: numbers are reused, pairs are not. Both are counted per namespace of processes (a container has its
own), so files from another one are left alone.
"""

import _posixshmem
import os
import re
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"ejax-data-(\d+)-(\d+)-(\d+)-\w+")
_DEAD = "ZX"
"""States of a process that has ended and only waits for its parent to collect it."""


def block_name() -> str:
    """A new name for shared memory of this process."""
    return f"{_prefix()}{secrets.token_hex(4)}"


def make_folder() -> Path:
    """Make a folder of this process in the temporary directory, which no other user can look into (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=_prefix()))


def clear_leftovers() -> None:
    """Remove shared memory and folders of engines whose process has ended, as far as they are this user's.

    What cannot be removed is left; several processes may do this at once.
    """
    namespace = _namespace()
    if namespace is None:
        return
    for folder, kind in ((_SHARED_MEMORY, stat.S_IFREG), (Path(tempfile.gettempdir()), stat.S_IFDIR)):
        for name in _orphans(folder, kind, namespace):
            if kind == stat.S_IFDIR:
                shutil.rmtree(folder / name, ignore_errors=True)
                continue
            with suppress(OSError):  # another engine was faster
                _posixshmem.shm_unlink(f"/{name}")


def _orphans(folder: Path, kind: int, namespace: int) -> list[str]:
    """Names of the leftovers in ``folder`` of this user's processes that have ended."""
    found = []
    with suppress(OSError):
        for name in os.listdir(folder):
            named = _NAME.fullmatch(name)
            if named is None or int(named[1]) != namespace:
                continue
            about = os.lstat(folder / name)
            if about.st_uid == os.geteuid() and stat.S_IFMT(about.st_mode) == kind:
                found += [name] if not _lives(int(named[2]), int(named[3])) else []
    return found


def _prefix() -> str:
    namespace, start = _namespace(), _started(os.getpid())
    known = namespace is not None and start is not None
    return f"ejax-data-{namespace}-{os.getpid()}-{start}-" if known else "ejax-data-unknown-"


def _lives(pid: int, start: int) -> bool:
    """Return True while the process with this number and start time runs, or where that cannot be known."""
    try:
        return _started(pid) == start
    except OSError:
        return True


def _started(pid: int) -> int | None:
    """Start time of a process, in ticks since the system's; None: it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in _DEAD else int(fields[18])


def _namespace() -> int | None:
    """The process namespace of this process; None: the system does not name it, or names another one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino if os.readlink("/proc/self") == str(os.getpid()) else None
    except OSError:
        return None
