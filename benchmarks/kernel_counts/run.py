"""Compile what a config runs for GPUs that are not here, and count it loop by loop."""

import time
from collections.abc import Sequence
from typing import Any

from ejax.preflight.run import absent_run, for_each_program

from .programs import compile_program
from .report import Settings, describe


def count_kernels(
    config: str, overrides: Sequence[str] = (), *, target: str = "h100", gpus: int = 1, hosts: int = 1
) -> dict[str, Any]:
    """Count what a config runs, ready for JSON; arguments and errors as ``ejax.preflight.run.preflight``."""
    began, worked = time.monotonic(), time.process_time()
    with absent_run(config, overrides, target=target, gpus=gpus, hosts=hosts) as (read, notes, card, devices):
        programs = for_each_program(compile_program, read, devices)
    trainer, given = read.trainer, (config, tuple(overrides), target, gpus, hosts)
    seconds = {"wall": time.monotonic() - began, "cpu": time.process_time() - worked}
    return describe(Settings(*given, trainer.num_envs, trainer.buffer_size, notes=notes), card, programs, seconds)
