"""The part of an observation that a network reads: one vector per row, of leaves ``[..., F]``."""

from collections.abc import Mapping

import jax.numpy as jnp

from ejax.types import Array, PyTree


def flatten_observation(obs: PyTree) -> Array:
    """Concatenate all leaves, depth first with keys sorted: [..., O] float32. ValueError without any array."""
    leaves = _leaves(obs)
    if not leaves:
        raise ValueError("the observation holds no array")
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)


def select_observation(obs: PyTree, groups: tuple[str, ...]) -> Array:
    """Flatten and concatenate groups in order, by dotted path (``robot.qpos``), all if none: [..., O]. Raises
    ValueError for a group that the observation lacks."""
    if not groups:
        return flatten_observation(obs)
    return jnp.concatenate([flatten_observation(part_of(obs, path)) for path in groups], axis=-1)


def part_of(obs: PyTree, path: str) -> PyTree:
    """Return the part at a dotted path; ValueError if the observation lacks it."""
    node = obs
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            there = sorted(node) if isinstance(node, Mapping) else "one array without names"
            raise ValueError(f"the policy reads '{path}', but the observation has no '{name}'; it has {there}")
        node = node[name]
    return node


def without(obs: PyTree, paths: tuple[str, ...], above: str = "") -> PyTree:
    """Drop the arrays at dotted paths, and sections that become empty."""
    kept = {}
    for name, part in obs.items():
        path = f"{above}.{name}" if above else str(name)
        inner = without(part, paths, path) if isinstance(part, Mapping) else part
        if path not in paths and not (isinstance(inner, Mapping) and not inner):
            kept[name] = inner
    return kept


def _leaves(obs: PyTree) -> list[Array]:
    if isinstance(obs, Mapping):
        return [leaf for name in sorted(obs) for leaf in _leaves(obs[name])]  # not in the order that a dict was made
    return [jnp.asarray(obs, jnp.float32)]
