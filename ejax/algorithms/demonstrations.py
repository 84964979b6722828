"""Demonstrations next to a replay buffer: a fixed part of each minibatch is drawn from demonstrated transitions.

Source: Ball et al. 2023, "Efficient online reinforcement learning with offline data" (RLPD), whose halves are ``share``
0.5. Its critics normalize their layers: ``policy.critic.network_cfg.use_layernorm``.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from ejax.algorithms.replay_buffer import Replay, Transition, add_rollout, init_replay, sample_rows, take_rows
from ejax.schema.frozen import Kwargs, PathText, StrictModel
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Rollout

SECTION = "algorithm.cfg.demonstrations"


def _trusted_task(name: str) -> str:
    from ejax.schema.registry import trusted_name  # with all that names code, which a config alone has

    return trusted_name("task", name)


class DemonstrationConfig(StrictModel):
    """``algorithm.cfg.demonstrations``: made, or read, before the first update, and kept in the run's checkpoints."""

    num_transitions: PositiveInt
    """Transitions that are kept, of as many episodes as have them; on several devices each has its part."""
    share: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Part of each minibatch that is drawn from them."""
    task: Annotated[str, AfterValidator(_trusted_task)] | None = None
    """Demonstrating task, as in ``data.engine.task``: failed attempts are left out."""
    task_cfg: Kwargs = Field(default_factory=FrozenDict)
    """Arguments of the task. The fields of its environment, ``env``, are ``env.cfg`` where this has none."""
    folder: PathText | None = None
    """In place of ``task``: a LeRobot v3.0 dataset, with rewards."""
    seed: NonNegativeInt = 0
    """Seed of the task's attempts."""
    obs_field: str = "obs"
    """Path of what the policy sees, as in ``data.obs_field``."""
    obs_parts: Kwargs = Field(default_factory=FrozenDict)
    """Paths of single parts of the observation, as in ``data.obs_parts``."""
    action_field: str = "actions"
    """Path of the actions that were carried out: the rewards are theirs."""
    reward_field: str = "rewards"
    """Path of the rewards, which must be those of the run's environment."""

    def num_rows(self, batch_size: int) -> int:
        """Count the rows of a minibatch that are demonstrated."""
        return round(self.share * batch_size)


def demonstration_problems(wanted: DemonstrationConfig, batch_size: int) -> Iterator[Problem]:
    """Find options that contradict each other, or the minibatches."""
    if (wanted.task is None) == (wanted.folder is None):
        yield Problem(SECTION, "needs a task that demonstrates, or a folder of episodes; set one of the two")
    if wanted.task is None and wanted.task_cfg:
        yield Problem(f"{SECTION}.task_cfg", "holds arguments of a task, and there is none; leave it out")
    if not 0 < wanted.num_rows(batch_size) < batch_size:
        text = f"got {wanted.share}, which is {wanted.num_rows(batch_size)} rows of algorithm.cfg.batch_size"
        yield Problem(f"{SECTION}.share", f"{text} {batch_size}; both parts need at least one")


def fill_demonstrations(options: Any, own: Any, rollout: Rollout) -> Any:
    """Fill ``own.demonstrations``, an empty ring, with the first transitions of demonstrations in a row.

    Args:
        rollout: leaves [T, 1, ...]. It has the transitions that fill the ring, and ends with n_step − 1 steps that are
            not ``valid``.
    """
    kept: Replay = own.demonstrations
    num_strata, capacity = kept.shapes.discount.shape
    form = jax.tree.map(lambda x: x[0], (rollout.obs, rollout.action))
    made = init_replay(options.replay.replace(capacity=len(rollout.reward), storage="device"), *form)
    made = jax.jit(partial(add_rollout, gamma=options.gamma))(made, rollout)

    def part(page: Array) -> Array:
        return page[0, : num_strata * capacity].reshape(num_strata, capacity, *page.shape[2:])

    rows, size = jax.tree.map(part, made.rows), jnp.full_like(kept.size, capacity)
    added = kept.added + size.astype(kept.added.dtype)
    return replace(own, demonstrations=replace(kept, rows=rows, size=size, added=added))


def sample_own(replay: Replay, key: Key, batch_size: int, wanted: DemonstrationConfig | None) -> Array:
    """Draw the rows of a minibatch that are not demonstrated, as ``sample_rows``."""
    if wanted is None:
        return sample_rows(replay, key, batch_size)
    return sample_rows(replay, jax.random.split(key)[0], batch_size - wanted.num_rows(batch_size))


def draw_minibatch(
    replay: Replay,
    demonstrations: Replay | None,
    key: Key,
    batch_size: int,
    wanted: DemonstrationConfig | None,
    rows: Array | None = None,
) -> Transition:
    """Draw a minibatch, leaves [B, ...]: the demonstrated rows are the last of each stratum. ``rows``: numbers of the
    others, where they were drawn before."""
    own = take_rows(replay, sample_own(replay, key, batch_size, wanted) if rows is None else rows)
    if demonstrations is None or wanted is None:
        return own
    num_strata, num_rows = replay.size.shape[0], wanted.num_rows(batch_size)
    key_demonstrated = jax.random.split(key)[1]
    parts = own, take_rows(demonstrations, sample_rows(demonstrations, key_demonstrated, num_rows))

    def join(*x: Array) -> Array:
        both = jnp.concatenate([each.reshape(num_strata, -1, *each.shape[1:]) for each in x], axis=1)
        return both.reshape(-1, *both.shape[2:])

    return jax.tree.map(join, *parts)
