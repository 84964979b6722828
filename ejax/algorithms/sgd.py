"""Epochs of minibatch gradient steps over a flat batch, in one scan: what PPO's and GRPO's updates have in common."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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
from ejax.types import Array, Key, Metrics, Params, PyTree, TrainState, split_critic


@struct.dataclass
class MinibatchConfig:
    """How a batch is used; hashable."""

    n_epochs: int = struct.field(pytree_node=False)
    batch_size: int = struct.field(pytree_node=False)
    max_grad_norm: float = struct.field(pytree_node=False)
    clip_per_network: bool = struct.field(pytree_node=False, default=False)
    skip_nonfinite: bool = struct.field(pytree_node=False, default=True)
    num_strata: int = struct.field(pytree_node=False, default=1)
    """Equal parts of the batch, each of successive rows, that give every minibatch equally many: the devices'."""
    chunk_rows: int | None = struct.field(pytree_node=False, default=None)
    """Accumulate the gradient in chunks of this many rows. None: as many as a CPU's cache holds; all on a GPU."""


def sgd_epochs(
    state: TrainState,
    batch: dict[str, PyTree],
    key: Key,
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[[dict[str, PyTree]], dict[str, PyTree]] | None = None,
    adapt_rate: Callable[[Array, Metrics], Array] | None = None,
    stop: Callable[[Metrics], Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """``n_epochs`` passes over ``batch``, each a new permutation cut into minibatches; the last one may be smaller.

    Args:
        batch: leaves [B, ...]. ``mask`` [B] ≥ 0, if there is one, weights the rows; a minibatch's sum divides by at
            least 1.
        loss: see ``Loss``. Its metrics are weighted sums too.
        prepare: applied to each minibatch (leaves [M, ...], with ``weight`` [M], 0 on padding) before the gradient.
        adapt_rate: ``(learning rate, minibatch metrics) -> learning rate`` of this very step.
        stop: ``minibatch metrics -> bool``; once true, this and all later minibatches of the update are skipped.

    Returns:
        The state after it (``step`` is left to the caller) and metrics: means over the rows of all minibatches that
        were looked at, ``grad_norm`` (before clipping), ``skipped_minibatches`` (loss, gradient or the step made of
        it not finite), ``skipped_fraction`` of those that were looked at, and ``stopped_early``.

    Raises:
        ValueError: arrays of different numbers of rows.
    """
    num_rows = _count_rows(batch)
    size = min(minibatches.batch_size, num_rows)
    if num_rows % minibatches.num_strata or size % minibatches.num_strata:
        text = f"{num_rows} rows in minibatches of {size} cannot be drawn equally from {minibatches.num_strata} strata"
        raise ValueError(f"{text}; let num_strata divide both")
    # jitted, so that it is traced once for both forms
    grad_fn = jax.jit(accumulated_grad(loss, size, minibatches.chunk_rows, skip_weightless="mask" in batch))
    learn = partial(
        _gradient_step, optimizer=optimizer, minibatches=minibatches, prepare=prepare, adapt_rate=adapt_rate
    )
    epochs = partial(_epochs, size=size, learn=learn, minibatches=minibatches, stop=stop)
    # only an optimizer that treats each number by itself may be given all of them in one vector
    flat = None
    if isinstance(optimizer, Elementwise):
        flat = flat_params(state.params["params"], critic_apart=minibatches.clip_per_network)
    one_by_one = partial(epochs, grad_fn=grad_fn)
    if flat is None:
        state, stopped, log = one_by_one(state, batch, key)
    else:
        # small parameters as one vector: a third of the kernels on a GPU, and a fifth more time on a CPU
        in_vectors = with_flat_params(epochs, grad_fn, flat)
        state, stopped, log = by_platform(state, batch, key, cpu=one_by_one, gpu=in_vectors)
    return state, _summary(log.metrics(), stopped, minibatches)


def _summary(metrics: Metrics, stopped: Array, minibatches: MinibatchConfig) -> Metrics:
    """The update's metrics from those of its minibatches, [epochs, minibatches] each."""
    rows = metrics.pop("rows")
    skipped = metrics.pop("skipped_minibatches").sum()
    # a skipped minibatch's metrics are not finite: they must not hide the others'. Where training stops for one they
    # must be seen
    mean = _finite_mean if minibatches.skip_nonfinite else _mean
    means = {name: mean(value, rows) for name, value in metrics.items()}
    return means | {
        "skipped_minibatches": skipped,
        "skipped_fraction": skipped / jnp.maximum(jnp.sum(rows > 0.0), 1),
        "stopped_early": stopped.astype(jnp.float32),
    }


def _epochs(
    state: TrainState,
    batch: dict[str, PyTree],
    key: Key,
    *,
    grad_fn: GradFn,
    size: int,
    learn: Callable[..., tuple[TrainState, Metrics]],
    minibatches: MinibatchConfig,
    stop: Callable[[Metrics], Array] | None,
) -> tuple[TrainState, Array, "_Log"]:
    """The state after all epochs, whether they were stopped, and the metrics of each minibatch.

    Args:
        size: rows of a minibatch.
        learn: ``_gradient_step`` with its options.
    """
    num_rows = _count_rows(batch)
    # rows of each minibatch of an epoch: the last one's may be fewer
    counts = np.minimum(size, num_rows - np.arange(0, num_rows, size)).astype(np.float32)

    def one_minibatch(carry: tuple[TrainState, Array], xs: tuple[Array, Array]) -> tuple[Any, _Log]:
        (state, stopped), (rows, count) = carry, xs
        # rows that count come first, so that the chunks behind them, with none that does, cost nothing
        if "mask" in batch:
            rows = _counting_first(rows, batch["mask"])
        step = partial(learn, batch=batch, rows=rows, count=count, grad_fn=grad_fn)
        if stop is None:
            state, metrics = step(state)
        else:
            (state, stopped), metrics = _learn_unless(stopped, step, stop, state)
        return (state, stopped), _Log.of(metrics)

    def one_epoch(carry: tuple[TrainState, Array], key: Key) -> tuple[Any, _Log]:
        rows = minibatch_rows(key, num_rows, size, minibatches.num_strata)
        return jax.lax.scan(one_minibatch, carry, (rows, jnp.asarray(counts)))

    # epochs within one scan and minibatches within another: one body is compiled, whatever their number
    carry = (state, jnp.asarray(False))
    (state, stopped), log = jax.lax.scan(one_epoch, carry, jax.random.split(key, minibatches.n_epochs))
    return state, stopped, log


def with_flat_params(epochs: Callable[..., Any], grad_fn: GradFn, flat: FlatParams) -> Callable[..., Any]:
    """``_epochs`` that carries the parameters as vectors from minibatch to minibatch, and gives back trees."""

    def flat_grad(params: Params, minibatch: PyTree) -> tuple[PyTree, Metrics]:
        # packed afterwards: the gradient of unpacking would be a sum of padded vectors
        grads, metrics = grad_fn({**params, "params": flat.unpack(params["params"])}, minibatch)
        return flat.pack(grads), metrics

    def flat_epochs(state: TrainState, batch: dict[str, PyTree], key: Key) -> tuple[TrainState, Array, _Log]:
        params = {**state.params, "params": flat.pack(state.params["params"])}
        packed = replace(state, params=params, opt_state=flat.pack_within(state.opt_state))
        after, stopped, log = epochs(packed, batch, key, grad_fn=flat_grad)
        params = {**after.params, "params": flat.unpack(after.params["params"])}
        opt_state = flat.unpack_within(after.opt_state, like=state.opt_state)
        return replace(after, params=params, opt_state=opt_state), stopped, log

    return flat_epochs


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


def _count_rows(batch: dict[str, PyTree]) -> int:
    rows_of = {name: {leaf.shape[0] for leaf in jax.tree.leaves(part)} for name, part in batch.items()}
    if len(set().union(*rows_of.values())) != 1:
        raise ValueError(f"every array of a batch needs the same number of rows, got {rows_of}")
    return jax.tree.leaves(batch)[0].shape[0]


def _counting_first(rows: Array, mask: Array) -> Array:
    """[D, M]: each stratum's rows of a minibatch, those with a weight first."""
    mask = mask.reshape(rows.shape[0], -1)
    weightless = jnp.take_along_axis(mask, rows % mask.shape[1], axis=1) <= 0.0
    return jnp.take_along_axis(rows, jnp.argsort(weightless, axis=1, stable=True), axis=1)


def _take(batch: dict[str, PyTree], rows: Array, count: Array, num_rows: int) -> tuple[dict[str, PyTree], Array]:
    """The minibatch of these rows with its ``weight``, and the weight of them all before it is made one.

    Args:
        rows: [D, M / D] int32, within each of D strata. Past a stratum's end: padding, filled with whichever row, of
            weight 0.
        count: of the rows that are no padding.
    """
    num_strata = rows.shape[0]
    stratum = num_rows // num_strata

    def of_one(part: Array, rows: Array) -> Array:
        return part.at[rows % stratum].get(mode="promise_in_bounds")

    def take(x: Array) -> Array:
        if num_strata == 1:
            return of_one(x, rows[0])
        # stratum by stratum, so that each device finds its part in its own memory
        parts = constrain_split(x.reshape(num_strata, stratum, *x.shape[1:]))
        return jax.vmap(of_one)(parts, rows).reshape(-1, *x.shape[1:])

    minibatch = constrain_split({name: jax.tree.map(take, leaf) for name, leaf in batch.items()})
    weight = (rows < stratum).reshape(-1).astype(jnp.float32)
    if "mask" in minibatch:
        weight = weight * minibatch.pop("mask")
        count = jnp.maximum(weight.sum(), 1.0)
    minibatch["weight"] = weight / count
    return minibatch, count


def _learn_unless(
    stopped: Array,
    learn: Callable[[TrainState], tuple[TrainState, Metrics]],
    stop: Callable[[Metrics], Array],
    state: TrainState,
) -> tuple[tuple[TrainState, Array], Metrics]:
    """One minibatch, unless an earlier one has stopped the update; the one that stops it is measured, not learned."""

    def look(state: TrainState) -> tuple[TrainState, Array, Metrics]:
        trained, metrics = learn(state)
        stops = stop(metrics)
        return _select(stops, state, trained), stops, metrics

    def skip(state: TrainState) -> tuple[TrainState, Array, Metrics]:
        return state, stopped, _zeros_like(jax.eval_shape(look, state)[2])

    state, stopped, metrics = jax.lax.cond(stopped, skip, look, state)
    return (state, stopped), metrics


def _gradient_step(
    state: TrainState,
    *,
    batch: dict[str, PyTree],
    rows: Array,
    count: Array,
    grad_fn: GradFn,
    optimizer: optax.GradientTransformation,
    minibatches: MinibatchConfig,
    prepare: Callable[[dict[str, PyTree]], dict[str, PyTree]] | None,
    adapt_rate: Callable[[Array, Metrics], Array] | None,
) -> tuple[TrainState, Metrics]:
    """One step on the minibatch of these ``rows``; see ``_take``."""
    minibatch, count = _take(batch, rows, count, _count_rows(batch))
    grads, metrics = grad_fn(state.params, minibatch if prepare is None else prepare(minibatch))
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
    return {**rest, **critic}, jnp.hypot(critic_norm, rest_norm)


def _mean(value: Array, rows: Array) -> Array:
    return jnp.sum(jnp.where(rows > 0, value, 0.0) * rows) / jnp.maximum(rows.sum(), 1.0)


def _finite_mean(value: Array, rows: Array) -> Array:
    weight = jnp.where(jnp.isfinite(value), rows, 0.0)
    mean = jnp.sum(jnp.where(weight > 0, value, 0.0) * weight) / jnp.maximum(weight.sum(), 1.0)
    return jnp.where(weight.sum() > 0, mean, jnp.nan)


def _select(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _zeros_like(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
