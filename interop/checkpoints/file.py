"""EmbodiChain's checkpoint files: the parts that concern ejax, read from every version, and written.

    version       keys
    seed, 122     global_step, policy
    0.2           ... best_eval_value, optimizer, lr_scheduler, lr_scheduler_cfg
    0.2 APG       ... schema_version 1, num_updates
    0.3           schema_version 2: ... restart_schedule, ref_policy (GRPO), and what ties a file to one trainer:
                  metadata, world_size, rng_by_rank, normalizer_by_rank, best_checkpoint

Files are read by ``interop.plain_pt`` alone, so no code that a file may hold is run, and their content is
checked by ``interop.checkpoints.content`` before it is used.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ejax.optim import SCHEDULE_KWARGS, ScheduleConfig
from ejax.policies.pretrained.weights import unwrapped
from ejax.schema.writing import replacing
from interop.checkpoints.content import problems
from interop.dense import to_numpy
from interop.exporters.entries import StateDict
from interop.plain_pt import load_plain

_FORM = "torch.save({'policy': STATE_DICT, 'global_step': STEPS}, FILE)"
_SCHEDULERS: dict[str, Any] = {
    "linear": torch.optim.lr_scheduler.LinearLR,
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
    "step": torch.optim.lr_scheduler.StepLR,
    "exponential": torch.optim.lr_scheduler.ExponentialLR,
}


@dataclass(frozen=True, kw_only=True)
class PtFile:
    """A file's content, with NumPy arrays for tensors."""

    global_step: int
    policy: StateDict
    num_updates: int | None
    """None: the version does not count updates."""
    schedule_step: int | None
    """Steps of the learning-rate schedule. None: the file has no schedule."""
    schedule: dict[str, Any] | None
    """``lr_scheduler_cfg``, its horizon bound."""
    optimizer: dict[str, Any] | None
    reference: StateDict | None
    """GRPO's frozen policy, where the file has it."""
    log_std_range: tuple[float, float]
    """Range that the version that wrote the file clamps log_std to."""
    modules: Mapping[str, str]
    """Names of the policy's modules and their torch classes. Empty: the version does not record them."""
    options: Mapping[str, Any]
    """``algorithm.cfg`` except optimizer and schedule. Empty: the version does not record it."""
    world_size: int
    """Processes that trained together, each with ``num_envs`` environments and minibatches of ``batch_size``."""
    ranks_differ: bool
    """Each rank normalizes observations by its own statistics; those in ``policy`` are one's."""


def read_pt(path: Path) -> PtFile:
    """Read the checkpoint at ``path``. Weights of 16 bits become float32, which holds all their values. Raises
    ValueError: no checkpoint of EmbodiChain, a damaged one, or one that holds more than tensors and plain data."""
    payload = load_content(path)
    if payload.get("observation_normalizer") is not None:
        text = f"{path} normalizes observations outside the policy (APG's normalize_observations), which ejax does not"
        raise ValueError(text)
    scheduler = payload.get("lr_scheduler")
    metadata = payload.get("metadata") or {}
    return PtFile(
        global_step=payload["global_step"],
        policy=_to_numpy(payload["policy"]),
        num_updates=payload.get("num_updates"),
        schedule_step=None if scheduler is None else scheduler["last_epoch"],
        schedule=payload.get("lr_scheduler_cfg") if scheduler is not None else None,
        optimizer=_adam_state(payload.get("optimizer")),
        reference=_to_numpy(payload.get("ref_policy")),
        log_std_range=log_std_range(metadata),
        modules={name: place.rpartition(".")[2] for name, place, _ in metadata.get("modules", ())},
        options=metadata.get("algorithm_config", {}),
        world_size=payload.get("world_size", 1),
        ranks_differ=_ranks_differ(payload.get("normalizer_by_rank", [])),
    )


def load_content(path: Path) -> dict[str, Any]:
    """Load the content of a checkpoint, every key that ejax reads of the kind that EmbodiChain writes. Raises
    ValueError: see ``read_pt``. FileNotFoundError: there is no such file."""
    payload = load_plain(path)
    for problem in problems(payload):
        remedy = "" if "policy" in payload else f"; save its state dict again: {_FORM}"
        raise ValueError(f"{path} is not a checkpoint of EmbodiChain: {problem}{remedy}")
    return payload | {key: unwrapped(payload[key], "model.") for key in ("policy", "ref_policy") if payload.get(key)}


