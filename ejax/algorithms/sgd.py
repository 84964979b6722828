"""Epochs of minibatch gradient steps over a flat batch: the part that the updates of all algorithms share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ejax.numerics.kernels import FlatParams, PackedRows, flat_params, pack_rows
from ejax.numerics.platforms import by_platform
from ejax.numerics.shuffle import minibatch_rows
from ejax.optim import Elementwise, apply_gradient, clip_by_global_norm, get_learning_rate
from ejax.runtime.sharding import constrain_split
from ejax.types import Array, Key, Metrics, Params, PyTree, TrainState, split_critic

Batch: TypeAlias = dict[str, PyTree]
Loss: TypeAlias = Callable[[Params, Batch], tuple[Array, Metrics]]
"""A weighted sum over the rows of the minibatch, whose ``weight`` [B] adds up to one, and metrics: sums too."""
Grad: TypeAlias = Callable[[PyTree, Params, Batch], tuple[PyTree, Metrics]]
"""``(trained, params, minibatch) -> (gradient of trained, metrics)``; ``trained`` replaces ``params["params"]``."""
# rows of a chunk x widest layer: 1 MiB of float32. Smaller chunks cost more in dispatch than they gain in cache
_CACHED_ELEMENTS = 2**18


@dataclass(frozen=True)
class MinibatchConfig:
    """Epochs and minibatches of a batch, and the limits of a gradient step; hashable."""

    n_epochs: int
    batch_size: int
    max_grad_norm: float
    clip_per_network: bool = False
    skip_nonfinite: bool = True
    num_strata: int = 1
    """Equal parts of the batch, each of successive rows, that give every minibatch equally many: the devices'."""


