"""Several teachers as one: who is responsible for which rows of the observations."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejax.algorithms.teaching import Responsibility
from ejax.policies.calls import apply_policy, first_memory
from ejax.policies.observations import flatten_observation, part_of
from ejax.types import Array, Key, Params, Policy, PolicyWithMemory, PyTree


@dataclass(frozen=True)
class Committee:
    """Several teachers as one policy: a row's distribution is that of the first one responsible for it."""

    members: tuple[tuple[Policy, str | None, Responsibility | None], ...]
    """Policy, part of the observation that it sees, and responsibility; None: for all rows that are left."""

    def init(self, key: Key, obs: PyTree) -> Params:
        return tuple(policy.init(key, seen_by(obs, part)) for policy, part, _ in self.members)

    def init_memory(self, num_rows: int) -> PyTree:
        return tuple(first_memory(policy, num_rows) for policy, _, _ in self.members)

    def apply(self, params: Params, obs: PyTree, *, memory: PyTree, **keywords: Any) -> tuple[Any, Array, PyTree]:
        decided = []
        for (policy, part, _), own, before in zip(self.members, params, memory, strict=True):
            known = keywords if isinstance(policy, PolicyWithMemory) else {}  # they are about memory
            decided.append(apply_policy(policy, own, seen_by(obs, part), before, **known))
        chosen, value, _ = decided[-1]
        for (_, _, when), (distribution, *_) in reversed(list(zip(self.members[:-1], decided, strict=False))):
            chosen = _choose(responsible(when, obs, value.shape), distribution, chosen)
        return chosen, value, tuple(after for *_, after in decided)


def _choose(rows: Array, new: Any, old: Any) -> Any:
    """Take ``new`` in these rows [..., N], ``old`` in the others; leaves [..., N, A]."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(*rows.shape, *[1] * (x.ndim - rows.ndim)), x, y), new, old)


def responsible(when: Responsibility | None, obs: PyTree, shape: tuple[int, ...]) -> Array:
    """Mark the rows of observations, leaves [..., N, F], that a teacher is responsible for: bool [..., N]."""
    if when is None:
        return jnp.ones(shape, bool)
    if when.envs is not None:
        share = jnp.arange(shape[-1]) / shape[-1]
        return jnp.broadcast_to((share >= when.envs[0]) & (share < when.envs[1]), shape)
    numbers = flatten_observation(seen_by(obs, when.obs))[..., jnp.array(when.entries)]
    size = numbers[..., 0] if len(when.entries) == 1 else jnp.linalg.norm(numbers, axis=-1)
    low, high = -jnp.inf if when.at_least is None else when.at_least, jnp.inf if when.below is None else when.below
    return (size >= low) & (size < high)


def seen_by(obs: PyTree, path: str | None) -> PyTree:
    """Return the part of an observation that a teacher sees as its whole one."""
    return obs if path is None else part_of(obs, path)


def distribution_form(policy: Policy, params: Params, obs: PyTree, part: str | None = None) -> Any:
    """Find the form of a policy's distribution at observations, or forms of them, leaves [1, ...]."""

    def decide(params: Params, obs: PyTree) -> Any:
        return apply_policy(policy, params, seen_by(obs, part), first_memory(policy, 1))[0]

    return jax.eval_shape(decide, params, obs)
