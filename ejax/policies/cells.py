"""Recurrent cells, GRU and LSTM, and sequences of them, with gradients in few kernels.

    GRU    r, z = σ(Wx + b + Uh + c)            n = tanh(Wx + b + r·(Uh + c))     h' = (1 − z)·n + z·h
    LSTM   i, f, o = σ(Wx + b + Uh + c)         g = tanh(Wx + b + Uh + c)         c' = f·c + i·g,  h' = o·tanh(c')

A state is h, or h and c, in a tuple. Source: ``torch.nn.GRU``, ``torch.nn.LSTM``.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ejax.policies.mlp import widen
from ejax.types import Array

State: TypeAlias = tuple[Array, ...]
Cell: TypeAlias = Callable[[Array, Array, State], State]
"""``(Wx + b, Uh + c, state) -> state``, element by element."""
_UNROLL = 8
"""Steps of a trip of a GPU's loop, which has two kernels of its own, for its counter and its results."""


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


def step(cell: Cell, given: Array, state: State, weight: Array, bias: Array) -> State:
    """Compute the state after one step. ``given``: Wx + b, [..., G·H]; ``weight``: U; ``bias``: c."""
    return cell(given, state[0] @ weight + widen(bias, given), state)


def sequence(cell: Cell, given: Array, state: State, first: Array, weight: Array, bias: Array) -> State:
    """Compute the states [L, B, H] after each step, from zeros at ``first`` [L, B]; ``state`` [B, H]: before them."""

    def one_step(state: State, now: tuple[Array, Array]) -> tuple[State, State]:
        x, starts = now
        after = step(cell, x, _reset(starts, state), weight, bias)
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
        after = step(cell, x, state, weight, bias)
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
    # a cell acts on each element by itself: its gradients are these derivatives times those of the state
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
