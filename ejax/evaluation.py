"""Deterministic evaluation without a bias to short episodes: slot i plays its share of ``num_episodes``, however long
the others take (EmbodiChain counts the first that finish). An episode with an observation, action or reward that was
not finite is no success, even if ``info`` has one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.actions import action_form, to_action
from ejax.numerics.finite import NONFINITE_EPISODES, finite_rows
from ejax.policies.calls import apply_policy, check_obs, first_memory, forget, forget_outside
from ejax.rollout import EnvCarry, reset, step, with_memory
from ejax.types import Array, Env, HostEnv, Key, Metrics, Params, Policy, PyTree

# steps that an episode of an environment without a time limit gets; one that goes on is NaN in the results
_UNLIMITED = 10_000


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
    """Play ``num_episodes`` complete episodes with the distribution's mode. The same key gives the same start states.
    Raises ValueError: a count that is not positive.

    Args:
        num_envs: slots that are stepped together; slots without a share of the episodes are not made.
        choice: each slot's share counts (``fixed``), or, with EmbodiChain's bias, ``first_finished``.

    Returns:
        ``return``, ``length``, ``nonfinite`` (1 where something in the episode was not finite) and, where the env
        reports them, ``success`` and ``metrics/<name>`` (scalars only, at the last step): each [num_episodes].
    """
    if num_envs <= 0 or num_episodes <= 0:
        raise ValueError(f"evaluate needs num_envs > 0 and num_episodes > 0, got {num_envs} and {num_episodes}")
    if choice == "fixed":
        num_envs = min(num_envs, num_episodes)
    quota = _quotas(num_envs, num_episodes, choice)
    most_steps = (env.max_episode_steps or _UNLIMITED) * int(quota.max())
    key_reset, key_steps = jax.random.split(key)
    play = partial(_play, policy, env, params, key_steps)

    def rows_of(ends: Array, count: Array) -> Array:
        chosen = ends & (count < quota)
        # a slot's episodes follow on each other, or all are in the order of their ends
        fixed = count + (np.cumsum(quota) - quota)
        return jnp.where(chosen, fixed if choice == "fixed" else count.sum() + jnp.cumsum(chosen) - 1, num_episodes)

    def one_step(now: _Progress) -> _Progress:
        envs, done, facts = play(now)
        row = rows_of(done, now.count)
        return _Progress(
            envs=envs,
            total=jnp.where(done, 0.0, facts["return"]),
            length=jnp.where(done, 0.0, facts["length"]),
            healthy=~facts["nonfinite"] | done,
            count=now.count + done,
            record={name: x.at[row].set(facts[name].astype(x.dtype), mode="drop") for name, x in now.record.items()},
            t=now.t + 1,
        )

    start = _first_progress(with_memory(reset(env, key_reset, num_envs), policy), num_envs)
    start = replace(start, record=dict.fromkeys(jax.eval_shape(play, start)[-1], jnp.full(num_episodes, jnp.nan)))
    with jax.named_scope("env_steps"):
        end = jax.lax.while_loop(
            lambda now: jnp.isnan(now.record["length"]).any() & (now.t < most_steps), one_step, start
        )
    # an episode that never ended has no other result than that it was not finite
    row = rows_of(~end.healthy, end.count)
    return end.record | {"nonfinite": end.record["nonfinite"].at[row].set(1.0, mode="drop")}


def _first_progress(envs: EnvCarry, num_envs: int) -> "_Progress":
    zeros = jnp.zeros(num_envs)
    return _Progress(
        envs=envs,
        total=zeros,
        length=zeros,
        healthy=jnp.ones(num_envs, bool),
        count=jnp.zeros(num_envs, jnp.int32),
        record={},
        t=jnp.zeros((), jnp.int32),
    )


@struct.dataclass(kw_only=True)
class _Progress:
    envs: EnvCarry
    total: Array
    length: Array
    healthy: Array
    """Everything in the episode was finite."""
    count: Array
    """Episodes that ended."""
    record: dict[str, Array]
    """[num_episodes] each; NaN where the episode has not ended."""
    t: Array


def _play(
    policy: Policy, env: Env, params: Params, key: Key, now: _Progress
) -> tuple[EnvCarry, Array, dict[str, Array]]:
    action, remembered = _mode(policy, params, now.envs.obs, now.envs.memory)
    given = to_action(action_form(env.action_space), action, jnp)
    envs, timestep = step(env, now.envs, given, jax.random.fold_in(key, now.t))
    healthy = now.healthy & finite_rows(now.envs.obs, action, timestep.reward, timestep.final_obs)
    facts = _facts(timestep.info, now.total + timestep.reward, now.length + 1.0, healthy, jnp)
    return replace(envs, memory=forget(policy, remembered, timestep.done)), timestep.done, facts


def _facts(info: dict[str, Any], total: Any, length: Any, healthy: Any, numpy: Any) -> dict[str, Any]:
    facts = {f"metrics/{name}": x for name, x in info.get("metrics", {}).items() if x.ndim == 1}
    if "success" in info:
        facts["success"] = numpy.where(healthy, info["success"], numpy.minimum(info["success"], 0.0))
    return facts | {"return": total, "length": length, "nonfinite": ~healthy}


def evaluate_host(
    policy: Policy,
    env: HostEnv,
    params: Params,
    seed: int,
    *,
    num_episodes: int,
    choice: Literal["fixed", "first_finished"] = "fixed",
) -> dict[str, NDArray[np.float32]]:
    """Play as ``evaluate``, but an environment outside JAX: the same episodes count, with the same results. ``seed`` is
    of the start states; the environment is reset. Raises ValueError: ``num_episodes`` is not positive."""
    if num_episodes <= 0:
        raise ValueError(f"evaluate_host needs num_episodes > 0, got {num_episodes}")
    num_envs, form = env.num_envs, action_form(env.action_space)
    quota = _quotas(num_envs, num_episodes, choice)
    obs = env.reset(np.random.SeedSequence(seed).generate_state(num_envs).astype(np.uint32))
    memory = first_memory(policy, num_envs)
    total, length, count = np.zeros(num_envs), np.zeros(num_envs), np.zeros(num_envs, int)
    healthy = np.ones(num_envs, bool)
    record: dict[str, list[float]] = {}
    # one more for each episode: a reset may take a step of its own
    for _ in range(((env.max_episode_steps or _UNLIMITED) + 1) * int(quota.max())):
        check_obs(policy, obs)
        mode, memory = _mode(policy, params, obs, memory)
        action = np.asarray(mode)
        timestep = env.step(to_action(form, action))
        valid = timestep.info.get("valid", np.ones(num_envs, bool))
        broken = timestep.info.get("nonfinite", np.zeros(num_envs, bool))
        healthy &= finite_rows(obs, action, timestep.reward, timestep.final_obs, numpy=np) & ~broken
        total, length = total + timestep.reward * valid, length + valid
        done = timestep.terminated | timestep.truncated
        memory = forget_outside(policy, memory, done | ~valid)
        facts = _facts(timestep.info, total, length, healthy, np)
        for row in np.flatnonzero(done & (valid | broken) & (count < quota)):
            for name, values in facts.items():
                record.setdefault(name, []).append(float(values[row]))
            count[row] += 1
        if count.sum() >= num_episodes:
            break
        total, length, obs = np.where(done, 0.0, total), np.where(done, 0.0, length), timestep.obs
        healthy |= done
    missing = num_episodes - len(record.get("return", []))
    names = {name for name, values in record.items() if not np.isnan(values).all()} | {"return", "length", "nonfinite"}
    return {name: np.array([*record.get(name, []), *[np.nan] * missing][:num_episodes], np.float32) for name in names}


@partial(jax.jit, static_argnames="policy")
def _mode(policy: Policy, params: Params, obs: PyTree, memory: PyTree) -> tuple[Array, PyTree]:
    distribution, _, remembered = apply_policy(policy, params, obs, memory)
    return distribution.mode(), remembered


def _quotas(num_envs: int, num_episodes: int, choice: str) -> NDArray[np.int64]:
    if choice == "first_finished":
        return np.full(num_envs, num_episodes)
    return np.full(num_envs, num_episodes // num_envs) + (np.arange(num_envs) < num_episodes % num_envs)


def summarize(episodes: Mapping[str, Any]) -> Metrics:
    """Average results [E] of ``evaluate`` under EmbodiChain's tags, and count the episodes that were not finite."""
    tags = {"return": "eval/avg_reward", "length": "eval/avg_length", "success": "eval/success_rate"}
    means = {tags.get(name, f"eval/{name}"): x.mean() for name, x in episodes.items() if name != "nonfinite"}
    return means | {NONFINITE_EPISODES: (episodes["nonfinite"] > 0).sum()}
