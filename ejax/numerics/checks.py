"""Checks of shapes and types where arrays of a user come in, by chex; what it asserts is raised as ValueError. Shapes
are known when a program is traced, so that none costs anything while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import chex
import jax

from ejax.types import Array, Rollout


@contextmanager
def value_errors(text: str) -> Iterator[None]:
    """Raise chex's assertions inside as ValueError: ``text``, the rule that is broken, and the array that breaks it."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(f"{text}: {str(error).partition(' failed: ')[2] or error}") from None


def check_one_shape(text: str, rank: int | None = None, **arrays: Array) -> None:
    """Refuse, by ValueError, arrays that are not all of one shape, of ``rank`` axes. ``text`` names the need."""
    if odd := [f"a {type(x).__name__} for {name}" for name, x in arrays.items() if not jax.tree_util.all_leaves([x])]:
        raise ValueError(f"{text}; got {', '.join(odd)}")
    shaped = jax.eval_shape(lambda *each: each, *arrays.values())  # of numbers too
    try:
        chex.assert_equal_shape(shaped)
        if rank is not None:
            chex.assert_rank(shaped, rank)
    except AssertionError:  # chex counts its inputs, where these have names
        given = ", ".join(f"{name} {array.shape}" for name, array in zip(arrays, shaped, strict=True))
        raise ValueError(f"{text}; got {given}") from None


def check_width(module: Any, collection: str, name: str, width: int) -> None:
    """Refuse inputs of another width than those that a Flax module's array ``name`` [inputs, ...] was made for."""
    if module.has_variable(collection, name) and (made := module.get_variable(collection, name).shape[0]) != width:
        raise ValueError(f"{'.'.join(module.path) or 'the network'} was made for {made} inputs; got {width}")


def check_time_major(who: str, **arrays: Array) -> None:
    """Refuse arrays that are not all of one shape [T, N], which ``who`` needs, or empty."""
    check_one_shape(f"{who} arrays of one shape [T, N] (time, environments)", rank=2, **arrays)
    if 0 in (shape := next(iter(arrays.values())).shape):
        raise ValueError(f"{who} at least one step of one environment; got [T, N] = {list(shape)}")


def check_rollout(rollout: Rollout, judged: tuple[str, ...] = ("value", "next_value", "log_prob")) -> None:
    """Refuse anything but a ``Rollout`` of arrays [T, N, ...], such as rows without their order in time. ``judged``:
    what the update needs of the policy that acted.

    Raises:
        TypeError: not a ``Rollout``.
        ValueError: an array of another shape, or flags that are not bool.
    """
    if not isinstance(rollout, Rollout):
        text = "flattened rows have lost their order in time: pass the rollout as it was collected"
        needed = "an update needs an ejax.Rollout with leaves [T, N, ...]"
        raise TypeError(f"{needed}, got a {type(rollout).__name__}; {text}")
    if rollout.obs is None or rollout.action is None:
        raise ValueError("a rollout needs obs and action, and has None for one of them")
    scalars = ("reward", *judged, "terminated", "truncated")
    check_time_major("a rollout needs", **{name: getattr(rollout, name) for name in scalars})
    parts = {name: getattr(rollout, name) for name in ("obs", "action", "next_obs", "dropout_seed", "valid", "memory")}
    with value_errors("a rollout needs leaves [T, N, ...]"):
        chex.assert_tree_shape_prefix(parts, rollout.reward.shape)
    with value_errors("a rollout's terminated and truncated, and valid, in this order, are bool"):
        chex.assert_type([x for x in (rollout.terminated, rollout.truncated, rollout.valid) if x is not None], bool)
