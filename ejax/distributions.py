"""Action distributions as pytrees: sample, mode, log_prob, entropy, kl; all summed over action dimensions."""

import math
from typing import Any, Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.types import Array, Distribution, Key

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@struct.dataclass
class Normal(Distribution):
    """Diagonal normal. ``mean``, ``log_std``: [..., A]."""

    mean: Array
    log_std: Array

    def sample(self, key: Key) -> Array:
        """Draw [..., A], reparameterized: gradients flow to mean and log_std."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def sample_and_log_prob(self, key: Key) -> tuple[Array, Array]:
        """Draw [..., A], reparameterized, with its log-density [...]."""
        action = self.sample(key)
        return action, self.log_prob(action)

    def mode(self) -> Array:
        return self.mean

    def log_prob(self, action: Array) -> Array:
        _check_width(action, self.mean.shape[-1])
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return -0.5 * jnp.sum(jnp.square(z), axis=-1) - jnp.sum(self.log_std + _HALF_LOG_2PI, axis=-1)

    def entropy(self) -> Array:
        return jnp.sum(0.5 + _HALF_LOG_2PI + self.log_std, axis=-1)

    def kl(self, other: "Normal") -> Array:
        variance_ratio = jnp.exp(2.0 * (self.log_std - other.log_std))
        scaled = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        return jnp.sum(0.5 * (variance_ratio + scaled - 1.0) + other.log_std - self.log_std, axis=-1)


@struct.dataclass
class TanhNormal(Distribution):
    """Squashed normal: center + half_width · tanh(u), u ~ Normal, so that actions stay inside the bounds.

    Source: SAC, appendix C.
    """

    base: Normal
    center: Array
    half_width: Array

    def sample(self, key: Key) -> Array:
        return self._squash(self.base.sample(key))

    def sample_and_log_prob(self, key: Key) -> tuple[Array, Array]:
        """Draw [..., A], reparameterized, with its log-density [...]: exact at the bounds too, as u is known."""
        u = self.base.sample(key)
        slope = _log_tanh_slope(u) + jnp.log(self.half_width)
        return self._squash(u), self.base.log_prob(u) - jnp.sum(slope, axis=-1)

    def mode(self) -> Array:
        return self._squash(self.base.mean)

    def log_prob(self, action: Array) -> Array:
        _check_width(action, self.base.mean.shape[-1])
        # one float32 step inside ±1: atanh(1) is infinite, and samples round to the bound
        unit = jnp.clip((action - self.center) / self.half_width, -1.0 + 1e-6, 1.0 - 1e-6)
        u, most = jnp.arctanh(unit), jnp.arctanh(jnp.asarray(1.0 - 1e-6, unit.dtype))
        # nor may the mean be farther out than any u: ratios of many deviations would overflow
        base = Normal(jnp.clip(self.base.mean, -most, most), self.base.log_std)
        return base.log_prob(u) - jnp.sum(_log_tanh_slope(u) + jnp.log(self.half_width), axis=-1)

    def entropy(self) -> Array:
        """Add E[log |slope|] at the mean to the base's: there is no closed form."""
        return self.base.entropy() + jnp.sum(_log_tanh_slope(self.base.mean) + jnp.log(self.half_width), axis=-1)

    def kl(self, other: "TanhNormal") -> Array:
        return self.base.kl(other.base)

    def _squash(self, u: Array) -> Array:
        return self.center + self.half_width * jnp.tanh(u)


@struct.dataclass
class Categorical(Distribution):
    """Choice of one of K. ``logits``: [..., K]; actions [...] int32."""

    logits: Array

    def sample(self, key: Key) -> Array:
        # int32 under x64 too: a rollout keeps one type
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        log_p = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_p, action[..., None].astype(jnp.int32), axis=-1)[..., 0]

    def entropy(self) -> Array:
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def kl(self, other: "Categorical") -> Array:
        log_p = jax.nn.log_softmax(self.logits)
        return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(other.logits)), axis=-1)


@struct.dataclass
class MultiCategorical(Distribution):
    """Independent categoricals. ``parts``: one ``Categorical`` per action dimension; actions [..., A] int32."""

    parts: tuple[Categorical, ...]

    def sample(self, key: Key) -> Array:
        keys = jax.random.split(key, len(self.parts))  # a key each: one would draw alike in every dimension
        return jnp.stack([part.sample(k) for part, k in zip(self.parts, keys, strict=True)], axis=-1)

    def mode(self) -> Array:
        return jnp.stack([part.mode() for part in self.parts], axis=-1)

    def log_prob(self, action: Array) -> Array:
        _check_width(action, len(self.parts))
        return sum(
            (part.log_prob(action[..., i]) for i, part in enumerate(self.parts)), start=jnp.zeros(action.shape[:-1])
        )

    def entropy(self) -> Array:
        return jnp.sum(jnp.stack([part.entropy() for part in self.parts]), axis=0)

    def kl(self, other: "MultiCategorical") -> Array:
        return jnp.sum(jnp.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]), axis=0)


