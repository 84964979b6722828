"""The teacher that a run distils: a policy of another run, of EmbodiChain's file, or of an export."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejax.algorithms.record import Teacher
from ejax.algorithms.step import RunState
from ejax.algorithms.taught import Committee, distribution_form, seen_by
from ejax.algorithms.teaching import TeacherConfig
from ejax.config import ConfigError, PolicyConfig, Problem, RunConfig
from ejax.config.environment import paths
from ejax.config.load import parse_policy
from ejax.envs.description import describe
from ejax.envs.host.rows import obs_forms
from ejax.logs.json_records import FactsError
from ejax.policies.observations import flatten_observation
from ejax.schema.frozen import thaw
from ejax.schema.messages import did_you_mean
from ejax.schema.paths import find
from ejax.schema.registry import EXPORT, POLICY_READERS, import_entry, is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_params
from ejax.store.resume_rules import differences
from ejax.training.environments import sample_obs
from ejax.training.policies import Spaces, make_policy
from ejax.training.warm_start import open_checkpoint, read_by_interop
from ejax.types import Env, HostEnv, Params, Policy

_TEACHER_REMEDY = (
    "A teacher reads what it was trained on: use an environment whose observation has it, and "
    "set teacher_obs beside its name where it is a part of that."
)


def load_teacher(config: RunConfig, env: Env | HostEnv) -> tuple[Teacher, tuple[str, ...]]:
    """Load the teacher that the algorithm's options name, for the run's ``env``, with messages about it; of several,
    all of them as one.

    Raises:
        ConfigError: there is no such policy, it is damaged, or it reads or does what this environment has not; several
            that act in different ways; a responsibility by numbers that the observation lacks.
    """
    options: Any = config.algorithm.record.taught(config.algorithm.cfg)
    key = "algorithm.cfg" if options is config.algorithm.cfg else "algorithm.cfg.distillation"
    if not options.teachers:
        return _load_one(options, key, config, env)
    loaded = [_load_one(each, f"{key}.teachers.{i}", config, env) for i, each in enumerate(options.teachers)]
    teachers, obs = [teacher for teacher, _ in loaded], obs_forms(env, 1)
    kinds = [type(distribution_form(*each[:2], obs, each.obs)).__name__ for each in teachers]
    if len(set(kinds)) > 1:
        text = f"have distributions of several kinds: {', '.join(kinds)}; use teachers that squash alike"
        raise ConfigError([Problem(f"{key}.teachers", text)])
    for i, each in enumerate(options.teachers[:-1]):
        when, place = each.when, f"{key}.teachers.{i}.when"
        _seen(env, when.obs, f"{place}.obs")
        (width,) = jax.eval_shape(lambda obs, part=when.obs: flatten_observation(seen_by(obs, part)), obs).shape[1:]
        if max(when.entries, default=0) >= width:
            text = f"got {list(when.entries)}, but {when.obs or 'the observation'} has the numbers 0 to {width - 1}"
            raise ConfigError([Problem(f"{place}.entries", text)])
    members = zip(teachers, options.teachers, strict=True)
    policy: Any = Committee(tuple((teacher.policy, teacher.obs, each.when) for teacher, each in members))
    params = tuple(teacher.params for teacher in teachers)
    return Teacher(policy, params), tuple(note for _, notes in loaded for note in notes)


def _load_one(
    options: TeacherConfig, key: str, config: RunConfig, env: Env | HostEnv
) -> tuple[Teacher, tuple[str, ...]]:
    named = str(options.teacher)
    source, seen = Path(named), _seen(env, options.teacher_obs, f"{key}.teacher_obs")
    foreign, exported, key = is_foreign_checkpoint(named), (source / EXPORT).is_file(), f"{key}.teacher"
    if options.teacher_policy and not foreign:
        text = f"is for EmbodiChain's .pt, whose networks it names; {source} describes its own: leave it out"
        raise ConfigError([Problem(f"{key}_policy", text)])
    notes: list[str] = []
    try:
        if foreign:
            policy = make_policy(_policy_of(options.teacher_policy) or config.policy, seen)
            # the reader fills in arrays of these shapes
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), _shapes(policy, seen))
            params = import_entry(POLICY_READERS, ".pt")(source, policy, zeros)
        elif exported:
            policy, params = import_entry(POLICY_READERS, EXPORT)(source, seen)
        else:
            path, meta = open_checkpoint(source, notes)
            there = meta["config"]
            policy = make_policy(_policy_of(there["policy"]) or config.policy, seen)
            notes.append(f"{path} has learned from {meta['global_step']} steps")
            for changed, before, now in differences(there["env"], config.to_dict()["env"], "env"):
                notes.append(f"{changed} was {json.dumps(before)} for the teacher and is {json.dumps(now)} here")
            params = load_params(path, _shapes(policy, seen), remedy=_TEACHER_REMEDY)
    except ConfigError as error:
        text = "; ".join(f"{problem.key}: {problem.text}" for problem in error.problems)
        raise ConfigError([Problem(key, f"the policy of {source} is not for this environment: {text}")]) from error
    except ImportError as error:
        raise ConfigError([Problem(key, read_by_interop(source, error))]) from error
    except (CheckpointError, FactsError, OSError, TypeError, ValueError) as error:
        raise ConfigError([Problem(key, str(error))]) from error
    return Teacher(policy, params, options.teacher_obs), (*notes, f"the teacher is that of {source}")


def check_teacher(config: RunConfig, now: RunState, saved: RunState) -> None:
    """Raise CheckpointError if the teacher of ``now``, as found today, differs from the checkpoint's."""
    pairs = zip(jax.tree.leaves(now.own.params), jax.tree.leaves(saved.own.params), strict=True)
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
        options = config.algorithm.record.taught(config.algorithm.cfg)
        source = options.teacher or ", ".join(str(each.teacher) for each in options.teachers)
        raise CheckpointError(
            f"the teacher {source} is not the one that this run was started with: its parameters have changed. "
            "Put it back, or start a new run (policy.init_from takes this one's student); a checkpoint's folder, in "
            "place of a run's, names one that does not change"
        )


def _shapes(policy: Policy, seen: Any) -> Params:
    return jax.eval_shape(policy.init, jax.random.key(0), sample_obs(seen, 1))


def _policy_of(section: Any) -> PolicyConfig | None:
    """Read the section ``policy`` of a config; None: empty. Code in it has to be trusted; ConfigError if invalid."""
    return parse_policy({"name": "actor_critic", **thaw(section)}) if section else None


def _seen(env: Env | HostEnv, path: str | None, key: str) -> Any:
    space = env.observation_space
    there = paths(space)
    if path is not None and path not in there:
        has = f"there is {', '.join(there)}" if there else "it is one array without parts: leave it out"
        text = f"'{path}' is not a part of the observation; {has}{did_you_mean(path, there)}"
        raise ConfigError([Problem(key, text)])
    part: Any = find(space, path) if path else space
    return Spaces(part, env.action_space, describe(env))
