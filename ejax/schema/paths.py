"""Names of the parts of a tree: the keys on the way to a part, joined in one place, so that no two parts share a name.

Only ``join`` joins. A name is never split: ``find`` compares it with the names of what is there.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Path: TypeAlias = tuple[Any, ...]
"""The keys on the way to a part, as the tree has them; of a single array none."""


def leaves(tree: Any, order: Callable[[Iterable[Any]], Iterable[Any]] = list, above: Path = ()) -> Iterator[Any]:
    """Yield ``(path, part)`` of each part of nested mappings that is not one itself, or is an empty one."""
    if isinstance(tree, Mapping) and len(tree.keys()):
        for key in order(tree.keys()):  # of a TensorDict: to iterate over it would take its rows
            yield from leaves(tree[key], order, (*above, key))
    else:
        yield above, tree


def join(paths: Iterable[Path], separator: str = ".", *, escape: bool = False) -> list[str]:
    """Join the keys of each path of a tree into its name.

    A key that holds the separator can look like a part of a section beside it: ``a.b`` beside ``a`` with a ``b``.

    Args:
        escape: write such a key, and those beside it, with a backslash before each separator and backslash. All other
            names are as without.

    Raises:
        ValueError: without ``escape`` such a key; two keys of one text, such as 1 and "1".
    """
    spelled = [tuple(map(str, path)) for path in paths]
    sections = {path[:depth] for path in spelled for depth in range(1, len(path))}
    meeting = set()
    for *above, key in {*sections, *filter(None, spelled)}:
        for head in accumulate(key.split(separator)[:-1], f"{{}}{separator}{{}}".format):
            if (*above, head) in sections:
                if not escape:
                    where = f" in '{separator.join(above)}'" if above else ""
                    raise ValueError(f"the key '{key}'{where} reads like a part of '{head}' beside it; rename one")
                meeting.add(tuple(above))
    for path, count in Counter(spelled).items():
        if count > 1 or path in sections:
            raise ValueError(f"two parts are called '{separator.join(path)}'; rename one")

    def written(path: tuple[str, ...]) -> Iterator[str]:
        for depth, key in enumerate(path):
            plain = path[:depth] not in meeting
            yield key if plain else key.replace("\\", "\\\\").replace(separator, f"\\{separator}")

    return [separator.join(written(path)) for path in spelled]


def named(tree: Any) -> dict[str, Any]:
    """Return the arrays, or spaces, of an observation by name, sorted at each level; of a single one under ``""``.

    Raises:
        ValueError: as ``join``.
    """
    parts = [(path, part) for path, part in leaves(tree, _sorted) if not isinstance(part, Mapping)]
    return dict(zip(join(path for path, _ in parts), (part for _, part in parts), strict=True))


def _sorted(keys: Iterable[Any]) -> list[Any]:
    keys = list(keys)
    if "" in keys or len({isinstance(key, str) for key in keys}) > 1:
        raise ValueError(f"got the keys {', '.join(map(repr, keys))}; must be texts that are not empty, or all numbers")
    return sorted(keys)


def find(tree: Any, name: str, separator: str = ".") -> Any:
    """Return the part of nested mappings that has this name, a section or a leaf; KeyError: none has."""
    there = {str(key): part for key, part in tree.items()} if isinstance(tree, Mapping) else {}
    if name in there:
        return there[name]
    for key, part in there.items():
        if name.startswith(f"{key}{separator}"):
            with suppress(KeyError):
                return find(part, name.removeprefix(f"{key}{separator}"), separator)
    raise KeyError(name)


def within(names: Iterable[str], groups: Iterable[str]) -> list[str]:
    """List the names that groups mean, in their order: each a part, or all parts of a section; all if none is given."""
    names, groups = list(names), list(groups)
    inside = [[group] if group in names else [x for x in names if x.startswith(f"{group}.")] for group in groups]
    return [name for each in inside for name in each] if groups else names


def nest(parts: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """Nest parts by their paths: the inverse of ``leaves``."""
    tree: dict[Any, Any] = {}
    for path, part in parts:
        if not path:
            return part
        *above, key = path
        section = tree
        for each in above:
            section = section.setdefault(each, {})
        section[key] = part
    return tree


def unique(pairs: Iterable[tuple[str, T]], what: str) -> dict[str, T]:
    """Make a dict; ValueError: two of one name, of ``what``."""
    made: dict[str, T] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"two {what} are called '{name}'; rename one")
        made[name] = value
    return made