def _check_width(action: Array, width: int) -> None:
    """Raise ValueError: an action has not ``width`` numbers. JAX would repeat a lone one, and ignore others."""
    if action.shape[-1:] != (width,):
        raise ValueError(f"this policy's actions have {width} numbers in their last axis; got shape {action.shape}")


@struct.dataclass
class Drawn:
    """The stored form of distributions that are too large for a rollout: one log-probability."""

    log_prob_drawn: Array
    """[...]: of the action that was drawn."""

    def log_prob(self, action: Array) -> Array:
        del action  # the one that was drawn
        return self.log_prob_drawn

    def kl(self, other: Any) -> Array:
        """Raise ValueError: there is nothing to compare."""
        del other
        raise ValueError("this policy's distribution has no exact divergence: leave out schedule: adaptive")


@struct.dataclass
class ActionSpec:
    """An action space for a policy: hashable, so that it can be a static field of a Flax module."""

    kind: Literal["normal", "tanh_normal", "categorical", "multi_categorical"] = struct.field(pytree_node=False)
    sizes: tuple[int, ...] = struct.field(pytree_node=False)
    """(A,) for the normals; the number of choices of each dimension for the categoricals."""
    low: tuple[float, ...] = struct.field(pytree_node=False, default=())  # tuples, since arrays have no hash
    high: tuple[float, ...] = struct.field(pytree_node=False, default=())

    @property
    def num_outputs(self) -> int:
        return sum(self.sizes)

    @property
    def num_actions(self) -> int:
        return self.sizes[0] if self.continuous else len(self.sizes)

    @property
    def continuous(self) -> bool:
        return self.kind in ("normal", "tanh_normal")

    def unit_action(self, action: Array) -> Array:
        """Scale an action [..., A] of bounded ones to [-1, 1] in each dimension."""
        low, high = (jnp.broadcast_to(jnp.asarray(bound), action.shape) for bound in (self.low, self.high))
        return (action - (low + high) / 2.0) / ((high - low) / 2.0)

    def distribution(self, output: Array, log_std: Array | None) -> Any:
        """Make the distribution of the network's ``output`` [..., num_outputs]; ``log_std`` [A]: for normals."""
        if self.kind == "categorical":
            return Categorical(output)
        if self.kind == "multi_categorical":
            splits = np.cumsum(self.sizes)[:-1].tolist()
            return MultiCategorical(tuple(Categorical(part) for part in jnp.split(output, splits, axis=-1)))
        if log_std is None:
            raise ValueError(f"{self.kind} needs log_std, got None")
        normal = Normal(output, jnp.broadcast_to(log_std, output.shape))
        if self.kind == "normal":
            return normal
        # bounds of the output's shape: a rollout stacks and flattens every leaf of a distribution alike
        low, high = (jnp.broadcast_to(jnp.asarray(bound), output.shape) for bound in (self.low, self.high))
        return TanhNormal(normal, (low + high) / 2.0, (high - low) / 2.0)


def action_spec(space: gymnasium.Space, *, squash: bool = False) -> ActionSpec:
    """Describe a gymnasium space. ``squash``: TanhNormal between its bounds instead of an unbounded Normal. Raises
    ValueError: a space that no policy here can act in."""
    if isinstance(space, gymnasium.spaces.Box):
        size = math.prod(space.shape)  # of a shape without axes it is 1
        if len(space.shape) > 1:
            raise ValueError(f"a Box action space must have one dimension, got {space.shape}: flatten it in the env")
        if size < 1:
            raise ValueError(f"an action space needs at least one number, got {space}")
        if not squash:
            return ActionSpec("normal", (size,))
        low, high = np.broadcast_to(space.low, (size,)), np.broadcast_to(space.high, (size,))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            text = "set bounds, or use a policy that does not squash"
            raise ValueError(f"squashed actions need finite bounds, got {space.low} to {space.high}; {text}")
        return ActionSpec("tanh_normal", (size,), tuple(low.tolist()), tuple(high.tolist()))
    if squash and isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        raise ValueError(f"squashed actions are of a Box, got {space}; set squash_actions to false")
    if isinstance(space, gymnasium.spaces.Discrete):
        return ActionSpec("categorical", (int(space.n),))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return ActionSpec("multi_categorical", tuple(int(n) for n in space.nvec.reshape(-1)))
    raise ValueError(f"action space {space} is not supported; allowed: Box (1-D), Discrete, MultiDiscrete")


def _log_tanh_slope(u: Array) -> Array:
    """log(1 − tanh²u) without cancellation."""
    return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))
