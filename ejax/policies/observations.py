"""The part of an observation that a network reads: one vector per row, of leaves ``[..., F]``."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ejax.policies.normalize import ObsNormalizer
from ejax.schema.paths import find, leaves, named, nest, part_names
from ejax.types import Array, PyTree


def flatten_observation(obs: PyTree) -> Array:
    """Concatenate all leaves, depth first with keys sorted: [..., O] float32. ValueError without any array."""
    parts = [jnp.asarray(part, jnp.float32) for part in named(obs).values()]
    if not parts:
        raise ValueError("the observation holds no array")
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def select_observation(obs: PyTree, groups: tuple[str, ...]) -> Array:
    """Flatten and concatenate groups in order, by dotted path (``robot.qpos``), all if none: [..., O]. Raises
    ValueError for a group that the observation lacks."""
    if not groups:
        return flatten_observation(obs)
    return jnp.concatenate([flatten_observation(part_of(obs, path)) for path in groups], axis=-1)


def network_input(module: Any, name: str, obs: PyTree, observe: bool | Array) -> Array:
    """Select the part of the observation that the network ``name`` reads, [..., O], normalized where fields of
    ``module`` ask for it. For use inside its ``nn.compact`` method."""
    x = select_observation(obs, getattr(module, f"{name}_obs_groups"))
    if getattr(module, f"{name}_obs_normalization"):
        x = ObsNormalizer(name=f"{name}_obs_normalizer")(x, observe=observe)
    return x


def part_of(obs: PyTree, path: str) -> PyTree:
    """Return the part at a dotted path; ValueError if the observation lacks it."""
    try:
        return find(obs, path)
    except KeyError:
        there = ", ".join(named(obs)) if isinstance(obs, Mapping) else "one array without names"
        raise ValueError(f"the policy reads '{path}', which the observation lacks; it has {there}") from None


def without(obs: PyTree, names: tuple[str, ...]) -> PyTree:
    """Drop the arrays of these names, and sections that become empty."""
    parts = [each for each in leaves(obs) if not isinstance(each[1], Mapping)]
    named_parts = zip(part_names(path for path, _ in parts), parts, strict=True)
    return nest(each for name, each in named_parts if name not in names)
