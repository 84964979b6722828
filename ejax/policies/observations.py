"""The part of an observation that a network reads: nested observations become one vector per row.

Every leaf of an observation that an MLP reads is ``[..., F]``: one feature axis behind the batch axes.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from ejax.types import Array, PyTree


def flatten_observation(obs: PyTree) -> Array:
    """All leaves, depth first with keys sorted at each level, concatenated: [..., O] float32.

    Raises:
        ValueError: no array in it.
    """
    leaves = _leaves(obs)
    if not leaves:
        raise ValueError("the observation holds no array")
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)


def select_observation(obs: PyTree, groups: tuple[str, ...]) -> Array:
    """The groups in the order given, by dotted path (``robot.qpos``), flattened and concatenated: [..., O].

    Args:
        groups: empty for the whole observation.

    Raises:
        ValueError: a group that the observation lacks.
    """
    if not groups:
        return flatten_observation(obs)
    return jnp.concatenate([flatten_observation(part_of(obs, path)) for path in groups], axis=-1)


def part_of(obs: PyTree, path: str) -> PyTree:
    """The part of a nested observation at a dotted path.

    Raises:
        ValueError: the observation lacks it.
    """
    node = obs
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            there = sorted(node) if isinstance(node, Mapping) else "one array without names"
            raise ValueError(f"obs_groups names '{path}', but the observation has no '{name}'; it has {there}")
        node = node[name]
    return node


def parts(obs: PyTree, above: str = "") -> list[str]:
    """The dotted paths of an observation's arrays; none of a single array's."""
    if not isinstance(obs, Mapping):
        return [above] if above else []
    return [path for name, part in obs.items() for path in parts(part, f"{above}.{name}" if above else str(name))]


def without(obs: PyTree, paths: tuple[str, ...], above: str = "") -> PyTree:
    """The nested observation without the arrays at dotted paths, and without sections that are empty then."""
    kept = {}
    for name, part in obs.items():
        path = f"{above}.{name}" if above else str(name)
        inner = without(part, paths, path) if isinstance(part, Mapping) else part
        if path not in paths and not (isinstance(inner, Mapping) and not inner):
            kept[name] = inner
    return kept


def _leaves(obs: PyTree) -> list[Array]:
    if isinstance(obs, Mapping):
        return [leaf for name in sorted(obs) for leaf in _leaves(obs[name])]
    return [jnp.asarray(obs, jnp.float32)]
