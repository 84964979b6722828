"""Evaluation without a bias to short episodes: slot i plays its share of ``num_episodes``, however long
the others take (EmbodiChain counts the first that finish). An episode with an observation, action or reward that was
not finite is not a success, even if ``info`` has one. An episode that continues when the evaluation ends counts with
what it has until there, as if it were cut by a time limit."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.actions import action_form, to_action
from ejax.episodes import act, episodes
from ejax.numerics.finite import NONFINITE_EPISODES, finite_rows
from ejax.policies.calls import forget
from ejax.rollout import EnvCarry, reset, step, with_memory
from ejax.types import Array, Env, HostEnv, Key, Metrics, Params, Policy

_UNLIMITED = 10_000
"""Steps that an episode of an environment without a time limit gets; where none has ended by then, no more are made."""
UNFINISHED_EPISODES = "eval/unfinished_episodes"
"""Tag of the episodes of an evaluation that did not end, or were never begun since others did not."""
REPEATED_EPISODES = "eval/repeated_episodes"
"""Tag of the episodes of an evaluation that began and went as its first one did."""
_ALIKE = 1e-3  # relative difference of two returns of one episode, in two rows of a product


@functools.partial(jax.jit, static_argnames=("policy", "env", "num_envs", "num_episodes", "choice", "samples"))
def evaluate(
    policy: Policy,
    env: Env,
    params: Params,
    key: Key,
    *,
    num_envs: int,
    num_episodes: int,
    choice: Literal["fixed", "first_finished"] = "fixed",
    samples: bool = False,
) -> dict[str, Array]:
    """Play ``num_episodes`` complete episodes with the distribution's mode. The same key gives the same start states.
    Raises ValueError: a count that is not positive.

    Args:
        num_envs: slots that are stepped together; slots without a share of the episodes are not made.
        choice: each slot's share counts (``fixed``), or, with EmbodiChain's bias, ``first_finished``.
        samples: act by samples of the distribution, as in training.

    Returns:
        ``return``, ``length``, ``nonfinite`` (1 where something in the episode was not finite), ``unfinished`` (1
        where it did not end), ``same_start`` (1 where its first observation was that of slot 0's first episode) and,
        where the env reports them, ``success`` and ``metrics/<name>`` (scalars only, at the last step): each
        [num_episodes]; NaN where an episode was not begun because those before it did not end.
    """
    if num_envs <= 0 or num_episodes <= 0:
        raise ValueError(f"evaluate needs num_envs > 0 and num_episodes > 0, got {num_envs} and {num_episodes}")
    if choice == "fixed":
        num_envs = min(num_envs, num_episodes)
    quota = _quotas(num_envs, num_episodes, choice)
    limit = env.max_episode_steps or _UNLIMITED
    most_steps = limit * int(quota.max())
    key_reset, key_steps = jax.random.split(key)

    def rows_of(ends: Array, count: Array) -> Array:
        chosen = ends & (count < quota)
        # a slot's episodes follow on each other, or all are in the order of their ends
        fixed = count + (np.cumsum(quota) - quota)
        return jnp.where(chosen, fixed if choice == "fixed" else count.sum() + jnp.cumsum(chosen) - 1, num_episodes)

    def play(now: _Progress) -> tuple[EnvCarry, dict[str, Array]]:
        # not by ``decide``: in one program with the reset of single rows, which costs nothing while none ends
        key = jax.random.fold_in(key_steps, now.t)
        action, remembered = act(policy, params, now.envs.obs, now.envs.memory, key, samples=samples)
        envs, timestep = step(env, now.envs, to_action(action_form(env.action_space), action, jnp), key)
        healthy = now.healthy & finite_rows(now.envs.obs, action, timestep.reward, timestep.final_obs)
        facts = _facts(timestep.info, now.total + timestep.reward, now.length + 1.0, healthy, now.same_start, jnp)
        envs = replace(envs, memory=forget(policy, remembered, timestep.done))
        return envs, facts | {"unfinished": ~timestep.done}

    def one_step(now: _Progress) -> _Progress:
        envs, facts = play(now)
        done = ~facts["unfinished"]
        cut = (now.t + 1 == most_steps) | ((now.t + 1 == limit) & ~(done | (now.count > 0)).any())
        row = rows_of(done | cut, now.count)
        return _Progress(
            envs=envs,
            total=jnp.where(done, 0.0, facts["return"]),
            length=jnp.where(done, 0.0, facts["length"]),
            healthy=~facts["nonfinite"] | done,
            same_start=jnp.where(done, _rows_equal(envs.obs, first, jnp), now.same_start),
            count=now.count + done,
            record={name: x.at[row].set(facts[name].astype(x.dtype), mode="drop") for name, x in now.record.items()},
            t=now.t + 1,
            cut=cut,
        )

    envs = with_memory(reset(env, key_reset, num_envs), policy)
    first = jax.tree.map(lambda x: x[0], envs.obs)
    start = _Progress(
        envs=envs,
        total=jnp.zeros(num_envs),
        length=jnp.zeros(num_envs),
        healthy=jnp.ones(num_envs, bool),
        same_start=_rows_equal(envs.obs, first, jnp),
        count=jnp.zeros(num_envs, jnp.int32),
        record={},
        t=jnp.zeros((), jnp.int32),
        cut=jnp.zeros((), bool),
    )
    start = replace(start, record=dict.fromkeys(jax.eval_shape(play, start)[1], jnp.full(num_episodes, jnp.nan)))
    with jax.named_scope("env_steps"):
        return jax.lax.while_loop(lambda now: jnp.isnan(now.record["length"]).any() & ~now.cut, one_step, start).record


@struct.dataclass(kw_only=True)
class _Progress:
    envs: EnvCarry
    total: Array
    length: Array
    healthy: Array
    """Everything in the episode was finite."""
    same_start: Array
    count: Array
    """Episodes that ended."""
    record: dict[str, Array]
    """[num_episodes] each; NaN where the episode has not ended."""
    t: Array
    cut: Array
    """The evaluation ends here: episodes under way count as they are."""


def _rows_equal(obs: Any, first: Any, numpy: Any) -> Any:
    """Compare each row of ``obs``, leaves [N, ...], with ``first``, leaves [...]; [N] bool."""
    leaves = zip(jax.tree.leaves(obs), jax.tree.leaves(first), strict=True)
    rows = [(numpy.asarray(x) == y[None]).reshape(len(x), -1).all(axis=1) for x, y in leaves]
    return functools.reduce(numpy.logical_and, rows)


def _facts(info: dict[str, Any], total: Any, length: Any, healthy: Any, same_start: Any, numpy: Any) -> dict[str, Any]:
    facts = {f"metrics/{name}": x for name, x in info.get("metrics", {}).items() if x.ndim == 1}
    if "success" in info:
        facts["success"] = numpy.where(healthy, info["success"], numpy.minimum(info["success"], 0.0))
    return facts | {"return": total, "length": length, "nonfinite": ~healthy, "same_start": same_start}


def evaluate_host(
    policy: Policy,
    env: HostEnv,
    params: Params,
    seed: int,
    *,
    num_episodes: int,
    choice: Literal["fixed", "first_finished"] = "fixed",
    samples: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Play as ``evaluate``, but an environment outside JAX: the same episodes count, with the same results. ``seed`` is
    of the start states; the environment is reset. Raises ValueError: ``num_episodes`` is not positive."""
    if num_episodes <= 0:
        raise ValueError(f"evaluate_host needs num_episodes > 0, got {num_episodes}")
    num_envs = env.num_envs
    quota = _quotas(num_envs, num_episodes, choice)
    total, length, count = np.zeros(num_envs), np.zeros(num_envs), np.zeros(num_envs, int)
    healthy = np.ones(num_envs, bool)
    record: dict[str, list[float]] = {}
    # one more than the limit: a reset may take a step
    limit = env.max_episode_steps + 1 if env.max_episode_steps else _UNLIMITED
    most_steps = limit * int(quota.max())
    decisions = episodes(policy, env, params, seed, samples=samples)
    starts = next(decisions).obs
    first = jax.tree.map(lambda x: np.array(x[0]), starts)  # copies: the environment may overwrite its arrays
    same_start = _rows_equal(starts, first, np)
    for t, made in enumerate(islice(decisions, most_steps), 1):
        timestep, valid = made.timestep, made.timestep.info.get("valid", np.ones(num_envs, bool))
        healthy &= made.finite
        total, length = total + timestep.reward * valid, length + valid
        done = timestep.terminated | timestep.truncated
        facts = _facts(timestep.info, total, length, healthy, same_start, np)
        cut = t == most_steps or (t == limit and not (done | (count > 0)).any())
        facts["unfinished"] = ~done
        for row in np.flatnonzero(((done & made.played) | (cut & (length > 0))) & (count < quota)):
            for name, values in facts.items():
                record.setdefault(name, []).append(float(values[row]))
            count[row] += 1
        if cut or count.sum() >= num_episodes:
            break
        total, length = np.where(done, 0.0, total), np.where(done, 0.0, length)
        healthy |= done
        same_start = np.where(done, _rows_equal(timestep.obs, first, np), same_start)
    missing = num_episodes - len(record.get("return", []))
    success = record.get("success", [])
    if not np.isnan(success).all():  # an end without it counts as none, next to others
        record["success"] = np.nan_to_num(success, nan=0.0).tolist()
    always = {"return", "length", "nonfinite", "unfinished", "same_start"}
    names = {name for name, values in record.items() if not np.isnan(values).all()} | always
    return {name: np.array([*record.get(name, []), *[np.nan] * missing][:num_episodes], np.float32) for name in names}


def _quotas(num_envs: int, num_episodes: int, choice: str) -> NDArray[np.int64]:
    if choice == "first_finished":
        return np.full(num_envs, num_episodes)
    return np.full(num_envs, num_episodes // num_envs) + (np.arange(num_envs) < num_episodes % num_envs)


def summarize(episodes: Mapping[str, Any]) -> Metrics:
    """Average results [E] of ``evaluate`` under EmbodiChain's tags, over the episodes that were begun, and count those
    that were not finite, did not end, or repeat the first."""
    tags = {"return": "eval/avg_reward", "length": "eval/avg_length", "success": "eval/success_rate"}
    numpy: Any = jnp if isinstance(episodes["length"], jax.Array) else np
    begun = ~numpy.isnan(episodes["length"])
    counted = ("nonfinite", "unfinished", "same_start")
    values = {tags.get(name, f"eval/{name}"): x for name, x in episodes.items() if name not in counted}
    # a mean over all numbers, since one over some is rounded otherwise
    means = {tag: numpy.where(begun, x, x.mean(where=begun)).mean() for tag, x in values.items()}
    unfinished = episodes.get("unfinished", ~begun)  # a caller's own columns may lack it; NaN where not begun
    # by the outcome as well: episodes may differ in what the first observation does not show
    pairs = [(x, x[0]) for x in (episodes["return"], episodes["length"])]
    alike = [abs(x - one) <= _ALIKE * abs(one) for x, one in pairs] + [episodes.get("same_start", 0.0) == 1.0]
    return means | {
        NONFINITE_EPISODES: (episodes["nonfinite"] > 0).sum(),
        UNFINISHED_EPISODES: (unfinished != 0).sum(),
        REPEATED_EPISODES: numpy.asarray(functools.reduce(numpy.logical_and, alike))[1:].sum(),
    }


def count_episodes(metrics: Mapping[str, Any], num_episodes: int) -> int:
    """Count the episodes that say something, by ``summarize``: one where all others repeat the first."""
    return 1 if metrics.get(REPEATED_EPISODES) == num_episodes - 1 else num_episodes


def evaluation_notes(metrics: Mapping[str, Any], num_episodes: int) -> list[str]:
    """Name the remedy for episodes of an evaluation that did not end, or are all the same one, by its ``summarize``."""
    notes, count = [], int(metrics.get(UNFINISHED_EPISODES, 0))
    if count:
        all_of = f"no episode ended within {metrics['eval/avg_length']:,.0f} steps"
        what = all_of if count == num_episodes else f"{count} of {num_episodes} episodes did not end, or did not begin"
        remedy = "set a time limit: max_episode_steps, or gymnasium.wrappers.TimeLimit"
        notes.append(f"evaluation: {what}; those under way count with what they have; {remedy}")
    if count_episodes(metrics, num_episodes) < num_episodes:
        remedy = "let episodes start at different places, as by env.cfg.reset_range"
        notes.append(f"evaluation: all {num_episodes} episodes began and went alike, and count as one; {remedy}")
    return notes
