"""The geometry of a ray and a primitive solid, in the solid's frame: its depth, and the normal at a point."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ejax.envs.mujoco.scenery import KINDS
from ejax.types import Array

_TINY = 1e-12

Vec: TypeAlias = tuple[Array, ...]
"""Three numbers, or three per pixel."""


def solid_normal(kinds: Set[str], mine: Mapping[str, Sequence[Array]], place: Vec) -> Vec:
    """Return unit normals at ``place``, both in the solid's frame."""
    (x, y, z), (a, b, c) = place, mine["size"]
    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    up: Vec = (zero, zero, one)
    found: dict[str, Vec] = {}
    if "box" in kinds:  # of the face that is nearest
        inside = a - jnp.abs(x), b - jnp.abs(y), c - jnp.abs(z)
        on_x = (inside[0] <= inside[1]) & (inside[0] <= inside[2])
        on_y = ~on_x & (inside[1] <= inside[2])
        on = on_x, on_y, ~on_x & ~on_y
        found["box"] = tuple(jnp.where(face, jnp.sign(each), 0.0) for face, each in zip(on, place, strict=True))
    if "ellipsoid" in kinds:
        found["ellipsoid"] = _unit((x / (a * a), y / (b * b), z / (c * c)))
    if "sphere" in kinds:
        found["sphere"] = _unit(place)
    if "capsule" in kinds:
        found["capsule"] = _unit((x, y, z - jnp.clip(z, -b, b)))
    if "cylinder" in kinds:
        on_cap = b - jnp.abs(z) < a - jnp.sqrt(x * x + y * y)
        found["cylinder"] = select(on_cap, (zero, zero, jnp.sign(z)), _unit((x, y, zero)))
    for kind, own in found.items():
        up = select(mine["kind"][0] == KINDS.index(kind), own, up)
    return up


def _unit(vector: Vec) -> Vec:
    scale = jax.lax.rsqrt(dot(vector, vector) + _TINY)
    return vector[0] * scale, vector[1] * scale, vector[2] * scale


def _enter_plane(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    depth = -origin[2] / _not_zero(direction[2])
    hit = depth > 0.0
    for i in (0, 1):
        hit &= (jnp.abs(origin[i] + depth * direction[i]) <= size[i]) | (size[i] <= 0.0)
    return depth, hit


def _enter_box(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    enters, leaves = zip(*(_slab(*each) for each in zip(origin, direction, size, strict=True)), strict=True)
    enter = larger(larger(enters[0], enters[1]), enters[2])
    leave = smaller(smaller(leaves[0], leaves[1]), leaves[2])
    return enter, enter < leave


def _enter_ball(origin: Vec, direction: Vec, radius: Array | float) -> tuple[Array, Array]:
    a, b, c = dot(direction, direction), dot(origin, direction), dot(origin, origin) - radius**2
    inside = b * b - a * c
    return (-b - jnp.sqrt(larger(inside, 0.0))) / a, inside > 0.0


def _enter_ellipsoid(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    (x, y, z), (u, v, w), (a, b, c) = origin, direction, size
    return _enter_ball((x / a, y / b, z / c), (u / a, v / b, w / c), 1.0)  # t is the same in the scaled space


def _enter_cylinder(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    radius, half, _ = size
    enter, leave, inside = _endless(origin, direction, radius)
    bottom, top = _slab(origin[2], direction[2], half)
    enter = larger(enter, bottom)
    return enter, (enter < smaller(leave, top)) & (inside > 0.0)


def _enter_capsule(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    radius, half, _ = size
    side, _, inside = _endless(origin, direction, radius)
    z = origin[2] + side * direction[2]
    end, round_hit = _enter_ball((origin[0], origin[1], origin[2] - jnp.where(z > 0.0, half, -half)), direction, radius)
    on_side = (jnp.abs(z) < half) & (inside > 0.0)
    return jnp.where(on_side, side, end), on_side | (round_hit & (inside > 0.0))


def _endless(origin: Vec, direction: Vec, radius: Array) -> tuple[Array, Array, Array]:
    """Return depths at which the ray enters and leaves the cylinder about z, and a number > 0 where it does."""
    (x, y, _), (u, v, _) = origin, direction
    a = u * u + v * v + _TINY
    b = x * u + y * v
    cross = x * v - y * u
    inside = radius**2 * a - cross * cross  # = b² − a·(x² + y² − r²), without its cancellation
    root, scale = jnp.sqrt(larger(inside, 0.0)), 1.0 / a
    return (-b - root) * scale, (-b + root) * scale, inside


def _slab(start: Array, rate: Array, half: Array) -> tuple[Array, Array]:
    inverse = 1.0 / _not_zero(rate)
    middle, width = -start * inverse, jnp.abs(inverse) * half
    return middle - width, middle + width


ENTER: dict[str, Callable[[Vec, Vec, Vec], tuple[Array, Array]]] = {
    "plane": _enter_plane,
    "box": _enter_box,
    "ellipsoid": _enter_ellipsoid,
    "sphere": lambda origin, direction, size: _enter_ball(origin, direction, size[0]),
    "capsule": _enter_capsule,
    "cylinder": _enter_cylinder,
}
"""(origin, direction, size) in the solid's frame -> depth where the ray enters, and whether it does."""


def select(condition: Array, new: Vec, old: Vec) -> Vec:
    return tuple(jnp.where(condition, one, other) for one, other in zip(new, old, strict=True))


def dot(one: Sequence[Array], other: Sequence[Array]) -> Array:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def larger(one: Array, other: Array | float) -> Array:
    """Return the maximum without ``jnp.maximum``'s care for NaN, which costs as much again."""
    return jnp.where(one > other, one, other)


def smaller(one: Array, other: Array | float) -> Array:
    return jnp.where(one < other, one, other)


def _not_zero(x: Array) -> Array:
    return jnp.where(jnp.abs(x) > _TINY, x, _TINY)
