"""The state of a run as the content of EmbodiChain's checkpoint, and back; see ``ejax embodichain``."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.optim import ScheduleConfig, bind_schedule, get_learning_rate, scheduled_learning_rate, set_learning_rate
from ejax.policies import ActorCritic, ActorOnly, NetworkConfig
from ejax.policies.actor_q import ActorQ, load_actor_from, loaded_actor_note
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.training.parts import Parts, rows_per_update
from ejax.types import Params, Policy, start_from
from interop.checkpoints.file import PtFile, bound_to, load_content, log_std_range, read_pt, scheduler_state
from interop.checkpoints.optimizer_state import opt_state_from_torch, torch_optimizer_state
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params
from interop.exporters.entries import StateDict
from interop.exporters.mlp import actor_only
from interop.twin.networks import ACTIVATIONS

PtLayout = Literal["0.3", "head", "seed"]
_STD_RANGE_0_3 = (1e-6, 1e6)
"""The default ``action_std_range`` of EmbodiChain 0.3's ActorCritic."""


def pt_payload(
    config: RunConfig,
    parts: Parts,
    state: RunState,
    meta: dict[str, Any],
    *,
    layout: PtLayout = "0.3",
    like: Path | None = None,
) -> dict[str, Any]:
    """Make the content of EmbodiChain's checkpoint, with NumPy arrays where the file has tensors. See ``export_pt``.
    ``meta``: the ejax checkpoint's: ``global_step``, ``num_updates``, ``best_eval_value``."""
    if like is not None and layout != "0.3":
        raise ValueError(f"like is for layout 0.3, got '{layout}'")
    algorithm = config.algorithm.record
    if algorithm.keeps_target and layout != "seed":
        text = f"EmbodiChain has no {config.algorithm.name}: layout '{layout}' has no place for its target critic and"
        raise ValueError(f"{text} second optimizer; use layout seed (the policy alone), or ejax export")
    clamp = _clamp_of(parts.policy, layout, like)
    policy = _exported(parts.policy, state.train.params, layout, clamp)
    payload: dict[str, Any] = {"global_step": meta["global_step"], "policy": policy}
    if layout == "seed":
        return payload
    options: Any = config.algorithm.cfg
    schedule = bind_schedule(options.lr_scheduler, config.trainer.num_updates)
    optimizer = torch_optimizer_state(parts.policy, state.train.opt_state, options.optimizer)
    if schedule.name is not None:
        optimizer["param_groups"][0]["initial_lr"] = options.optimizer.learning_rate
    payload |= {"best_eval_value": meta["best_eval_value"], "optimizer": optimizer}
    rate = float(get_learning_rate(state.train.opt_state))
    lr_scheduler = scheduler_state(schedule, options.optimizer.learning_rate, rate, int(state.train.step))
    if lr_scheduler is not None or layout == "0.3":
        kwargs = {"name": schedule.name, "kwargs": dict(schedule.kwargs)}
        payload |= {"lr_scheduler": lr_scheduler, "lr_scheduler_cfg": kwargs}
    # EmbodiChain has another trainer, with its own schema, for algorithms with the environment in their program
    differentiable = algorithm.update is None and algorithm.with_teacher is None
    if differentiable:
        payload["schema_version"] = 1
    if layout == "0.3" or differentiable:
        payload["num_updates"] = meta["num_updates"]
    if layout == "0.3":
        payload["restart_schedule"] = False
        if state.train.reference is not None:
            payload["ref_policy"] = _exported(parts.policy, state.train.reference, layout, clamp)
    if like is not None:
        payload |= bound_to(like, policy, seed=config.trainer.seed + meta["num_updates"])
    return payload


def read_state(file: Path, config: RunConfig, parts: Parts, *, policy_only: bool = False) -> tuple[RunState, list[str]]:
    """Read the state that ``--resume FILE.pt`` and ``policy.init_from: FILE.pt`` start from; see ``restore``."""
    return restore(read_pt(file), config, parts, policy_only=policy_only)


def read_policy(file: Path, policy: Policy, params: Params) -> Params:
    """Read the parameters of the policy in EmbodiChain's file, as this policy has them. ``params``: of the policy, in
    whose shapes they have to be. Raises ValueError: the file is of another policy."""
    saved = read_pt(file)
    _check_activations(saved, policy)
    return _imported(policy, params, saved.policy, saved.log_std_range)


