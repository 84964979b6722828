"""EmbodiChain's checkpoint files: what of them concerns ejax, read from every version, and written.

    version       keys
    seed, 122     global_step, policy
    0.2           ... best_eval_value, optimizer, lr_scheduler, lr_scheduler_cfg
    0.2 APG       ... schema_version 1, num_updates
    0.3           schema_version 2: ... restart_schedule, ref_policy (GRPO), and what ties a file to one trainer:
                  metadata, world_size, rng_by_rank, normalizer_by_rank, best_checkpoint

Files are read by ``torch.load(weights_only=True)`` alone: no code that a file may hold is run.
"""

import math
import os
import pickle
import random
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ejax.optim import SCHEDULE_KWARGS, ScheduleConfig
from interop.weights import StateDict

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
    """What the version that wrote the file clamps log_std to."""
    modules: Mapping[str, str]
    """Names of the policy's modules and their torch classes. Empty: the version does not tell them."""
    options: Mapping[str, Any]
    """``algorithm.cfg`` but for optimizer and schedule. Empty: the version does not tell it."""
    world_size: int
    """Processes that trained together, each with ``num_envs`` environments and minibatches of ``batch_size``."""
    ranks_differ: bool
    """Each rank normalizes observations by statistics of its own; those in ``policy`` are one's."""


def read_pt(path: Path) -> PtFile:
    """The checkpoint at ``path``. Weights of 16 bits become float32, which holds all their values.

    Raises:
        ValueError: no checkpoint of EmbodiChain, a damaged one, or one that holds more than tensors and plain data.
    """
    payload = load_plain(path)
    for problem in _problems(payload):
        raise ValueError(f"{path} is no checkpoint of EmbodiChain: {problem}")
    if payload.get("observation_normalizer") is not None:
        raise ValueError(
            f"{path} normalizes observations outside the policy (APG's normalize_observations), which ejax does not"
        )
    scheduler = payload.get("lr_scheduler")
    metadata = payload.get("metadata") or {}
    return PtFile(
        global_step=payload["global_step"],
        policy=_to_numpy(payload["policy"]),
        num_updates=payload.get("num_updates"),
        schedule_step=None if scheduler is None else int(scheduler["last_epoch"]),
        schedule=payload.get("lr_scheduler_cfg") if scheduler is not None else None,
        optimizer=_to_numpy(payload.get("optimizer")),
        reference=_to_numpy(payload.get("ref_policy")),
        log_std_range=log_std_range(metadata),
        modules={name: place.rpartition(".")[2] for name, place, _ in metadata.get("modules", ())},
        options=metadata.get("algorithm_config", {}),
        world_size=payload.get("world_size", 1),
        ranks_differ=_ranks_differ(payload.get("normalizer_by_rank", [])),
    )


def load_plain(path: Path) -> dict[str, Any]:
    """The mapping in a .pt file of tensors and plain data.

    Raises:
        ValueError: something else is in it; it is not run. Or the file is damaged.
        FileNotFoundError: there is none.
    """
    try:
        if zipfile.is_zipfile(path):  # torch reads a damaged tensor as it is
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not hold")
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f": it names {named[1]}" if named else ""
        raise ValueError(f"{path} holds more than tensors and plain data, and is not read{what}") from error
    except Exception as error:  # what is no file of torch fails in it anywhere
        raise ValueError(f"{path} is no torch file, or a damaged one: {error!r}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} holds a {type(payload).__name__}, a checkpoint is a mapping")
    return payload


