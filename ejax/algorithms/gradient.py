"""The gradient of a minibatch, in chunks where a CPU's cache is too small for all of it."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp

from ejax.numerics.kernels import by_platform
from ejax.types import Array, Metrics, Params, PyTree

_CACHED_ELEMENTS = 2**18
"""Rows of a chunk x widest layer: 1 MiB of float32. Smaller chunks cost more in dispatch than they gain in cache."""


class Loss(Protocol):
    """A weighted sum over the rows of ``batch``, whose ``weight`` [B] adds up to one over a minibatch."""

    def __call__(self, params: Params, batch: PyTree) -> tuple[Array, Metrics]: ...


GradFn: TypeAlias = Callable[[Params, PyTree], tuple[PyTree, Metrics]]
"""``(params, minibatch) -> (gradient with respect to params["params"], metrics)``."""


def accumulated_grad(loss: Loss, params: Params, size: int, chunk_rows: int | None, *, skip_weightless: bool) -> GradFn:
    """Make the gradient of a loss, and its metrics with the ``loss`` among them, for minibatches of ``size`` rows.

    Args:
        chunk_rows: add the gradient up in chunks of this many rows. None: as many as a CPU's cache holds; all on a GPU.
        skip_weightless: chunks without a row that has a weight cost nothing.
    """

    def loss_of_trained(trained: PyTree, params: Params, batch: PyTree) -> tuple[Array, Metrics]:
        value, metrics = loss({**params, "params": trained}, batch)
        return value, metrics | {"loss": value}

    def grad(params: Params, batch: PyTree) -> tuple[PyTree, Metrics]:
        return jax.grad(loss_of_trained, has_aux=True)(params["params"], params, batch)

    def in_chunks(params: Params, batch: PyTree) -> tuple[PyTree, Metrics]:
        # weights add up to one over the minibatch, so that chunks' gradients are summed, not averaged
        chunks = jax.tree.map(lambda x: x.reshape(size // rows, rows, *x.shape[1:]), batch)

        def add(total: PyTree, chunk: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, total, grad(params, chunk))

        def add_or_skip(total: PyTree, chunk: PyTree) -> tuple[PyTree, None]:
            if not skip_weightless:
                return add(total, chunk), None
            return jax.lax.cond(chunk["weight"].any(), add, lambda total, chunk: total, total, chunk), None

        # the scan adds to zeros, whose shapes are known without computing a chunk
        first = jax.tree.map(lambda x: x[0], chunks)
        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad, params, first))
        return jax.lax.scan(add_or_skip, nothing, chunks)[0]

    rows = _rows_in_cache(params["params"], size) if chunk_rows is None else chunk_rows
    # chunks are of equal size, or there are none
    if rows == size or size % rows:
        return grad
    # a GPU has no such cache, and each chunk would cost it the kernels of a minibatch
    return in_chunks if chunk_rows is not None else partial(by_platform, cpu=in_chunks, gpu=grad)


def _rows_in_cache(params: PyTree, size: int) -> int:
    """Count the rows of the fewest equal chunks that fit a CPU's cache; all where few chunks cannot be equal."""
    widest = max((leaf.shape[-1] for leaf in jax.tree.leaves(params) if leaf.ndim), default=1)
    # beyond twice the fewest, chunks are so small that their dispatch costs more than the cache gains
    fewest = -(-size * widest // _CACHED_ELEMENTS)
    return size // next((n for n in range(fewest, 2 * fewest) if size % n == 0), 1)
