"""Begin with what another run learned: its policy, or all of its state.

``policy.init_from`` names a policy to start with, ``--fork RUN`` a whole state, and ``--resume FILE.pt`` the state of a
training of another system.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ejax.algorithms.record import find_algorithm
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.logs.json_records import FactsError
from ejax.optim import OptimizerConfig, scheduled_learning_rate, set_learning_rate
from ejax.schema.registry import CHECKPOINT_READERS, import_entry, is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint, load_params, load_policy_arrays, verify_checkpoint
from ejax.store.resume_rules import differences
from ejax.store.run_dir import RunMeta, open_policy_run
from ejax.training.parts import Parts
from ejax.types import Params, start_from

_REPLACED = frozenset({"action_dim", "cfg", "init_from", "initial_log_std"})
"""Keys of ``policy`` that do not matter if parameters are given."""


def start_from_file(
    file: Path, parts: Parts, config: RunConfig, *, policy_only: bool = False
) -> tuple[RunState, list[str]]:
    """Read the state in which another system's training stands, with messages about it.

    ``policy_only``: the policy alone, for a training from the start.

    Raises:
        CheckpointError: no such file, a damaged one, or one of another policy or optimizer; a missing reader.
    """
    try:
        read = import_entry(CHECKPOINT_READERS, Path(file).suffix)
    except ImportError as error:
        raise CheckpointError(read_by_interop(file, error)) from error
    try:
        return read(file, config, parts, policy_only=policy_only)
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def read_by_interop(file: Path, error: ImportError) -> str:
    return f"{file} is read by interop: pip install -e '.[torch]' in ejax's folder ({error})"


def start_from_run(checkpoint: Path, parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    """Read the whole state of another run's checkpoint, with messages about it. The learning rate in it becomes this
    config's at that update, if rate or schedule differ, and so do demonstrations.

    Raises:
        CheckpointError: the state has other arrays than this config's.
        ConfigError: the run would be over; the demonstrations do not fit.
    """
    more: list[str] = []
    if config.algorithm.record.add_demonstrations is None:
        state, meta = load_checkpoint(checkpoint, parts.state)
    else:
        from ejax.training.demonstrations import load_fork  # brings the data wing, which no other run needs

        state, meta, more = load_fork(checkpoint, config, parts)
    update = int(state.update)
    if update >= config.trainer.num_updates:  # it would end without an update
        key = "iterations" if config.trainer.total_timesteps is None else "total_timesteps"
        text = f"means {config.trainer.num_updates} updates, and {checkpoint} has {update} already; use more"
        raise ConfigError([Problem(f"trainer.{key}", text)])
    notes = [f"forked from {checkpoint}, after update {update}", *more]
    state, more = set_rates(state, config, meta)
    return state, [*notes, *more]


def set_rates(state: RunState, config: RunConfig, meta: Mapping[str, Any]) -> tuple[RunState, list[str]]:
    """Set the learning rates of a checkpoint's state to this config's at its update, if rates or schedule differ."""
    options: Any = config.algorithm.cfg
    saved = meta["config"]["algorithm"]["cfg"]
    now = options.model_dump(mode="json")
    names = ("optimizer", "critic_optimizer", "lr_scheduler")
    if all(now.get(name) == saved.get(name) for name in names) or config.data is not None:
        return state, []

    def rate_of(optimizer: OptimizerConfig) -> jax.Array:
        return scheduled_learning_rate(optimizer.learning_rate, options.lr_scheduler, state.train.step)

    # the optimizer's state holds the rate that it stood at
    opt_state = set_learning_rate(state.train.opt_state, rate := rate_of(options.optimizer))
    if "critic_optimizer" in now:
        opt_state |= {"critic": set_learning_rate(opt_state["critic"], rate_of(options.critic_optimizer))}
    state = replace(state, train=replace(state.train, opt_state=opt_state))
    return state, [f"the learning rate is {float(rate):.4g} from here on"]


def start_from_policy(parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    """Begin with the policy that ``policy.init_from`` names, if any, and the demonstrations that
    ``algorithm.cfg.demonstrations`` does: the first state, and messages about it.

    Parameters and normalizers' statistics are taken over, for a ``kl_coef`` reference as well; the optimizer is fresh,
    the step 0.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or its parameters have other names or shapes; the same
            of demonstrations.
    """
    state, reports = _take_policy(parts, config)
    more: list[str] = []
    if config.algorithm.record.add_demonstrations is not None:
        from ejax.training.demonstrations import add_demonstrations  # brings the data wing, which no other run needs

        state, more = add_demonstrations(state, config, parts.env)
    return state, [*reports, *more]


def _take_policy(parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    state, source = parts.state, config.policy.init_from
    if source is None:
        return _start_from_weights(parts, config)
    reports: list[str] = []
    try:
        if is_foreign_checkpoint(source):
            state, notes = start_from_file(Path(source), parts, config, policy_only=True)
            return state, [f"the policy is that of {source}", *notes]
        path, meta = open_checkpoint(Path(source), reports)
        params = _params_of(path, meta["config"]["policy"], config, parts)
    except (CheckpointError, FactsError, FileNotFoundError) as error:
        raise ConfigError([Problem("policy.init_from", str(error))]) from error
    train = start_from(state.train, params)  # with a fresh optimizer: moments would be of other gradients
    cloned = find_algorithm(meta["config"]["algorithm"]["name"]).learns_from == "demonstrations"
    steps = "samples" if cloned else "env steps"
    reports.append(f"the policy is that of {path}, after {meta['global_step']} {steps}")
    there = meta["config"]["policy"]
    if config.policy.record.load_actor is not None and there.get("name") != config.policy.name:
        reports.append(config.policy.record.loaded_actor_note(squashed=there.get("squash_actions", False)))
    for key, before, now in differences(there, config.to_dict()["policy"], "policy"):
        if key.split(".")[1] not in _REPLACED and not key.endswith("orthogonal_init"):
            reports.append(f"{key} was {json.dumps(before)} there and is {json.dumps(now)} here")
    return replace(state, train=train), reports


def find_checkpoint(source: Path, reports: list[str]) -> Path:
    """Find ``source`` itself, or of a run the best checkpoint, else the latest; of a population, the best member's.

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


