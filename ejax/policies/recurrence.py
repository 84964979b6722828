"""Memories of policies: GRU and LSTM with torch's arithmetic and layout, and a window of past observations.

A memory is one vector [..., M], of zeros at an episode's start: a GRU's h of each layer, an LSTM's h and c of each, a
window's K − 1 past observations, the last in the end, and then their count.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.numerics.checks import check_width
from ejax.numerics.platforms import by_platform
from ejax.policies.memory_config import GATES
from ejax.policies.memory_config import MemoryConfig as MemoryConfig
from ejax.policies.mlp import MLP, dense_product, orthogonal, uniform_init, widen
from ejax.types import Array, Key

State: TypeAlias = tuple[Array, ...]
Cell: TypeAlias = Callable[[Array, Array, State], State]
"""``(Wx + b, Uh + c, state) -> state``, element by element."""
_UNROLL = 8
"""Steps of a trip of a GPU's loop, which takes two kernels itself, for its counter and its results."""


def gru_cell(given: Array, own: Array, state: State) -> State:
    (hidden,) = state
    reset, update, new = jnp.split(given, 3, axis=-1)
    own_reset, own_update, own_new = jnp.split(own, 3, axis=-1)
    update = jax.nn.sigmoid(update + own_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
    return ((1.0 - update) * new + update * hidden,)


def lstm_cell(given: Array, own: Array, state: State) -> State:
    _, cell = state
    add, keep, new, show = jnp.split(given + own, 4, axis=-1)
    cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(add) * jnp.tanh(new)
    return jax.nn.sigmoid(show) * jnp.tanh(cell), cell


def cell_step(cell: Cell, given: Array, state: State, weight: Array, bias: Array) -> State:
    """Compute the state after one step. ``given``: Wx + b, [..., G·H]; ``weight``: U; ``bias``: c."""
    return cell(given, state[0] @ weight + widen(bias, given), state)


def sequence(cell: Cell, given: Array, state: State, first: Array, weight: Array, bias: Array) -> State:
    """Compute the states [L, B, H] after each step, from zeros at ``first`` [L, B]; ``state`` [B, H]: before them."""

    def one_step(state: State, now: tuple[Array, Array]) -> tuple[State, State]:
        x, starts = now
        after = cell_step(cell, x, _reset(starts, state), weight, bias)
        return after, after

    return jax.lax.scan(one_step, state, (given, first))[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_sequence(cell: Cell, given: Array, state: State, first: Array, weight: Array, bias: Array) -> State:
    """Compute ``sequence`` and its gradients in few kernels: about two for each step and two for each step back.

    Autodiff would keep all gates, and add to the gradient of U at every step. Here only the states are kept; gates,
    their derivatives and the gradients of weights are made for all steps at once.
    """
    return _forward(cell, given, state, first, weight, bias)[0]


def _forward(cell: Cell, given: Array, state: State, first: Array, weight: Array, bias: Array) -> tuple[State, Any]:
    def one_step(state: State, t: Array) -> tuple[State, State]:
        x, is_last = _at(t, (given, last))
        after = cell_step(cell, x, state, weight, bias)
        return _reset(is_last, after), after  # selected in the cell's kernel, not in one before the next product

    last = jnp.concatenate([first[1:], jnp.zeros_like(first[:1])])
    # by number: a batch of networks [N, L, B, ...] is read where it is, not transposed to [L, N, B, ...]
    states = jax.lax.scan(one_step, _reset(first[0], state), jnp.arange(len(first)), unroll=_UNROLL)[1]
    return states, (given, state, first, weight, bias, states)


def _backward(cell: Cell, kept: Any, grad_states: State) -> tuple[Array, State, None, Array, Array]:
    given, state, first, weight, bias, states = kept
    before = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs[:-1]]), state, states)
    before = _reset(first, before)
    _, pull = jax.vjp(cell, given, before[0] @ weight + widen(bias, given), before)
    # a cell acts on each element separately: its gradients are these derivatives times those of the state
    units = [tuple(jnp.full_like(x, i == n) for i, x in enumerate(before)) for n in range(len(before))]
    derivatives = [pull(unit) for unit in units]

    def chain(grad: State, derivatives: Any) -> Any:
        return jax.tree.map(lambda *each: reduce(jnp.add, map(_times, grad, each)), *derivatives)

    def one_step(later: State, t: Array) -> tuple[State, State]:
        grad, starts, its = _at(t, (grad_states, first, [each[1:] for each in derivatives]))
        grad = jax.tree.map(jnp.add, grad, later)
        grad_own, (grad_hidden, *others) = chain(grad, its)
        return _reset(starts, (grad_hidden + grad_own @ weight.T, *others)), grad

    none = jax.tree.map(jnp.zeros_like, state)
    grad_state, grads = jax.lax.scan(one_step, none, jnp.arange(len(first)), reverse=True, unroll=_UNROLL)
    grad_given, grad_own = chain(grads, [each[:2] for each in derivatives])
    return grad_given, grad_state, None, jnp.einsum("lbh,lbg->hg", before[0], grad_own), grad_own.sum(axis=(0, 1))


