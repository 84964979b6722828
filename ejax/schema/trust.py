"""The one gate for code that is named as text, ``package.module:Name``: who named it decides whether it runs.

Who wrote a config, a run's folder or an episode need not be who opens it. A file may name what ejax has registered.
Other code runs only if it was named

- on the command line: ``--trust package.module:Name``, or in an override such as ``env.id=package.module:Name``;
- by the program itself: ``trust("package.module:Name")``, or in a config that is made in memory;
- on an earlier command line of this user, for a top-level module in the same file as then;
- or if it is in a folder that was named so, ``--trust FOLDER``. Every step of ``package.module`` must be a regular
  package inside it that only the user can write, not in ``site-packages``, a run, a checkpoint or an export.

Asking imports nothing, and needs the standard library alone, since the worker of ``ejax.data`` checks too.
"""

import argparse
import contextlib
import grp
import importlib
import importlib.util
import itertools
import json
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ejax.schema.messages import short_repr
from ejax.schema.plain_files import replace_file

_PLACE = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|[^:\n\0]+\.py):[\w./-]+")
"""``package.module:Name`` or ``FILE.py:Name``; the name may be one of Gymnasium's ids."""
_MAX_CHARS = 1000
_FOLDERS = "folders"  # key of the remembered folders among the places, of which none has such a form
_NOT_FOUND = (ImportError, ValueError, AttributeError, KeyError, OSError)
"""Errors of looking a module up: finders of other packages raise more than ImportError."""

_named: dict[str, bool] = {}
"""Places that this process lets through; True: named on the command line, and to be remembered once it is used."""
_folders: dict[str, bool] = {}
"""Real paths of folders whose code this process lets through; True: to be remembered once it is used."""
_noticed: set[str] = set()


class _Folder(str):
    """A folder that ``--trust`` names. A stray word of the command line that is one by chance opens nothing."""


class UntrustedCodeError(ValueError):
    """A file names code that nobody trusted. Nothing of it was imported."""


def trust(*places: str) -> None:
    """Let code through that files name, in this process only; to be called before they are opened.

    ``places``: ``package.module:Name``, also as ``gymnasium:package.module:Name-v0`` or ``torch:FILE.py:Name``; another
    form is a ValueError.
    """
    for text in places:
        if (place := _place_in(text)) is None:
            raise ValueError(f"got {short_repr(text)}; write package.module:Name")
        _named.setdefault(place, False)


def trusted() -> tuple[set[str], set[str]]:
    """Give the places and the folders whose code this process lets through, for ``trust_as`` in one that it starts."""
    return set(_named), set(_folders)


def trust_as(others: tuple[set[str], set[str]]) -> None:
    """Let through what the process lets through that started this one."""
    for known, more in zip((_named, _folders), others, strict=True):
        known.update(dict.fromkeys(more - known.keys(), False))


def trust_strings(tree: Any) -> None:
    """``trust`` every place among the strings of nested mappings and lists."""
    if isinstance(tree, str) and (place := _place_in(tree)):
        _named.setdefault(place, False)
    elif isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            trust_strings(part)


def trust_words(words: Iterable[str], *, remember: bool = False) -> None:
    """``trust`` each place in what a person typed: a name, a folder, or an override ``section.key=value`` with names.

    ``remember``: for later processes of this user too, once the place is used. For command lines only.
    """
    for word in words:
        if isinstance(word, _Folder):
            folder = os.path.realpath(word)
            _folders[folder] = _folders.get(folder, False) or remember
            continue
        for text in (word, word.partition("=")[2], *re.split(r"[\s,=\[\]{}'\"]+", word)):
            if place := _place_in(text):
                _named[place] = _named.get(place, False) or remember


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        type=_argument,
        metavar="package.module:Name|FOLDER",
        help="let this code, or all in this folder, run where a file names it, now and later; see docs/security.md",
    )


