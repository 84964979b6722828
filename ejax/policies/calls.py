"""Calls of a policy with or without memory; without, the memory is ``()``."""

import inspect
from functools import cache, partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.numerics.checks import value_errors
from ejax.types import Array, Key, Params, Policy, PolicyWithMemory, PyTree


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


@runtime_checkable
class BinnedPolicy(Protocol):
    """A policy whose critics give logits over bins of the return; None: each gives one value."""

    num_bins: int | None


@runtime_checkable
class BatchStatisticsPolicy(Protocol):
    """A policy whose networks normalize by statistics of batches, which ``flash_sac`` alone moves."""

    batch_statistics: ClassVar[bool]


def check_obs(policy: Policy, obs: PyTree) -> None:
    """Let a policy refuse observations, leaves [..., F], outside programs, by ValueError."""
    if _checks(type(policy)):
        policy.check_obs(obs)  # type: ignore[attr-defined]  # it is a CheckingPolicy


@cache  # asking a protocol takes 8 µs, at every step outside JAX
def _checks(kind: type) -> bool:
    return issubclass(kind, CheckingPolicy)


@cache
def takes(kind: type, keyword: str) -> bool:
    """Return whether the forward pass of this class of policies has the parameter ``keyword``."""
    methods = (kind.__call__, getattr(kind, "apply", kind.__call__))
    return any(keyword in inspect.signature(method).parameters for method in methods)


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


@partial(jax.jit, static_argnames=("policy", "deterministic"))
def get_action(
    policy: Policy, params: Params, obs: PyTree, key: Key, deterministic: bool = False
) -> tuple[Array, Array, Array]:
    """Act: ``(action [..., A], log_prob [...], value [...])`` for observations with leaves [..., F].

    ``params`` are Flax variables. ``deterministic`` takes the distribution's mode and does not use ``key``. log π is
    summed over action dimensions.
    """
    distribution, value = policy.apply(params, obs)
    action = distribution.mode() if deterministic else distribution.sample(key)
    return action, distribution.log_prob(action), value


@partial(jax.jit, static_argnames="policy")
def get_value(policy: Policy, params: Params, obs: PyTree) -> Array:
    """Compute V(obs) [...] for observations with leaves [..., F]; zeros of a policy without a critic."""
    return policy.apply(params, obs)[1]


@partial(jax.jit, static_argnames="policy")
def evaluate_actions(policy: Policy, params: Params, obs: PyTree, action: Array) -> tuple[Array, Array, Array]:
    """Compute ``(log_prob, entropy, value)``, each [...], of actions [..., A] taken at ``obs``, leaves [..., F].
    Raises ValueError: actions of another shape than the policy draws."""
    distribution, value = policy.apply(params, obs)
    with value_errors("evaluate_actions takes actions as the policy draws them"):
        chex.assert_equal_shape([action, jax.eval_shape(distribution.sample, jax.random.key(0))])
    return distribution.log_prob(action), distribution.entropy(), value
