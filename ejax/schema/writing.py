"""Write files: whole or not at all, and below a run's folder through no symbolic link.

A link in a stranger's run would have ejax write over files of the user's. So who writes names the folder that the user
chose, ``below``: itself and those above it may be links, what is under it may not (``LinkError``). None: the file's own
folder. The standard library alone is needed.
"""

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ejax.schema.messages import explain
from ejax.schema.plain_files import HUGE, check_found, open_plain

FAILED: list[str] = []
"""Lines of this process on what ``by_product`` could not write."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LinkError(OSError):
    """A symbolic link where a file or a folder is to be written; the text has the remedy."""

    errno = errno.ELOOP


def replace_file(path: Path, content: str | bytes, below: Path | None = None) -> None:
    """Write a file, text as UTF-8, as ``replacing``; without ``below`` its folder must be there."""
    data = content.encode() if isinstance(content, str) else content
    if below is None and (str(path).startswith("/dev/") or not path.parent.is_dir()):  # /dev/stdout, for example
        path.write_bytes(data)
        return
    with replacing(path, below) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, below: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a new file, at its ``name``, that takes the place of ``path`` where the block ends without an error.

    Its folder is made if need be. A crash leaves the former file or the new one, and maybe ``.<digits>.partial…``.
    OSError: it cannot be written, or ``path`` is a folder. LinkError: it is a link, or in one.
    """
    with _folder(path, below) as folder:
        with suppress(FileNotFoundError):
            found = os.lstat(path.name or ".", dir_fd=folder)
            _refuse_link(path, found, below)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        partial = path.with_name(f".{secrets.token_hex(4)}.partial{path.suffix}"[:255])
        try:
            with open(partial, "xb", opener=_opener(folder)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # before the name: a power cut must not leave an empty file
            os.replace(partial.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial.name, dir_fd=folder)
            raise
        os.fsync(folder)


def new_file(path: Path, below: Path | None = None) -> IO[bytes]:
    """Open a file that is not there yet for writing; errors as ``replacing``. FileExistsError: it is there."""
    with _folder(path, below) as folder:
        return open(path, "xb", opener=_opener(folder))


def append_file(path: Path, below: Path) -> IO[bytes]:
    """Open a file to read it and to write at its end, unbuffered, and make it if need be; waits for no pipe's reader.

    OSError: it is not a regular file, or cannot be written. LinkError: it is a link, or in one.
    """
    with _folder(path, below) as folder:
        with suppress(FileNotFoundError):
            _refuse_link(path, os.lstat(path.name, dir_fd=folder), below)
        descriptor = _opener(folder)(str(path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
    file = os.fdopen(descriptor, "a+b", 0)
    try:
        check_found(os.fstat(file.fileno()), path, HUGE)
    except BaseException:
        file.close()
        raise
    return file


def append_whole(file: IO[bytes], record: bytes) -> None:
    """Write a record at the end of what ``append_file`` opened. OSError: it cannot be written, and no part of it is."""
    end = os.fstat(file.fileno()).st_size
    try:
        while record:
            record = record[file.write(record) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def make_folder(path: Path, below: Path | None = None) -> Path:
    """Make a folder, and those above it, where it is not there yet; errors as ``replacing``. Returns it."""
    with _folder(path / "_", below):
        return path


def move(source: Path, target: Path, below: Path | None = None) -> Path:
    """Rename a file or a folder, and force the new name to the disk; errors as ``replacing``. Returns ``target``."""
    with _folder(target, below) as folder:
        os.replace(source, target.name, dst_dir_fd=folder)
        os.fsync(folder)
    return target


def link_file(source: str | Path, target: str | Path) -> str | Path:
    """Link a file under a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        with open_plain(source, HUGE) as read, replacing(Path(target)) as written:
            shutil.copyfileobj(read, written)
    return target


def sync(path: Path) -> None:
    """Force a file, or a folder with all that is in it, to the disk."""
    for each in path.iterdir() if path.is_dir() else ():
        sync(each)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def by_product(what: str, note: Callable[[str], object] | None = None, errors: Any = OSError) -> Iterator[None]:
    """Write something in addition to a result, which is not lost if that fails: it is a line, and exit code 1.

    ``note`` takes the line; None: standard error.
    """
    try:
        yield
    except errors as error:
        line = f"{what} is not written: {explain(error)}"
        if line not in FAILED:  # a full disk refuses many alike
            FAILED.append(line)
            print(f"ejax: {line}", file=sys.stderr, flush=True) if note is None else note(line)


def _opener(folder: int) -> Callable[[str, int], int]:
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return lambda path, flags: os.open(os.path.basename(path), flags | more, 0o666, dir_fd=folder)


@contextmanager
def _folder(path: Path, below: Path | None) -> Iterator[int]:
    """Open the folder of ``path``, made if need be; an error names what it means."""
    place = path.parent if below is None else below
    names = path.parent.relative_to(place).parts
    with suppress(FileExistsError):  # a file, if it is not a folder: not to be opened
        place.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(place, flags)
    try:
        for name in names:
            place /= name
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=descriptor)
                os.fsync(descriptor)
            _refuse_link(place, os.lstat(name, dir_fd=descriptor), below)
            inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        place = path
        yield descriptor
    except OSError as error:
        ours = error.filename == place.name or ".partial" in str(error.filename)  # relative to the folder
        if ours or (error.filename is None and error.errno in _FULL):
            raise OSError(error.errno, error.strerror, str(place)) from error
        raise
    finally:
        os.close(descriptor)


def _refuse_link(path: Path, found: os.stat_result, below: Path | None) -> None:
    if stat.S_ISLNK(found.st_mode):
        remedy = "use the path it leads to" if below is None else f"make {below} itself, or a folder above it, a link"
        raise LinkError(f"{path} is a symbolic link, and nothing is written through it; remove it, or {remedy}")
