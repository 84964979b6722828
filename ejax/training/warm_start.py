"""A new run that does not start from nothing: from the policy of another one (``policy.init_from``), from all that
another one is (``--fork RUN``), or from where a training of another system stands (``--resume FILE.pt``)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel, NonNegativeInt

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.models import find_algorithm
from ejax.logs.json_records import FactsError, read_facts
from ejax.optim import scheduled_learning_rate, set_learning_rate
from ejax.schema.registry import CHECKPOINT_READERS, import_entry, is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint, load_params, verify_checkpoint
from ejax.store.resume_rules import differences
from ejax.store.run_dir import open_policy_run
from ejax.training.parts import Parts
from ejax.types import Params, start_from

_REPLACED = frozenset({"action_dim", "cfg", "init_from", "initial_log_std"})
"""Keys of ``policy`` that say nothing about a policy whose parameters are given."""


class _Algorithm(BaseModel):
    name: str


class _Config(BaseModel):
    algorithm: _Algorithm
    policy: dict[str, Any]


class _Origin(BaseModel):
    """The part of a checkpoint's meta that is compared with this run."""

    global_step: NonNegativeInt
    config: _Config


def start_from_file(
    file: Path, parts: Parts, config: RunConfig, *, policy_only: bool = False
) -> tuple[RunState, list[str]]:
    """The state in which another system's training stands, and messages about it.

    Args:
        parts: of ``build(config)``.
        policy_only: the policy alone, for a training from the start.

    Raises:
        CheckpointError: no such file, a damaged one, or one of another policy or optimizer; what reads it is missing.
    """
    try:
        read = import_entry(CHECKPOINT_READERS, Path(file).suffix)
    except ImportError as error:
        raise CheckpointError(
            f"{file} is read by interop: pip install -e '.[torch]' in ejax's folder ({error})"
        ) from error
    try:
        return read(file, config, parts, policy_only=policy_only)
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def start_from_run(checkpoint: Path, parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    """The whole state of another run's checkpoint, and messages about it.

    The learning rate is a number in that state: where this config has another one, or another schedule, it is this
    config's at that update.

    Raises:
        CheckpointError: the state has other arrays than this config's. ConfigError: the run would be over.
    """
    state, meta = load_checkpoint(checkpoint, parts.state)
    update = int(state.update)
    if update >= config.trainer.num_updates:
        key = "iterations" if config.trainer.total_timesteps is None else "total_timesteps"
        text = f"means {config.trainer.num_updates} updates, and {checkpoint} has {update} already; give more"
        raise ConfigError([Problem(f"trainer.{key}", text)])
    notes = [f"forked from {checkpoint}, after update {update}"]
    options: Any = config.algorithm.cfg
    saved = meta["config"]["algorithm"]["cfg"]
    now = options.model_dump(mode="json")
    if any(now.get(name) != saved.get(name) for name in ("optimizer", "lr_scheduler")) and config.data is None:
        rate = scheduled_learning_rate(options.optimizer.learning_rate, options.lr_scheduler, state.train.step)
        train = replace(state.train, opt_state=set_learning_rate(state.train.opt_state, rate))
        state, notes = replace(state, train=train), [*notes, f"the learning rate is {float(rate):.4g} from here on"]
    return state, notes


def start_from_policy(parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    """The first state of a run with the policy that ``policy.init_from`` names, and messages about it.

    Taken over are the parameters and the statistics of the normalizers; the optimizer is fresh, the step is 0. A
    reference, which ``kl_coef`` keeps the policy close to, is that policy as well.

    Args:
        parts: of ``build(config)``.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or its parameters have other names or shapes.
    """
    state, source = parts.state, config.policy.init_from
    if source is None:
        return _start_from_weights(parts, config)
    reports: list[str] = []
    try:
        if is_foreign_checkpoint(source):
            state, notes = start_from_file(Path(source), parts, config, policy_only=True)
            return state, [f"the policy is that of {source}", *notes]
        path = find_checkpoint(Path(source), reports)
        verify_checkpoint(path)
        meta = read_facts(path / "meta.json", _Origin)
        remedy = "The networks and normalizers under policy must be those of the checkpoint."
        params = _params_of(path, meta["config"]["policy"], config, parts, remedy)
    except (CheckpointError, FactsError, FileNotFoundError) as error:
        raise ConfigError([Problem("policy.init_from", str(error))]) from error
    train = start_from(state.train, params)
    cloned = find_algorithm(meta["config"]["algorithm"]["name"]).learns_from == "demonstrations"
    steps = "samples" if cloned else "env steps"
    reports.append(f"the policy is that of {path}, after {meta['global_step']} {steps}")
    there = meta["config"]["policy"]
    for key, before, now in differences(there, config.to_dict()["policy"], "policy"):
        if key.split(".")[1] not in _REPLACED and not key.endswith("orthogonal_init"):
            reports.append(f"{key} was {json.dumps(before)} there and is {json.dumps(now)} here")
    return replace(state, train=train), reports


def find_checkpoint(source: Path, reports: list[str]) -> Path:
    """``source`` itself, or of a run the best checkpoint, or the latest where there is no best.

    Of a population it is that of the best member.

    Args:
        source: a checkpoint's folder; a run's, or without the time at its end the newest run of that name.
        reports: is given messages about damaged ones.

    Raises:
        FileNotFoundError, CheckpointError: there is none.
    """
    if source.exists() and not (source / "checkpoints").is_dir():
        return source
    directory, _ = open_policy_run(source)
    return directory.find(None, reports.append)


def _params_of(path: Path, there: dict[str, Any], config: RunConfig, parts: Parts, remedy: str) -> Params:
    """The parameters of a checkpoint, as this policy has them: one with adapters takes over the policy that has none.

    Args:
        there: ``policy`` of the checkpoint's config.
    """
    policy: Any = parts.policy
    own = parts.state.train.params
    if _has_adapters(config.policy.model_dump(mode="json")) and not _has_adapters(there):
        like = jax.eval_shape(policy.merge, own)
        return policy.adopt(load_params(path, like, remedy=remedy), own)
    return load_params(path, own, remedy=remedy)


def _has_adapters(policy: dict[str, Any]) -> bool:
    """Recognize a ``policy`` section of a ``vla`` with ``lora``."""
    model = (policy.get("vla_config") or {}).get("model_config") or {}
    return model.get("lora") is not None


def _start_from_weights(parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    """The first state of a run, with the weights that ``policy.vla_config`` names, and messages about them."""
    if config.policy.vla_config is None:
        return parts.state, []
    from ejax.policies.pretrained.weights import WeightsError
    from ejax.policies.vla.loading import load_parts

    try:
        params, notes = load_parts(parts.policy, parts.state.train.params, config.policy.vla_config)
    except WeightsError as error:
        raise ConfigError([Problem("policy.vla_config", str(error))]) from error
    if not notes:
        return parts.state, []
    return replace(parts.state, train=start_from(parts.state.train, params)), notes
