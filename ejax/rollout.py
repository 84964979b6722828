"""Batched stepping of pure environments: reset, step with automatic reset, and whole rollouts in one scan."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from ejax.returns import first_episode_mask
from ejax.types import (
    Array,
    Env,
    HostTimestep,
    Key,
    Params,
    Policy,
    PolicyWithMemory,
    PyTree,
    Rollout,
    Timestep,
)

Xs: TypeAlias = tuple[Key, dict[str, Array]]


@struct.dataclass(kw_only=True)
class EnvCarry:
    """N environments between two steps."""

    state: PyTree
    obs: PyTree
    """The observation to act on next, leaves [N, ...]."""
    memory: PyTree = ()
    """The memory of a policy with memory, leaves [N, ...]; see ``with_memory``."""


@partial(jax.jit, static_argnames=("env", "num_envs", "group_size"))
def reset(env: Env, key: Key, num_envs: int, group_size: int = 1) -> EnvCarry:
    """N new episodes; each ``group_size`` consecutive ones start from the same state."""
    keys = jnp.repeat(jax.random.split(key, num_envs // group_size), group_size)
    state, obs = jax.vmap(env.reset)(keys)
    return EnvCarry(state=state, obs=obs)


def with_memory(carry: EnvCarry, policy: Policy) -> EnvCarry:
    """The environments at the start of their episodes, with the policy's initial memory: usually none."""
    if not isinstance(policy, PolicyWithMemory):
        return carry
    return replace(carry, memory=policy.init_memory(jax.tree.leaves(carry.obs)[0].shape[0]))


def step(env: Env, carry: EnvCarry, action: Array, key: Key) -> tuple[EnvCarry, Timestep]:
    """One step of N environments; rows whose episode ended start a new one.

    The reset is under one ``lax.cond`` for the batch, so that it costs nothing while no episode ends. (Under ``vmap``
    the cond becomes a select: batch environments inside, not outside.)

    Args:
        action: [N, ...].
    """
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    key_step, key_reset = jax.random.split(key)
    state, timestep = jax.vmap(env.step)(carry.state, action, jax.random.split(key_step, num_envs))
    done = timestep.terminated | timestep.truncated

    def reset_done(ended: EnvCarry) -> EnvCarry:
        fresh = replace(reset(env, key_reset, num_envs), memory=ended.memory)
        return jax.tree.map(lambda new, old: jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old), fresh, ended)

    ended = EnvCarry(state=state, obs=timestep.obs, memory=carry.memory)
    carry = jax.lax.cond(done.any(), reset_done, lambda same: same, ended)
    return carry, replace(timestep, obs=carry.obs, final_obs=timestep.obs)


