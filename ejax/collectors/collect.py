"""One entry point for the rollouts of all environments, for custom training loops and algorithms."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ejax.collectors.host import HostCollector
from ejax.policies.calls import apply_policy
from ejax.rollout import EnvCarry, unroll, with_memory
from ejax.types import Array, Env, HostEnv, HostTimestep, Key, Params, Policy, PyTree, Rollout, Timestep

StepCallback: TypeAlias = Callable[[PyTree, Any, Any, Any, dict[str, Any], PyTree], object]
"""``(obs, actions, reward, done, info, next_obs)`` of one step, NumPy arrays [N, ...]."""


def collect_rollout(
    env: Env | HostEnv,
    policy: Policy,
    params: Params,
    carry: EnvCarry | PyTree,
    key: Key,
    num_steps: int,
    on_step_callback: StepCallback | None = None,
    *,
    dropout: bool = False,
) -> tuple[Rollout, EnvCarry]:
    """Make T steps of N environments of either kind: the rollout, leaves [T, N, ...], and the environments after it.

    Args:
        carry: the environments' start: that of the call before; of an ``Env`` from ``ejax.reset``; of a ``HostEnv`` the
            observations [N, ...] that its ``reset`` gave.
        on_step_callback: called for each step with ``(obs, actions, reward, done, info, next_obs)``, NumPy arrays
            [N, ...]. ``actions`` are those that the environments were given, ``next_obs`` the ones to act on next: of
            a new episode where ``done``. ``info`` has ``terminated`` and ``truncated`` too. Of a ``HostEnv`` it is
            called after each step, whose arrays the next one may overwrite; an ``Env`` is stepped within one program,
            and all calls follow when that is over.
        dropout: as in ``ejax.unroll``.

    Raises:
        ValueError: no steps, or a start that is not one of this kind of environment.
        Exception: what an environment outside JAX raised.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not isinstance(carry, EnvCarry):
        if not isinstance(env, HostEnv):
            text = "pass ejax.reset(env, key, num_envs), or the carry of the call before"
            raise ValueError(f"an environment in JAX starts from an EnvCarry, got a {type(carry).__name__}; {text}")
        carry = EnvCarry(state=(), obs=carry)
    if not jax.tree.leaves(carry.memory):
        carry = with_memory(carry, policy)

    def listen(callback: StepCallback, obs: PyTree, action: Any, made: HostTimestep | Timestep) -> None:
        info = {**made.info, "terminated": made.terminated, "truncated": made.truncated}
        callback(obs, action, made.reward, made.terminated | made.truncated, info, made.obs)

    if isinstance(env, HostEnv):
        collector = HostCollector(policy, [env], num_steps=num_steps, seed=0, dropout=dropout)
        collector.continue_from(carry.obs, carry.memory)
        if (callback := on_step_callback) is not None:
            collector.listeners = [lambda step: listen(callback, step.obs, step.action, step.timestep)]
        rollout = collector.collect(params, key, index=0).rollout
        worker = collector.workers[0]
        return rollout, EnvCarry(state=(), obs=worker.obs, memory=worker.memory)
    rollout, carry = unroll(policy, env, params, carry, key, num_steps=num_steps, dropout=dropout)
    if on_step_callback is not None:
        steps = jax.device_get(_steps(policy, params, rollout, carry.obs))
        for t in range(num_steps):
            listen(on_step_callback, *jax.tree.map(lambda x, t=t: x[t], steps))
    return rollout, carry


@partial(jax.jit, static_argnames="policy")
def _steps(policy: Policy, params: Params, rollout: Rollout, last_obs: PyTree) -> tuple[PyTree, Array, Timestep]:
    """Take observations, actions and answers as environments outside JAX have them, leaves [T, N, ...]."""
    # of a flow's draw the environments are given a part; XLA leaves the networks out
    action = apply_policy(policy, params, rollout.obs, rollout.memory)[0].env_action(rollout.action)
    flags = {"terminated": rollout.terminated, "truncated": rollout.truncated}
    following = jax.tree.map(lambda x, last: jnp.concatenate([x[1:], last[None]]), rollout.obs, last_obs)
    return rollout.obs, action, Timestep(obs=following, reward=rollout.reward, info=rollout.info, **flags)
