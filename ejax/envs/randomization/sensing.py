"""Sensors and actuators between a task and its policy: noise, bias and latency of observations and actions.

    seen = mix of the last observations + bias + noise        done = mix of the last actions + bias + noise

Bias and latency are drawn by the event's mode (``startup`` or ``reset``), noise in every step. With a latency of
n + f control steps, 0 ≤ f < 1, it is (1 − f)·x[t − n] + f·x[t − n − 1]; before an episode's start, x is the first
observation, or no action: zeros.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.randomization.draws import Draw, check_choice, read_draw
from ejax.types import Array, Key, PyTree

Side = Literal["observation", "action"]
NoiseKind = Literal["gaussian", "uniform"]


@dataclass(frozen=True)
class Sensing:
    """One event's effect on observations or on actions.

    ``draw(key, level)``: what holds for an episode. ``add(x, drawn, key, level)``: noise and bias; None of a latency.
    """

    side: Side
    draw: Callable[[Key, Array | None], PyTree]
    add: Callable[[PyTree, PyTree, Key, Array | None], PyTree] | None = None
    longest: int = 0
    """Steps that a latency reaches back at most, a broken one counted whole."""


def add_noise(
    side: Side,
    spaces: Mapping[Side, gymnasium.Space[Any]],
    noise: Any = 0.0,
    bias_range: Any = None,
    distribution: NoiseKind = "gaussian",
    part: str | None = None,
) -> Sensing:
    """Add noise and bias to an observation, or an action. ``noise``: standard deviation (gaussian) or largest value
    (uniform), of all numbers or of each; ``bias_range``: (low, high), uniform, each number's drawn alone; ``part``:
    of an observation that is a dict."""
    check_choice("distribution", distribution, get_args(NoiseKind))
    space, size = _array(spaces[side], part), np.asarray(noise, np.float64)
    if size.shape not in ((), space.shape) or not np.isfinite(size).all() or (size < 0.0).any():
        raise ValueError(f"noise: got {noise!r}; must be a number >= 0, or {space.shape} of them")
    bias = None if bias_range is None else read_draw("bias_range", bias_range)
    if bias is None and not size.any():
        raise ValueError("gives neither noise nor bias_range: it would do nothing")

    def draw(key: Key, level: Array | None) -> PyTree:
        return () if bias is None else bias.value(np.zeros(space.shape), bias.sample(key, space.shape), level)

    def add(x: PyTree, drawn: PyTree, key: Key, level: Array | None) -> PyTree:
        if part is not None:
            return {**x, part: add_to_array(x[part], drawn, key, level)}
        return add_to_array(x, drawn, key, level)

    def add_to_array(x: Array, drawn: PyTree, key: Key, level: Array | None) -> Array:
        if size.any():
            gaussian = distribution == "gaussian"
            unit = jax.random.normal(key, x.shape) if gaussian else jax.random.uniform(key, x.shape, minval=-1.0)
            reach = jnp.asarray(size, jnp.float32) * unit
            x = x + (reach if level is None else level * reach).astype(x.dtype)
        return x if bias is None else x + drawn.astype(x.dtype)

    return Sensing(side, draw, add)


def delay(side: Side, spaces: Mapping[Side, gymnasium.Space[Any]], steps_range: Any, whole: bool = False) -> Sensing:
    """Delay actions, or the numbers of an observation, by control steps, uniform in (low, high); text and pictures come
    at once. ``whole``: whole numbers of steps only, each as likely."""
    if side == "action":  # of an observation, parts that are not numbers come undelayed
        _array(spaces["action"], None)
    draw = read_draw("steps_range", steps_range)
    if draw.low < 0.0 or (whole and (draw.low % 1.0 or draw.high % 1.0)):
        raise ValueError(f"steps_range: got {steps_range!r}; must be {'whole numbers ' if whole else ''}>= 0")
    # floored, the last whole number needs its own interval to be as likely as the others
    ends = Draw(draw.low, draw.high + (1.0 if whole else 0.0), "uniform", "abs")

    def steps(key: Key, level: Array | None) -> Array:
        drawn = ends.sample(key)
        drawn = jnp.minimum(jnp.floor(drawn), float(draw.high)) if whole else drawn  # float32 may round up to the end
        drawn = drawn if level is None else level * drawn
        return jnp.round(drawn) if whole else drawn

    return Sensing(side, steps, None, math.ceil(float(draw.high)))


SENSING: dict[str, Callable[..., Sensing]] = {
    "add_observation_noise": partial(add_noise, "observation"),
    "add_action_noise": partial(add_noise, "action"),
    "delay_observation": partial(delay, "observation"),
    "delay_action": partial(delay, "action"),
}


def first(x: PyTree, longest: int) -> PyTree:
    """Make the past of an episode that begins: ``x`` all along. Leaves [longest + 1, ...], the newest first."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (longest + 1, *leaf.shape)), x)


def push_newest(past: PyTree, x: PyTree) -> PyTree:
    return jax.tree.map(lambda old, new: jnp.concatenate([new[None], old[:-1]]), past, x)


def late(past: PyTree, steps: Array | None) -> PyTree:
    """Look ``steps`` control steps back. None: at the present."""

    def mixed(leaf: Array) -> Array:
        if steps is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf[0]  # text and pictures, which do not mix
        n = jnp.floor(steps).astype(jnp.int32)  # whole steps, and the part of one that mixes in the next older
        share = (steps - n).astype(leaf.dtype)
        return (1.0 - share) * leaf[n] + share * leaf[jnp.minimum(n + 1, len(leaf) - 1)]

    return jax.tree.map(mixed, past)


def _array(space: gymnasium.Space[Any], part: str | None) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        floats = [name for name, each in space.spaces.items() if _is_numbers(each)]
        if part not in floats:
            raise ValueError(f"part: got {part!r}; the observation has {', '.join(floats) or 'no numbers'}")
        return space.spaces[part]
    if part is not None:
        raise ValueError(f"part: got {part!r}, but there is one array only; leave it out")
    if not _is_numbers(space):
        raise ValueError(f"needs numbers, got {space}")
    return space


def _is_numbers(space: Any) -> bool:
    return isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating)