@partial(jax.jit, static_argnames=("policy", "env", "num_steps", "dropout", "first_episodes"))
def unroll(
    policy: Policy,
    env: Env,
    params: Params,
    carry: EnvCarry,
    key: Key,
    *,
    num_steps: int,
    dropout: bool = False,
    first_episodes: bool = False,
) -> tuple[Rollout, EnvCarry]:
    """T steps of N environments under one policy, in one scan.

    Only the actor runs inside the scan. The critic sees all T·N observations at once afterwards, together with the
    true next ones, which is one large matrix product instead of T small ones.

    Args:
        dropout: give the policy a ``dropout_seed`` for each row, and keep it in the rollout, so that the update drops
            the same units: the probability ratio is 1 before the first gradient step.
        first_episodes: stop when every environment has ended an episode. The steps that are left are not simulated:
            zeros, and False in ``valid``. The others are the same bits as without it.

    Returns:
        The rollout, with the acting policy's ``distribution``, and the environments after it.
    """
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    key_dropout, key_steps = jax.random.split(key)
    rows: dict[str, Array] = {}
    if dropout:
        rows["dropout_seed"] = jax.random.bits(key_dropout, (num_steps, num_envs), jnp.uint32)

    def one_step(carry: tuple[EnvCarry, Array], xs: Xs) -> tuple[tuple[EnvCarry, Array], Any]:
        envs, ended = carry
        key, row = xs
        key_action, key_env = jax.random.split(key)
        distribution, _, remembered = _ask(policy, params, envs.obs, envs.memory, row)
        action = distribution.sample(key_action)
        after, timestep = step(env, envs, action, key_env)
        done = timestep.terminated | timestep.truncated
        after = replace(after, memory=_forget(policy, remembered, done))
        return (after, ended | done), (envs.obs, action, distribution, timestep, (envs.memory, remembered))

    def step_or_skip(carry: tuple[EnvCarry, Array], xs: Xs) -> tuple[tuple[EnvCarry, Array], Any]:
        skipped = jax.tree.map(jnp.zeros_like, jax.eval_shape(one_step, carry, xs)[1])
        return jax.lax.cond(carry[1].all(), lambda carry, xs: (carry, skipped), one_step, carry, xs)

    xs = (jax.random.split(key_steps, num_steps), rows)
    nobody = jnp.zeros(num_envs, bool)
    with jax.named_scope("env_steps"):
        (carry, _), made = jax.lax.scan(step_or_skip if first_episodes else one_step, (carry, nobody), xs)
    obs, action, distribution, timestep, memory = made
    rollout = make_rollout(
        policy,
        params,
        obs,
        action,
        timestep,
        distribution=distribution,
        memory=memory,
        dropout_seed=rows.get("dropout_seed"),
    )
    if first_episodes:
        simulated = first_episode_mask(rollout.done).any(axis=1, keepdims=True)
        rollout = replace(rollout, valid=jnp.broadcast_to(simulated, rollout.done.shape))
    return rollout, carry


def make_rollout(
    policy: Policy,
    params: Params,
    obs: PyTree,
    action: Array,
    timestep: Timestep | HostTimestep,
    *,
    distribution: Any = None,
    memory: tuple[PyTree, PyTree] = ((), ()),
    dropout_seed: Array | None = None,
) -> Rollout:
    """A rollout from recorded steps, with the policy's log-probabilities and values.

    Args:
        obs, action, timestep: leaves [T, N, ...]. ``valid`` in the timestep's ``info`` becomes the rollout's.
        distribution: of the policy that acted, if it is known already. None: it is computed here.
        memory: of a policy with memory, before and after each action, leaves [T, N, ...].
        dropout_seed: [T, N], of the units that were dropped.
    """
    seed = {} if dropout_seed is None else {"dropout_seed": dropout_seed}
    before, after = memory
    computed, value, _ = _ask(policy, params, obs, before, seed)
    distribution = computed if distribution is None else distribution
    info = dict(timestep.info)
    valid = info.pop("valid", None)
    return Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=_ask(policy, params, timestep.final_obs, after, seed)[1],
        reward=jnp.asarray(timestep.reward),
        terminated=jnp.asarray(timestep.terminated),
        truncated=jnp.asarray(timestep.truncated),
        info=info,
        distribution=distribution,
        dropout_seed=dropout_seed,
        valid=valid,
        memory=None if before == () else before,
    )


def _ask(
    policy: Policy, params: Params, obs: PyTree, memory: PyTree, row: dict[str, Array]
) -> tuple[Any, Array, PyTree]:
    """``(distribution, value, memory after it)``."""
    if isinstance(policy, PolicyWithMemory):
        return policy.apply(params, obs, memory=memory, **row)
    return *policy.apply(params, obs, **row), ()


def _forget(policy: Policy, memory: PyTree, done: Array) -> PyTree:
    """The memory for the next step: a new episode's where one ended."""
    if not isinstance(policy, PolicyWithMemory):
        return memory
    first = policy.init_memory(done.shape[0])
    return jax.tree.map(lambda new, old: jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old), first, memory)
