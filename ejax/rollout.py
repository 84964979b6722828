"""Batched stepping of pure environments: reset, step with automatic reset, and whole rollouts in one scan."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from ejax.envs.actions import action_form, to_action
from ejax.numerics.checks import check_rollout
from ejax.numerics.kernels import PackedRows, has_large_rows, pack_rows
from ejax.numerics.platforms import by_platform
from ejax.policies.calls import apply_policy, first_memory, forget, rows_like
from ejax.returns import first_episode_mask
from ejax.runtime.sharding import by_device
from ejax.types import (
    ActionValuePolicy,
    Array,
    Env,
    ExploringPolicy,
    HostTimestep,
    Key,
    Params,
    PersistentEnv,
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


@struct.dataclass(kw_only=True)
class _Step:
    """One step as a rollout stores it; leaves [N, ...]."""

    obs: PyTree
    action: Array
    distribution: Any
    timestep: Timestep
    """Without its ``obs``, which is that of the next step."""
    memory: tuple[PyTree, PyTree]
    """Before and after the action."""


_Carry: TypeAlias = tuple[EnvCarry, Array]  # the environments, and which of them have ended an episode, [N] bool
_STEPS_OF_LARGE_OBS = 16
_ROWS_OF_LONG_RESET = 8


@partial(jax.jit, static_argnames=("env", "num_envs", "group_size"))
def reset(env: Env, key: Key, num_envs: int, group_size: int = 1) -> EnvCarry:
    """Start N episodes, leaves [N, ...]; each ``group_size`` consecutive ones start from the same state. ``env`` is one
    environment, hashable; N is a multiple of ``group_size``."""
    keys = jnp.repeat(jax.random.split(key, num_envs // group_size), group_size)  # one key: one start state
    state, obs = by_device(jax.vmap(env.reset), num_envs)(keys)
    return EnvCarry(state=state, obs=obs)


def restart(env: Env, ended: EnvCarry, start: EnvCarry, group_size: int = 1) -> EnvCarry:
    """Start episodes after others in the same rows, with what outlasts them (``ejax.types.PersistentEnv``): that of a
    group's first row is the whole group's."""
    if not isinstance(env, PersistentEnv):
        return start
    if group_size > 1:
        ended = jax.tree.map(lambda x: jnp.repeat(x[::group_size], group_size, axis=0), ended)
    num_envs = jax.tree.leaves(start.obs)[0].shape[0]
    state, obs = by_device(jax.vmap(env.persist), num_envs)(ended.state, start.state, start.obs)
    return replace(start, state=state, obs=obs)


def start_done(env: Env, ended: EnvCarry, done: Array, start: EnvCarry) -> EnvCarry:
    """Start the episodes of ``start`` in the rows [N] that are ``done``; the caller makes the policy forget them."""
    start = replace(restart(env, ended, start), memory=ended.memory)
    return jax.tree.map(lambda new, old: jnp.where(rows_like(done, old), new, old), start, ended)


def with_memory(carry: EnvCarry, policy: Policy) -> EnvCarry:
    """Add the policy's initial memory, usually none, to environments at the start of their episodes."""
    return replace(carry, memory=first_memory(policy, jax.tree.leaves(carry.obs)[0].shape[0]))


def step(
    env: Env, carry: EnvCarry, action: Array, key: Key, start: EnvCarry | None = None
) -> tuple[EnvCarry, Timestep]:
    """Make one step of N environments by actions of their space (``ejax.envs.actions``); rows whose episode ended start
    a new one: ``start``'s, or drawn here. The time step's ``obs`` is the next to act on, its ``final_obs`` the true
    next one.

    On a CPU the reset is under one ``lax.cond`` for the batch, so that it costs nothing while no episode ends. (Under
    ``vmap`` the cond becomes a select: batch environments inside, not outside.) A GPU resets all rows. Where the
    environment says that its reset is long (``long_reset``), both reset only rows that ended, a few at a time.
    """
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    key_step, key_reset = jax.random.split(key)
    state, timestep = step_all(env, carry.state, action, key_step)
    done = timestep.done

    def restart_done(ended: EnvCarry, start: EnvCarry | None) -> EnvCarry:
        return start_done(env, ended, done, reset(env, key_reset, num_envs) if start is None else start)

    def restart_if_any(ended: EnvCarry) -> EnvCarry:
        return jax.lax.cond(done.any(), lambda: restart_done(ended, None), lambda: ended)

    ended = EnvCarry(state=state, obs=timestep.obs, memory=carry.memory)
    if start is not None:
        carry = restart_done(ended, start)
    elif _has_long_reset(env):
        few = by_device(partial(_reset_few, env), num_envs)
        carry = restart_done(ended, few(done, ended, jax.random.split(key_reset, num_envs)))
    else:
        carry = by_platform(cpu=restart_if_any, gpu=lambda ended: restart_done(ended, None))(ended)
    return carry, replace(timestep, obs=carry.obs, final_obs=timestep.obs)


def _has_long_reset(env: Env) -> bool:
    return getattr(env, "long_reset", False)