def check_trusted(place: str) -> None:
    """Check that code may run, importing none. UntrustedCodeError: nobody named it; the text has the remedy."""
    if _place_in(place) != place:
        raise UntrustedCodeError(f"{short_repr(place)} is no place of code; write package.module:Name")
    if place not in _named and (not_in_folder := _by_folder(place)) is not None:
        found, earlier = _found_in(place), _remembered().get(place, [])
        if found is None or found not in earlier:
            raise UntrustedCodeError(_refusal(place, found, earlier, not_in_folder))
        _named[place] = False
    if _named.get(place):
        _named[place] = False
        if found := _found_in(place):  # else the import reports it
            _write_down(place, found, f"'{place}' in {found}")
    _reach(place)


def import_trusted(place: str) -> ModuleType:
    """Import the module of ``package.module:Name``, once ``check_trusted`` lets it through.

    ImportError: there is no such module, or it is a file.
    """
    check_trusted(place)
    module = place.partition(":")[0]
    if module.endswith(".py"):
        raise ImportError(f"'{place}' is a file; write package.module:Name")
    return importlib.import_module(module)


def import_trusted_file(place: str) -> ModuleType:
    """Run the file of ``FILE.py:Name``, once ``check_trusted`` lets it through; it does not enter ``sys.modules``.

    ImportError: there is no such file.
    """
    check_trusted(place)
    file = place.rpartition(":")[0]
    if not Path(file).is_file():
        raise ImportError(f"there is no file {file}; it is looked for from the working directory")
    # its name in sys.modules is unset: what pickles or compares its classes wants a package.module
    module = ModuleType(re.sub(r"\W", "_", file))
    module.__file__ = file
    SourceFileLoader(module.__name__, file).exec_module(module)
    return module


def trusted_file() -> Path:
    """Give ``$XDG_CONFIG_HOME/ejax/trusted.json``, the user's trust. RuntimeError: no home folder."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path.home() / ".config"  # relative: would be anybody's folder
    return folder / "ejax" / "trusted.json"


def _place_in(text: str) -> str | None:
    """Give a place without the family of ``torch:`` or ``gymnasium:`` in front. None: it is none."""
    family, _, rest = text.partition(":")
    if ":" in rest and family.isidentifier():
        text = rest
    return text if len(text) <= _MAX_CHARS and _PLACE.fullmatch(text) else None


def _argument(text: str) -> str:
    if os.path.isdir(folder := os.path.expanduser(text)):
        return _Folder(folder)
    if _place_in(text) is None:
        raise argparse.ArgumentTypeError(
            f"got {short_repr(text)}; write package.module:Name, or a folder that is there"
        )
    return text


def _by_folder(place: str) -> str | None:
    """Ask the folders that the user named. None: one lets the place through; else why none does."""
    files, remembered, reason = _steps(place), _remembered().get(_FOLDERS, []), ""
    if not files or not files[0]:  # a file by its path, or what is not there: it may be anybody's
        return ""
    for folder in sorted({*_folders, *remembered}):
        if not Path(files[0]).is_relative_to(folder):
            continue
        if not (reason := _folder_problem(Path(folder), files)):
            if _folders.get(folder) and folder not in remembered:
                _folders[folder] = False
                _write_down(_FOLDERS, folder, f"all code in {folder}")
            return None
    return reason


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a top-level module, last in the working directory (not under ``python -P``)."""
    found = importlib.util.find_spec(name)
    return found if found or sys.flags.safe_path else PathFinder.find_spec(name, [os.getcwd()])


def _reach(place: str) -> None:
    """Put the working directory last on Python's path, for trusted code that only it has."""
    name = place.rpartition(":")[0].partition(".")[0]
    with contextlib.suppress(*_NOT_FOUND):
        if importlib.util.find_spec(name) is None and _find_spec(name) is not None:
            sys.path.append(os.getcwd())


