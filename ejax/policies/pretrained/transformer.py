"""Blocks of the transformers that others published, by options: SigLIP's, Gemma's, Llama's.

    x ← x + out(softmax(q·kᵀ/√d)·v),   q, k, v of norm(x)         x ← x + down(act(gate(norm(x)))·up(norm(x)))

SigLIP: LayerNorm, biases, no gate, learned places. Gemma: RMSNorm of 1 + w, GELU, rotary places. Llama (SmolLM2):
RMSNorm of w, SiLU, rotary places. Several heads of queries may share one of keys and values. Sources: Zhai et al. 2023;
Gemma Team 2024; Touvron et al. 2023; Su et al. 2021, RoFormer; the formulas as in transformers 5.5.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ejax.policies.mlp import dense_product, own_precision, widen
from ejax.types import Array

Cache: TypeAlias = tuple[Array, Array]
"""Keys and values of one block, [B, T, heads, d], the keys turned to their places."""
WAVELENGTH = 10_000.0
"""The longest period of a rotary place, in 2π tokens."""


@dataclass(frozen=True)
class Stack:
    """Sizes of a stack of blocks; hashable."""

    style: Literal["siglip", "gemma", "llama"]
    width: int
    depth: int
    inside: int
    """Width of a block's MLP."""
    heads: int
    kv_heads: int
    head_size: int
    cross: tuple[int, ...] = ()
    """Blocks that attend to another stack's keys and values alone, each through two matrices."""


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · (w + offset), computed in float32 at least."""

    epsilon: float
    offset: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.constant(1.0 - self.offset), x.shape[-1:])
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * widen(scale + self.offset, wide)).astype(x.dtype)


class Block(nn.Module):
    """One block of a stack."""

    stack: Stack
    crosses: bool
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array, mask: Array | None, place: Array | None, past: Cache | None) -> tuple[Array, Cache]:
        """Return tokens [B, T, W] for ``x``, and the keys and values that it made.

        ``mask`` [B, T, P + T] bool says which tokens each attends to, of those of ``past`` and its own; None: all.
        A block that ``crosses`` has P alone. ``place`` [B, T]: of each token; None: no rotary places.
        """
        s = self.stack
        linear = partial(nn.Dense, dtype=self.dtype, use_bias=s.style == "siglip", dot_general=dense_product)
        rows, length = x.shape[:2]

        def heads(y: Array, name: str, count: int) -> Array:
            return linear(count * s.head_size, name=name)(y).reshape(*y.shape[:2], count, s.head_size)

        normed = _norm(s.style, "norm_attention")(x)
        query, source = heads(normed, "q", s.heads), (normed, normed)
        if self.crosses:
            assert past is not None  # the caller is in this file
            source = (past[0].reshape(*past[0].shape[:2], -1), past[1].reshape(*past[1].shape[:2], -1))
        key, value = (heads(y, name, s.kv_heads) for y, name in zip(source, "kv", strict=True))
        if place is not None:
            query = rotate(query, place)
            key = key if self.crosses else rotate(key, place)
        cache = key, value
        if past is not None and not self.crosses:
            key, value = (jnp.concatenate(pair, axis=1) for pair in zip(past, cache, strict=True))
        mixed = attend(query, key, value, mask).reshape(rows, length, -1)
        x = x + linear(s.width, name="o")(mixed).astype(x.dtype)
        normed = _norm(s.style, "norm_mlp")(x)
        up = linear(s.inside, name="up")(normed)
        if s.style == "siglip":
            up = jax.nn.gelu(up, approximate=True)
        else:
            act = partial(jax.nn.gelu, approximate=True) if s.style == "gemma" else jax.nn.silu
            up = act(linear(s.inside, name="gate")(normed)) * up
        return x + linear(s.width, name="down")(up).astype(x.dtype), cache


class Transformer(nn.Module):
    """All blocks of a stack, and the last norm."""

    stack: Stack
    dtype: Any = None
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        place: Array | None = None,
        past: tuple[Cache, ...] | None = None,
        *,
        cross_mask: Array | None = None,
        cross_place: Array | None = None,
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Return normed tokens [B, T, W], and each block's keys and values.

        ``past`` has those of another stack's blocks. ``cross_mask`` and ``cross_place`` are for blocks that cross.
        """
        block, caches = nn.remat(Block) if self.remat else Block, []
        for i in range(self.stack.depth):
            crosses = i in self.stack.cross
            seen = (cross_mask, cross_place) if crosses else (mask, place)
            of_past = None if past is None else past[i]
            x, cache = block(self.stack, crosses, self.dtype, name=f"layers_{i}")(x, *seen, of_past)
            caches.append(cache)
        return _norm(self.stack.style, "norm")(x), tuple(caches)


