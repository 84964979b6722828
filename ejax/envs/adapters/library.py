"""Shared by the adapters: libraries that are imported on demand, and observations as vectors.

No library that an adapter speaks to is a dependency of ejax: each is an extra.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.types import PyTree


def import_library(module: str, extra: str) -> Any:
    """The module, imported now.

    Raises:
        ModuleNotFoundError: it, or something that it needs, is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"environments '{extra}:<name>' need {extra}, and '{error.name}' is not installed: "
            f"pip install -e '.[{extra}]' in ejax's folder",
            name=error.name,
        ) from error


def check_name(family: str, name: str, known: Iterable[str]) -> None:
    """Check the name of an environment of a library.

    Raises:
        ValueError: ``name`` is not in ``known``; the message gives the nearest names, or all where none is near.
    """
    by_fold = {candidate.casefold(): candidate for candidate in known}
    if name in by_fold.values():
        return
    near = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.5)
    listed = ", ".join(by_fold[key] for key in near or sorted(by_fold))
    raise ValueError(f"{family} has no environment '{name}'; {'nearest' if near else 'there is'}: {listed}")


def as_vectors(obs: PyTree) -> PyTree:
    """Every leaf as one float32 vector [F]: numbers become [1]; grids and images are flattened row by row."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32).reshape(-1), obs)


def vector_space(obs: PyTree) -> gymnasium.Space:
    """The unbounded space of the result of ``as_vectors``: a Box, or a Dict of spaces.

    Args:
        obs: arrays, or their shapes.

    Raises:
        ValueError: a container other than mappings.
    """
    if isinstance(obs, Mapping):
        return gymnasium.spaces.Dict({name: vector_space(part) for name, part in obs.items()})
    if not hasattr(obs, "shape"):
        raise ValueError(f"observations must be arrays or mappings of them, got {type(obs).__name__}")
    return gymnasium.spaces.Box(-np.inf, np.inf, (int(np.prod(obs.shape)),), np.float32)


def settle_dtypes(tree: PyTree, like: PyTree | None = None) -> PyTree:
    """The same tree in the dtypes of ``like`` (None: its own), none of them weak, as a loop's carry must be."""
    like = tree if like is None else like
    return jax.tree.map(lambda x, model: jnp.asarray(x, jnp.asarray(model).dtype), tree, like)