def _problems(payload: Mapping[str, Any]) -> Iterator[str]:
    """What of the content is not as any version writes it."""
    if payload.get("schema_version") not in (None, 1, 2):
        yield f"schema_version {payload['schema_version']} is unknown; there are 1 and 2, and files without one"
    for key in ("global_step", "policy"):
        if key not in payload:
            yield f"'{key}' is missing; it has {', '.join(map(str, payload))}"
    for key in ("global_step", "num_updates"):
        number = payload.get(key)
        if number is not None and (not isinstance(number, int) or number < 0):
            yield f"'{key}' must be an integer >= 0, got {number!r}"
    if type(payload.get("world_size", 1)) is not int or payload.get("world_size", 1) < 1:
        yield f"'world_size' must be an integer >= 1, got {payload['world_size']!r}"
    normalizers = payload.get("normalizer_by_rank", [])
    if not isinstance(normalizers, list) or any(map(_no_tensors, normalizers)):
        yield "'normalizer_by_rank' must be a list of mappings of dense tensors"
    for key in ("policy", "ref_policy"):
        state_dict = payload.get(key)
        odd = [] if state_dict is None and key == "ref_policy" else _no_tensors(state_dict)
        if odd:
            yield f"'{key}' must be a mapping of dense tensors; {', '.join(odd)}"
    optimizer, scheduler = payload.get("optimizer"), payload.get("lr_scheduler")
    if optimizer is not None and not _is_optimizer(optimizer):
        yield "'optimizer' must be the state_dict of one of torch.optim: state and param_groups, with lr and params"
    if scheduler is not None and not (isinstance(scheduler, Mapping) and isinstance(scheduler.get("last_epoch"), int)):
        yield "'lr_scheduler' must be the state_dict of one of torch's: it has no whole last_epoch"


def _no_tensors(state_dict: Any) -> list[str]:
    if not isinstance(state_dict, Mapping):
        return [f"it is a {type(state_dict).__name__}"]
    return [
        f"{key} is a {type(x).__name__}" if not isinstance(x, torch.Tensor) else f"{key} is {x.layout}"
        for key, x in state_dict.items()
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided
    ]


def _ranks_differ(normalizers: list[Mapping[str, torch.Tensor]]) -> bool:
    first, *others = normalizers or [{}]
    return any(not torch.equal(x, other[key]) for other in others for key, x in first.items())


def _is_optimizer(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(isinstance(g, Mapping) and {"lr", "params"} <= g.keys() for g in groups)


def write_pt(path: Path, payload: dict[str, Any]) -> Path:
    """Write arrays as tensors and everything else as it is; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        torch.save(_to_tensors(payload), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def log_std_range(metadata: Mapping[str, Any] | None) -> tuple[float, float]:
    """What EmbodiChain clamps log_std to: (−5, 2) in ActorOnly and up to 0.2; in 0.3 what the policy was made with."""
    std_range = (metadata or {}).get("policy_attributes", {}).get("action_std_range")
    return (-5.0, 2.0) if std_range is None else (math.log(std_range[0]), math.log(std_range[1]))


def scheduler_state(schedule: ScheduleConfig, base_rate: float, rate: float, step: int) -> dict[str, Any] | None:
    """``state_dict`` of the torch scheduler ``step`` steps on. None where there is no schedule.

    Args:
        schedule: with its horizon.
        rate: the learning rate now.
    """
    if schedule.name is None:
        return None
    options = SCHEDULE_KWARGS[schedule.name](**dict(schedule.kwargs)).model_dump()
    optimizer = torch.optim.SGD([torch.zeros(())], lr=base_rate)
    state = _SCHEDULERS[schedule.name](optimizer, **options).state_dict()
    return {**state, "last_epoch": step, "_step_count": step + 1, "_last_lr": [rate]}


def bound_to(trainer_file: Path, policy: StateDict, seed: int) -> dict[str, Any]:
    """The keys of schema 2 that tie a checkpoint to one trainer, taken from another checkpoint of that trainer.

    Random streams start anew from ``seed``: ejax has none that torch could go on with.

    Raises:
        ValueError: ``trainer_file`` is not of schema 2, or of another policy.
    """
    payload = load_plain(trainer_file)
    if payload.get("schema_version") != 2 or "rollout_index" in payload:
        raise ValueError(f"{trainer_file} is no checkpoint of EmbodiChain 0.3's PPO or GRPO (schema 2)")
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


def _to_numpy(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        widened = tree.float() if tree.dtype in (torch.bfloat16, torch.float16) else tree
        return widened.detach().numpy().copy()
    return {name: _to_numpy(x) for name, x in tree.items()} if isinstance(tree, Mapping) else tree


def _to_tensors(tree: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    if isinstance(tree, Mapping):
        return {name: _to_tensors(x) for name, x in tree.items()}
    return [_to_tensors(x) for x in tree] if isinstance(tree, list) else tree
