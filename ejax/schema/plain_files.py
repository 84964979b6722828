"""Read files that a config, a run's folder or a command line names: regular files of bounded size only. And write them.

A named pipe, ``/dev/zero`` or 100,000 brackets are an ``OSError`` or a ``ValueError``, as a missing or damaged file is.
A link in a stranger's run would have ejax write over files of the user's. So who writes names the folder that the user
chose, ``below``: itself and those above it may be links, what is under it may not (``LinkError``). None: the file's own
folder. The standard library alone is needed.
"""

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import re
import secrets
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

MAX_DIGITS = 100  # digits of an integer: the time to read one grows with their square, and nobody means more
HUGE = 1 << 40  # bytes of a file that is read piece by piece
MAX_DEPTH = 100  # mappings and lists inside each other
MAX_BYTES = 64 << 20  # bytes of a file, where the reader gives no bound of its own
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SIDE_FILE = re.compile(
    r"\.DS_Store|\._.*|__MACOSX|\.(Spotlight-V100|Trashes|fseventsd|AppleDouble|localized)|Icon\r"  # of a Mac
    r"|(eh)?thumbs(_vista)?\.db|desktop\.ini|\$RECYCLE\.BIN|.*:Zone\.Identifier"  # of Windows
    r"|\.nfs[0-9a-f]+|\.fuse_hidden\w+|\.directory|@eaDir|\.Trash-\d+"  # of Linux and network drives
    r"|.+~|\.?#.*|\..*\.sw[a-z]|\.~lock\..*|\.(ipynb_checkpoints|idea|vscode)",  # of editors
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"(~[^/]*)|.*?(\$(?:\w+|\{[^}]*\}))")  # what os.path could not expand
FAILED: list[str] = []
"""Lines of this process on what ``by_product`` could not write."""
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ExpansionError(argparse.ArgumentTypeError, ValueError):
    """A path with a part that stands for nothing here; argparse shows the text."""


def kind_of(mode: int) -> str:
    """Name the kind of a file for a message, by its ``st_mode``."""
    return _KINDS.get(stat.S_IFMT(mode), "another kind of thing")


def open_plain(path: str | Path, most: int = MAX_BYTES) -> BufferedReader:
    """Open a regular file for reading; never waits for a pipe's writer.

    OSError: it is not there, not a regular file, or has more than ``most`` bytes.
    """
    check_plain(path, most)  # before it is opened: that alone may do something to a device
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:  # again, of what is open now: another file may have taken its name
        check_found(os.fstat(file.fileno()), path, most)
    except BaseException:
        file.close()
        raise
    return file


def check_plain(path: str | Path, most: int = MAX_BYTES) -> None:
    """Refuse what ``open_plain`` does, with its errors, for a library that opens the file itself."""
    try:
        check_found(os.stat(path), path, most)
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file; errors as ``open_plain``."""
    with open_plain(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it grew meanwhile
        raise _too_large(path, len(data), most)
    return data


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """Read a regular file as UTF-8, without its byte order mark. As ``open_plain``; UnicodeDecodeError: other bytes."""
    return read_bytes(path, most).decode("utf-8-sig")


def sha256(source: bytes | IO[bytes]) -> str:
    """Give the digest of bytes, or of what is left to read of an open file, in hexadecimal digits."""
    made = hashlib.sha256(source) if isinstance(source, bytes) else hashlib.file_digest(cast(Any, source), "sha256")
    return made.hexdigest()


def read_json(path: str | Path, most: int = MAX_BYTES) -> Any:
    """Read a JSON file; errors as ``open_plain`` and ``parse_json``."""
    return parse_json(read_bytes(path, most))


def to_json(value: Any, infinity: str = "1e999", **options: Any) -> str:
    """Write strict JSON, which has no NaN (null) and no infinity: a number that every reader takes for one, or null."""
    known = {"NaN": "null", "Infinity": infinity, "-Infinity": infinity if infinity == "null" else f"-{infinity}"}
    # texts are passed over as they are
    pattern = r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN'
    return re.sub(pattern, lambda found: known.get(found[0], found[0]), json.dumps(value, **options))


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Floats may be infinite or NaN, also those that are too large to be finite.

    ValueError: no JSON, nested deeper than ``MAX_DEPTH``, or an integer of more than ``MAX_DIGITS`` digits.
    """
    try:
        found = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [found]
    for _ in range(MAX_DEPTH):  # level by level: who recurses over what is left stays far from Python's own limit
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for part in parts for each in part]
    if level:
        raise ValueError(_TOO_DEEP)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits; allowed are {MAX_DIGITS}")
    return int(digits)


