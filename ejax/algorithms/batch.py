"""The flat batch of a rollout, for epochs of minibatches. A row is a step; of a policy with memory it is a sequence: L
successive steps of an environment, with the memory before the first and the steps that episodes start at."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp

from ejax.algorithms.options import MinibatchOptions
from ejax.algorithms.sgd import Batch, MinibatchConfig
from ejax.losses import kl_k3
from ejax.numerics.checks import value_errors
from ejax.numerics.kernels import has_large_rows
from ejax.numerics.traced_options import is_active
from ejax.policies.calls import takes
from ejax.runtime.sharding import num_shards
from ejax.types import Array, Metrics, Params, Policy, PolicyWithMemory, PyTree, Rollout, TrainState

Loss: TypeAlias = Callable[..., tuple[Array, Metrics]]
"""``(params, batch, *, policy, config) -> (loss, metrics)`` of one minibatch, like ``ppo_loss``."""
Columns: TypeAlias = Callable[[Rollout], Mapping[str, PyTree]]
"""``rollout -> {name: leaves [T, N, ...]}``, which a loss of yours reads as ``batch[name]``."""

MAX_SEQUENCE_LENGTH = 128
"""Steps of a sequence whose length is not given."""
_NAMES = ("obs", "action", "log_prob", "dropout_seed", "memory", "first", "share", "mask", "weight", "key")
"""Names of columns that ``flatten_rollout`` and ``sgd_epochs`` make."""


def make_batch(
    policy: Policy,
    rollout: Rollout,
    options: MinibatchOptions,
    more: Columns | None = None,
    /,
    **columns: PyTree | None,
) -> tuple[Batch, MinibatchConfig]:
    """Make the rows of a rollout, leaves [T, N, ...], for ``sgd_epochs``, and their use.

    Args:
        more: makes the columns of a loss of yours from the rollout.
        columns: see ``flatten_rollout``.

    Raises:
        ValueError: a ``sequence_length`` that does not divide T, strata that do not divide N, or a column of yours
            whose name is taken.
    """
    yours = {} if more is None else dict(more(rollout))
    if taken := sorted(yours.keys() & {*columns, *_NAMES}):
        raise ValueError(f"columns: got {', '.join(taken)}, which the update computes itself; rename yours")
    num_strata, length = sequence_cut(policy, rollout, options)
    minibatches = options.minibatches(rollout.reward.size, num_strata, length or 1)
    return flatten_rollout(rollout, num_strata, length, **columns, **yours), minibatches


def sequence_cut(policy: Policy, rollout: Rollout, options: MinibatchOptions) -> tuple[int, int | None]:
    """Compute ``(strata, L)``, L the steps of a sequence. None: the policy has no memory."""
    num_strata, length = options.minibatch_strata or num_shards(), options.sequence_length
    if not isinstance(policy, PolicyWithMemory):
        return num_strata, None
    num_steps = rollout.reward.shape[0]
    if length is None:
        # a divisor of the rollout's steps and of a stratum's share of a minibatch, so that both hold whole sequences
        of_device = options.minibatch_steps
        share = num_steps if of_device is None else max(1, num_shards() * of_device // num_strata)
        common = math.gcd(num_steps, share)
        length = max(n for n in range(1, min(common, MAX_SEQUENCE_LENGTH) + 1) if common % n == 0)
    if num_steps % length:
        raise ValueError(f"{num_steps} steps do not make whole sequences of {length}; let sequence_length divide")
    return num_strata, length


def flatten_rollout(
    rollout: Rollout, num_strata: int = 1, length: int | None = None, /, **columns: PyTree | None
) -> Batch:
    """Make rows of ``obs``, ``action``, ``log_prob`` and ``dropout_seed`` of all T·N steps, and of ``columns``.

    Args:
        num_strata: groups of neighbouring environments; rows are ordered by group, then by time.
        columns: leaves [T, N, ...]; those that are None are left out.

    Returns:
        Leaves [T·N, ...]. Of sequences of ``length`` L, [T·N/L, L, ...], with the ``memory`` [T·N/L, ...] before them,
        ``first``, and ``share``, of each step in the ``mask`` of its sequence.
    """
    rows = {
        "obs": rollout.obs,
        "action": rollout.action,
        "log_prob": rollout.log_prob,
        "dropout_seed": rollout.dropout_seed,
        **columns,
    }
    present = {name: column for name, column in rows.items() if column is not None}
    with value_errors("columns of a batch have leaves [T, N, ...]"):  # [N, T] would have as many rows
        chex.assert_tree_shape_prefix(present, rollout.reward.shape)
    num_envs = rollout.reward.shape[1]
    if num_envs % num_strata:
        raise ValueError(f"{num_envs} environments do not make {num_strata} equal strata; let minibatch_strata divide")

    def rows_of(x: Array) -> Array:
        # strata first: the rows of one device then follow on each other, and drawing from them sends nothing
        steps = x.shape[0]
        strata = x.reshape(steps, num_strata, num_envs // num_strata, *x.shape[2:]).swapaxes(0, 1)
        return strata.reshape(steps * num_envs, *x.shape[2:])

    if length is None:
        return jax.tree.map(rows_of, present)
    mask = present.pop("mask", jnp.ones_like(rollout.reward))
    sequences = {**present, "first": episode_starts(rollout), "share": mask}
    # [T, N, ...] -> [T/L, N, L, ...]
    rows = jax.tree.map(lambda x: rows_of(x.reshape(-1, length, *x.shape[1:]).swapaxes(1, 2)), sequences)
    # a sequence needs only what was remembered before its first step: the policy makes the rest again
    rows["memory"] = jax.tree.map(lambda x: rows_of(x[::length]), rollout.memory)
    # minibatches weigh whole sequences, which the loss hands on to their steps by these shares
    rows["mask"] = rows["share"].sum(axis=1)
    rows["share"] = rows["share"] / jnp.where(rows["mask"] > 0.0, rows["mask"], 1.0)[:, None]
    return rows


def apply_to_batch(policy: Policy, params: Params, batch: Batch, *, joint: bool = False) -> tuple[Any, Array, Batch]:
    """Apply the policy to rows of ``flatten_rollout`` with their ``weight`` [B]: ``(distribution, value, batch)``,
    leaves [B, ...]; of sequences [L, B, ...], weights included. ``joint``: the loss reads both, which a GPU may compute
    as one."""
    seed = {"dropout_seed": batch["dropout_seed"]} if "dropout_seed" in batch else {}
    if "memory" not in batch:
        form: Any = {"joint": True} if joint and takes(type(policy), "joint") else {}
        return *policy.apply(params, batch["obs"], **seed, **form), batch
    weight = step_weight(batch)
    steps = {name: x for name, x in batch.items() if name not in ("memory", "weight", "share")}
    # a policy with memory reads time first, as a scan does
    steps = jax.tree.map(lambda x: x.swapaxes(0, 1), steps | {"weight": weight})
    seed = {name: steps[name] for name in seed}
    distribution, value, _ = policy.apply(
        params, steps["obs"], memory=batch["memory"], first=steps.pop("first"), **seed
    )
    return distribution, value, steps


def step_weight(batch: Batch) -> Array:
    """Weigh each step of a minibatch: [B], of sequences [B, L]."""
    return batch["weight"][:, None] * batch["share"] if "share" in batch else batch["weight"]


def evaluate_rollout(params: Params, rollout: Rollout, length: int | None, *, policy: Policy) -> tuple[Array, Array]:
    """Compute ``(log_prob, value)``, [T, N], of other parameters than acted; memory is that of the ones that acted."""

    def seen(batch: Batch) -> tuple[Array, Array]:
        distribution, value, steps = apply_to_batch(policy, params, batch)
        return distribution.log_prob(steps["action"]), value

    if length is None:
        seed = {} if rollout.dropout_seed is None else {"dropout_seed": rollout.dropout_seed}
        rows = {"obs": rollout.obs, "action": rollout.action, **seed}
        # a large policy's activations for T·N pictures at once would take more memory than its training
        large = has_large_rows(jax.tree.map(lambda x: x[0], rollout.obs))
        return jax.lax.map(seen, rows) if large else seen(rows)
    batch = flatten_rollout(rollout, 1, length)
    batch["weight"] = batch.pop("mask")
    num_envs = rollout.reward.shape[1]

    def whole(x: Array) -> Array:
        return x.reshape(length, -1, num_envs).swapaxes(0, 1).reshape(-1, num_envs)

    log_prob, value = seen(batch)
    return whole(log_prob), whole(value)


def recompute_behaviour(
    params: Params, rollout: Rollout, options: MinibatchOptions, *, policy: Policy, weight_threshold: float
) -> tuple[Rollout, Array, Metrics]:
    """Return a rollout of older parameters with the log-probabilities and values of ``params``, which an update starts
    with. Source: Hilton et al. 2022, "Batch size-invariance for policy optimization".

    Returns:
        The rollout, the weight π(params)/π(acted) ≤ ``weight_threshold`` of each step [T, N], and metrics of how far
        apart the two are.
    """
    _, length = sequence_cut(policy, rollout, options)
    log_prob, value = evaluate_rollout(params, rollout, length, policy=policy)
    # V of the true next observation is V of the next row, but where an episode ended; there the old one must do
    following = jnp.concatenate([value[1:], rollout.next_value[-1:]])
    continues = ~rollout.done & (jnp.arange(len(value)) < len(value) - 1)[:, None]
    next_value = jnp.where(continues, following, rollout.next_value)
    log_ratio = log_prob - rollout.log_prob
    ratio = jnp.exp(log_ratio)
    metrics = {
        "behave_approx_kl": kl_k3(log_ratio).mean(where=rollout.valid),
        "behave_weight_clipped": (ratio > weight_threshold).mean(where=rollout.valid),
    }
    seen = replace(rollout, log_prob=log_prob, value=value, next_value=next_value)
    return seen, jnp.minimum(ratio, weight_threshold), metrics


def episode_starts(rollout: Rollout) -> Array:
    """Mark the steps that an episode starts at, [T, N] bool; the rollout's first has the memory that it needs."""
    ended = rollout.done if rollout.valid is None else rollout.done | ~rollout.valid
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def cut_before_invalid(rollout: Rollout) -> Array:
    """Mark, with the steps that were truncated, those before one that is not a transition: they end their episode,
    though the environment did not report it; [T, N] bool."""
    truncated = rollout.truncated
    return truncated if rollout.valid is None else truncated.at[:-1].set(truncated[:-1] | ~rollout.valid[1:])


def reference_log_prob(state: TrainState, rollout: Rollout, *, policy: Policy, kl_coef: float) -> Array | None:
    """Compute log π_ref(action | obs), [T, N], without dropout; None where ``kl_coef`` is 0. A reference with memory
    begins it at an episode's start, or at the rollout's where the episode began before. Raises ValueError: no reference
    to measure the divergence to."""
    if not is_active(kl_coef):
        return None
    if state.reference is None:
        raise ValueError("kl_coef > 0 needs state.reference, got None; start with init_train_state(…, reference=True)")
    if isinstance(policy, PolicyWithMemory):
        # the rollout holds what the acting policy remembered, which means nothing to other parameters
        memory = policy.init_memory(rollout.reward.shape[1])
        distribution, _, _ = policy.apply(state.reference, rollout.obs, memory=memory, first=episode_starts(rollout))
        return distribution.log_prob(rollout.action)
    # not trained: it drops nothing
    return evaluate_rollout(state.reference, replace(rollout, dropout_seed=None), None, policy=policy)[0]