def sgd_epochs(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    keyed: bool = False,
    prepare: Callable[[Batch], Batch] | None = None,
    adapt_rate: Callable[[Array, Metrics], Array] | None = None,
    stop: Callable[[Metrics], Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """Pass over ``batch`` ``n_epochs`` times, each in a new order cut into minibatches; the last one may be smaller.

    Args:
        batch: leaves [B, ...]. ``mask`` [B] ≥ 0, if there is one, weights the rows; a minibatch's sum divides by at
            least 1.
        loss: see ``Loss``.
        keyed: a minibatch has a ``key`` for each of its rows, [M], another one in every epoch.
        prepare: applied to each minibatch (leaves [M, ...], with ``weight`` [M], 0 on padding) before the gradient.
        adapt_rate: ``(learning rate, minibatch metrics) -> learning rate`` of this very step.
        stop: ``minibatch metrics -> bool``; once true, this and all later minibatches of the update are skipped.

    Returns:
        The state after it (``step`` is left to the caller) and metrics: means over the rows of the minibatches that
        were looked at, ``grad_norm`` (before clipping), ``skipped_minibatches`` (not finite) and their
        ``skipped_fraction``, ``stopped_early``.

    Raises:
        ValueError: arrays of different numbers of rows.
    """
    key, key_rows = jax.random.split(key) if keyed else (key, None)
    orders, counts = _orders(key, batch, minibatches)
    keys = None if key_rows is None else jax.random.split(key_rows, counts.shape)

    def loss_of_trained(trained: PyTree, params: Params, minibatch: Batch) -> tuple[Array, Metrics]:
        value, metrics = loss({**params, "params": trained}, minibatch)
        return value, metrics | {"loss": value}

    grad: Grad = jax.jit(jax.grad(loss_of_trained, has_aux=True))  # jitted: it is traced once for both forms
    hooks: dict[str, Any] = {"prepare": prepare, "adapt_rate": adapt_rate, "stop": stop}
    scan: Any = partial(_scan_minibatches, gradient=grad, optimizer=optimizer, minibatches=minibatches, **hooks)
    trained = state.params["params"]
    size = math.prod(orders.shape[2:])
    rows = _rows_in_cache(trained, size)
    in_cache = grad if rows == size else _in_chunks(grad, rows, skip_weightless="mask" in batch)
    # only an optimizer that treats each number separately may be given all of them in one vector
    is_flat = isinstance(optimizer, Elementwise)
    flat = flat_params(trained, critic_apart=minibatches.clip_per_network) if is_flat else None
    # A GPU has no cache that a chunk would fit, and pays for kernels instead: one vector takes a third of those that
    # small parameters do. A CPU would need a fifth more time for it.
    forms = by_platform(cpu=partial(scan, gradient=in_cache), gpu=partial(scan, flat=flat))
    one_form = in_cache is grad and flat is None
    after, stopped, log = (scan if one_form else forms)(state, batch, (orders, counts, keys))
    return after, _summary({name: x[..., 0] for name, x in log.tree().items()}, stopped, minibatches)


def _scan_minibatches(
    state: TrainState,
    batch: Batch,
    draws: tuple[Array, Array, Key | None],
    *,
    gradient: Grad,
    flat: FlatParams | None = None,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[[Batch], Batch] | None,
    adapt_rate: Callable[[Array, Metrics], Array] | None,
    stop: Callable[[Metrics], Array] | None,
) -> tuple[TrainState, Array, PackedRows]:
    """Make the steps of all minibatches: rows, counts and keys ``draws``, leaves [epochs, minibatches, ...]. ``flat``:
    the parameters are one vector."""

    def step(carry: tuple[TrainState, Array], draw: tuple[Array, Array, Key | None]) -> tuple[Any, PackedRows]:
        (state, stopped), (rows, count, key) = carry, draw
        minibatch, count = _take(batch, rows, count)
        if key is not None:
            minibatch["key"] = jax.random.split(key, rows.size)
        minibatch = minibatch if prepare is None else prepare(minibatch)
        trained = state.params["params"]
        # packed after the gradient, not before: the gradient of unpacking would be a sum of padded vectors
        grads, metrics = gradient(trained if flat is None else flat.unpack(trained), state.params, minibatch)
        grads, norm = _clip(grads if flat is None else flat.pack(grads), minibatches)
        # adapted by this very minibatch, for this very step
        rate = None if adapt_rate is None else adapt_rate(get_learning_rate(state.opt_state), metrics)
        state, finite = apply_gradient(
            state,
            grads,
            optimizer=optimizer,
            finite=jnp.isfinite(norm) & jnp.isfinite(metrics["loss"]),
            skip=minibatches.skip_nonfinite,
            learning_rate=rate,
        )
        metrics |= {"grad_norm": norm, "skipped_minibatches": 1.0 - finite, "rows": count}
        # one table: each array that a loop stores is a separate kernel on a GPU
        return (state, stopped), pack_rows({name: x.astype(jnp.float32)[None] for name, x in metrics.items()})

    start = (state if flat is None else flat.pack_state(state), jnp.asarray(False))
    # one scan over the minibatches of all epochs: what a loop over epochs did besides would split a CUDA graph
    in_a_row = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws)
    with jax.named_scope("minibatches"):
        (after, stopped), log = jax.lax.scan(step if stop is None else _until(stop, step), start, in_a_row)
    log = jax.tree.map(lambda x: x.reshape(*draws[1].shape, *x.shape[1:]), log)
    return after if flat is None else flat.unpack_state(after, like=state), stopped, log


def _orders(key: Key, batch: Batch, minibatches: MinibatchConfig) -> tuple[Array, Array]:
    """Draw the rows of each minibatch, [epochs, minibatches, strata, rows], and count those that are not padding."""
    rows_of = {name: {leaf.shape[0] for leaf in jax.tree.leaves(part)} for name, part in batch.items()}
    if len(set().union(*rows_of.values())) != 1:
        raise ValueError(f"every array of a batch needs the same number of rows, got {rows_of}")
    num_rows, num_strata = jax.tree.leaves(batch)[0].shape[0], minibatches.num_strata
    size = min(minibatches.batch_size, num_rows)
    if num_rows % num_strata or size % num_strata:
        text = f"{num_rows} rows in minibatches of {size} cannot be drawn equally from {num_strata} strata"
        raise ValueError(f"{text}; let num_strata divide both")
    draw = partial(minibatch_rows, num_rows=num_rows, size=size, num_strata=num_strata)
    counts = jnp.asarray(np.minimum(size, num_rows - np.arange(0, num_rows, size)), jnp.float32)
    orders = jax.vmap(draw)(jax.random.split(key, minibatches.n_epochs))
    return orders, jnp.broadcast_to(counts, (minibatches.n_epochs, *counts.shape))


def _rows_in_cache(params: PyTree, size: int) -> int:
    """Count the rows of the fewest equal chunks that fit a CPU's cache; all where few chunks cannot be equal."""
    widest = max((leaf.shape[-1] for leaf in jax.tree.leaves(params) if leaf.ndim), default=1)
    # beyond twice the fewest, chunks are so small that their dispatch costs more than the cache gains
    fewest = -(-size * widest // _CACHED_ELEMENTS)
    return size // next((n for n in range(fewest, 2 * fewest) if size % n == 0), 1)


def _in_chunks(grad: Grad, rows: int, *, skip_weightless: bool) -> Grad:
    """Add up the gradient in chunks of ``rows``; those without a row that has a weight can be skipped."""

    def summed(trained: PyTree, params: Params, minibatch: Batch) -> tuple[PyTree, Metrics]:
        def add(total: PyTree, chunk: Batch) -> PyTree:
            return jax.tree.map(jnp.add, total, grad(trained, params, chunk))

        def add_or_skip(total: PyTree, chunk: Batch) -> tuple[PyTree, None]:
            if not skip_weightless:
                return add(total, chunk), None
            return jax.lax.cond(chunk["weight"].any(), add, lambda total, chunk: total, total, chunk), None

        # weights add up to one over the minibatch, so that chunks' gradients are summed, not averaged
        chunks = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), minibatch)
        # the scan adds to zeros, whose shapes are known without computing a chunk
        shapes = jax.eval_shape(grad, trained, params, jax.tree.map(lambda x: x[0], chunks))
        return jax.lax.scan(add_or_skip, jax.tree.map(jnp.zeros_like, shapes), chunks)[0]

    return summed


