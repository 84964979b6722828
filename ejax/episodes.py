"""The episodes of a policy, decision by decision: who evaluates, shows, films or compares plays them through here.

    key_reset, key_steps = split(key(seed));    decision t has fold_in(key_steps, t)

so that a seed has the same episodes wherever they are played. Rollouts to learn from are ``ejax.rollout.unroll``'s and
``ejax.collectors``', which store the policy's distributions and continue from one update to the next.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.actions import action_form, to_action
from ejax.numerics.finite import finite_rows
from ejax.policies.calls import apply_policy, check_obs, first_memory, forget, forget_outside
from ejax.rollout import EnvCarry, reset, start_done, step_all, with_memory
from ejax.types import Array, ChunkedEnv, Env, HostEnv, Key, Params, Policy, PyTree

UNLIMITED = 1000
"""Steps to show of an episode without a time limit."""
_SAMPLES = 0x5A
"""Folded into a decision's key: samples are drawn apart from what happens to the environment."""


class Decision(NamedTuple):
    """One decision in each of N environments, and its consequence. Outside JAX the next one may overwrite its arrays.

    ``action`` and what follows are None where an episode starts: in the first one, and in JAX after each end.
    """

    obs: PyTree
    """Observation that is acted on, leaves [N, ...]."""
    states: PyTree
    """In JAX: after each of the decision's A actions (before the first, at a start), leaves [A, N, ...]."""
    action: Any = None
    """Given to the environment, [N, ...]."""
    timestep: Any = None
    """A ``Timestep`` without a reset, or a ``HostTimestep``."""
    finite: Any = None
    """[N] bool: observations, action and reward are finite."""
    played: Any = None
    """[N] bool: False where an environment outside JAX only reset."""


@partial(jax.jit, static_argnames=("policy", "samples"))
def act(
    policy: Policy, params: Params, obs: PyTree, memory: PyTree, key: Key, *, samples: bool = False
) -> tuple[Array, PyTree]:
    """Return the mode, or a sample, as ``ejax.envs.actions.to_action`` takes it, and the memory after it."""
    distribution, _, remembered = apply_policy(policy, params, obs, memory)
    if not samples:
        return distribution.mode(), remembered
    return distribution.env_action(distribution.sample(jax.random.fold_in(key, _SAMPLES))), remembered


@partial(jax.jit, static_argnames=("policy", "env", "samples"))
def decide(
    policy: Policy, env: Env, params: Params, envs: EnvCarry, key: Key, *, samples: bool = False
) -> tuple[EnvCarry, Decision]:
    """Act and step once; a row whose episode ends forgets, and is not reset."""
    numbers, remembered = act(policy, params, envs.obs, envs.memory, key, samples=samples)
    action = to_action(action_form(env.action_space), numbers, jnp)
    key_step, _ = jax.random.split(key)  # as ``ejax.rollout.step`` splits it
    state, timestep = step_all(env, envs.state, action, key_step)
    states = jax.tree.map(lambda x: x[None], state)
    # a chunk is shown action by action; it is simulated once more, which a viewer can afford
    if isinstance(env, ChunkedEnv) and env.actions_per_decision > 1:
        keys = jax.random.split(key_step, len(action))
        states = jax.vmap(env.trajectory, out_axes=1)(envs.state, action, keys)
    finite = finite_rows(envs.obs, numbers, timestep.reward, timestep.obs)
    after = EnvCarry(state=state, obs=timestep.obs, memory=forget(policy, remembered, timestep.done))
    return after, Decision(envs.obs, states, action, timestep, finite, jnp.ones_like(finite))