fused_sequence.defvjp(_forward, _backward)


def _at(t: Array, arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, t, keepdims=False), arrays)


def _reset(starts: Array, state: State) -> State:
    """Select zeros where an episode starts: 0 · NaN is NaN."""
    return jax.tree.map(lambda x: jnp.where(starts[..., None], 0.0, x), state)


def _times(x: Array, factor: Array) -> Array:
    """Multiply x [..., H] by ``factor``, [..., H] or gates [..., G·H]."""
    gates = factor.reshape(*factor.shape[:-1], -1, x.shape[-1])
    return (x[..., None, :] * gates).reshape(factor.shape)


Opened: TypeAlias = tuple[Array, list[dict[str, Array]]]
"""Wx + b of a recurrence's first layer, and the other weights of each layer."""


class Recurrence(nn.Module):
    """``(x [..., I], memory [..., M]) -> (features [..., H], memory after it)``: a step of a GRU or an LSTM.

    With ``first`` a sequence: x [L, B, I], memory [B, M] before its first step. Parameters, for layer l:
    ``weight_ih_l<l>`` [I, G·H], ``weight_hh_l<l>`` [H, G·H], transposed to torch's, ``bias_ih_l<l>`` and
    ``bias_hh_l<l>`` [G·H]; gates in torch's order, r z n and i f g o.
    """

    config: MemoryConfig

    def __call__(
        self, x: Array, memory: Array, first: Array | None = None, dropout_seed: Array | None = None
    ) -> tuple[Array, Array]:
        """Step; ``first`` [L, B] bool marks an episode's first steps, before which nothing is remembered."""
        return recur({"": self.open(x, dropout_seed)}, {"": memory}, first)[""]

    @nn.compact
    def open(self, x: Array, dropout_seed: Array | None) -> Opened:
        """Compute the first layer's Wx + b, of all steps of a sequence at once, and list what else ``recur`` needs."""
        c = self.config
        if c.encoder is not None:
            x = MLP(c.encoder, c.width, name="encoder")(x, dropout_seed=dropout_seed)
        layers = [
            {
                "weight_ih": self._gates(f"weight_ih_l{layer}", c.width if layer else x.shape[-1]),
                "bias_ih": self._gates(f"bias_ih_l{layer}"),
                "weight_hh": self._gates(f"weight_hh_l{layer}", c.width),
                "bias_hh": self._gates(f"bias_hh_l{layer}"),
            }
            for layer in range(c.depth)
        ]
        return _given(x, layers[0].pop("weight_ih"), layers[0].pop("bias_ih")), layers

    def _gates(self, name: str, *num_inputs: int) -> Array:
        """Make the parameter of all gates: a weight, or without inputs a bias."""
        c, init = self.config, uniform_init(self.config.width)
        if c.orthogonal_init:
            by_gate = partial(_orthogonal_gates, num_gates=GATES[c.type])
            init = by_gate if num_inputs else jax.nn.initializers.zeros
        for width in num_inputs:
            check_width(self, "params", name, width)
        return self.param(name, init, (*num_inputs, GATES[c.type] * c.width))


def recur(opened: dict[str, Opened], memory: dict[str, Array], first: Array | None) -> dict[str, tuple[Array, Array]]:
    """Compute ``(features, memory after)`` of each network from what ``open`` gave; arguments as of ``Recurrence``."""
    if first is None:
        return _apart(opened, memory)
    results: dict[str, tuple[Array, Array]]
    results = by_platform(cpu=partial(_apart, run=sequence), gpu=_together)(opened, memory, first)
    return results