class Patches(nn.Module):
    """Pictures [B, H, W, 3] -> tokens [B, H/p·W/p, width]: one for each square of p pixels, and its learned place."""

    patch: int
    side: int
    """Squares in each direction."""
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, side = self.patch, self.side
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, size, x.shape[-1], self.width))
        bias = self.param("bias", nn.initializers.zeros, (self.width,))
        place = self.param("place", nn.initializers.normal(0.02), (side * side, self.width))
        x = x.reshape(x.shape[0], side, size, side, size, x.shape[-1]).swapaxes(2, 3).reshape(x.shape[0], side**2, -1)
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        kernel = kernel.reshape(-1, self.width).astype(dtype)
        x = jnp.matmul(x.astype(dtype), kernel, precision=own_precision(kernel))
        return x.astype(bias.dtype) + (bias[None] + place)[None]


def attend(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    """Compute softmax(q·kᵀ/√d)·v [B, T, H, d]; key and value [B, S, G, d], G dividing H; ``mask`` [B, T, S] bool."""
    rows, length, heads, size = query.shape
    query = query.reshape(rows, length, key.shape[2], heads // key.shape[2], size)
    einsum = partial(jnp.einsum, precision=own_precision(query))
    score = einsum("btgnd,bsgd->bgnts", query, key) * size**-0.5
    score = score.astype(jnp.promote_types(score.dtype, jnp.float32))
    if mask is not None:  # not −∞: where nothing is attended to, softmax would be NaN
        score = jnp.where(mask[:, None, None], score, -1e30)
    share = jax.nn.softmax(score, axis=-1).astype(value.dtype)
    return einsum("bgnts,bsgd->btgnd", share, value).reshape(rows, length, heads, size)


def rotate(x: Array, place: Array) -> Array:
    """Turn [B, T, H, d] by the angles of ``place`` [B, T]: entry i with i + d/2, at frequency 10000^(−2i/d)."""
    half = x.shape[-1] // 2
    dtype: Any = jnp.promote_types(x.dtype, jnp.float32)
    frequency = jnp.asarray(WAVELENGTH ** (-np.arange(half) / half), dtype)
    angle = (place.astype(dtype)[..., None] * widen(frequency, place[..., None]))[:, :, None]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def time_features(time: Array, width: int, shortest: float, longest: float) -> Array:
    """Encode times [B] in [0, 1] as sin and cos [B, width] of 2π·t/p, p from ``shortest`` to ``longest``.

    At 250 turns float32 knows the angle to 1e-4 alone, so t and 1/p are each split into parts whose products are exact,
    and complete turns are left out before they are added. Source: openpi's create_sinusoidal_pos_embedding.
    """
    dtype: Any = time.dtype
    period = shortest * (longest / shortest) ** np.linspace(0.0, 1.0, width // 2)
    frequency, turns = 1.0 / period, jnp.zeros((time.shape[0], width // 2), dtype)
    high = jax.lax.reduce_precision(time, 8, 11)
    for _ in range(3):
        part = _leading_bits(frequency) if dtype == jnp.float32 else frequency
        for each in (high, time - high):
            product = each[:, None] * jnp.asarray(part, dtype)[None]
            turns = turns + product - jnp.round(product)
        frequency = frequency - part
    angle = 2.0 * np.pi * (turns - jnp.round(turns))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _leading_bits(x: np.ndarray) -> np.ndarray:
    """Round to 12 bits, whose product with 12 others float32 holds."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 4096.0) / 4096.0, exponent)


def _norm(style: str, name: str) -> Any:
    if style == "siglip":
        return nn.LayerNorm(epsilon=1e-6, use_fast_variance=False, name=name)
    return RMSNorm(1e-6 if style == "gemma" else 1e-5, 1.0 if style == "gemma" else 0.0, name=name)
