"""Deterministic evaluation without a bias to short episodes.

Which episodes count is fixed beforehand: slot i plays its share of ``num_episodes``, whatever the others do. Counting
the first episodes to finish, as EmbodiChain does, favours the short ones.

An episode in which an observation, an action or a reward was not finite is no success, whatever the environment says.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.numerics.finite import NONFINITE_EPISODES, finite_rows
from ejax.policies.calls import apply_policy, check_obs, first_memory, forget, forget_outside
from ejax.rollout import EnvCarry, reset, step, with_memory
from ejax.types import Array, Env, HostEnv, Key, Metrics, Params, Policy, PyTree

_UNLIMITED = 10_000
"""Steps that an episode of an environment without a time limit gets; one that goes on is NaN in the results."""


@partial(jax.jit, static_argnames=("policy", "env", "num_envs", "num_episodes", "choice"))
def evaluate(
    policy: Policy,
    env: Env,
    params: Params,
    key: Key,
    *,
    num_envs: int,
    num_episodes: int,
    choice: Literal["fixed", "first_finished"] = "fixed",
) -> dict[str, Array]:
    """Play ``num_episodes`` complete episodes with the distribution's mode.

    Args:
        num_envs: slots that are stepped together; slots without a share of the episodes are not made.
        key: the same key gives the same start states.
        choice: which episodes count: each slot's share (``fixed``), or EmbodiChain's biased ``first_finished``.

    Returns:
        ``return``, ``length``, ``nonfinite`` (1 where something in the episode was not finite) and, where the env
        reports them, ``success`` and ``metrics/<name>`` (scalars only, at the last step): each [num_episodes].

    Raises:
        ValueError: a count that is not positive.
    """
    if num_envs <= 0 or num_episodes <= 0:
        raise ValueError(f"evaluate needs num_envs > 0 and num_episodes > 0, got {num_envs} and {num_episodes}")
    if choice == "fixed":
        num_envs = min(num_envs, num_episodes)
    quota = _shares(num_envs, num_episodes)
    first_row = np.concatenate([[0], np.cumsum(quota)[:-1]])
    longest = env.max_episode_steps or _UNLIMITED
    most_steps = longest * (int(quota.max()) if choice == "fixed" else num_episodes)
    key_reset, key_steps = jax.random.split(key)
    envs = with_memory(reset(env, key_reset, num_envs), policy)

    def facts_of(envs: EnvCarry, key: Key) -> tuple[EnvCarry, Array, Array, Array, dict[str, Array]]:
        distribution, _, remembered = apply_policy(policy, params, envs.obs, envs.memory)
        action, obs = distribution.mode(), envs.obs
        envs, timestep = step(env, envs, action, key)
        envs = replace(envs, memory=forget(policy, remembered, timestep.terminated | timestep.truncated))
        finite = finite_rows(obs, action, timestep.reward, timestep.final_obs)
        facts = {f"metrics/{name}": x for name, x in timestep.info.get("metrics", {}).items() if x.ndim == 1}
        if "success" in timestep.info:
            facts["success"] = timestep.info["success"]
        facts = {name: x.astype(jnp.float32) for name, x in facts.items()}
        return envs, timestep.reward, timestep.terminated | timestep.truncated, finite, facts

    def rows_of(chosen: Array, count: Array) -> Array:
        """In the results; a row past their end is dropped."""
        row = first_row + count if choice == "fixed" else count.sum() + jnp.cumsum(chosen) - 1
        return jnp.where(chosen, row, num_episodes)

    names = ["return", "length", "nonfinite", *jax.eval_shape(facts_of, envs, key)[-1]]
    record = {name: jnp.full(num_episodes, jnp.nan) for name in names}
    zeros = jnp.zeros(num_envs)
    healthy, count = jnp.ones(num_envs, bool), jnp.zeros(num_envs, jnp.int32)
    carry = (envs, zeros, zeros, healthy, count, record, jnp.zeros((), jnp.int32))

    def unfinished(carry: PyTree) -> Array:
        *_, count, _, t = carry
        missing = (count < quota).any() if choice == "fixed" else count.sum() < num_episodes
        return missing & (t < most_steps)

    def one_step(carry: PyTree) -> PyTree:
        envs, episode_return, length, healthy, count, record, t = carry
        envs, reward, done, finite, facts = facts_of(envs, jax.random.fold_in(key_steps, t))
        healthy &= finite
        facts |= {"return": episode_return + reward, "length": length + 1.0, "nonfinite": 1.0 - healthy}
        if "success" in facts:
            facts["success"] = jnp.where(healthy, facts["success"], jnp.minimum(facts["success"], 0.0))
        row = rows_of(done & (count < quota) if choice == "fixed" else done, count)
        record = {name: x.at[row].set(facts[name], mode="drop") for name, x in record.items()}
        running = (jnp.where(done, 0.0, facts["return"]), jnp.where(done, 0.0, facts["length"]), healthy | done)
        return envs, *running, count + done, record, t + 1

    with jax.named_scope("env_steps"):
        *_, healthy, count, record, _ = jax.lax.while_loop(unfinished, one_step, carry)
    # of an episode that never ended there is no more to be said
    row = rows_of(~healthy & (count < quota) if choice == "fixed" else ~healthy, count)
    return record | {"nonfinite": record["nonfinite"].at[row].set(1.0, mode="drop")}


def evaluate_host(
    policy: Policy,
    env: HostEnv,
    params: Params,
    seed: int,
    *,
    num_episodes: int,
    choice: Literal["fixed", "first_finished"] = "fixed",
) -> dict[str, NDArray[np.float32]]:
    """``evaluate`` for an environment outside JAX: the same episodes count, with the same results.

    Args:
        seed: of the start states; the environment is reset.

    Raises:
        ValueError: ``num_episodes`` is not positive.
    """
    if num_episodes <= 0:
        raise ValueError(f"evaluate_host needs num_episodes > 0, got {num_episodes}")
    num_envs = env.num_envs
    quota = _shares(num_envs, num_episodes)
    longest = env.max_episode_steps or _UNLIMITED
    # one more for each episode: a reset may take a step of its own
    most_steps = (longest + 1) * (int(quota.max()) if choice == "fixed" else num_episodes)
    obs = env.reset(np.random.SeedSequence(seed).generate_state(num_envs).astype(np.uint32))
    memory = first_memory(policy, num_envs)
    total, length, count = np.zeros(num_envs), np.zeros(num_envs), np.zeros(num_envs, int)
    healthy = np.ones(num_envs, bool)
    record: dict[str, list[float]] = {}
    for _ in range(most_steps):
        wanting = count < quota if choice == "fixed" else np.full(num_envs, count.sum() < num_episodes)
        if not wanting.any():
            break
        check_obs(policy, obs)
        mode, memory = _mode(policy, params, obs, memory)
        action = np.asarray(mode)
        timestep = env.step(action)
        valid = timestep.info.get("valid", np.ones(num_envs, bool))
        broken = timestep.info.get("nonfinite", np.zeros(num_envs, bool))
        healthy &= finite_rows(obs, action, timestep.reward, timestep.final_obs, numpy=np) & ~broken
        total, length = total + timestep.reward * valid, length + valid
        done = timestep.terminated | timestep.truncated
        memory = forget_outside(policy, memory, done | ~valid)
        facts = {f"metrics/{name}": x for name, x in timestep.info.get("metrics", {}).items() if x.ndim == 1}
        if "success" in timestep.info:
            success = timestep.info["success"]
            facts["success"] = np.where(healthy, success, np.minimum(success, 0.0))
        facts |= {"return": total, "length": length, "nonfinite": ~healthy}
        for row in np.flatnonzero(done & (valid | broken) & wanting):
            for name, values in facts.items():
                record.setdefault(name, []).append(float(values[row]))
            count[row] += 1
        total, length, obs = np.where(done, 0.0, total), np.where(done, 0.0, length), timestep.obs
        healthy |= done
    missing = num_episodes - len(record.get("return", []))
    names = {name for name, values in record.items() if not np.isnan(values).all()} | {"return", "length", "nonfinite"}
    return {name: np.array([*record.get(name, []), *[np.nan] * missing][:num_episodes], np.float32) for name in names}


@partial(jax.jit, static_argnames="policy")
def _mode(policy: Policy, params: Params, obs: PyTree, memory: PyTree) -> tuple[Array, PyTree]:
    distribution, _, remembered = apply_policy(policy, params, obs, memory)
    return distribution.mode(), remembered


def _shares(num_envs: int, num_episodes: int) -> NDArray[np.int64]:
    """[num_envs]: how many of the episodes are each environment's."""
    return np.full(num_envs, num_episodes // num_envs) + (np.arange(num_envs) < num_episodes % num_envs)


def summarize(episodes: Mapping[str, Any]) -> Metrics:
    """Means over the episodes, under EmbodiChain's tags, and the number of those that were not finite throughout.

    Args:
        episodes: from ``evaluate``, [E] each.
    """
    tags = {"return": "eval/avg_reward", "length": "eval/avg_length", "success": "eval/success_rate"}
    means = {tags.get(name, f"eval/{name}"): x.mean() for name, x in episodes.items() if name != "nonfinite"}
    return means | {NONFINITE_EPISODES: (episodes["nonfinite"] > 0).sum()}