def open_checkpoint(source: Path, reports: list[str]) -> tuple[Path, dict[str, Any]]:
    """Find a checkpoint as ``find_checkpoint`` does, check its files, and read its meta."""
    path = find_checkpoint(source, reports)
    meta = verify_checkpoint(path, RunMeta)
    if not {"algorithm", "env", "policy"} <= meta["config"].keys():
        raise CheckpointError(f"checkpoint {path} has no config of a run")
    return path, meta


def _params_of(path: Path, there: dict[str, Any], config: RunConfig, parts: Parts) -> Params:
    """Read the parameters of a checkpoint, as this policy has them: one with adapters takes over one without."""
    policy: Any = parts.policy
    own, remedy = parts.state.train.params, "The networks and normalizers under policy must be those of the checkpoint."
    load_actor = config.policy.record.load_actor
    if load_actor is not None and there.get("name") in ("actor_critic", "actor_only"):
        try:
            saved = load_policy_arrays(path)
            return load_actor(policy, own, saved, squashed=there.get("squash_actions", False))
        except ValueError as error:
            raise CheckpointError(f"{path} is not for this policy: {error}. {remedy}") from error
    if not _has_adapters(config.policy.model_dump(mode="json")) or _has_adapters(there):
        return load_params(path, own, remedy=remedy)
    # weights without adapters have the shapes of merged ones
    return policy.adopt(load_params(path, jax.eval_shape(policy.merge, own), remedy=remedy), own)


def _has_adapters(policy: dict[str, Any]) -> bool:
    model = (policy.get("vla_config") or {}).get("model_config") or {}
    return model.get("lora") is not None or bool(model.get("frozen"))


def _start_from_weights(parts: Parts, config: RunConfig) -> tuple[RunState, list[str]]:
    """Begin with the weights that ``policy.vla_config`` names, if any: the first state, and messages about them."""
    if config.policy.vla_config is None:
        return parts.state, []
    from ejax.policies.pretrained.weights import WeightsError
    from ejax.policies.vla.policy import load_parts

    try:
        params, notes = load_parts(parts.policy, parts.state.train.params, config.policy.vla_config)
    except WeightsError as error:
        raise ConfigError([Problem("policy.vla_config", str(error))]) from error
    if not notes:
        return parts.state, []
    return replace(parts.state, train=start_from(parts.state.train, params)), notes
