"""Calls of a policy with or without memory; without, the memory is ``()``."""

from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.types import Array, Params, Policy, PolicyWithMemory, PyTree


@runtime_checkable
class CheckingPolicy(Protocol):
    """A policy that refuses observations which its program would misread."""

    def check_obs(self, obs: PyTree) -> None:
        """Raise ValueError for such an observation, leaves [..., F], outside programs."""


@runtime_checkable
class DroppingPolicy(Protocol):
    """A policy that knows whether it drops units in training."""

    @property
    def drops(self) -> bool: ...


def check_obs(policy: Policy, obs: PyTree) -> None:
    """Let a policy refuse observations, leaves [..., F], outside programs, by ValueError."""
    if _checks(type(policy)):
        policy.check_obs(obs)  # type: ignore[attr-defined]  # it is a CheckingPolicy


@cache  # asking a protocol takes 8 µs, at every step outside JAX
def _checks(kind: type) -> bool:
    return issubclass(kind, CheckingPolicy)


def first_memory(policy: Policy, num_rows: int) -> PyTree:
    """Make the memory at the start of an episode, leaves [num_rows, ...]."""
    return policy.init_memory(num_rows) if isinstance(policy, PolicyWithMemory) else ()  # a pytree without leaves


def apply_policy(
    policy: Policy, params: Params, obs: PyTree, memory: PyTree, **keywords: Any
) -> tuple[Any, Array, PyTree]:
    """Compute ``(distribution, value, memory after it)`` of single steps, leaves [..., F]."""
    if isinstance(policy, PolicyWithMemory):
        return policy.apply(params, obs, memory=memory, **keywords)
    return *policy.apply(params, obs, **keywords), ()


def forget(policy: Policy, memory: PyTree, ended: Array) -> PyTree:
    """Return the memory for the next step: a new episode's in the rows [N] with an end."""
    if not isinstance(policy, PolicyWithMemory):
        return memory
    first = policy.init_memory(ended.shape[0])
    return jax.tree.map(lambda new, old: jnp.where(rows_like(ended, old), new, old), first, memory)


def forget_outside(policy: Policy, memory: PyTree, ended: NDArray[np.bool_]) -> PyTree:
    """Apply ``forget`` after a step of environments outside JAX."""
    # in this order: asking a protocol takes 20 µs, at every step
    return _forget(policy, memory, ended) if ended.any() and isinstance(policy, PolicyWithMemory) else memory


_forget = jax.jit(forget, static_argnames="policy")


def rows_like(flag: Array, like: Array) -> Array:
    """Reshape [N] to [N, 1, ...], to go with ``like`` [N, ...]."""
    return flag.reshape(-1, *[1] * (like.ndim - 1))