def episodes(
    policy: Policy,
    env: Env | HostEnv,
    params: Params,
    seed: int,
    *,
    num_envs: int = 1,
    samples: bool = False,
    patch: Callable[[PyTree], PyTree] = lambda state: state,
) -> Iterator[Decision]:
    """Play one episode after the other in each row, without an end.

    Args:
        num_envs: of an environment in JAX; outside it there are as many rows as the environment has.
        samples: act by samples of the policy's distribution, not by its mode.
        patch: changes the state [N, ...] before each decision, in JAX.
    """
    if isinstance(env, HostEnv):
        yield from _episodes_outside(policy, env, params, seed, samples=samples)
        return
    key_reset, key_steps = jax.random.split(jax.random.key(seed))
    envs = with_memory(reset(env, key_reset, num_envs), policy)
    yield _start(envs)
    for t in itertools.count():
        key = jax.random.fold_in(key_steps, t)
        envs, made = decide(policy, env, params, replace(envs, state=patch(envs.state)), key, samples=samples)
        yield made
        if (done := made.timestep.done).any():
            envs = _start_done(env, envs, done, jax.random.split(key)[1])  # the other half went to the step
            yield _start(envs)


def _start(envs: EnvCarry) -> Decision:
    return Decision(envs.obs, jax.tree.map(lambda x: x[None], envs.state))


@partial(jax.jit, static_argnames="env")
def _start_done(env: Env, envs: EnvCarry, done: Array, key: Key) -> EnvCarry:
    return start_done(env, envs, done, reset(env, key, len(done)))


def _episodes_outside(policy: Policy, env: HostEnv, params: Params, seed: int, *, samples: bool) -> Iterator[Decision]:
    key, memory, form = jax.random.key(seed), first_memory(policy, env.num_envs), action_form(env.action_space)
    obs = env.reset(np.random.SeedSequence(seed).generate_state(env.num_envs).astype(np.uint32))
    yield Decision(obs, ())
    for t in itertools.count():
        check_obs(policy, obs)
        step_key = jax.random.fold_in(key, t) if samples else key
        numbers, memory = act(policy, params, obs, memory, step_key, samples=samples)
        given = np.asarray(numbers)
        finite = finite_rows(obs, given, numpy=np)  # before the step, which may overwrite the observation
        action = to_action(form, given)
        timestep = env.step(action)
        valid = np.asarray(timestep.info.get("valid", np.ones(env.num_envs, bool)))
        broken = np.asarray(timestep.info.get("nonfinite", np.zeros(env.num_envs, bool)))
        finite = finite & finite_rows(timestep.reward, timestep.final_obs, numpy=np) & ~broken
        # a step that only reset belongs to no episode, and must leave no memory either
        memory = forget_outside(policy, memory, timestep.terminated | timestep.truncated | ~valid)
        yield Decision(obs, (), action, timestep, finite, valid | broken)
        obs = timestep.obs


@partial(jax.jit, static_argnames=("policy", "env", "num_envs", "samples"))
def record_episodes(
    policy: Policy, env: Env, params: Params, key: Key, *, num_envs: int, samples: bool = False
) -> tuple[PyTree, Array]:
    """Return states [T, N, ...] and ends [T, N] of one episode each, played on past its end: those of ``episodes`` by
    this key, in one program, which leaves the interpreter to a training meanwhile.

    In a ``ChunkedEnv`` there is a state for each action of a chunk. ``samples``: act as in training, not by the mode.
    """
    key_reset, key_steps = jax.random.split(key)

    def one_step(envs: EnvCarry, t: Array) -> tuple[EnvCarry, tuple[PyTree, Array]]:
        envs, made = decide(policy, env, params, envs, jax.random.fold_in(key_steps, t), samples=samples)
        num_states = jax.tree.leaves(made.states)[0].shape[0]
        ended = jnp.zeros((num_states, num_envs), bool).at[-1].set(made.timestep.done)
        return envs, (made.states, ended)

    start = with_memory(reset(env, key_reset, num_envs), policy)
    recorded = jax.lax.scan(one_step, start, jnp.arange(env.max_episode_steps or UNLIMITED))[1]
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), recorded)  # a leaf may be empty
