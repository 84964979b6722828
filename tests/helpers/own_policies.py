"""Policies for PointMassRL, each in Flax Linen and in Flax NNX: ``linen_<kind>`` and ``nnx_<kind>`` make one."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ejax.distributions import ActionSpec
from ejax.policies.mlp import consistent_dropout
from ejax.policies.nnx import NnxPolicy, NnxPolicyWithMemory
from ejax.policies.nnx import ObsNormalizer as NnxObsNormalizer
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.recurrence import in_sequence

SPEC, OBS, HIDDEN = ActionSpec("normal", (2,)), 14, 16
KINDS = ("plain", "normalizer", "batch_norm", "dropout", "memory")


class LinenHeads(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        log_std = self.param("log_std", nn.initializers.zeros, (2,))
        return SPEC.distribution(nn.Dense(2)(x), log_std), nn.Dense(1)(x)[..., 0]


class LinenPlain(nn.Module):
    @nn.compact
    def __call__(self, obs: jax.Array) -> Any:
        return LinenHeads()(jnp.tanh(nn.Dense(HIDDEN)(obs)))


class LinenNormalizer(nn.Module):
    @nn.compact
    def __call__(self, obs: jax.Array, *, observe: bool | jax.Array = False) -> Any:
        return LinenHeads()(jnp.tanh(nn.Dense(HIDDEN)(ObsNormalizer()(obs, observe=observe))))


class LinenBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, obs: jax.Array, *, observe: bool | jax.Array = False) -> Any:
        x = nn.BatchNorm(use_running_average=observe is False, momentum=0.9, name="norm")(nn.Dense(HIDDEN)(obs))
        return LinenHeads()(jnp.tanh(x))


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, obs: jax.Array, *, dropout_seed: jax.Array | None = None) -> Any:
        x = jnp.tanh(nn.Dense(HIDDEN)(obs))
        return LinenHeads()(x if dropout_seed is None else consistent_dropout(x, dropout_seed, layer=0, p=0.5))


class LinenMemory(nn.Module):
    def init_memory(self, num_rows: int) -> jax.Array:
        return jnp.zeros((num_rows, HIDDEN))

    @nn.compact
    def __call__(self, obs: jax.Array, *, memory: Any = None, first: jax.Array | None = None) -> Any:
        weight = self.param("weight", nn.initializers.lecun_normal(), (HIDDEN, HIDDEN))
        x, memory = remember(nn.Dense(HIDDEN)(obs), memory, first, weight)
        return *LinenHeads()(x), memory


class NnxHeads(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mean = nnx.Linear(HIDDEN, 2, rngs=rngs)
        self.critic = nnx.Linear(HIDDEN, 1, rngs=rngs)
        self.log_std = nnx.Param(jnp.zeros(2))

    def __call__(self, x: jax.Array) -> Any:
        return SPEC.distribution(self.mean(x), self.log_std[...]), self.critic(x)[..., 0]


class NnxPlain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Sequential(nnx.Linear(OBS, HIDDEN, rngs=rngs), jnp.tanh)
        self.heads = NnxHeads(rngs)

    def __call__(self, obs: jax.Array) -> Any:
        return self.heads(self.hidden(obs))


class NnxNormalizer(NnxPlain):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.normalizer = NnxObsNormalizer(OBS)

    def __call__(self, obs: jax.Array, *, observe: bool | jax.Array = False) -> Any:
        return super().__call__(self.normalizer(obs, observe=observe))


class NnxBatchNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(OBS, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.heads = NnxHeads(rngs)

    def __call__(self, obs: jax.Array) -> Any:
        return self.heads(jnp.tanh(self.norm(self.hidden(obs))))


class NnxDropout(NnxPlain):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, obs: jax.Array) -> Any:
        return self.heads(self.dropout(self.hidden(obs)))


class NnxMemory(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(OBS, HIDDEN, rngs=rngs)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (HIDDEN, HIDDEN)) / HIDDEN**0.5)
        self.heads = NnxHeads(rngs)

    def init_memory(self, num_rows: int) -> jax.Array:
        return jnp.zeros((num_rows, HIDDEN))

    def __call__(self, obs: jax.Array, *, memory: Any = None, first: jax.Array | None = None) -> Any:
        x, memory = remember(self.hidden(obs), memory, first, self.weight[...])
        return *self.heads(x), memory


def remember(x: jax.Array, memory: Any, first: jax.Array | None, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Step a plain recurrence; ``memory`` None: an episode starts."""

    def step(x: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        memory = jnp.tanh(x + memory @ weight)
        return memory, memory

    rows = x.shape[:-1] if first is None else x.shape[1:-1]
    memory = jnp.zeros((*rows, HIDDEN)) if memory is None else memory
    return step(x, memory) if first is None else in_sequence(step, x, memory, first)


LINEN = dict(zip(KINDS, (LinenPlain, LinenNormalizer, LinenBatchNorm, LinenDropout, LinenMemory), strict=True))
NNX = dict(zip(KINDS, (NnxPlain, NnxNormalizer, NnxBatchNorm, NnxDropout, NnxMemory), strict=True))


def make(framework: str, kind: str) -> Any:
    """Make a policy of ``policy.name: own_policies:make``."""
    if framework == "linen":
        return LINEN[kind]()
    return (NnxPolicyWithMemory if kind == "memory" else NnxPolicy)(NNX[kind])
