"""The folders of runs in shared memory, ``/dev/shm/ejax-data-<namespace>-<pid>-<start>-<random>``.

A run's owner removes its folder at the end; if that is killed, its worker; if both are, the next engine of the same
user. A process is identified by its number and its start time in ticks, per namespace of processes (a container has
its own); folders from another namespace are left alone.
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


def make_folder() -> Path:
    """Make a folder of this process that no other user can look into (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=_prefix(), dir=PLACE))


def clear_leftovers() -> None:
    """Remove folders of this user's ended engines, where it can; several processes may do so at once."""
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
    """Return a process's start time in ticks; None: it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in _DEAD else int(fields[18])


def _namespace() -> int | None:
    """Return this process's namespace of processes; None: the system does not name it, or names another one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino if os.readlink("/proc/self") == str(os.getpid()) else None
    except OSError:
        return None
