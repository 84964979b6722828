"""Actor and critics of FlashSAC: residual blocks, normalized by the batch, whose weights keep their length.

    x ← W·BN(x)
    x ← x + relu(BN(W₂·relu(BN(W₁·x)))), a block; W₁ is ``expansion`` times as wide
    output = W·RMSNorm(x) + b

Outputs of the actor are means and log-deviations, of a critic logits over ``num_bins`` atoms. ``unit_length`` is what
the algorithm makes of the parameters after each of its steps. Running statistics act and evaluate; with ``observe`` the
rows are normalized by their own, and move the running ones. A ``FlashActor`` is what an export makes of an actor.

Source: FlashSAC (github.com/Holiday-Robot/FlashSAC), its architecture and its exploration, noise that is held.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ejax.distributions import ActionSpec
from ejax.numerics.checks import check_width
from ejax.policies.mlp import dense_product, orthogonal, widen
from ejax.policies.observations import select_observation
from ejax.policies.record import PolicyKind
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Params, PyTree

BLOCK = 1024
"""Steps after which a hold ends in any case: the process starts again, from the block's number."""


def noise_repeat_start(key: Key, step: Array, *, exponent: float, longest: int) -> Array:
    """Find the step at which the hold began that step number ``step``, int32, is part of."""
    if longest == 1:
        return step
    block = step // BLOCK
    drawn = jax.random.uniform(jax.random.fold_in(key, block), (BLOCK,))
    weight = np.arange(1, longest + 1) ** -exponent
    cumulative = np.cumsum(weight / weight.sum())[:-1].astype(np.float32)
    lengths = 1 + jnp.sum(drawn[:, None] >= jnp.asarray(cumulative)[None, :], axis=-1, dtype=jnp.int32)
    ends = jnp.cumsum(lengths)  # at least BLOCK at the last
    begin = jnp.max(jnp.where(ends <= step - block * BLOCK, ends, 0))
    return block * BLOCK + begin


_MOMENTUM = 0.01  # of running statistics, a step


class FlashQ(nn.Module):
    """Actor and critics of actions: ``obs -> (distribution, zeros [...])``, an ``ActionValuePolicy`` that explores."""

    batch_statistics: ClassVar[bool] = True
    action_spec: ActionSpec
    """Bounded, squashed actions."""
    actor_width: int = 128
    critic_width: int = 256
    num_blocks: int = 2
    expansion: int = 4
    """A block's inner width, in units of its outer one."""
    num_critics: int = 2
    num_bins: int | None = 101
    """Atoms of a critic's distribution. None: one value."""
    value_range: float = 5.0
    """The atoms lie evenly in ± this, in units of scaled rewards."""
    post_norm: bool = True
    """RMSNorm after the blocks."""
    unit_rows: bool = True
    """The parameters keep their length; see ``unit_length``."""
    log_std_range: tuple[float, float] = (-10.0, 2.0)
    """A tanh maps the network's output to it."""
    initial_alpha: float = 0.01
    """The entropy's weight at the start."""
    hold_exponent: float = 2.0
    """Noise is held for n steps with a probability ∝ n to minus this."""
    longest_hold: int = 16
    """The largest n; 1: new noise at each step."""
    actor_obs_groups: tuple[str, ...] = ()
    critic_obs_groups: tuple[str, ...] = ()
    """Dotted paths of the critics' part of the observation: they may see more than the actor."""

    @nn.compact
    def __call__(self, obs: PyTree, *, observe: bool | Array = False) -> tuple[Any, Array]:
        """Return the distribution of actions [..., A] for observations with leaves [..., F], and zeros [...]."""
        x, num_actions = select_observation(obs, self.actor_obs_groups), self.action_spec.num_outputs
        output = self._network(_Network, self.actor_width, 2 * num_actions, observe, name="actor")(x)
        mean, log_std = _mean_and_log_std(output, self.log_std_range)
        self.param("log_alpha", nn.initializers.constant(math.log(self.initial_alpha)), ())
        if self.is_initializing():
            self.variable("exploration", "seed", lambda: jax.random.bits(self.make_rng("params"), (), jnp.uint32))
            self.variable("exploration", "uniform", jnp.ones, (), bool)
            self.action_values(obs, jnp.zeros_like(mean))
        return self.action_spec.distribution(mean, log_std), jnp.zeros(mean.shape[:-1])

    @nn.compact
    def action_values(self, obs: PyTree, action: Array, *, observe: bool | Array = False) -> Array:
        """Evaluate ``action`` [..., A], in the environment's units, by each critic: logits [critics, ..., bins], or
        values [critics, ...]."""
        x = select_observation(obs, self.critic_obs_groups)
        x = jnp.concatenate([x, self.action_spec.unit_action(action)], axis=-1)
        stacked = nn.vmap(
            _Network,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=self.num_critics,
        )
        output = self._network(stacked, self.critic_width, self.num_bins or 1, observe, name="critic")(x)
        return output[..., 0] if self.num_bins is None else output

    def explore(self, params: Params, distribution: Any, key: Key, step: Array, group: int | Array = 0) -> Array:
        """Draw the actions of step number ``step``: uniformly before the first gradient step, then by noise that is
        held, the same numbers for steps that follow each other. See ``ejax.types.ExploringPolicy``."""
        seed = jax.random.key(params["exploration"]["seed"])
        start = noise_repeat_start(seed, step, exponent=self.hold_exponent, longest=self.longest_hold)
        held = distribution.sample(jax.random.fold_in(jax.random.fold_in(seed, start), group))
        low, high = (
            widen(jnp.asarray(bound, held.dtype), held) for bound in (self.action_spec.low, self.action_spec.high)
        )
        uniform = jax.random.uniform(key, held.shape, held.dtype, low, high)
        return jnp.where(params["exploration"]["uniform"], uniform, held)

    def _network(self, kind: Any, width: int, num_outputs: int, observe: bool | Array, name: str) -> Any:
        sizes = {"hidden_sizes": (width, self.expansion * width), "num_blocks": self.num_blocks}
        options = {"num_outputs": num_outputs, "post_norm": self.post_norm, "observe": observe is not False}
        return kind(**sizes, **options, name=name)


