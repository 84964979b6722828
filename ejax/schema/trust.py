"""The one gate for code that is named as text, ``package.module:Name``: who named it decides whether it runs.

Who wrote a config, a run's folder or an episode need not be who opens it. A file may name what ejax has registered.
Other code runs only if it was named to this process

- on the command line: ``--trust package.module:Name``, or in an override such as ``env.id=package.module:Name``;
- by the program itself: ``trust("package.module:Name")``, or in a config that is made in memory.

Python finds it, or it lies where the run that is being read noted it (``ejax.schema.code_places``). Asking imports
nothing, and needs the standard library alone, since the worker of ``ejax.data`` checks too.
"""

import argparse
import importlib
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
    main_module,
    module_of,
    reach,
    source_file,
    two_of_a_name,
)
from ejax.schema.messages import short_repr

_PLACE = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|[^:\n\0]+\.py):[\w./-]+")
"""``package.module:Name`` or ``FILE.py:Name``; the name may be one of Gymnasium's ids."""
_MAX_CHARS = 1000

_named: set[str] = set()
_passed: set[str] = set()
_noticed: set[str] = set()


class UntrustedCodeError(ValueError):
    """A file names code that nobody trusted. Nothing of it was imported."""


def trust(*places: str) -> None:
    """Let code through that files name, in this process; to be called before they are opened.

    ``places``: ``package.module:Name``, also as ``gymnasium:package.module:Name-v0`` or ``torch:FILE.py:Name``;
    another form is a ValueError.
    """
    for text in places:
        if (place := _place_in(text)) is None:
            raise ValueError(f"got {short_repr(text)}; write package.module:Name")
        _named.add(place)


def trusted() -> set[str]:
    """List the places that this process lets through, for ``trust`` in one that it starts."""
    return set(_named)


def trust_options(tree: Any) -> str:
    """Write `` --trust NAME`` for each place in nested mappings and lists that this process let through."""
    return "".join(f" --trust {shlex.quote(place)}" for place in dict.fromkeys(places_in(tree)) if place in _passed)


def trust_strings(tree: Any) -> None:
    """``trust`` every place among the strings of nested mappings and lists."""
    for place in places_in(tree):
        _named.update((place, as_imported(place)))


def trust_words(words: Iterable[str]) -> None:
    """``trust`` each place in what a person typed: a name, or an override ``section.key=value`` with names."""
    for word in words:
        trust_strings([word, word.partition("=")[2], *re.split(r":?[\s,=\[\]{}'\"]+", word)])


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        type=_argument,
        metavar="package.module:Name",
        help="allow this command to run this code if a file names it; see docs/security.md",
    )


def check_trusted(place: str) -> None:
    """Check that code may run, importing none; the folder that it lies in is on Python's path then.

    UntrustedCodeError: nobody named it, or two modules have that name; the text has the remedy.
    """
    if _place_in(place) != place:
        raise UntrustedCodeError(f"{short_repr(place)} is not a place of code; write package.module:Name")
    if place.startswith("__main__:") and not hasattr(sys.modules["__main__"], place.partition(":")[2]):
        text = "was defined at a prompt, in a notebook or another script; put it into a module, and train with that"
        raise UntrustedCodeError(f"{short_repr(place)} {text}")
    if place not in _named:
        found, note = source_file(place), change_since_noted(place)
        where = f"found in {found}" if found else f"there is no file of '{module_of(place)}' here"
        text = f"{short_repr(place)} ({where}{note and f'; {note}'}) is code that a file alone may not start"
        remedy = f"if you know it, add --trust {shlex.quote(place)} to the command line (docs/security.md)"
        raise UntrustedCodeError(f"{text}; {remedy}")
    if text := two_of_a_name(place):
        raise UntrustedCodeError(text)
    _passed.update((place, as_imported(place)))
    if (text := reach(place) or change_since_noted(place)) and text not in _noticed:
        _noticed.add(text)
        print(f"ejax: {text}", file=sys.stderr)


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
        text = f"{error}{note and f'; {note}'}; start in the folder that it lies in, or add that to PYTHONPATH"
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


def places_in(tree: Any) -> Iterator[str]:
    """List the places of code among the strings of nested mappings and lists, keys as well: ``env.wrappers``."""
    if isinstance(tree, str) and (place := _place_in(tree)):
        yield place
    elif isinstance(tree, Mapping | list | tuple):
        for part in (*tree, *tree.values()) if isinstance(tree, Mapping) else tree:
            yield from places_in(part)


def _place_in(text: str) -> str | None:
    """Return a place without the family of ``torch:`` or ``gymnasium:`` in front. None: it is none."""
    family, _, rest = text.partition(":")
    if ":" in rest and family.isidentifier():
        text = rest
    return text if len(text) <= _MAX_CHARS and _PLACE.fullmatch(text) else None


def _argument(text: str) -> str:
    if _place_in(text) is None:
        raise argparse.ArgumentTypeError(f"got {short_repr(text)}; write package.module:Name")
    return text
