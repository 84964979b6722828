"""The folders of runs, in shared memory: their names, which identify their owner, and the removal of orphaned ones.

    /dev/shm/ejax-data-<namespace>-<pid>-<start>-<random>

A run's folder has its buffer and the files that its processes exchange. Its owner removes it when it ends; if that is
killed, its worker; if both are killed at once, the next engine of the same user. A process is identified by its number
and its start time, in ticks since the system's: numbers are reused, pairs are not. Both are counted per namespace of
processes (a container has its own), so folders from another one are left alone.
"""

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_NAME = re.compile(r"ejax-data-(\d+)-(\d+)-(\d+)-\w+")
_DEAD = "ZX"
"""States of a process that has ended and only waits for its parent to collect it."""


def make_folder() -> Path:
    """Make a folder of this process, which no other user can look into (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=_prefix(), dir=PLACE))


def clear_leftovers() -> None:
    """Remove folders of engines whose process has ended, as far as they are this user's.

    What cannot be removed is left; several processes may do this at once.
    """
    with suppress(OSError):
        for path in PLACE.iterdir():
            named = _NAME.fullmatch(path.name)
            if named is not None and int(named[1]) == _namespace():
                about = path.lstat()
                mine = about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode)
                if mine and _started(int(named[2])) != int(named[3]):
                    shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    namespace, start = _namespace(), _started(os.getpid())
    known = namespace is not None and start is not None
    return f"ejax-data-{namespace}-{os.getpid()}-{start}-" if known else "ejax-data-unknown-"


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