def check_found(found: os.stat_result, path: str | Path, most: int) -> None:
    """Refuse what ``open_plain`` does, with its errors, by the file's ``stat``."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"is {kind_of(found.st_mode)}, no regular file", str(path))
    if found.st_size > most:
        raise _too_large(path, found.st_size, most)


def _too_large(path: str | Path, size: int, most: int) -> OSError:
    return OSError(errno.EFBIG, f"has {size} bytes; at most {most} are read", str(path))


def is_side_file(name: str) -> bool:
    """Recognize by its name what systems and editors leave beside the files of others, and nobody reads."""
    return _SIDE_FILE.fullmatch(name) is not None


def expanded(path: str) -> str:
    """Put the home folder for ``~`` and variables of the environment for ``$NAME`` and ``${NAME}``.

    ExpansionError: there is no home folder, or no such variable, nor a file of that very name.
    """
    found = os.path.expandvars(os.path.expanduser(path))
    if (left := _UNKNOWN.match(found)) and (path[:1] == "~" or not os.path.lexists(path)):
        raise ExpansionError(
            f"got '{path}', and here {left[1] or left[2]} stands for nothing; write the path without it"
        )
    return found


def a_path(text: str) -> Path:
    """Read a path of a command line, for argparse: a shell leaves the ``~`` of ``--to=~/file``, and what is quoted."""
    return Path(expanded(text))


def tables_beside(module: str) -> dict[str, Any]:
    """Read the TOML of a module's own name beside it, ``tables_beside(__file__)``: data that ejax ships."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text())


def package_folder(name: str) -> Path | None:
    """Find the folder of an installed top-level package without importing it. None: it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # of a module that no file is the source of, such as __main__
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


class LinkError(OSError):
    """A symbolic link where a file or a folder is to be written; the text has the remedy."""

    errno = errno.ELOOP


def replace_file(path: Path, content: str | bytes, below: Path | None = None, *, mode: int = 0o666) -> None:
    """Write a file, text as UTF-8, as ``replacing``; without ``below`` its folder must be there."""
    data = content.encode() if isinstance(content, str) else content
    if below is None and (str(path).startswith("/dev/") or not path.parent.is_dir()):  # /dev/stdout, for example
        path.write_bytes(data)
        return
    with replacing(path, below, mode=mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, below: Path | None = None, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
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
            with open(partial, "xb", opener=_opener(folder, mode)) as file:
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
    """Write something beside a result, which is not lost if that fails: it is a line, and the command's exit code 1.

    ``note`` takes the line; None: standard error.
    """
    try:
        yield
    except errors as error:
        line = f"{what} is not written: {error}"
        if line not in FAILED:  # a full disk refuses many alike
            FAILED.append(line)
            print(f"ejax: {line}", file=sys.stderr, flush=True) if note is None else note(line)


def _opener(folder: int, mode: int = 0o666) -> Callable[[str, int], int]:
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return lambda path, flags: os.open(os.path.basename(path), flags | more, mode, dir_fd=folder)


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
        remedy = "give what it leads to" if below is None else f"make {below} itself, or a folder above it, a link"
        raise LinkError(f"{path} is a symbolic link, and nothing is written through it; remove it, or {remedy}")
