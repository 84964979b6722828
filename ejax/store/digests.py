"""Digests that prove a folder whole: its ``SHA256`` file must be the one that would be written now.

<digest>  <path>        a line for each other file, in the order of their paths
<digest>  SHA256        of the lines above
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ejax.schema.plain_files import HUGE, MAX_BYTES, is_side_file, kind_of, open_plain, read_text, sha256
from ejax.schema.writing import replace_file
from ejax.store.arrays import CheckpointError

LISTING = "SHA256"


class DamagedError(ValueError):
    """A folder that differs from its digests; the text begins with the difference."""


class ForeignError(DamagedError, CheckpointError):
    """Something in the folder that ejax did not put there: no reason to take an older one. The text has the remedy."""


def write_digests(folder: Path, origin: Path | None = None) -> None:
    """Write ``SHA256`` for all files of ``folder``, at any depth. ``origin``: a folder with digests. Files that are
    hard links to those of the same path there keep their digests."""
    listed = {} if origin is None else _listed(read_text(origin / LISTING))
    known = {name: digest for name, digest in listed.items() if origin and _is_same(folder / name, origin / name)}
    replace_file(folder / LISTING, render_digests(_digests(folder, None, known)))


def render_digests(digests: Mapping[str, str]) -> str:
    """Write the text of a ``SHA256`` file: digests by path, in this order."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return f"{lines}{sha256(lines.encode())}  {LISTING}\n"


def check_digests(folder: Path, names: Sequence[str] | None = None, listing: str = LISTING) -> None:
    """Compare each file of ``folder``, at any depth, with ``listing``. ``names``: the files that are listed, where the
    folder may hold others as well. None: all. Raises DamagedError: they differ, or there is something other than files
    and folders."""
    try:
        written, digests = read_text(folder / listing), _digests(folder, names)
    except OSError as error:
        raise DamagedError(f"{Path(error.filename).name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{listing} was changed: it is not text") from None
    # compared as a whole, so that no line can hide
    if not digests or written != render_digests(digests):
        raise _difference(written, digests)


def files_of(folder: Path) -> list[Path]:
    """List the files of ``folder``, at any depth, in order. ForeignError: one is neither a file nor a folder."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_side_file(name)]
        for path in (Path(root, name) for name in (*folders, *names) if not is_side_file(name)):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                found.append(path)
            elif not stat.S_ISDIR(mode):
                text = f"is {kind_of(mode)}, where only files and folders may be; remove it"
                if stat.S_ISLNK(mode):  # as huggingface_hub has its snapshots
                    text = "is a symbolic link; copy the whole folder with cp -rL, or download it with local_dir="
                raise ForeignError(f"{path.relative_to(folder)} {text}")
    return sorted(found)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _digests(folder: Path, names: Sequence[str] | None, known: Mapping[str, str] | None = None) -> dict[str, str]:
    digests = {}
    for path in files_of(folder):
        name = str(path.relative_to(folder))
        if known and name in known:
            digests[name] = known[name]
        elif name != LISTING if names is None else name in names:
            # named ones are facts, which nobody reads where they are larger
            with open_plain(path, HUGE if names is None else MAX_BYTES) as file:
                digests[name] = sha256(file)
    return digests


def _listed(written: str) -> dict[str, str]:
    lines = (line.partition("  ") for line in written.splitlines())
    return {name: digest for digest, _, name in lines if name not in ("", LISTING)}


def _difference(written: str, digests: Mapping[str, str]) -> DamagedError:
    listed = _listed(written)
    for name in sorted(listed):
        if name not in digests:
            return DamagedError(f"{name} is missing")
        if listed[name] != digests[name]:
            return DamagedError(f"{name} was changed, or its digest in {LISTING}")
    for name in sorted(digests.keys() - listed):
        text = f"{name} is not in {LISTING}, which lists every file"
        if written == render_digests({name: x for name, x in digests.items() if name in listed}):
            return ForeignError(f"{text}; remove it, and nothing is damaged")
        return DamagedError(text)
    return DamagedError(f"{LISTING} was changed")  # its order, a repeated line, or the list's own digest