def _apart(
    opened: dict[str, Opened], memory: dict[str, Array], *first: Array, run: Callable[..., State] = cell_step
) -> dict[str, tuple[Array, Array]]:
    return {name: _layers(each, memory[name], *first, run=run) for name, each in opened.items()}


def _together(opened: dict[str, Opened], memory: dict[str, Array], first: Array) -> dict[str, tuple[Array, Array]]:
    """Make networks of equal shapes one, whose products are batched."""
    parts = [(each, memory[name]) for name, each in opened.items()]
    shapes = [jax.tree.map(jnp.shape, each) for each in parts]
    if len(parts) < 2 or any(each != shapes[0] for each in shapes):
        return _apart(opened, memory, first, run=fused_sequence)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *parts)
    results = jax.vmap(partial(_layers, run=fused_sequence), in_axes=(0, 0, None))(*stacked, first)
    return {name: jax.tree.map(lambda x, i=i: x[i], results) for i, name in enumerate(opened)}


def _layers(opened: Opened, memory: Array, *first: Array, run: Callable[..., State]) -> tuple[Array, Array]:
    """Run the layers, one above the other: a single step, or with ``first`` a sequence."""
    given, layers = opened
    x, after = given, list[Array]()
    for layer, of_layer in zip(layers, jnp.split(memory, len(layers), axis=-1), strict=True):
        if after:
            given = _given(x, layer["weight_ih"], layer["bias_ih"])
        width, gates = layer["weight_hh"].shape
        cell = gru_cell if gates == 3 * width else lstm_cell
        state = tuple(jnp.split(of_layer, of_layer.shape[-1] // width, axis=-1))
        states = run(cell, given, state, *first, layer["weight_hh"], layer["bias_hh"])
        x = states[0]
        after += [each[-1] for each in states] if first else states
    return x, jnp.concatenate(after, axis=-1)


def _given(x: Array, weight: Array, bias: Array) -> Array:
    return dense_product(x, weight) + widen(bias, x)


def history_step(x: Array, memory: Array, *, length: int) -> tuple[Array, Array]:
    """Return the last K observations [..., K, F], the oldest first, and the memory after ``x`` [..., F]."""
    past = memory[..., :-1].reshape(*memory.shape[:-1], length - 1, x.shape[-1])
    count = jnp.round(memory[..., -1:])  # stored as a float, among the observations
    together = jnp.concatenate([past, x[..., None, :]], axis=-2)
    # before an episode's start there is its first observation: the oldest one that there is
    oldest = jnp.take_along_axis(together, (length - 1 - count)[..., None].astype(jnp.int32), axis=-2)
    place = jnp.arange(length, dtype=x.dtype).reshape((1,) * count[..., 0].ndim + (-1,))
    missing = place < length - 1 - count
    window = jnp.where(missing[..., None], oldest, together)
    kept = together[..., 1:, :].reshape(*memory.shape[:-1], -1)
    return window, jnp.concatenate([kept, jnp.minimum(count + 1.0, length - 1.0)], axis=-1)


def in_sequence(
    step: Callable[[Array, Array], tuple[Any, Array]], xs: Array, memory: Array, first: Array | None
) -> tuple[Any, Array]:
    """Run ``step`` from zeros at ``first`` [L, B]: its results [L, B, ...] and the last memory. None: a single step."""
    if first is None:
        return step(xs, memory)

    def one_step(memory: Array, now: tuple[Array, Array]) -> tuple[Array, Any]:
        x, starts = now
        y, memory = step(x, jnp.where(starts[:, None], 0.0, memory))  # selected, not multiplied: 0 · NaN is NaN
        return memory, y

    memory, ys = jax.lax.scan(one_step, memory, (xs, first))
    return ys, memory


def _orthogonal_gates(key: Key, shape: tuple[int, int], dtype: Any = jnp.float32, *, num_gates: int) -> Array:
    make = orthogonal()
    each = (shape[0], shape[1] // num_gates)
    return jnp.concatenate([make(part, each, dtype) for part in jax.random.split(key, num_gates)], axis=-1)
