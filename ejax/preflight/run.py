"""One preflight: a config on so many cards, everything that was found, and the largest number of environments."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax

from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.preflight.plugin import absent_devices, compiler_problem, without_compilation_cache
from ejax.preflight.programs import Memory, compile_programs, on_accelerator
from ejax.preflight.report import Settings, describe
from ejax.preflight.targets import find_card
from ejax.runtime.device import matmul_precision
from ejax.training.watchdog import guarded_calls

USABLE = 0.75
"""Share of a card's memory that JAX takes by default (``XLA_PYTHON_CLIENT_MEM_FRACTION``)."""


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
        target: a card's short name, or a file; see ``ejax.preflight.targets``.
        gpus: on each of ``hosts`` machines.
        fit: compile at several sizes for the largest ``num_envs``, instead of an estimate.

    Returns:
        The result of ``ejax.preflight.report.describe``, ready for JSON.

    Raises:
        ConfigError: the config, the card, or the compiler that is missing.
    """
    began, worked = time.monotonic(), time.process_time()
    if gpus < 1 or hosts < 1:
        raise ConfigError(
            [Problem("--gpus", f"got {gpus} on {hosts} hosts; both must be at least 1")], "ejax.preflight"
        )
    card = find_card(target)
    if problem := compiler_problem():
        raise ConfigError([Problem("", problem)], "ejax.preflight")
    read, notes = on_accelerator(load_config(config, overrides, device="cpu"))
    trainer = read.trainer
    devices = absent_devices(card, gpus=gpus, hosts=hosts)
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
    found = describe(settings, card, programs, None if largest is None else asdict(largest), seconds)
    return found | {"replay": replay_facts(read, training.memory, len(devices), card.memory)}


def _memory_at(config: RunConfig, devices: Sequence[jax.Device], num_envs: int) -> Memory:
    trainer = config.trainer.model_copy(update={"num_envs": num_envs})
    resized = config.model_copy(update={"trainer": trainer})
    return compile_programs(resized, devices, evaluation=False)[0].memory


def replay_facts(config: RunConfig, memory: Memory, num_devices: int, card_memory: int) -> dict[str, Any] | None:
    """Describe a run's replay buffer: bytes on each GPU, or those on the host; the largest that fits the GPUs; and what
    an update reads of it. None: it has none."""
    options: Any = config.algorithm.cfg
    if not memory.replay + memory.replay_on_host:
        return None
    beside = getattr(options, "demonstrations", None)
    demonstrated = beside.num_transitions if beside else 0
    row = (memory.replay * num_devices + memory.replay_on_host) // (options.replay.capacity + demonstrated)
    room = max(int(USABLE * card_memory) - memory.peak + memory.replay, 0)
    return {
        "capacity": options.replay.capacity,
        "row_bytes": row,
        "bytes": memory.replay_on_host or memory.replay,
        "storage": options.replay.storage,
        "largest_capacity": None if memory.replay_on_host else max(room * num_devices // row - demonstrated, 0),
        "gathers_per_update": options.gradient_steps,
        "rows_per_gather": options.batch_size,
    }


@dataclass(frozen=True)
class Fit:
    num_envs: int
    """On each GPU; 0: not even one."""
    method: str
    usable: int
    """Bytes that were there for it."""


def estimate(memory: Memory, num_envs: int, card_memory: int) -> Fit:
    """Estimate from one compilation, rather low: all but the fixed memory is taken to grow with the environments."""
    usable = int(USABLE * card_memory)
    fixed = 2 * memory.fixed + memory.replay  # what an update reads, and what it writes
    per_env = max(memory.peak - fixed, 1) / num_envs
    most = max(int((usable - fixed) / per_env), 0)
    method = (
        f"estimated from the peak at {num_envs:,}, all of it but parameters and optimizer taken to grow with num_envs; "
        f"{USABLE:.0%} of the card's memory, JAX's default; --fit compiles to find out"
    )
    return Fit(most, method, usable)


def search(memory_at: Callable[[int], Memory], first: Memory, num_envs: int, card_memory: int) -> Fit:
    """Compile at two sizes, then where the line through them meets the memory; ``first``: at ``num_envs``."""
    usable = int(USABLE * card_memory)
    points = [(num_envs, first.peak)]
    # far enough that what grows outweighs what does not
    size = 8 * num_envs
    # memory is so close to linear in num_envs that two or three compilations suffice
    for _ in range(4):
        points.append((size, memory_at(size).peak))
        crossing = _crossing(points[-2:], usable, num_envs)
        if points[-1][1] <= usable and crossing <= points[-1][0]:
            break
        size = crossing
    fitting = max((size for size, peak in points if peak <= usable), default=0)
    tried = ", ".join(f"{size:,}: {peak / 2**30:.3g} GiB" for size, peak in points)
    return Fit(fitting, f"compiled at {tried}; {USABLE:.0%} of the card's memory, JAX's default", usable)


def _crossing(points: Sequence[tuple[int, int]], usable: int, multiple: int) -> int:
    """Give the largest multiple below the point where the line through both meets ``usable``."""
    (n0, peak0), (n1, peak1) = points
    slope = max((peak1 - peak0) / (n1 - n0), 1.0) if n1 != n0 else 1.0
    # 1% below: padding bends the line
    return max(int(0.99 * (n1 + (usable - peak1) / slope)) // multiple, 1) * multiple