class FlashActor(nn.Module):
    """Actor of a ``FlashQ`` whose norms are a part of its linear layers: ``obs -> (distribution, zeros [...])``.

    The RMSNorm is left, without its scale.
    """

    action_spec: ActionSpec
    hidden_sizes: tuple[int, int]
    """Outer and inner width of a block."""
    num_blocks: int
    post_norm: bool
    log_std_range: tuple[float, float]
    actor_obs_groups: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, obs: PyTree, *, observe: bool | Array = False) -> tuple[Any, Array]:
        """Return the distribution of actions [..., A] for observations with leaves [..., F], and zeros [...]."""
        del observe
        num_outputs = 2 * self.action_spec.num_outputs
        network = _Network(self.hidden_sizes, self.num_blocks, num_outputs, self.post_norm, None, name="actor")
        output = network(select_observation(obs, self.actor_obs_groups))
        mean, log_std = _mean_and_log_std(output, self.log_std_range)
        return self.action_spec.distribution(mean, log_std), jnp.zeros(mean.shape[:-1])


def unit_length(networks: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Scale each output's weights to length 1, and the scales of a norm, with its biases if any, together to √d.

    Args:
        networks: parameters, of which other arrays, such as an output's bias, stay as they are.
    """
    made: dict[str, PyTree] = {}
    for name, part in networks.items():
        if not isinstance(part, Mapping):
            made[name] = part
        elif "kernel" in part:
            made[name] = {**part, "kernel": _unit_columns(part["kernel"])}
        elif "scale" in part:
            squares = sum(jnp.square(x).sum(axis=-1, keepdims=True) for x in part.values())
            factor = math.sqrt(part["scale"].shape[-1]) * jax.lax.rsqrt(squares + 1e-8)
            made[name] = {each: x * factor for each, x in part.items()}
        else:
            made[name] = unit_length(part)
    return made


def _unit_columns(kernel: Array) -> Array:
    """Scale the columns of [..., I, F], each an output's weights."""
    return kernel / jnp.maximum(jnp.sqrt(jnp.square(kernel).sum(axis=-2, keepdims=True)), 1e-8)


def _mean_and_log_std(output: Array, log_std_range: tuple[float, float]) -> tuple[Array, Array]:
    """Make both [..., A] of an actor's output [..., 2·A]."""
    mean, raw = jnp.split(output, 2, axis=-1)
    low, high = log_std_range
    return mean, low + (high - low) * 0.5 * (1.0 + jnp.tanh(raw))


class _Network(nn.Module):
    hidden_sizes: tuple[int, int]
    num_blocks: int
    num_outputs: int
    post_norm: bool
    observe: bool | None
    """None: the linear layers hold the norms and the scale."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        outer, inner = self.hidden_sizes
        folded = self.observe is None
        x = _Linear(outer, bias=folded, name="embed")(_normalize(x, self.observe, "norm"))
        for i in range(self.num_blocks):
            x = _Block(inner, self.observe, name=f"block_{i}")(x)
        if self.post_norm:
            x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
            x = x if folded else x * widen(_Scale(name="post_norm")(outer), x)
        return _Linear(self.num_outputs, bias=True, name="output")(x)


class _Block(nn.Module):
    size: int
    observe: bool | None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = x
        for i, size in enumerate((self.size, x.shape[-1])):
            h = _Linear(size, bias=self.observe is None, name=f"linear_{i}")(h)
            h = nn.relu(_normalize(h, self.observe, f"norm_{i}"))
        return x + h


def _normalize(x: Array, observe: bool | None, name: str) -> Array:
    return x if observe is None else _BatchNorm(observe, name=name)(x)


class _Linear(nn.Module):
    size: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def init(key: Key, shape: tuple[int, int]) -> Array:
            return _unit_columns(orthogonal()(key, shape))

        check_width(self, "params", "kernel", x.shape[-1])
        y = dense_product(x, self.param("kernel", init, (x.shape[-1], self.size)))
        return y + widen(self.param("bias", nn.initializers.zeros, (self.size,)), y) if self.bias else y


class _Scale(nn.Module):
    @nn.compact
    def __call__(self, size: int) -> Array:
        return self.param("scale", nn.initializers.ones, (size,))


class _BatchNorm(nn.Module):
    """(x − mean) / √(variance + 1e-5)·scale + bias over all axes of x but the last; torch's arithmetic, whose running
    variance is the unbiased one."""

    observe: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = x.shape[-1:]
        check_width(self, "params", "scale", *size)
        scale, bias = self.param("scale", nn.initializers.ones, size), self.param("bias", nn.initializers.zeros, size)
        running = self.variable("batch_stats", "mean", jnp.zeros, size)
        running_variance = self.variable("batch_stats", "variance", jnp.ones, size)
        mean, variance = running.value, running_variance.value
        if self.observe:
            rows, axes = x.size // x.shape[-1], tuple(range(x.ndim - 1))
            mean = x.mean(axis=axes)
            # through the mean the variance has no gradient, which XLA does not know
            variance = jnp.square(x - widen(jax.lax.stop_gradient(mean), x)).mean(axis=axes)
            for old, new in ((running, mean), (running_variance, variance * (rows / max(rows - 1, 1)))):
                old.value += _MOMENTUM * (jax.lax.stop_gradient(new) - old.value)
        factor = jax.lax.rsqrt(variance + 1e-5) * scale
        return x * widen(factor, x) + widen(bias - mean * factor, x)


def _problems(section: Any) -> Iterator[Problem]:
    if not section.squash_actions:
        text = "got false; flash_q acts between the bounds of the action space: set it to true"
        yield Problem("policy.squash_actions", text)
    for name in ("num_bins", "longest_hold", "num_blocks"):
        least = 2 if name == "num_bins" else 1
        if (given := section.cfg.get(name)) is not None and given < least:
            yield Problem(f"policy.cfg.{name}", f"got {given}; use at least {least}")


_FIXED = "has no effect on {name}, whose networks are sized in policy.cfg; leave it out"
_NORMALIZED = "is not needed by {name}, which normalizes its input by the batch; leave it out"
POLICY = PolicyKind(
    make=FlashQ,
    problems=_problems,
    unread={
        "actor": _FIXED,
        "critic": _FIXED,
        "initial_log_std": "has no effect on {name}, whose log_std starts in the middle of log_std_range; leave it out",
        "actor_obs_normalization": _NORMALIZED,
        "critic_obs_normalization": _NORMALIZED,
        "vla_config": "belongs to the policy vla, not to {name}; leave it out",
    },
    exporters={FlashQ: "interop.exporters.flash:EXPORTER", FlashActor: "interop.exporters.flash:FOLDED"},
)
