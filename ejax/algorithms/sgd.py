"""Epochs of minibatch gradient steps over a flat batch: the part that the updates of all algorithms share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from ejax.algorithms.gradient import GradFn, Loss, accumulated_grad
from ejax.algorithms.shuffle import minibatch_rows
from ejax.numerics.kernels import FlatParams, by_platform, flat_params
from ejax.optim import Elementwise, apply_gradient, clip_by_global_norm, get_learning_rate
from ejax.runtime.sharding import constrain_split
from ejax.types import Array, Key, Metrics, PyTree, TrainState, split_critic

Batch: TypeAlias = dict[str, PyTree]


@dataclass(frozen=True)
class MinibatchConfig:
    """The use of a batch; hashable."""

    n_epochs: int
    batch_size: int
    max_grad_norm: float
    clip_per_network: bool = False
    skip_nonfinite: bool = True
    num_strata: int = 1
    """Equal parts of the batch, each of successive rows, that give every minibatch equally many: the devices'."""
    chunk_rows: int | None = None
    """Accumulate the gradient in chunks of this many rows. None: as many as a CPU's cache holds; all on a GPU."""


def sgd_epochs(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[[Batch], Batch] | None = None,
    adapt_rate: Callable[[Array, Metrics], Array] | None = None,
    stop: Callable[[Metrics], Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """Pass over ``batch`` ``n_epochs`` times, each in a new order cut into minibatches; the last one may be smaller.

    Args:
        batch: leaves [B, ...]. ``mask`` [B] ≥ 0, if there is one, weights the rows; a minibatch's sum divides by at
            least 1.
        loss: see ``Loss``. Its metrics are weighted sums too.
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
    num_rows = _count_rows(batch)
    size = min(minibatches.batch_size, num_rows)
    if num_rows % minibatches.num_strata or size % minibatches.num_strata:
        text = f"{num_rows} rows in minibatches of {size} cannot be drawn equally from {minibatches.num_strata} strata"
        raise ValueError(f"{text}; let num_strata divide both")
    # jitted, so that it is traced once for both forms
    grad_fn = accumulated_grad(loss, state.params, size, minibatches.chunk_rows, skip_weightless="mask" in batch)
    learn = partial(
        _gradient_step,
        grad_fn=jax.jit(grad_fn),
        optimizer=optimizer,
        minibatches=minibatches,
        prepare=prepare,
        adapt_rate=adapt_rate,
    )
    epochs = partial(_epochs, size=size, learn=learn, minibatches=minibatches, stop=stop)
    # only an optimizer that treats each number by itself may be given all of them in one vector
    flat = None
    if isinstance(optimizer, Elementwise):
        flat = flat_params(state.params["params"], critic_apart=minibatches.clip_per_network)
    if flat is None:
        state, stopped, log = epochs(state, batch, key)
    else:
        # small parameters as one vector: a third of the kernels on a GPU, and a fifth more time on a CPU
        state, stopped, log = by_platform(state, batch, key, cpu=epochs, gpu=partial(epochs, flat=flat))
    return state, _summary(log.metrics(), stopped, minibatches)


def _epochs(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    size: int,
    learn: Callable[..., tuple[TrainState, Metrics]],
    minibatches: MinibatchConfig,
    stop: Callable[[Metrics], Array] | None,
    flat: FlatParams | None = None,
) -> tuple[TrainState, Array, "_Log"]:
    """Learn all epochs: the state, a bool that they were stopped, and each minibatch's metrics."""
    num_rows = _count_rows(batch)
    # rows of each minibatch of an epoch: the last one's may be fewer
    counts = np.minimum(size, num_rows - np.arange(0, num_rows, size)).astype(np.float32)

    def one_minibatch(carry: tuple[TrainState, Array], xs: tuple[Array, Array]) -> tuple[Any, _Log]:
        (state, stopped), (rows, count) = carry, xs
        # rows that count come first, so that the chunks behind them, with none that does, cost nothing
        if "mask" in batch:
            rows = _counting_first(rows, batch["mask"])
        step = partial(learn, batch=batch, rows=rows, count=count, flat=flat)
        if stop is None:
            state, metrics = step(state)
        else:
            (state, stopped), metrics = _learn_unless(stopped, step, stop, state)
        return (state, stopped), _Log.of(metrics)

    def one_epoch(carry: tuple[TrainState, Array], key: Key) -> tuple[Any, _Log]:
        rows = minibatch_rows(key, num_rows, size, minibatches.num_strata)
        return jax.lax.scan(one_minibatch, carry, (rows, jnp.asarray(counts)))

    # epochs within one scan and minibatches within another: one body is compiled for any number of either
    start = (state if flat is None else flat.pack_state(state), jnp.asarray(False))
    (after, stopped), log = jax.lax.scan(one_epoch, start, jax.random.split(key, minibatches.n_epochs))
    return after if flat is None else flat.unpack_state(after, like=state), stopped, log


def _gradient_step(
    state: TrainState,
    *,
    batch: Batch,
    rows: Array,
    count: Array,
    flat: FlatParams | None,
    grad_fn: GradFn,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[[Batch], Batch] | None,
    adapt_rate: Callable[[Array, Metrics], Array] | None,
) -> tuple[TrainState, Metrics]:
    """Make one step on the minibatch of these ``rows``; see ``_take``. ``flat``: the layout of the state's
    parameters."""
    minibatch, count = _take(batch, rows, count, _count_rows(batch))
    minibatch = minibatch if prepare is None else prepare(minibatch)
    if flat is None:
        grads, metrics = grad_fn(state.params, minibatch)
    else:
        # packed afterwards: the gradient of unpacking would be a sum of padded vectors
        grads, metrics = grad_fn({**state.params, "params": flat.unpack(state.params["params"])}, minibatch)
        grads = flat.pack(grads)
    grads, norm = _clip(grads, minibatches)
    # adapted by this very minibatch, for this very step
    rate = None if adapt_rate is None else adapt_rate(get_learning_rate(state.opt_state), metrics)
    new, finite = apply_gradient(
        state,
        grads,
        optimizer=optimizer,
        finite=jnp.isfinite(norm) & jnp.isfinite(metrics["loss"]),
        skip=minibatches.skip_nonfinite,
        learning_rate=rate,
    )
    return new, metrics | {"grad_norm": norm, "skipped_minibatches": 1.0 - finite, "rows": count}


def _clip(grads: PyTree, minibatches: MinibatchConfig) -> tuple[PyTree, Array]:
    if not minibatches.clip_per_network:
        return clip_by_global_norm(grads, minibatches.max_grad_norm)
    rest, critic = split_critic(grads)
    critic, critic_norm = clip_by_global_norm(critic, minibatches.max_grad_norm)
    rest, rest_norm = clip_by_global_norm(rest, minibatches.max_grad_norm)
    # logs have one norm, that of both parts together
    return {**rest, **critic}, jnp.hypot(critic_norm, rest_norm)


def _learn_unless(
    stopped: Array,
    learn: Callable[[TrainState], tuple[TrainState, Metrics]],
    stop: Callable[[Metrics], Array],
    state: TrainState,
) -> tuple[tuple[TrainState, Array], Metrics]:
    """Learn one minibatch unless an earlier one has stopped the update; the one that stops it is only measured."""

    def measure(state: TrainState) -> tuple[TrainState, Array, Metrics]:
        trained, metrics = learn(state)
        stops = stop(metrics)
        # the metric that stops comes with the gradient: the step is made, and undone
        return jax.tree.map(lambda old, new: jnp.where(stops, old, new), state, trained), stops, metrics

    def skip(state: TrainState) -> tuple[TrainState, Array, Metrics]:
        return state, stopped, jax.tree.map(jnp.zeros_like, jax.eval_shape(measure, state)[2])

    state, stopped, metrics = jax.lax.cond(stopped, skip, measure, state)
    return (state, stopped), metrics


@struct.dataclass
class _Log:
    """Metrics as one vector: each array that a loop stores is a kernel of its own."""

    names: tuple[str, ...] = struct.field(pytree_node=False)
    values: Array

    @classmethod
    def of(cls, metrics: Metrics) -> "_Log":
        names = tuple(sorted(metrics))
        return cls(names, jnp.stack([metrics[name].astype(jnp.float32) for name in names]))

    def metrics(self) -> Metrics:
        return {name: self.values[..., i] for i, name in enumerate(self.names)}


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


def _count_rows(batch: Batch) -> int:
    rows_of = {name: {leaf.shape[0] for leaf in jax.tree.leaves(part)} for name, part in batch.items()}
    if len(set().union(*rows_of.values())) != 1:
        raise ValueError(f"every array of a batch needs the same number of rows, got {rows_of}")
    return jax.tree.leaves(batch)[0].shape[0]


def _counting_first(rows: Array, mask: Array) -> Array:
    """Put each stratum's rows of a minibatch, [D, M], that have a weight first."""
    mask = mask.reshape(rows.shape[0], -1)
    weightless = jnp.take_along_axis(mask, rows % mask.shape[1], axis=1) <= 0.0
    return jnp.take_along_axis(rows, jnp.argsort(weightless, axis=1, stable=True), axis=1)


def _take(batch: Batch, rows: Array, count: Array, num_rows: int) -> tuple[Batch, Array]:
    """Take the minibatch of ``rows`` [D, M / D], numbered within D strata, with ``weight``, and the sum of its weights
    before they are made to add up to one. Rows past a stratum's end are padding of weight 0; ``count`` are not."""
    num_strata = rows.shape[0]
    stratum = num_rows // num_strata

    def rows_of_stratum(part: Array, rows: Array) -> Array:
        # padding wraps around to rows that exist, and has the weight 0
        return part.at[rows % stratum].get(mode="promise_in_bounds")

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
