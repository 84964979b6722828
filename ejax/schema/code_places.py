"""Files of the code that is named as text, ``package.module:Name`` or ``FILE.py:Name``: those that Python finds here,
and those that a run noted when it was made. Looking imports nothing, and needs the standard library alone.
"""

import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ejax.schema.messages import short_repr
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
    files = {module_of(place): source_file(place) for place in places}
    own = {name: file for name, file in files.items() if file and name.partition(".")[0] not in _SAME_EVERYWHERE}
    return {name: f"{_digest(file)} {file}" for name, file in own.items() if "site-packages" not in Path(file).parts}


def change_since_noted(place: str) -> str:
    """Describe how the code found here differs from that which the run noted; "" where it does not."""
    file, (digest, _, then) = source_file(place), noted.get(module_of(place), "").partition(" ")
    if not then or (file and _digest(file) == digest):
        return ""
    differs = f", from which {file} differs" if file else ""
    changed = f"{file} has changed since the run was trained with it"
    return changed if file == then else f"the run was trained with {then}{differs}"


def two_of_a_name(place: str) -> str:
    """Describe the code found here where the run noted another that is still there; "" where PYTHONPATH decides."""
    here, lay = source_file(place), _noted_file(place)
    chosen = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if not here or lay in ("", here) or _root_of(place, here) in chosen:
        return ""
    text = f"{short_repr(place)} is {here} here, and the run was trained with {lay}"
    return f"{text}; put the folder of the one that you mean first in PYTHONPATH (docs/security.md)"


def reach(place: str) -> str:
    """Put the folder of a place on Python's path, where it is not: the working directory, or the one that the run
    noted, in which case a notice is returned."""
    lay, top = _noted_file(place), module_of(place).partition(".")[0]
    with contextlib.suppress(*_NOT_FOUND):
        if lay and not source_file(place):
            if (kind := _made_by_ejax(lay)) is not None:
                return f"{lay} lies in {kind}, from which no code is run"
            # last, or before the entry that another package of that name is in
            others = (i for i, entry in enumerate(sys.path) if PathFinder.find_spec(top, [entry or os.getcwd()]))
            sys.path.insert(next(others, len(sys.path)), _root_of(place, lay))
            return f"'{place}' is taken from {lay}, with which the run was trained"
        if importlib.util.find_spec(top) is None and _find_top(top) is not None:
            sys.path.append(os.getcwd())
    return ""


def source_file(place: str) -> str:
    """Return the source file of a place's module, importing none; "" where there is none."""
    module, path, origin = module_of(place), None, ""
    if module.endswith(".py"):
        return os.path.realpath(module) if os.path.isfile(module) else ""
    # the names of all steps, outermost first: "a", "a.b", "a.b.c"
    for i, name in enumerate(itertools.accumulate(module.split("."), "{}.{}".format)):
        try:
            # below the first step without importlib.util.find_spec, which imports the packages above
            spec = PathFinder.find_spec(name, path or []) if i else _find_top(name)
        except _NOT_FOUND:
            spec = None
        if spec is None:
            return ""
        origin = (spec.origin or "") if spec.has_location else ""
        path = spec.submodule_search_locations  # of a folder without __init__.py too
    return os.path.realpath(origin) if os.path.isfile(origin) else ""


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


def _noted_file(place: str) -> str:
    """Return the real path of the file that the run noted; "" where there is none."""
    file = noted.get(module_of(place), "").partition(" ")[2]
    return os.path.realpath(file) if os.path.isabs(file) and os.path.isfile(file) else ""


def _root_of(place: str, file: str) -> str:
    """Return the folder that has to be on Python's path for a place's module to be in ``file``."""
    above = Path(file).parents
    return str(above[min(module_of(place).count(".") + file.endswith("/__init__.py"), len(above) - 1)])


def _made_by_ejax(file: str) -> str | None:
    """Name the folder above a file that people send to each other; None: there is none."""
    for folder in Path(file).parents:
        if (folder / "configs" / "resolved.json").exists() or (folder / "population.json").exists():
            return f"the run {folder}"
        if (folder / "policy.json").exists() or ((folder / "SHA256").exists() and (folder / "meta.json").exists()):
            return f"the export or checkpoint {folder}"
    return None


def _find_top(name: str) -> ModuleSpec | None:
    """Find a top-level module, last in the working directory (not under ``python -P``)."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # the script that this process was started with
        found = PathFinder.find_spec(name)
    return found if found or sys.flags.safe_path else PathFinder.find_spec(name, [os.getcwd()])


def _digest(file: str) -> str:
    with contextlib.suppress(OSError):  # to note a file must not keep a run from starting
        return sha256(read_bytes(file))
    return ""