def _until(stop: Callable[[Metrics], Array], body: Callable[..., tuple[Any, PackedRows]]) -> Callable[..., Any]:
    """Skip minibatches after the first whose metrics say stop; that one is only measured."""

    def unless_stopped(carry: tuple[TrainState, Array], xs: PyTree) -> tuple[Any, PackedRows]:
        def measure(carry: tuple[TrainState, Array]) -> tuple[Any, PackedRows]:
            (trained, _), log = body(carry, xs)
            stops = stop({name: x[0] for name, x in log.tree().items()})
            # the metric that stops comes with the gradient: the step is made, and undone
            return (jax.tree.map(lambda old, new: jnp.where(stops, old, new), carry[0], trained), stops), log

        def skip(carry: tuple[TrainState, Array]) -> tuple[Any, PackedRows]:
            return carry, jax.tree.map(jnp.zeros_like, jax.eval_shape(measure, carry)[1])

        return jax.lax.cond(carry[1], skip, measure, carry)

    return unless_stopped


def _clip(grads: PyTree, minibatches: MinibatchConfig) -> tuple[PyTree, Array]:
    if not minibatches.clip_per_network:
        return clip_by_global_norm(grads, minibatches.max_grad_norm)
    rest, critic = split_critic(grads)
    critic, critic_norm = clip_by_global_norm(critic, minibatches.max_grad_norm)
    rest, rest_norm = clip_by_global_norm(rest, minibatches.max_grad_norm)
    # logs have one norm, that of both parts together
    return {**rest, **critic}, jnp.hypot(critic_norm, rest_norm)


def _summary(metrics: Metrics, stopped: Array, minibatches: MinibatchConfig) -> Metrics:
    """Combine the metrics of minibatches, [epochs, minibatches] each."""
    rows = metrics.pop("rows")
    skipped = metrics.pop("skipped_minibatches").sum()

    def mean(value: Array) -> Array:
        # a skipped minibatch's metrics are not finite: they must not hide the others', unless training stops for them
        weight = jnp.where(jnp.isfinite(value), rows, 0.0) if minibatches.skip_nonfinite else rows
        total = jnp.sum(jnp.where(weight > 0, value, 0.0) * weight) / jnp.maximum(weight.sum(), 1.0)
        return jnp.where(weight.sum() > 0, total, jnp.nan) if minibatches.skip_nonfinite else total

    return {name: mean(value) for name, value in metrics.items()} | {
        "skipped_minibatches": skipped,
        "skipped_fraction": skipped / jnp.maximum(jnp.sum(rows > 0.0), 1),
        "stopped_early": stopped.astype(jnp.float32),
    }


def _take(batch: Batch, rows: Array, count: Array) -> tuple[Batch, Array]:
    """Take the minibatch of ``rows`` [D, M / D], numbered within D strata, with ``weight``, and the sum of its weights
    before they are made to add up to one. Rows past a stratum's end are padding of weight 0; ``count`` are not."""
    num_strata = rows.shape[0]
    stratum = jax.tree.leaves(batch)[0].shape[0] // num_strata
    if "mask" in batch:
        # rows that count come first, so that the chunks behind them, with none that does, cost nothing
        weightless = jnp.take_along_axis(batch["mask"].reshape(num_strata, -1), rows % stratum, axis=1) <= 0.0
        rows = jnp.take_along_axis(rows, jnp.argsort(weightless, axis=1, stable=True), axis=1)

    def rows_of_stratum(part: Array, rows: Array) -> Array:
        # padding repeats the last row: a remainder costs more than the gather. None is negative: that costs a kernel
        rows = jnp.minimum(rows, stratum - 1)
        return part.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def take(x: Array) -> Array:
        if num_strata == 1:
            return rows_of_stratum(x, rows[0])
        # stratum by stratum, so that each device finds its part in its own memory
        parts = constrain_split(x.reshape(num_strata, stratum, *x.shape[1:]))
        return jax.vmap(rows_of_stratum)(parts, rows).reshape(-1, *x.shape[1:])

    minibatch = constrain_split({name: jax.tree.map(take, leaf) for name, leaf in batch.items()})
    weight = (rows < stratum).reshape(-1).astype(jnp.float32)
    if "mask" in minibatch:
        weight = weight * minibatch.pop("mask")
        # a minibatch of little weight is not scaled up to a whole one
        count = jnp.maximum(weight.sum(), 1.0)
    minibatch["weight"] = weight / count
    return minibatch, count