def _reset_few(env: Env, done: Array, ended: EnvCarry, keys: Key) -> EnvCarry:
    """Start the episodes of the rows that are ``done``, a few at a time; the others keep what they have."""
    count, size = done.sum(), min(_ROWS_OF_LONG_RESET, done.shape[0])
    order = jnp.argsort(~done)  # those that ended first

    def some(i: Array, made: EnvCarry) -> EnvCarry:
        rows = order[(i * size + jnp.arange(size)) % done.shape[0]]
        state, obs = jax.vmap(env.reset)(keys[rows])
        new = EnvCarry(state=state, obs=obs, memory=jax.tree.map(lambda x: x[rows], made.memory))
        # those that did not end may be reset too: the caller leaves them as they were
        return jax.tree.map(lambda x, new: x.at[rows].set(new), made, new)

    return jax.lax.fori_loop(0, -(-count // size), some, ended)


# jitted, as ``_act`` is, so that it is traced once for both forms of a rollout
@partial(jax.jit, static_argnames="env")
def step_all(env: Env, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
    """Step N environments; none is reset."""
    num_envs = action.shape[0]
    return by_device(jax.vmap(env.step), num_envs)(state, action, jax.random.split(key, num_envs))


@partial(jax.jit, static_argnames="policy")
def _act(
    policy: Policy, params: Params, envs: EnvCarry, row: dict[str, Array], key: Key
) -> tuple[Array, Array, Any, PyTree]:
    """Return the action, its executed part, what is kept of the distribution, and the memory after it."""
    step = row.get("step")
    given = {name: x for name, x in row.items() if name != "step"}
    distribution, _, remembered = apply_policy(policy, params, envs.obs, envs.memory, **given)
    if step is not None and isinstance(policy, ExploringPolicy):
        action = policy.explore(params, distribution, key, step)
    else:
        action = distribution.sample(key)
    return action, distribution.env_action(action), distribution.for_storage(action), remembered


def starts_of(env: Env, keys: Key, num_envs: int) -> EnvCarry:
    """Draw the new episodes that ``step(…, key)`` draws with each of the ``keys`` [T]. Leaves [T, N, ...]."""
    return jax.vmap(lambda key: reset(env, jax.random.split(key)[1], num_envs))(keys)


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
    first_step: Array | None = None,
) -> tuple[Rollout, EnvCarry]:
    """Make T steps of N environments under one policy, in one scan; the critic sees all T·N observations afterwards.
    The rollout, leaves [T, N, ...], has the acting policy's ``distribution``.

    Args:
        carry: from ``reset`` or from the rollout before.
        dropout: pass the policy a ``dropout_seed`` for each row, and keep it in the rollout, so that the update drops
            the same units: the probability ratio is 1 before the first gradient step.
        first_episodes: stop when every environment has ended an episode. The steps that are left are zeros, and False
            in ``valid``; a CPU does not simulate them. The others are the same bits as without it.
        first_step: the run's number of the first of them, for an ``ExploringPolicy``. None: it draws from its
            distribution.
    """
    num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
    # split without dropout too: the steps draw the same numbers with and without it
    key_dropout, key_steps = jax.random.split(key)
    rows: dict[str, Array] = {}
    if dropout:
        rows["dropout_seed"] = jax.random.bits(key_dropout, (num_steps, num_envs), jnp.uint32)
    if first_step is not None:
        rows["step"] = first_step + jnp.arange(num_steps)
    collect = partial(_collect, policy, env, first_episodes=first_episodes)

    def some_steps(carry: _Carry, xs: Xs) -> tuple[_Carry, Rollout]:
        carry, made = by_platform(cpu=collect, gpu=partial(collect, few_kernels=True))(params, carry, xs)
        return carry, make_rollout(
            policy,
            params,
            *(made.obs, made.action, made.timestep),
            distribution=made.distribution,
            memory=made.memory,
            dropout_seed=xs[1].get("dropout_seed"),
        )

    xs = (jax.random.split(key_steps, num_steps), rows)
    start, size = (carry, jnp.zeros(num_envs, bool)), _steps_at_once(num_steps, carry.obs)
    if size == num_steps:
        (carry, _), rollout = some_steps(start, xs)
    else:
        # each part's next observations give way to their values before the next part is simulated
        parts = jax.tree.map(lambda x: x.reshape(num_steps // size, size, *x.shape[1:]), xs)
        (carry, _), rollouts = jax.lax.scan(some_steps, start, parts)
        rollout = jax.tree.map(lambda x: x.reshape(num_steps, *x.shape[2:]), rollouts)
    if first_episodes:
        # environments are stepped together: all continue until the last one has ended an episode
        simulated = first_episode_mask(rollout.done).any(axis=1, keepdims=True)
        rollout = replace(rollout, valid=jnp.broadcast_to(simulated, rollout.done.shape))
    return rollout, carry


def _steps_at_once(num_steps: int, obs: PyTree) -> int:
    """Count the steps to take before their values are computed: all of them, or a few where observations are large."""
    if not has_large_rows(obs):
        return num_steps
    # a divisor, so that a scan over parts has no remainder
    return max(size for size in range(1, _STEPS_OF_LARGE_OBS + 1) if num_steps % size == 0)


def _collect(
    policy: Policy, env: Env, params: Params, carry: _Carry, xs: Xs, *, first_episodes: bool, few_kernels: bool = False
) -> tuple[_Carry, _Step]:
    """Make T steps, leaves [T, N, ...]. ``few_kernels``: the form for a GPU, with the same bits: new episodes are drawn
    beforehand, a step stores one table, and steps that are not to count are made and zeroed.

    Of an environment whose reset is long a GPU draws one new episode for each row, not one for each step: other bits,
    and a row that ends twice within the T steps begins the same one again.
    """
    num_envs, form = carry[1].shape[0], action_form(env.action_space)

    def one_step(envs: EnvCarry, key: Key, row: dict[str, Array], start: EnvCarry | None) -> tuple[EnvCarry, _Step]:
        key_action, key_env = jax.random.split(key)
        action, given, distribution, remembered = _act(policy, params, envs, row, key_action)
        after, timestep = step(env, envs, to_action(form, given, jnp), key_env, start)
        made = _Step(
            obs=envs.obs,
            action=action,
            distribution=distribution,
            timestep=replace(timestep, obs=()),
            memory=(envs.memory, remembered),
        )
        return replace(after, memory=forget(policy, remembered, timestep.done)), made

    def plain(carry: _Carry, xs: Xs) -> tuple[_Carry, _Step]:
        after, made = one_step(carry[0], *xs, None)
        return (after, carry[1] | made.timestep.done), made

    def plain_or_skipped(carry: _Carry, xs: Xs) -> tuple[_Carry, _Step]:
        skipped = jax.tree.map(jnp.zeros_like, jax.eval_shape(plain, carry, xs)[1])
        return jax.lax.cond(carry[1].all(), lambda carry, xs: (carry, skipped), plain, carry, xs)

    def packed(envs: PackedRows, xs: tuple[Key, dict[str, Array], PackedRows | None]) -> tuple[PackedRows, PackedRows]:
        key, row, start = xs
        # packed, since every array that a scan carries or stores is a separate kernel
        after, made = one_step(envs.tree(), key, row, (of_all_steps if start is None else start).tree())
        return pack_rows(after), pack_rows(made)

    if not few_kernels:
        with jax.named_scope("env_steps"):
            return jax.lax.scan(plain_or_skipped if first_episodes else plain, carry, xs)
    # all resets of the rollout in one batch: drawn within the scan, they would add their kernels to every step
    (envs, ended), (keys, rows) = carry, xs
    drawn = keys[:1] if _has_long_reset(env) else keys
    starts = jax.vmap(pack_rows)(starts_of(env, jax.vmap(lambda key: jax.random.split(key)[1])(drawn), num_envs))
    of_all_steps = jax.tree.map(lambda x: x[0], starts)
    with jax.named_scope("env_steps"):
        given = (keys, rows, None if _has_long_reset(env) else starts)
        after, log = jax.lax.scan(packed, pack_rows(envs), given)
    made = log.tree()
    done = made.timestep.done
    if first_episodes:
        # the zeros of the CPU's form, which skips these steps
        simulated = ((first_episode_mask(done) > 0.0) & ~ended[None]).any(axis=1)
        made = jax.tree.map(lambda x: jnp.where(rows_like(simulated, x), x, jnp.zeros_like(x)), made)
    return (after.tree(), ended | done.any(axis=0)), made


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
    """Make a rollout of recorded steps [T, N, ...], with the policy's log-probabilities and values. ``valid`` in the
    time step's ``info`` becomes the rollout's; ``memory`` is from before and after each action; ``distribution`` None:
    it is computed here."""
    seed = {} if dropout_seed is None else {"dropout_seed": dropout_seed}  # a policy without dropout need not take it
    before, after = memory
    computed, value, _ = apply_policy(policy, params, obs, before, **seed)
    distribution = computed.for_storage(action) if distribution is None else distribution
    info = dict(timestep.info)  # a copy: the caller's stays whole
    valid = info.pop("valid", None)
    # an action-value policy has no V: what follows is valued by its critics, from the next observation
    of_actions, first = isinstance(policy, ActionValuePolicy), jax.tree.map(lambda x: x[0], obs)
    rollout = Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=value if of_actions else apply_policy(policy, params, timestep.final_obs, after, **seed)[1],
        reward=jnp.asarray(timestep.reward),
        terminated=jnp.asarray(timestep.terminated),
        truncated=jnp.asarray(timestep.truncated),
        info=info,
        distribution=distribution,
        dropout_seed=dropout_seed,
        valid=valid,
        memory=before if isinstance(policy, PolicyWithMemory) else None,
        next_obs=timestep.final_obs if of_actions or not has_large_rows(first) else None,
    )
    check_rollout(rollout)
    return rollout
