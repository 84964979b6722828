"""A teacher's part in an algorithm: a loss that imitates it, PPO or GRPO with such a loss, and several teachers as one.

    L = L_algorithm + c·E[D(π_teacher, π)],    c = coef · schedule(update) · max(0, 1 − success/until_success)

with D one of ``imitation_terms`` and the expectation over what the policy has collected.
Source: Schmitt et al. 2018, "Kickstarting deep reinforcement learning".
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ejax.algorithms.batch import episode_starts
from ejax.algorithms.record import Algorithm, Teacher
from ejax.algorithms.teaching import DistillationConfig, Responsibility, TeachersConfig
from ejax.envs.host.rows import obs_forms
from ejax.numerics.episodes import EpisodeStats, episode_metrics, init_episode_stats, track_episodes
from ejax.optim import scheduled_learning_rate
from ejax.policies.calls import apply_policy, first_memory, forget
from ejax.policies.observations import flatten_observation, part_of
from ejax.schema.problems import ConfigError, Problem
from ejax.types import Array, Env, HostEnv, Key, Metrics, Params, Policy, PolicyWithMemory, PyTree, Rollout, TrainState


@struct.dataclass(kw_only=True)
class TeacherState:
    """The teacher, as ``RunState.own``."""

    params: Params
    memory: PyTree
    """Memory of the episodes under way, leaves [N, ...]; () for a teacher without memory."""
    episodes: EpisodeStats | None = None
    """By whose success the loss gets smaller. None: it does not."""


def imitation_terms(label: Any, distribution: Any) -> dict[str, Array]:
    """Compute how far a policy's distribution is from a teacher's, each [...]: ``nll``; ``kl`` of distributions of one
    kind; ``mse`` of numbers, ``agreement`` of choices."""
    action, own = label.env_action(label.mode()), distribution.mode()
    terms = {"nll": -distribution.log_prob(action)}
    if type(label) is type(distribution):
        terms["kl"] = label.kl(distribution)
    if jnp.issubdtype(action.dtype, jnp.floating):
        terms["mse"] = jnp.square(own - action).mean(axis=-1)
    else:
        rows = terms["nll"].shape
        terms["agreement"] = (own == action).reshape(*rows, -1).mean(axis=-1)
    return terms


def distillation_terms(batch: Any, distribution: Any, options: DistillationConfig) -> dict[str, Array]:
    """Compute a minibatch's ``imitation_terms`` and, of the one chosen, ``distillation_loss`` with its weight."""
    if "label" not in batch:
        raise ValueError("distillation needs a teacher, which only a run loads; leave it out, or call ejax.run.train")
    terms = {f"teacher_{name}": x for name, x in imitation_terms(batch["label"], distribution).items()}
    return terms | {"distillation_loss": batch["label_weight"] * terms[f"teacher_{options.loss}"]}


def make_taught(record: Algorithm, teacher: Teacher) -> Algorithm:
    """Return the record of an algorithm whose options have ``distillation``, with the teacher that it imitates."""
    update = partial(taught_update, update=record.update, resets=record.resets, teacher=teacher)
    make_own = partial(make_teacher_state, teacher=teacher, key="algorithm.cfg.distillation")
    return replace(record, update=update, make_own=make_own)


def taught_update(
    state: tuple[TrainState, TeacherState],
    rollout: Rollout,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: Any,
    update: Any,
    resets: Any,
    teacher: Teacher,
) -> tuple[tuple[TrainState, TeacherState], Metrics]:
    """Make an ``update`` whose minibatches have the teacher's ``label``, and ``label_weight``, the coefficient."""
    (train, own), options = state, config.distillation
    first = episode_starts(rollout)
    if resets(config).restart:
        first = first.at[0].set(True)
    known = {"first": first} if isinstance(teacher.policy, PolicyWithMemory) else {}
    label, _, memory = apply_policy(teacher.policy, own.params, seen_by(rollout.obs, teacher.obs), own.memory, **known)
    own = replace(own, memory=forget(teacher.policy, memory, rollout.done[-1]))
    if own.episodes is not None:
        if "success" not in rollout.info:
            text = f"got {options.until_success}, but the environment reports no success; leave it out"
            raise ConfigError([Problem("algorithm.cfg.distillation.until_success", text)])
        steps = rollout.reward, rollout.done, rollout.info["success"]
        episodes = track_episodes(own.episodes, *steps, rollout.valid)
        own = replace(own, episodes=episodes)
    coef = distillation_coef(options, train.step, own.episodes)
    taught = {"label": label, "label_weight": jnp.full_like(rollout.reward, coef)}
    train, metrics = update(
        train,
        replace(rollout, info={"taught": taught}),
        key,
        policy=policy,
        optimizer=optimizer,
        config=config,
        columns=_taught_columns,
    )
    return (train, own), metrics | {"distillation_coef": coef}


def distillation_coef(options: DistillationConfig, num_updates: Array, episodes: EpisodeStats | None) -> Array:
    """Compute the weight of the teacher's loss after ``num_updates`` updates, float32 scalar."""
    coef = scheduled_learning_rate(options.coef, options.schedule, num_updates)
    if options.until_success is None or episodes is None:
        return coef
    success = jnp.nan_to_num(episode_metrics(episodes)["charts/success_rate_avg_100"])
    return coef * jnp.maximum(0.0, 1.0 - success / options.until_success)


def _taught_columns(rollout: Rollout) -> Any:
    return rollout.info["taught"]


def make_teacher_state(
    options: Any, policy: Policy, env: Env | HostEnv, num_envs: int, *, teacher: Teacher, key: str
) -> TeacherState:
    """Make the teacher's state. ConfigError: a loss that student and teacher lack."""
    section = options if isinstance(options, TeachersConfig) else options.distillation
    if problems := list(loss_problems(policy, env, teacher, section, key)):
        raise ConfigError(problems)
    by_success = getattr(section, "until_success", None) is not None
    return TeacherState(
        params=teacher.params,
        memory=first_memory(teacher.policy, num_envs),
        episodes=init_episode_stats(num_envs) if by_success else None,
    )


def loss_problems(
    policy: Policy, env: Env | HostEnv, teacher: Teacher, options: TeachersConfig, key: str
) -> Iterator[Problem]:
    """Report a loss, of the section ``key``, that the student's and the teacher's distributions do not have."""
    obs = obs_forms(env, 1)
    params = jax.eval_shape(policy.init, jax.random.key(0), obs)
    own = distribution_form(policy, params, obs)
    theirs = distribution_form(teacher.policy, teacher.params, obs, teacher.obs)
    if own.is_flow:
        text = "got a policy with a flow head, which no loss of distill supports; use another head"
        yield Problem("policy.vla_config", text)
    elif options.loss == "kl" and type(own) is not type(theirs):
        kinds = f"the student's is {type(own).__name__}, the teacher's {type(theirs).__name__}"
        text = f"got 'kl', but the distributions are of two kinds: {kinds}; use nll, or another policy.squash_actions"
        yield Problem(f"{key}.loss", text)
    elif options.loss == "mse" and not jnp.issubdtype(own.mode().dtype, jnp.floating):
        text = f"got 'mse', but the environment's actions are choices: {env.action_space}; use kl or nll"
        yield Problem(f"{key}.loss", text)


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