def restore(saved: PtFile, config: RunConfig, parts: Parts, *, policy_only: bool = False) -> tuple[RunState, list[str]]:
    """Make the run state that EmbodiChain's checkpoint describes, and notes on the missing parts. ``parts``: of
    ``build(config)``. Raises ValueError: see ``import_pt``."""
    if config.algorithm.record.keeps_target and not policy_only:
        name = config.algorithm.name
        text = f"EmbodiChain has no {name}, so no file continues its training; start one: policy.init_from=FILE.pt"
        raise ValueError(text)
    options: Any = config.algorithm.cfg
    notes = []
    if policy_only and isinstance(parts.policy, ActorQ):
        params, notes = _adopted(parts.policy, parts.state.train.params, saved), [loaded_actor_note(squashed=False)]
    else:
        params = _imported(parts.policy, parts.state.train.params, saved.policy, saved.log_std_range)
        _check_activations(saved, parts.policy)
    train = start_from(parts.state.train, params)
    if train.reference is not None and saved.reference is not None and not policy_only:
        reference = _imported(parts.policy, params, saved.reference, saved.log_std_range)
        train = replace(train, reference=reference)
    if saved.ranks_differ:
        notes.append(f"the normalizers of the file's {saved.world_size} ranks differ; taken are those of its policy")
    if policy_only:
        return replace(parts.state, train=train), notes
    rows = rows_per_update(config, parts)
    update, rest = divmod(saved.global_step, rows)
    if update >= 2**31:
        text = f"'global_step' {saved.global_step} is {update} updates of {rows} env steps; 31 bits count them"
        raise ValueError(text)
    # the schedule's own count, if any, decides the rate; older files have the env steps alone
    step = next(n for n in (saved.schedule_step, saved.num_updates, update) if n is not None)
    schedule = bind_schedule(options.lr_scheduler, config.trainer.num_updates)
    notes += _schedule_notes(saved, schedule) + _option_notes(saved, options)
    notes += _size_notes(saved, parts.num_devices, rows, update)
    if rest:
        notes.append(
            f"{saved.global_step} env steps are not a whole number of updates, of {rows} each; "
            f"counting continues from {saved.global_step - rest}"
        )
    if saved.optimizer is None:
        notes.append("the file has no optimizer state: the optimizer's moments start at zero")
        rate = scheduled_learning_rate(options.optimizer.learning_rate, schedule, jnp.asarray(step))
        opt_state = set_learning_rate(train.opt_state, rate)
    else:
        opt_state = opt_state_from_torch(parts.policy, params, saved.optimizer, options.optimizer)
    train = replace(train, step=jnp.asarray(step, jnp.int32), opt_state=jax.tree.map(jnp.asarray, opt_state))
    return replace(parts.state, update=jnp.asarray(update, jnp.int32), train=train), notes


def _clamp_of(policy: Policy, layout: PtLayout, like: Path | None) -> tuple[float, float]:
    """Return the clamp of log_std in the EmbodiChain that reads this layout."""
    if like is not None:
        return log_std_range(load_content(like).get("metadata"))
    # 0.3 made the clamp an option of ActorCritic alone
    separate = layout == "0.3" and isinstance(policy, ActorCritic)
    return log_std_range({"policy_attributes": {"action_std_range": _STD_RANGE_0_3}} if separate else None)


def _exported(policy: Policy, params: Params, layout: PtLayout, clamp: tuple[float, float]) -> StateDict:
    """Make the state_dict, with log_std as the policy uses it: EmbodiChain may clamp it to another range."""
    normal_policy = _normal_policy(policy)
    state_dict = state_dict_from_params(policy, params)
    log_std = np.clip(state_dict["log_std"], *normal_policy.log_std_range)
    if not np.array_equal(np.clip(log_std, *clamp), log_std):
        raise ValueError(f"log_std {log_std.tolist()} is outside {clamp}, the range that EmbodiChain clamps it to")
    normalizes = any("normalizer" in key for key in state_dict)
    if normalizes and (layout != "0.3" or isinstance(policy, ActorOnly)):
        text = "the policy normalizes observations; of EmbodiChain's only the ActorCritic of 0.3 does (--layout 0.3)"
        raise ValueError(text)
    return {**state_dict, "log_std": log_std}