def _ranks_differ(normalizers: list[Mapping[str, torch.Tensor]]) -> bool:
    first, *others = map(_to_numpy, normalizers or [{}])
    return any(
        other.keys() != first.keys() or any(not np.array_equal(x, other[key]) for key, x in first.items())
        for other in others
    )


def write_pt(path: Path, payload: dict[str, Any]) -> Path:
    """Write arrays as tensors and everything else unchanged; the file appears whole or not at all."""
    with replacing(path) as file:
        torch.save(_to_tensors(payload), file)
    return path


def log_std_range(metadata: Mapping[str, Any] | None) -> tuple[float, float]:
    """EmbodiChain's clamp of log_std: (−5, 2) in ActorOnly and up to 0.2; in 0.3 the policy's own setting."""
    std_range = (metadata or {}).get("policy_attributes", {}).get("action_std_range")
    return (-5.0, 2.0) if std_range is None else (math.log(std_range[0]), math.log(std_range[1]))


def scheduler_state(schedule: ScheduleConfig, base_rate: float, rate: float, step: int) -> dict[str, Any] | None:
    """``state_dict`` of the torch scheduler ``step`` steps on. None without a schedule.

    Args:
        schedule: with its horizon.
        rate: the learning rate now.
    """
    if schedule.name is None:
        return None
    options = SCHEDULE_KWARGS[schedule.name](**dict(schedule.kwargs)).model_dump()
    # a scheduler is made of an optimizer, any one, and reads its rate
    optimizer = torch.optim.SGD([torch.zeros(())], lr=base_rate)
    state = _SCHEDULERS[schedule.name](optimizer, **options).state_dict()
    return {**state, "last_epoch": step, "_step_count": step + 1, "_last_lr": [rate]}


def bound_to(trainer_file: Path, policy: StateDict, seed: int) -> dict[str, Any]:
    """Make the keys of schema 2 that tie a checkpoint to one trainer, from another checkpoint of that trainer.

    Random streams start from ``seed``: ejax has none that torch could continue.

    Raises ValueError: ``trainer_file`` is not of schema 2, or of another policy.
    """
    payload = load_content(trainer_file)
    if payload.get("schema_version") != 2 or "rollout_index" in payload:
        raise ValueError(f"{trainer_file} is not a checkpoint of EmbodiChain 0.3's PPO or GRPO (schema 2)")
    missing = [key for key in ("metadata", "world_size", "rng_by_rank") if payload.get(key) is None]
    if missing:
        raise ValueError(f"{trainer_file} is of schema 2, but lacks {', '.join(missing)}")
    if payload["world_size"] != len(payload["rng_by_rank"]):
        text = f"{trainer_file} has world_size {payload['world_size']},"
        raise ValueError(f"{text} but 'rng_by_rank' of {len(payload['rng_by_rank'])}")
    theirs = {key: tuple(x.shape) for key, x in payload["policy"].items()}
    ours = {key: x.shape for key, x in policy.items()}
    if theirs != ours:
        differ = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
        raise ValueError(f"{trainer_file} is of another policy: {', '.join(differ)} differ")
    normalizers = {key: x for key, x in policy.items() if "normalizer" in key.split(".")[0]}
    streams = [_random_streams(seed + rank) for rank in range(payload["world_size"])]
    return {
        "schema_version": 2,
        "metadata": payload["metadata"],
        "world_size": payload["world_size"],
        "rng_by_rank": [{**old, **new} for old, new in zip(payload["rng_by_rank"], streams, strict=True)],
        "normalizer_by_rank": [normalizers] * payload["world_size"],
        "best_checkpoint": None,
    }


def _random_streams(seed: int) -> dict[str, Any]:
    name, numbers, *rest = np.random.RandomState(seed).get_state()  # EmbodiChain's generator
    return {
        "python": random.Random(seed).getstate(),
        "numpy": (name, np.asarray(numbers).tolist(), *rest),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }


def _adam_state(optimizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Adam's part of the state_dict of a torch optimizer: other state is ignored."""
    if optimizer is None:
        return None
    state = {
        number: {name: _to_numpy(x) for name, x in of_parameter.items() if name in ("step", "exp_avg", "exp_avg_sq")}
        for number, of_parameter in optimizer["state"].items()
    }
    return {"state": state, "param_groups": optimizer["param_groups"]}


def _to_numpy(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return to_numpy(tree).copy()
    return {name: _to_numpy(x) for name, x in tree.items()} if isinstance(tree, Mapping) else tree


def _to_tensors(tree: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    if isinstance(tree, Mapping):
        return {name: _to_tensors(x) for name, x in tree.items()}
    return [_to_tensors(x) for x in tree] if isinstance(tree, list) else tree
