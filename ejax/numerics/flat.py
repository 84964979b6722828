"""Small parameters as one vector: a gradient step then takes a few kernels, not a few for each parameter."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ejax.types import Array, PyTree, split_critic

_MAX_ELEMENTS = 2**20
"""Above it a kernel for each parameter costs less than the copies into a vector and out of it."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Trees of the form of some parameters, as one vector; as two where the critic's stays apart.

    Vectors are a dict, so that what maps over a tree, or takes the critic out of one, does so here.
    """

    shapes: PyTree
    critic_apart: bool = False

    def pack(self, tree: PyTree) -> dict[str, Array]:
        if not self.critic_apart:
            return {"all": _ravel(tree)}
        rest, critic = split_critic(tree)
        return {"rest": _ravel(rest), **{name: _ravel(part) for name, part in critic.items()}}

    def unpack(self, vectors: dict[str, Array]) -> PyTree:
        if not self.critic_apart:
            return _unravel(vectors["all"], self.shapes)
        rest, critic = split_critic(self.shapes)
        return {
            **_unravel(vectors["rest"], rest),
            **{name: _unravel(vectors[name], part) for name, part in critic.items()},
        }

    def pack_within(self, tree: PyTree) -> PyTree:
        """Pack every part of a tree that has the parameters' form, such as an optimizer's moments."""
        return jax.tree.map(lambda x: self.pack(x) if self._fits(x) else x, tree, is_leaf=self._fits)

    def unpack_within(self, tree: PyTree, like: PyTree) -> PyTree:
        """The inverse of ``pack_within``; ``like`` is the tree before it."""
        return jax.tree.map(lambda old, x: self.unpack(x) if self._fits(old) else x, like, tree, is_leaf=self._fits)

    def _fits(self, tree: PyTree) -> bool:
        return bool(jax.tree.structure(tree) == jax.tree.structure(self.shapes))  # type: ignore[operator]  # no stubs


def vectors_of(params: PyTree, *, critic_apart: bool = False) -> Vectors | None:
    """How to see ``params`` as vectors; None where that is not worth it, or their types differ."""
    leaves = jax.tree.leaves(params)
    if len(leaves) < 2 or len({x.dtype for x in leaves}) > 1 or sum(x.size for x in leaves) > _MAX_ELEMENTS:
        return None
    if critic_apart and not all(split_critic(params)):  # nothing is apart from the other
        return None
    return Vectors(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), critic_apart)


def _ravel(tree: PyTree) -> Array:
    return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])


def _unravel(vector: Array, like: PyTree) -> PyTree:
    shapes = jax.tree.leaves(like)
    ends = np.cumsum([shape.size for shape in shapes])
    leaves = [vector[end - shape.size : end].reshape(shape.shape) for shape, end in zip(shapes, ends, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
