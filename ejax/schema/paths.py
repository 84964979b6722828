"""Names of the parts of a tree: the keys on the way to a part, joined here alone, so that no two parts share a name.

A name is never split: ``find`` compares it with the names of what is there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Path: TypeAlias = tuple[Any, ...]
"""The keys on the way to a part, as the tree has them; none to a single array."""


def leaves(tree: Any, order: Callable[[Iterable[Any]], Iterable[Any]] = list, above: Path = ()) -> Iterator[Any]:
    """Yield ``(path, part)`` of each part of nested mappings that is not one itself, or is an empty one."""
    if not isinstance(tree, Mapping) or not len(tree.keys()):
        yield above, tree
        return
    for key in order(tree.keys()):  # not of the tree itself: a TensorDict would give its rows
        yield from leaves(tree[key], order, (*above, key))


def part_names(paths: Iterable[Path], separator: str = ".") -> list[str]:
    """Join the keys of each path of a tree into its name.

    Keys of a section in which two names would be equal, such as ``a.b`` next to ``a`` with a ``b``, get a backslash
    before each separator and backslash. Raises ValueError: two names are equal even so.
    """
    spelled, first = [tuple(map(str, path)) for path in paths], defaultdict[Any, set[str]](set)
    for path in spelled:
        for depth, key in enumerate(path):
            first[path[:depth], separator.join(path[depth:])].add(key)
    meeting = {section for (section, _), keys in first.items() if len(keys) > 1}

    def written(path: tuple[str, ...], depth: int) -> str:
        key = path[depth]
        return key.replace("\\", "\\\\").replace(separator, f"\\{separator}") if path[:depth] in meeting else key

    names = (separator.join(written(path, depth) for depth in range(len(path))) for path in spelled)
    return list(unique(((name, name) for name in names), "parts"))


def named(tree: Any) -> dict[str, Any]:
    """Return the arrays, or spaces, of an observation by name, sorted at each level; a single one is ``""``. Raises
    ValueError: keys that are empty, or of two types; one that reads like a part of a section next to it."""
    parts = [(path, part) for path, part in leaves(tree, _checked) if not isinstance(part, Mapping)]
    sections = {path[:depth] for path, _ in parts for depth in range(1, len(path))}
    for *above, key in {*sections, *(path for path, _ in parts if path)}:
        for head in accumulate(str(key).split(".")[:-1], "{}.{}".format):
            if (*above, head) in sections:
                raise ValueError(f"the key '{key}' reads like a part of '{head}', which is next to it; rename one")
    return dict(zip(part_names(path for path, _ in parts), (part for _, part in parts), strict=True))


def find(tree: Any, name: str, separator: str = ".", *default: Any) -> Any:
    """Return the part of nested mappings of this name, a section or a leaf; KeyError, or ``default``: there is none."""
    there = {str(key): part for key, part in tree.items()} if isinstance(tree, Mapping) else {}
    if name in there:
        return there[name]
    for key in there:
        if name.startswith(f"{key}{separator}"):
            with suppress(KeyError):
                return find(there[key], name.removeprefix(f"{key}{separator}"), separator)
    if default:
        return default[0]
    raise KeyError(name)


def within(names: Iterable[str], groups: Sequence[str]) -> tuple[str, ...]:
    """List the names that groups mean, each a part or all parts of a section, in their order; all if none is given."""
    names = list(names)
    inside = [[group] if group in names else [x for x in names if x.startswith(f"{group}.")] for group in groups]
    return tuple(name for each in inside for name in each) if groups else tuple(names)


def nest(parts: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """Nest parts by their paths: the inverse of ``leaves``."""
    tree: dict[Any, Any] = {}
    for path, part in parts:
        if not path:
            return part
        section = tree
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = part
    return tree


def unique(pairs: Iterable[tuple[str, T]], what: str) -> dict[str, T]:
    """Make a dict; ValueError: two of one name, of ``what``."""
    made: dict[str, T] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"two {what} are called '{name}'; rename one")
        made[name] = value
    return made


def _checked(keys: Iterable[Any]) -> list[Any]:
    keys = list(keys)
    if "" in keys or len({isinstance(key, str) for key in keys}) > 1:
        raise ValueError(f"got the keys {', '.join(map(repr, keys))}; must be non-empty texts, or all numbers")
    return sorted(keys)