def _imported(given: Policy, like: Params, state_dict: StateDict, clamp: tuple[float, float]) -> Params:
    policy = _normal_policy(given)
    params = params_from_state_dict(policy, state_dict)
    for key, x in state_dict_from_params(policy, like).items():
        if state_dict[key].shape != x.shape:
            shapes = f"{key} is {list(state_dict[key].shape)} in the file and {list(x.shape)} here"
            raise ValueError(f"the file is of a policy for other observations than the environment's: {shapes}")
    log_std = params["params"]["log_std"]
    low, high = policy.log_std_range
    if not np.array_equal(np.clip(log_std, *clamp), np.clip(log_std, low, high)):
        raise ValueError(
            f"log_std {log_std.tolist()} means something else under policy.log_std_range [{low}, {high}]: EmbodiChain "
            f"clamps it to [{clamp[0]:.6g}, {clamp[1]:.6g}]; set policy.log_std_range to that"
        )
    return jax.tree.map(jnp.asarray, params)


def _adopted(policy: ActorQ, like: Params, saved: PtFile) -> Params:
    """Take over the actor alone, whose actions are not squashed in the file."""
    actor: Any = actor_only(policy)
    params = params_from_state_dict(actor, {key: x for key, x in saved.policy.items() if not key.startswith("critic")})
    _check_activations(saved, actor)
    params["params"]["log_std"] = np.clip(params["params"]["log_std"], *saved.log_std_range)
    try:
        return load_actor_from(policy, like, flatten_dict(params, sep="."), squashed=False)
    except ValueError as error:  # names and outputs fit by now
        text = f"the file is of a policy for other observations than the environment's: {error}"
        raise ValueError(text) from error


def _check_activations(saved: PtFile, policy: Policy) -> None:
    """Check the activations: weights do not show them; files of 0.3 name them. Raises ValueError: the file's are not
    the config's."""
    for name in ("actor", "critic"):
        network: NetworkConfig | None = getattr(policy, name, None)
        if network is None or name not in saved.modules:
            continue
        activation = 1 + network.use_layernorm  # its place in a hidden layer of ``stride`` modules
        stride = 1 + activation + (network.dropout_p > 0.0)
        last = len(network.hidden_sizes) * stride + 1
        places = dict.fromkeys(range(activation, last - 1, stride), network.activation)
        for i, wanted in {**places, last: network.last_activation}.items():
            there = saved.modules.get(f"{name}.{i}", "no module")
            here = "no module" if wanted is None else ACTIVATIONS[wanted].__name__
            if there != here:
                raise ValueError(f"{name}.{i} is {there} in the file and {here} by the config: change policy.{name}")


def _normal_policy(policy: Policy) -> Any:
    """Return the policy itself, if EmbodiChain has its counterpart."""
    if isinstance(policy, ActorCriticWithMemory):
        text = "EmbodiChain's policies have no memory, and its files no place for one; ejax export takes this policy"
        raise TypeError(text)
    if not isinstance(policy, ActorCritic | ActorOnly):
        text = f"EmbodiChain's policies are actor_critic and actor_only, got {type(policy).__name__};"
        raise TypeError(f"{text} ejax export takes this policy")
    if policy.action_spec.kind != "normal":
        raise ValueError(f"EmbodiChain's policies act by a normal distribution, this one by {policy.action_spec.kind}")
    return policy


def _option_notes(saved: PtFile, options: Any) -> list[str]:
    """Note the options that change: a checkpoint moves state, the config decides what is computed with it."""
    ours = options.model_dump()
    return [
        f"algorithm.cfg.{name} was {there} there and is {ours[name]} here"
        for name, there in saved.options.items()
        if name in ours and ours[name] != there
    ]


def _size_notes(saved: PtFile, num_devices: int, rows: int, update: int) -> list[str]:
    """Note a changed size of an update: ``num_envs`` and ``batch_size`` are per rank there, per device here."""
    notes = []
    if saved.world_size != num_devices:
        notes.append(
            f"world_size was {saved.world_size} there, devices here: {num_devices}. trainer.num_envs and "
            "algorithm.cfg.batch_size are of each: the file's make other totals here"
        )
    if saved.num_updates and saved.num_updates != update:
        there = saved.global_step / saved.num_updates
        notes.append(
            f"the file's {saved.num_updates} updates were of {there:.6g} env steps each on average; "
            f"here one has {rows}, so counting continues from update {update}"
        )
    return notes


def _schedule_notes(saved: PtFile, ours: ScheduleConfig) -> list[str]:
    here = (ours.name, dict(ours.kwargs))
    if saved.schedule is None:
        unscheduled = ours.name is not None and saved.optimizer is not None
        return [f"the file has no lr_scheduler; the config's, {here}, holds from now on"] if unscheduled else []
    there = (saved.schedule["name"], dict(saved.schedule["kwargs"]))
    return [] if here == there else [f"the file's lr_scheduler is {there}; the config's, {here}, holds from now on"]
