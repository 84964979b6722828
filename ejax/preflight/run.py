"""One preflight: a config, a card, how many of them; everything that was found."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.preflight.fit import Fit, estimate, search
from ejax.preflight.plugin import absent_devices, without_compilation_cache
from ejax.preflight.programs import Memory, compile_programs, on_accelerator
from ejax.preflight.report import Settings, describe
from ejax.preflight.targets import find_card
from ejax.runtime.device import matmul_precision
from ejax.training.watchdog import guarded_calls


def preflight(
    config: str,
    overrides: Sequence[str] = (),
    *,
    target: str = "h100",
    gpus: int = 1,
    hosts: int = 1,
    fit: bool = False,
) -> dict[str, Any]:
    """Compile what a config runs for GPUs that are not here, and count it.

    Args:
        config: the file. overrides: as on the command line of training.
        target: a card's short name, or a file; see ``ejax.preflight.targets``.
        gpus: on each of ``hosts`` machines.
        fit: compile at several sizes for the largest ``num_envs``, instead of an estimate.

    Returns:
        What ``ejax.preflight.report.describe`` says, ready for JSON.

    Raises:
        ConfigError: the config, the card, or the compiler that is missing.
    """
    began, worked = time.monotonic(), time.process_time()
    if gpus < 1 or hosts < 1:
        raise ConfigError(
            [Problem("--gpus", f"got {gpus} on {hosts} hosts; both must be at least 1")], "ejax.preflight"
        )
    card = find_card(target)
    devices = absent_devices(card, gpus=gpus, hosts=hosts)
    read, notes = on_accelerator(load_config(config, overrides, device="cpu"))
    trainer = read.trainer
    settings = Settings(
        config, tuple(overrides), target, gpus, hosts, trainer.num_envs, trainer.buffer_size, notes=notes
    )
    largest: Fit | None = None
    with (
        guarded_calls(read.env.id, trainer.collector),
        without_compilation_cache(),
        matmul_precision(trainer.matmul_precision, "cuda"),
    ):
        programs = compile_programs(read, devices)
        training = programs[0]
        if training.name == "train" and fit:
            largest = search(partial(_memory_at, read, devices), training.memory, trainer.num_envs, card.memory)
        elif training.name == "train":
            largest = estimate(training.memory, trainer.num_envs, card.memory)
    seconds = {"wall": time.monotonic() - began, "cpu": time.process_time() - worked}
    return describe(settings, card, programs, largest, seconds)


def _memory_at(config: RunConfig, devices: Sequence[jax.Device], num_envs: int) -> Memory:
    trainer = config.trainer.model_copy(update={"num_envs": num_envs})
    resized = config.model_copy(update={"trainer": trainer})
    return compile_programs(resized, devices, evaluation=False)[0].memory
