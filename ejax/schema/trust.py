"""The one gate for code that is named as text, ``package.module:Name``: who named it decides whether it runs.

Who wrote a config, a run's folder or an episode need not be who opens it. A file may name what ejax has registered.
Other code runs only if it was named

- on the command line: ``--trust package.module:Name``, or in an override such as ``env.id=package.module:Name``;
- by the program itself: ``trust("package.module:Name")``, or in a config that is made in memory;
- on an earlier command line of this user, for a top-level module in the same file as then;
- or if it is in a folder that was named so, ``--trust FOLDER``. Every step of ``package.module`` must be a regular
  package inside it that only the user can write, not in ``site-packages``, a run, a checkpoint or an export.

It is imported from where it lies (``_choose``). Asking imports nothing, and needs the standard library alone, since the
worker of ``ejax.data`` checks too.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ejax.schema.code_places import (
    as_imported,
    change_since_noted,
    file_of,
    folder_problem,
    found_in,
    made_by_ejax,
    main_module,
    module_of,
    noted_file,
    reach,
    root_of,
    steps,
)
from ejax.schema.messages import short_repr
from ejax.schema.writing import replace_file

_PLACE = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|[^:\n\0]+\.py):[\w./-]+")
"""``package.module:Name`` or ``FILE.py:Name``; the name may be one of Gymnasium's ids."""
_MAX_CHARS = 1000
_FOLDERS = "folders"  # key of the remembered folders among the places, of which none has such a form

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

    ``places``: ``package.module:Name``, also as ``gymnasium:package.module:Name-v0`` or ``torch:FILE.py:Name``, or an
    absolute path of a folder; another form is a ValueError.
    """
    for text in places:
        if (place := _place_in(text)) is not None:
            _named.setdefault(place, False)
        elif os.path.isabs(text) and os.path.isdir(text):
            _folders.setdefault(os.path.realpath(text), False)
        else:
            raise ValueError(f"got {short_repr(text)}; write package.module:Name")


def trusted() -> tuple[set[str], set[str]]:
    """Give the places and the folders whose code this process lets through, for ``trust_as`` in one that it starts."""
    return set(_named), set(_folders)


def trust_as(others: tuple[set[str], set[str]]) -> None:
    """Let through what the process lets through that started this one."""
    for known, more in zip((_named, _folders), others, strict=True):
        known.update(dict.fromkeys(more - known.keys(), False))


def trust_strings(tree: Any) -> None:
    """``trust`` every place among the strings of nested mappings and lists."""
    for place in places_in(tree):
        _named.update({name: _named.get(name, False) for name in (place, as_imported(place))})


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
    """Check that code may run, importing none; the folder that it lies in is on Python's path then.

    UntrustedCodeError: nobody named it, or two modules have that name; the text has the remedy.
    """
    if _place_in(place) != place:
        raise UntrustedCodeError(f"{short_repr(place)} is no place of code; write package.module:Name")
    if place.startswith("__main__:") and not hasattr(sys.modules["__main__"], place.partition(":")[2]):
        text = "was defined at a prompt, in a notebook or another script; put it into a module, and train with that"
        raise UntrustedCodeError(f"{short_repr(place)} {text}")
    reason = _choose(place)
    if place not in _named and (not_in_folder := _by_folder(place)) is not None:
        found, earlier = found_in(place), _remembered().get(place, [])
        if found is None or found not in earlier:
            raise UntrustedCodeError(_refusal(place, found, earlier, not_in_folder or reason))
        _named[place] = False
    if text := two_of_a_name(place):
        raise UntrustedCodeError(text)
    if _named.get(place):
        _named[place] = False
        if found := found_in(place):  # else the import reports it
            _write_down(place, found, f"'{place}' in {found}")
    if found_in(place):
        _notice(change_since_noted(place))
    reach(place)


def import_trusted(place: str) -> ModuleType:
    """Import the module of ``package.module:Name``, once ``check_trusted`` lets it through.

    ImportError: there is no such module, or it is a file.
    """
    check_trusted(place)
    module = place.partition(":")[0]
    if module.endswith(".py"):
        raise ImportError(f"'{place}' is a file; write package.module:Name")
    main_module(module)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        note = change_since_noted(place)
        text = f"{error}{note and f'; {note}'}; add --trust FOLDER with the folder that it lies in"
        raise ModuleNotFoundError(text, name=error.name) from None


def import_trusted_file(place: str) -> ModuleType:
    """Run the file of ``FILE.py:Name``, once ``check_trusted`` lets it through; it does not enter ``sys.modules``.

    ImportError: there is no such file.
    """
    check_trusted(place)
    file = module_of(place)
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


def places_in(tree: Any) -> Iterator[str]:
    """List the places of code among the strings of nested mappings and lists."""
    if isinstance(tree, str) and (place := _place_in(tree)):
        yield place
    elif isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from places_in(part)


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


def _choose(place: str) -> str:
    """Put the folder on Python's path that a place lies in, if it was named now; or where Python finds no such module,
    the one in which a run noted it, or the only one in which it was trusted before. Returns why neither may; or ""."""
    here, lay, earlier, reason = found_in(place), noted_file(place), _remembered().get(place, []), ""
    here = None if lay and not file_of(place) else here  # a folder of that name is not a module
    module, top = module_of(place), place.partition(":")[0].partition(".")[0]
    root = root_of(module, lay) if lay else root_of(top, earlier[0]) if len(earlier) == 1 else None
    settled = found_in(place, root) == here if root in _folders else _inside(here, _folders)
    if module.endswith(".py") or (here and settled):
        return ""
    for folder in dict.fromkeys(
        [*sorted(_folders, key=lambda each: each != root), *([root] if root and not here else [])]
    ):
        found = found_in(place, folder)
        if found in (None, here):
            continue
        problem = None if found in earlier else _by_folder(place, folder)
        if problem == "" and folder == root and place in _named:  # its name is enough, where nobody else put it there
            above = next(filter(made_by_ejax, Path(folder).parents), Path(folder))
            problem = folder_problem(above, [file for file in steps(place, folder) if file]) or None
        if problem is not None:
            reason = problem
        elif here and top in sys.modules:
            text = f"{short_repr(place)} is {here} in this process, and you trust {found}; open it in another process"
            raise UntrustedCodeError(text)
        else:
            _notice(f"'{place}' is taken from {found}; there is another in {here}" if here else "")
            reach(place, folder)
            return ""
    return reason


def two_of_a_name(place: str) -> str:
    """Describe the code found here beside another that the run noted; "" if there is one, or a folder says which."""
    here, lay = file_of(place), noted_file(place)
    if not here or lay in (None, here) or (_inside(here, _folders) and not _inside(lay, _folders)):
        return ""
    text = f"{short_repr(place)} is {here} here, and the run was trained with {lay}; add --trust FOLDER with the folder"
    return f"{text} of the one that you mean (docs/security.md)"


def _inside(path: str | None, folders: Iterable[str]) -> bool:
    return path is not None and any(Path(path).is_relative_to(folder) for folder in folders)


def _by_folder(place: str, root: str = "") -> str | None:
    """Ask the folders that the user named. None: one, ``root`` if given, lets the place through; else why not."""
    files, remembered, reason = steps(place, root), _remembered().get(_FOLDERS, []), ""
    if not files or not files[0]:  # a file by its path, or what is not there: it may be anybody's
        return ""
    for folder in sorted({*_folders, *remembered}):
        if not _inside(files[0], [folder]) or root not in ("", folder):
            continue
        if not (reason := folder_problem(Path(folder), files)):
            if _folders.get(folder) and folder not in remembered:
                _folders[folder] = False
                _write_down(_FOLDERS, folder, f"all code in {folder}")
            return None
    return reason


def _refusal(place: str, found: str | None, earlier: list[str], not_in_folder: str) -> str:
    where = f"found in {found}" if found else f"there is no module '{place.partition(':')[0].partition('.')[0]}' here"
    if note := change_since_noted(place):
        where += f"; {note}"
    text = f"{short_repr(place)} ({where}) is code that a file alone may not start"
    if not_in_folder:
        text += f", and the folder that you trusted does not let it through: {not_in_folder}"
    if earlier:
        text += f", and what you trusted by that name is in {' and in '.join(earlier)}"
    return f"{text}; if you know it, add --trust {shlex.quote(place)} to the command line (docs/security.md)"


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
    if text and text not in _noticed:
        _noticed.add(text)
        print(f"ejax: {text}", file=sys.stderr)