def _steps(place: str) -> list[str]:
    """Find the file of each step of ``package.module:Name``, importing none; "" for one that is no source file."""
    module = place.rpartition(":")[0]
    if module.endswith(".py"):
        return []
    files, path = list[str](), None
    # the names of all steps, outermost first: "a", "a.b", "a.b.c"
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        if files and path is None:  # the step before is no package
            return [*files, ""]
        try:
            # below the first step without importlib.util.find_spec, which imports the packages above
            spec = PathFinder.find_spec(name, path) if files else _find_spec(name)
        except _NOT_FOUND:
            spec = None
        origin = spec.origin if spec and spec.has_location and (spec.origin or "").endswith(".py") else None
        files.append(os.path.realpath(origin) if origin else "")
        path = spec.submodule_search_locations if spec and origin else None
    return files


def _folder_problem(folder: Path, files: list[str]) -> str:
    for file in files:
        if not file:
            return "each step must be a module, or a package with an __init__.py"
        path = Path(file)
        if not path.is_relative_to(folder) or "site-packages" in path.relative_to(folder).parts:
            return f"{file} is not part of {folder}"
        for each in (path, *path.parents):
            if each != path and (kind := _made_by_ejax(each)):
                return f"{each} is {kind}, whose files may be a stranger's"
            if problem := _owner_problem(each):
                return f"{each} {problem}"
            if each == folder:
                break
    return ""


def _made_by_ejax(folder: Path) -> str:
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
    """Give the user's group that nobody else is in, whose files a umask of 002 leaves writable."""
    try:
        entry = pwd.getpwuid(os.getuid())
        members = grp.getgrgid(entry.pw_gid).gr_mem
    except KeyError:  # a user of a container without a name
        return None
    return entry.pw_gid if set(members) <= {entry.pw_name} else None


def _refusal(place: str, found: str | None, earlier: list[str], not_in_folder: str) -> str:
    where = f"found in {found}" if found else f"there is no module '{place.partition(':')[0].partition('.')[0]}' here"
    text = f"{short_repr(place)} ({where}) is code that a file alone may not start"
    if not_in_folder:
        text += f", and the folder that you trusted does not let it through: {not_in_folder}"
    if earlier:
        text += f", and what you trusted by that name is in {' and in '.join(earlier)}"
    return f"{text}; if you know it, add --trust {shlex.quote(place)} to the command line (docs/security.md)"


def _found_in(place: str) -> str | None:
    """Give the file of the code's top-level package; of a namespace package its folders. Imports nothing."""
    module = place.rpartition(":")[0]
    if module.endswith(".py"):
        return os.path.realpath(module)
    try:
        spec = _find_spec(module.partition(".")[0])
    except _NOT_FOUND:
        return None
    if spec is None:
        return None
    if spec.origin is None:
        return os.pathsep.join(sorted(map(os.path.realpath, spec.submodule_search_locations or ()))) or None
    return os.path.realpath(spec.origin) if spec.has_location else spec.origin


def _remembered() -> dict[str, list[str]]:
    """Read place -> the files that it was found in. What somebody else could have written does not count."""
    try:
        file = trusted_file()
        with file.open(encoding="utf-8") as opened:
            status, text = os.fstat(opened.fileno()), opened.read()
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _notice(f"what you trusted earlier cannot be read: {error}")
        return {}
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        _notice(f"{file} is not read: others may write it (it must be yours, with mode 600)")
        return {}
    try:
        places = json.loads(text)["trusted"]
        return {str(place): [str(found) for found in files] for place, files in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        _notice(f"{file} is damaged, so nothing in it counts; it is written again with what you trust next")
        return {}


def _write_down(place: str, found: str, what: str) -> None:
    """Remember for later processes. A home that cannot be written to costs a notice only."""
    places = _remembered()
    if found in places.setdefault(place, []):
        return
    places[place].append(found)
    try:
        file = trusted_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, json.dumps({"trusted": dict(sorted(places.items()))}, indent=1), mode=0o600)
    except (OSError, RuntimeError) as error:
        _notice(f"{what} is trusted this once, it cannot be remembered: {error}")
    else:
        _notice(f"{what} is trusted from now on ({file})")


def _notice(text: str) -> None:
    if text not in _noticed:
        _noticed.add(text)
        print(f"ejax: {text}", file=sys.stderr)
