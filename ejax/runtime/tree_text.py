"""A tree of arrays as text: the names of its leaves, and what is in a rollout, an observation, parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ejax.schema.paths import part_names
from ejax.types import PyTree


def named_leaves(tree: PyTree, separator: str = ".") -> dict[str, Any]:
    """Return the leaves of a tree by name, in JAX's order: no two are the same (``ejax.schema.paths.part_names``)."""
    parts = jax.tree_util.tree_leaves_with_path(tree)
    keys = (tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in parts)
    return dict(zip(part_names(keys, separator), (leaf for _, leaf in parts), strict=True))


def describe_tree(tree: PyTree) -> str:
    """Describe the arrays of a tree, one a line: its path, its type and its shape.

    Trees are those of JAX (``Rollout``, parameters, dicts) and mappings such as TensorDict, with arrays of any library.
    What is None has no line.
    """
    leaves = list(_leaves(tree, ""))
    width = max((len(path) for path, _ in leaves), default=0)
    return "\n".join(f"{path:<{width}}  {leaf}" for path, leaf in leaves) or "no arrays"


def print_tree(tree: PyTree) -> None:
    """Print ``describe_tree``: a rollout, to see what flows. Inside a jitted function it shows the shapes when that is
    traced."""
    print(describe_tree(tree))


def _leaves(tree: PyTree, prefix: str) -> Iterator[tuple[str, str]]:
    for name, leaf in named_leaves(tree).items():
        path = ".".join(part for part in (prefix, name) if part)
        shape, dtype = (getattr(leaf, name, None) for name in ("shape", "dtype"))
        if isinstance(leaf, Mapping):  # of a library that JAX does not know
            yield from _leaves(dict(leaf), path)
        elif shape is None or dtype is None:
            yield path, f"{type(leaf).__name__} {leaf!r}"
        else:
            yield path, f"{str(dtype).removeprefix('torch.')}{list(shape)}"
