"""The teacher of a run that distils: another run's policy, an export's, or EmbodiChain's."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from pydantic import BaseModel, NonNegativeInt, ValidationError

from ejax.algorithms.record import Teacher
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, PolicyConfig, Problem, RunConfig
from ejax.config.explain import explain
from ejax.config.spaces import paths
from ejax.envs.description import EnvDescription, describe
from ejax.logs.json_records import FactsError, read_facts
from ejax.schema.frozen import thaw
from ejax.schema.registry import EXPORT, POLICY_READERS, did_you_mean, import_entry, is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_params, verify_checkpoint
from ejax.store.resume_rules import differences
from ejax.training.environments import sample_obs
from ejax.training.policies import build_policy
from ejax.training.warm_start import find_checkpoint
from ejax.types import Env, HostEnv, Params, Policy

_TEACHER = "algorithm.cfg.teacher"
_REMEDY = (
    "A teacher reads what it was trained on: give an environment whose observation has it, and "
    "algorithm.cfg.teacher_obs where it is a part of that."
)


class _Config(BaseModel):
    env: dict[str, Any]
    policy: dict[str, Any]


class _Origin(BaseModel):
    """The part of a checkpoint's meta that says what its policy is."""

    global_step: NonNegativeInt
    config: _Config


@dataclass(frozen=True)
class _Seen:
    """An environment as the teacher sees it: enough to make a policy for it."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    description: EnvDescription


def load_teacher(config: RunConfig, env: Env | HostEnv) -> tuple[Teacher, tuple[str, ...]]:
    """The teacher that ``algorithm.cfg`` names, and messages about it.

    Args:
        env: of the run, whose observation has all that the teacher reads.

    Raises:
        ConfigError: there is no such policy, it is damaged, or it reads or does what this environment has not.
    """
    options: Any = config.algorithm.cfg
    source, seen = Path(options.teacher), _seen(env, options.teacher_obs)
    foreign, exported = is_foreign_checkpoint(options.teacher), (Path(options.teacher) / EXPORT).is_file()
    if options.teacher_policy and not foreign:
        text = f"is for EmbodiChain's .pt, whose networks it names; {source} says itself what its are: leave it out"
        raise ConfigError([Problem("algorithm.cfg.teacher_policy", text)])
    notes: list[str] = []
    try:
        if foreign:
            policy, params = _from_pt(source, _policy_of(options.teacher_policy) or config.policy, seen)
        elif exported:
            policy, params = import_entry(POLICY_READERS, EXPORT)(source, seen)
        else:
            policy, params = _from_run(source, config, seen, notes)
    except ConfigError as error:
        text = "; ".join(f"{problem.key}: {problem.text}" for problem in error.problems)
        raise ConfigError([Problem(_TEACHER, f"the policy of {source} is not for this environment: {text}")]) from error
    except ImportError as error:
        text = f"{source} is read by interop: pip install -e '.[torch]' in ejax's folder ({error})"
        raise ConfigError([Problem(_TEACHER, text)]) from error
    except (CheckpointError, FactsError, OSError, TypeError, ValueError) as error:
        raise ConfigError([Problem(_TEACHER, str(error))]) from error
    return Teacher(policy, params, options.teacher_obs), (*notes, f"the teacher is that of {source}")


def check_teacher(config: RunConfig, now: RunState, saved: RunState) -> None:
    """Refuse to go on with another teacher than the one that a checkpoint was taught by.

    Args:
        now: the first state, with the teacher as it is found today.

    Raises:
        CheckpointError: its parameters differ.
    """
    if config.algorithm.record.with_teacher is None:
        return
    pairs = zip(jax.tree.leaves(now.own.params), jax.tree.leaves(saved.own.params), strict=True)
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
        source = getattr(config.algorithm.cfg, "teacher", None)
        raise CheckpointError(
            f"the teacher {source} is not the one that this run was started with: its parameters have changed. "
            "Put it back, or start a new run (policy.init_from takes this one's student); a checkpoint's folder, in "
            "place of a run's, names one that does not change"
        )


def _from_run(source: Path, config: RunConfig, seen: Any, notes: list[str]) -> tuple[Policy, Params]:
    path = find_checkpoint(source, notes)
    verify_checkpoint(path)
    meta = read_facts(path / "meta.json", _Origin)
    there = meta["config"]
    policy = build_policy(_policy_of(there["policy"]) or config.policy, seen)
    notes.append(f"{path} has learned from {meta['global_step']} steps")
    for key, before, now in differences(there["env"], config.to_dict()["env"], "env"):
        notes.append(f"{key} was {json.dumps(before)} for the teacher and is {json.dumps(now)} here")
    return policy, load_params(path, _shapes(policy, seen), remedy=_REMEDY)


def _from_pt(source: Path, config: PolicyConfig, seen: Any) -> tuple[Policy, Params]:
    policy = build_policy(config, seen)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), _shapes(policy, seen))
    return policy, import_entry(POLICY_READERS, ".pt")(source, policy, zeros)


def _shapes(policy: Policy, seen: Any) -> Params:
    return jax.eval_shape(policy.init, jax.random.key(0), sample_obs(seen, 1))


def _policy_of(section: Any) -> PolicyConfig | None:
    """The section ``policy`` of a config; None: it is empty. Code that it names has to be trusted.

    Raises:
        ConfigError: it is not as it should be.
    """
    tree = thaw(section)
    if not tree:
        return None
    try:
        return PolicyConfig.model_validate_json(json.dumps({"name": "actor_critic", **tree}), strict=True)
    except ValidationError as error:
        raise ConfigError([Problem(f"policy.{each.key}", each.text) for each in explain(error, tree)]) from error


def _seen(env: Env | HostEnv, path: str | None) -> Any:
    space = env.observation_space
    there = paths(space)
    if path is not None and path not in there:
        has = f"there is {', '.join(there)}" if there else "it is one array without parts: leave it out"
        text = f"'{path}' is no part of the observation; {has}{did_you_mean(path, there)}"
        raise ConfigError([Problem("algorithm.cfg.teacher_obs", text)])
    for name in path.split(".") if path else ():
        space = space[name]  # type: ignore[index]  # a Dict, as ``paths`` has seen
    return _Seen(space, env.action_space, describe(env))
