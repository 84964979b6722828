"""Episodes of ``algorithm.cfg.demonstrations`` as the rollout that an algorithm takes its transitions from.

A step that only ends the episode, by a limit, is left out: what came after it was not recorded. After one that ends the
task nothing has a value, and its own observation takes the place of the next.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejax.algorithms.demonstrations import SECTION, DemonstrationConfig
from ejax.algorithms.replay_buffer import Replay
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.data.samplers import attempt_seeds
from ejax.data.task import Episode, NoSuccessError, attempts, flatten, nest_fields
from ejax.envs.host.rows import obs_forms
from ejax.numerics.finite import finite_rows
from ejax.schema.frozen import thaw
from ejax.schema.messages import explain
from ejax.schema.registry import resolve
from ejax.store.checkpoint import load_checkpoint, verify_checkpoint
from ejax.training.fields import check_bounds, open_kept, read_array, read_observation
from ejax.training.parts import Parts
from ejax.types import Env, HostEnv, PyTree, Rollout

_MOST_FAILURES = 100
"""Attempts in a row without a success, after which a task is given up."""


def add_demonstrations(state: RunState, config: RunConfig, env: Env | HostEnv) -> tuple[RunState, list[str]]:
    """Fill in the demonstrations that a config names, if any: the state, and a message about them.

    Raises:
        ConfigError: too few of them, without rewards, or not of this environment's observations and actions.
    """
    options: Any = config.algorithm.cfg
    add = config.algorithm.record.add_demonstrations
    if add is None or options.demonstrations is None:
        return state, []
    rollout, note = read_rollout(options.demonstrations, env, config.env.cfg, num_padded=options.replay.n_step - 1)
    return replace(state, own=add(options, state.own, rollout)), [note]


def load_fork(checkpoint: Path, config: RunConfig, parts: Parts) -> tuple[RunState, dict[str, Any], list[str]]:
    """Load another run's state and meta with the demonstrations that a config names, if any, and messages about them.

    Where both name the same (``share`` may differ), they are the checkpoint's.

    Raises:
        CheckpointError: the rest of the state has other arrays. ConfigError: as ``add_demonstrations``.
    """
    own, wanted = parts.state.own, getattr(config.algorithm.cfg, "demonstrations", None)
    saved = verify_checkpoint(checkpoint)["config"]["algorithm"]["cfg"].get("demonstrations")
    there = None if saved is None else _empty_ring(own.replay, saved["num_transitions"])
    state, meta = load_checkpoint(checkpoint, replace(parts.state, own=replace(own, demonstrations=there)))
    here = None if wanted is None else wanted.model_dump(mode="json") | {"share": None}
    if here == (None if saved is None else saved | {"share": None}):
        return state, meta, []
    notes = [] if saved is None else [f"the demonstrations of {checkpoint} are left out"]
    empty = own.demonstrations
    if saved is not None and empty is not None:
        # rows are counted on: a save would take new ones for those that it has already, and link them
        empty = replace(empty, added=state.own.demonstrations.added)
    state, more = add_demonstrations(replace(state, own=replace(state.own, demonstrations=empty)), config, parts.env)
    return state, meta, [*notes, *more]


def _empty_ring(replay: Replay, num_transitions: int) -> Replay:
    """Return the form of demonstrations next to a replay buffer."""

    def form(x: Any) -> Any:
        return jax.ShapeDtypeStruct((len(x), num_transitions // len(x), *x.shape[2:]), x.dtype)

    no_tail = jax.tree.map(lambda x: x[:, :0], replay.tail)
    return replace(replay, rows=jax.tree.map(form, replay.shapes), tail=no_tail)


def read_rollout(
    wanted: DemonstrationConfig, env: Env | HostEnv, env_cfg: Mapping[str, Any], *, num_padded: int
) -> tuple[Rollout, str]:
    """Make or read as many episodes as have ``num_transitions``, in a row, leaves [T, 1, ...]; and a message.

    ``num_padded``: steps at the end that are not transitions.
    """
    source = wanted.task if wanted.folder is None else wanted.folder
    form, parts, num_transitions = obs_forms(env, 1), list[PyTree](), 0
    for episode in _recorded(wanted.folder) if wanted.folder else _played(wanted, env_cfg):
        parts.append(_steps_of(episode, wanted, form, env.action_space))
        num_transitions += int(parts[-1]["valid"].sum())
        if num_transitions >= wanted.num_transitions:
            break
    else:
        text = f"got {wanted.num_transitions}, but the {len(parts)} episodes in {source} have {num_transitions}"
        raise ConfigError([Problem(f"{SECTION}.num_transitions", f"{text}; use at most that, or record more")])
    mean = sum(part["reward"].sum() for part in parts) / len(parts)
    steps = jax.tree.map(lambda *x: np.concatenate(x)[:, None], *parts)
    padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros((num_padded, *x.shape[1:]), x.dtype)]), steps)
    unknown = np.zeros_like(padded["reward"])  # nobody asks how likely the actions were
    text = f"{wanted.num_transitions} transitions of {source} lie next to the replay buffer, of {len(parts)} episodes"
    note = f"{text} with a mean return {mean:.4g}"
    return Rollout(**padded, log_prob=unknown, value=unknown, next_value=unknown), note


def _recorded(folder: str) -> Iterator[Episode]:
    reader = open_kept("episodes", folder, SECTION)
    for i in reader.training:
        yield reader[i]


def _played(wanted: DemonstrationConfig, env_cfg: Mapping[str, Any]) -> Iterator[Episode]:
    """Let the task demonstrate, with the seeds that a recording would have."""
    made = _make_task(wanted, env_cfg)
    with made if isinstance(made, AbstractContextManager) else nullcontext(made) as task:
        try:
            for _, episodes, _ in attempts(task.generate, attempt_seeds(wanted.seed), _MOST_FAILURES):
                yield from episodes
        except NoSuccessError as error:
            raise ConfigError([Problem(f"{SECTION}.task", f"{wanted.task}: {error}")]) from error


def _make_task(wanted: DemonstrationConfig, env_cfg: Mapping[str, Any]) -> Any:
    try:
        make, cfg = resolve("task", str(wanted.task)), thaw(wanted.task_cfg)
        if "env" in inspect.signature(make).parameters:
            cfg = {"env": thaw(env_cfg)} | cfg
        return make(**cfg)
    except ImportError as error:
        raise ConfigError([Problem(f"{SECTION}.task", str(error))]) from error
    except (TypeError, ValueError) as error:
        text = f"{wanted.task} refuses it: {explain(error)} (its env is env.cfg where task_cfg has none)"
        raise ConfigError([Problem(f"{SECTION}.task_cfg", text)]) from error


def _steps_of(episode: Episode, wanted: DemonstrationConfig, form: PyTree, space: Any) -> dict[str, PyTree]:
    """Make the steps of an episode: fields of a rollout, leaves [T, ...]."""
    fields = nest_fields({path: np.asarray(x)[None] for path, x in flatten(episode.frames).items()})
    obs = read_observation(fields, form, wanted, SECTION)
    obs = jax.tree.map(lambda x, like: _cast(x[0], like.dtype, wanted.obs_field, "obs_field"), obs, form)
    action = read_array(fields, wanted.action_field, f"{SECTION}.action_field")[0]
    _check_actions(action, space)
    remedy = "; a task's environment gives them: name task in place of folder, or record with rewards"
    reward = read_array(fields, wanted.reward_field, f"{SECTION}.reward_field", remedy)[0]
    if reward.size != len(action):
        text = f"'{wanted.reward_field}' is {list(reward.shape[1:])}, and a step has one reward; name another field"
        raise ConfigError([Problem(f"{SECTION}.reward_field", text)])
    steps = {
        "obs": obs,
        "action": np.float32(action),
        "reward": np.float32(reward.reshape(-1)),
        "next_obs": jax.tree.map(lambda x: np.concatenate([x[1:], x[-1:]]), obs),
    }
    last = np.arange(len(action)) == len(action) - 1
    truncated = last & (not episode.terminated)
    valid = finite_rows(*steps.values(), numpy=np) & ~truncated
    return {**steps, "terminated": last & episode.terminated, "truncated": truncated, "valid": valid}


def _cast(array: Any, dtype: Any, path: str, key: str) -> Any:
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        text = f"'{path}' is of {array.dtype}, the environment's observation of {dtype}; name what fits"
        raise ConfigError([Problem(f"{SECTION}.{key}", text)])
    return array.astype(dtype)


def _check_actions(action: Any, space: Any) -> None:
    if action.shape[1:] != space.shape:
        text = f"the demonstrated actions are {list(action.shape[1:])}, the environment's {list(space.shape)}"
        raise ConfigError([Problem(f"{SECTION}.action_field", f"{text}; name what fits")])
    check_bounds(action, space, f"{SECTION}.action_field")
