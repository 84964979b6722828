"""Files of the code that is named as text, ``package.module:Name`` or ``FILE.py:Name``: those that Python finds here,
those that a run noted when it was made, and who may have put them there. Looking imports nothing, and needs the
standard library alone.
"""

import contextlib
import grp
import importlib
import importlib.util
import itertools
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ejax.schema.plain_files import read_bytes, sha256

_NOT_FOUND = (ImportError, ValueError, AttributeError, KeyError, OSError)
"""Errors of looking a module up: finders of other packages raise more than ImportError."""
_SAME_EVERYWHERE = sys.stdlib_module_names | {"ejax", "interop"}

noted: dict[str, str] = {}
"""Module -> "SHA-256 file", as the run says whose config is being read: where to look, not what to trust."""


def module_of(place: str) -> str:
    return place.rpartition(":")[0]


def note_code(places: Iterable[str]) -> dict[str, str]:
    """Note for a run where its code lies, ``{module: "SHA-256 file"}``; of installed packages nothing."""
    files = {module_of(place): file_of(place) for place in places}
    own = {name: file for name, file in files.items() if file and name.partition(".")[0] not in _SAME_EVERYWHERE}
    return {name: f"{_digest(file)} {file}" for name, file in own.items() if "site-packages" not in Path(file).parts}


def noted_file(place: str) -> str | None:
    """Return the real path of the file that the run noted, if it is there. None: there is none."""
    file = noted.get(module_of(place), "").partition(" ")[2]
    return os.path.realpath(file) if os.path.isabs(file) and os.path.isfile(file) else None


def change_since_noted(place: str) -> str:
    """Describe how the code found here differs from that which the run noted; "" where it does not."""
    file, (digest, _, then) = file_of(place), noted.get(module_of(place), "").partition(" ")
    if not then or (file and _digest(file) == digest):
        return ""
    differs = f", from which {file} differs" if file else ""
    changed = f"{file} has changed since the run was trained with it"
    return changed if file == then else f"the run was trained with {then}{differs}"


def root_of(module: str, file: str) -> str:
    """Return the folder that has to be on Python's path for ``module`` to be in ``file``."""
    path = Path(file)
    return str(path.parents[min(module.count(".") + (path.name == "__init__.py"), len(path.parents) - 1)])


def reach(place: str, root: str = "") -> None:
    """Put ``root`` on Python's path for a place: last, or before the entry that another module of that name is in.
    Without one it is the working directory, for code that only it has."""
    top = module_of(place).partition(".")[0]
    with contextlib.suppress(*_NOT_FOUND):
        if root:
            others = (i for i, entry in enumerate(sys.path) if PathFinder.find_spec(top, [entry or os.getcwd()]))
            sys.path.insert(next(others, len(sys.path)), root)
        elif importlib.util.find_spec(top) is None and _find_spec(top) is not None:
            sys.path.append(os.getcwd())


def found_in(place: str, root: str = "") -> str | None:
    """Return the file of a place's top package, of a namespace package its folders; in ``root`` alone if given."""
    module = module_of(place)
    if module.endswith(".py"):
        return os.path.realpath(module)
    try:
        spec = _find_spec(module.partition(".")[0], root)
    except _NOT_FOUND:
        return None
    if spec is None:
        return None
    if spec.origin is None:
        return os.pathsep.join(sorted(map(os.path.realpath, spec.submodule_search_locations or ()))) or None
    return os.path.realpath(spec.origin) if spec.has_location else spec.origin


def steps(place: str, root: str = "") -> list[str]:
    """Find the file of each step of ``package.module:Name``, importing none; "" for one that is not a source file."""
    module = module_of(place)
    if module.endswith(".py"):
        return []
    files, path = list[str](), None
    # the names of all steps, outermost first: "a", "a.b", "a.b.c"
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        if files and path is None:  # the step before is not a package
            return [*files, ""]
        try:
            # below the first step without importlib.util.find_spec, which imports the packages above
            spec = PathFinder.find_spec(name, path) if files else _find_spec(name, root)
        except _NOT_FOUND:
            spec = None
        origin = spec.origin if spec and spec.has_location and (spec.origin or "").endswith(".py") else None
        files.append(os.path.realpath(origin) if origin else "")
        path = spec.submodule_search_locations if spec else None  # of a folder without __init__.py too
    return files


def file_of(place: str) -> str:
    """Return the source file of a place's module; "" where there is none."""
    file = (steps(place) or [found_in(place) or ""])[-1]
    return file if os.path.isfile(file) else ""


def as_imported(place: str) -> str:
    """Name a place of ``__main__`` as other processes import it, if they can; here it is the same module then."""
    return re.sub(r"^(\w+:)?__main__:", lambda found: f"{found[1] or ''}{main_module()}:", place)


def main_module(name: str | None = None) -> str:
    """Name the module that this process was started with, if it is ``name`` or that is None. "__main__": no user's."""
    main: Any = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    own = spec.name if spec else Path(getattr(main, "__file__", None) or "").stem
    named = own.replace(".", "").isidentifier() and own.partition(".")[0] not in _SAME_EVERYWHERE
    return own if named and name in (None, own) and sys.modules.setdefault(own, main) is main else "__main__"


def folder_problem(folder: Path, files: list[str]) -> str:
    """Describe why the files of a place may be another's than theirs whose ``folder`` it is; "" if they are not."""
    for file in files:
        if not file:
            return "each step must be a module, or a package with an __init__.py"
        path = Path(file)
        if not path.is_relative_to(folder) or "site-packages" in path.relative_to(folder).parts:
            return f"{file} is not part of {folder}"
        for each in (path, *path.parents):
            if each != path and (kind := made_by_ejax(each)):
                return f"{each} is {kind}, whose files may be a stranger's"
            if problem := _owner_problem(each):
                return f"{each} {problem}"
            if each == folder:
                break
    return ""


def made_by_ejax(folder: Path) -> str:
    """Name the kind of a folder that people send to each other; "" for any other."""
    if (folder / "configs" / "resolved.json").exists() or (folder / "population.json").exists():
        return "a run"
    if (folder / "SHA256").exists() and (folder / "meta.json").exists():
        return "a checkpoint"
    return "an export" if (folder / "policy.json").exists() else ""


def _owner_problem(path: Path) -> str:
    status, user = path.stat(), os.getuid()
    if status.st_uid not in (user, 0):
        return "belongs to another user"
    writable = stat.S_IWOTH
    if status.st_gid not in (0, _private_group()):
        writable |= stat.S_IWGRP
    return "can be written by others (chmod go-w)" if status.st_mode & writable else ""


def _private_group() -> int | None:
    """Return the user's group that nobody else is in, whose files a umask of 002 leaves writable."""
    try:
        entry = pwd.getpwuid(os.getuid())
        members = grp.getgrgid(entry.pw_gid).gr_mem
    except KeyError:  # a user of a container without a name
        return None
    return entry.pw_gid if set(members) <= {entry.pw_name} else None


def _find_spec(name: str, root: str = "") -> ModuleSpec | None:
    """Find a top-level module, last in the working directory (not under ``python -P``)."""
    if root:
        return PathFinder.find_spec(name, [root])
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # the script that this process was started with
        found = PathFinder.find_spec(name)
    return found if found or sys.flags.safe_path else PathFinder.find_spec(name, [os.getcwd()])


def _digest(file: str) -> str:
    with contextlib.suppress(OSError):  # to note a file must not keep a run from starting
        return sha256(read_bytes(file))
    return ""
