"""Libraries that are imported on demand, each an extra of ejax, and observations as vectors."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp

from ejax.types import Array, PyTree


@dataclass(frozen=True)
class LibraryEnv:
    """A library's pure environment. Those of equal name and options are equal, and share programs."""

    clip_actions: ClassVar[bool] = True
    name: str
    """With its family: ``brax:ant``."""
    max_episode_steps: int
    options: Mapping[str, Any] = field(hash=False)
    env: Any = field(repr=False, compare=False)
    observation_space: gymnasium.Space = field(repr=False, compare=False)
    action_space: gymnasium.Space = field(repr=False, compare=False)

    def check_action(self, action: Array) -> None:
        """Raise ValueError for another shape than the space's."""
        if action.shape != self.action_space.shape:
            raise ValueError(f"{self.name} takes an action of shape {self.action_space.shape}, got {action.shape}")


def import_library(module: str, extra: str) -> Any:
    """Import a module. Raises ModuleNotFoundError: it, or what it needs, is missing; the message has the command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = f"'{error.name}' is not installed: pip install -e '.[{extra}]' in ejax's folder"
        raise ModuleNotFoundError(f"environments '{extra}:<name>': {text}", name=error.name) from error


def check_name(family: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError unless ``name`` is in ``known``; the message gives the nearest names, or all."""
    by_fold = {candidate.casefold(): candidate for candidate in known}
    if name in by_fold.values():
        return
    near = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.5)  # of hundreds, all would hide them
    listed = ", ".join(by_fold[key] for key in near or sorted(by_fold))
    raise ValueError(f"{family} has no environment '{name}'; {'nearest' if near else 'there is'}: {listed}")


def check_options(name: str, kind: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError for an option that is not allowed."""
    allowed = list(allowed)
    if unknown := sorted(set(given) - set(allowed)):
        raise ValueError(f"{name} has no {kind} {', '.join(unknown)}; it has {', '.join(allowed)}")


def as_vectors(obs: PyTree) -> PyTree:
    """Turn leaves into float32 vectors [F]: numbers become [1]; grids and images are flattened row by row."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32).reshape(-1), obs)


def resolve_dtypes(tree: PyTree, like: PyTree | None = None) -> PyTree:
    """Cast a tree to the dtypes of ``like`` (None: its own), none of them weak, as a loop's carry must be."""
    like = tree if like is None else like
    return jax.tree.map(lambda x, model: jnp.asarray(x, jnp.asarray(model).dtype), tree, like)
