"""One preflight: a config on so many cards, its memory and work there, and the largest number of environments."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.experimental import topologies

from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.preflight.programs import Memory, Program, for_each_program, on_accelerator
from ejax.preflight.targets import Card, find_card
from ejax.preflight.work import Work, count_work
from ejax.runtime.device import matmul_precision
from ejax.runtime.host_call import FOR_ABSENT_DEVICES
from ejax.training.watchdog import guarded_calls

_PACKAGES = (("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax-cuda13-plugin", "jax-cuda13-pjrt"))


def compiler_problem() -> str | None:
    """Return the reason why nothing can be compiled for a GPU here, with the remedy; None: there is none."""
    wanted = jax.__version__
    for packages in _PACKAGES:
        found = {name: _version(name) for name in packages}
        if not all(found.values()):
            continue
        # JAX does not use a plugin of another release
        if set(found.values()) == {wanted}:
            return None
        have = ", ".join(f"{name} {number}" for name, number in found.items())
        return f"{have} do not fit jax {wanted}; {_remedy(wanted)}"
    return f"compiling for a GPU needs XLA's GPU compiler, which is not installed; {_remedy(wanted)}"


def absent_devices(card: Card, *, gpus: int, hosts: int) -> Sequence[jax.Device]:
    """Describe the devices of machines that are not here; needs the compiler. ConfigError: it refuses the card."""
    jax.devices()  # loads the plugin
    try:
        topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{hosts}x{gpus}", target_config=card.text)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError([Problem("--target", f"XLA refuses {card.name}: {error}")], "ejax.preflight") from error
    return topology.devices


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Keep JAX from writing what it compiles for absent devices into its cache, which it cannot read again, and have no
    device asked for a call of the host."""
    kept: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # jax defines it at run time
    jax.config.update("jax_enable_compilation_cache", False)
    token = FOR_ABSENT_DEVICES.set(True)
    try:
        yield
    finally:
        FOR_ABSENT_DEVICES.reset(token)
        jax.config.update("jax_enable_compilation_cache", kept)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _remedy(wanted: str) -> str:
    return (
        "pip install -e '.[preflight]' in ejax's folder, which also brings the jax that it fits, or "
        f"pip install jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted}"
    )


USABLE = 0.75
"""Share of a card's memory that JAX takes by default (``XLA_PYTHON_CLIENT_MEM_FRACTION``)."""


ASSUMED = (
    "{name}: {gib:.4g} GiB, {bandwidth:.4g} TB/s, FP32 {fp32:.4g} TFLOP/s, matrix products {rates} TFLOP/s (f32 is "
    "TF32, f32 exact takes the FP32 rate)",
    "elementwise operations are fused with what reads them, nothing stays in the L2 cache",
    "a loop of unknown length takes one trip; of a conditional's branches the one with most operations runs",
)
NOT_KNOWN = (
    "launches of kernels, which bound small networks: the estimate is a bound from below, not a forecast",
    "trips of loops of unknown length (MJX's solver, evaluations)",
    "memory that the allocator loses between buffers, and what CUDA, NCCL and libraries take for themselves",
)


@dataclass(frozen=True)
class Compiled:
    """A program's memory and work on each device."""

    name: str
    memory: Memory
    work: Work
    library_products: bool
    """Matrix products are cuBLAS's, none XLA's own."""
    seconds: float


def preflight(
    config: str,
    overrides: Sequence[str] = (),
    *,
    target: str = "h100",
    gpus: int = 1,
    hosts: int = 1,
    fit: bool = False,
) -> dict[str, Any]:
    """Compile what a config runs for GPUs that are not here: its memory on each, and the work of an update.

    Args:
        target: a card's short name, or a file; see ``ejax.preflight.targets``.
        gpus: on each of ``hosts`` machines.
        fit: compile at several sizes for the largest ``num_envs``, instead of an estimate.

    Returns:
        A dict that is ready for JSON.

    Raises:
        ConfigError: the config, the card, or the compiler that is missing.
    """
    began, worked = time.monotonic(), time.process_time()
    largest: Fit | None = None
    with absent_run(config, overrides, target=target, gpus=gpus, hosts=hosts) as (read, notes, card, devices):
        programs = for_each_program(partial(measure, len(devices)), read, devices)
        training, num_envs = programs[0], read.trainer.num_envs
        if training.name == "train" and fit:
            largest = search(partial(_memory_at, read, devices), training.memory, num_envs, card.memory)
        elif training.name == "train":
            largest = estimate(training.memory, num_envs, card.memory)
    rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in card.matrix.items()) or "none known"
    numbers: Any = {"gib": card.memory / 2**30, "bandwidth": card.bandwidth / 1e12, "fp32": card.fp32 / 1e12}
    seconds = {"wall": time.monotonic() - began, "cpu": time.process_time() - worked}
    return {
        "schema_version": 3,
        "config": config,
        "overrides": list(overrides),
        "target": target,
        "gpus": gpus,
        "hosts": hosts,
        "num_envs": num_envs,
        "notes": list(notes),
        "card": {name: value for name, value in asdict(card).items() if name != "text"},
        "programs": {each.name: describe(each, card) for each in programs},
        "env_steps_per_update": num_envs * len(devices) * read.trainer.buffer_size,
        "largest_num_envs": None if largest is None else asdict(largest),
        "replay": replay_facts(read, training.memory, len(devices), card.memory),
        "assumptions": [each.format(name=card.name, rates=rates, **numbers) for each in ASSUMED],
        "not_known": list(NOT_KNOWN),
        "seconds": {name: round(number, 1) for name, number in seconds.items()},
    }


@contextmanager
def absent_run(
    config: str, overrides: Sequence[str], *, target: str, gpus: int, hosts: int
) -> Iterator[tuple[RunConfig, tuple[str, ...], Card, Sequence[jax.Device]]]:
    """Read a config as for ``gpus`` of the card on each of ``hosts``, and trace in the block: ``(config, notes on what
    it leaves open, card, devices)``. Errors as ``preflight``."""
    if gpus < 1 or hosts < 1:
        raise ConfigError(
            [Problem("--gpus", f"got {gpus} on {hosts} hosts; both must be at least 1")], "ejax.preflight"
        )
    card = find_card(target)
    if problem := compiler_problem():
        raise ConfigError([Problem("", problem)], "ejax.preflight")
    read, notes = on_accelerator(load_config(config, overrides, device="cpu"))
    devices = absent_devices(card, gpus=gpus, hosts=hosts)
    with (
        guarded_calls(read.env.id, read.trainer.collector),
        without_compilation_cache(),
        matmul_precision(read.trainer.matmul_precision, "cuda"),
    ):
        yield read, notes, card, devices


def measure(num_devices: int, program: Program) -> Compiled:
    """Compile a program, and count its work on each of the devices that share it."""
    began = time.monotonic()
    compiled, library_products = program.compile()
    work = Work()
    work.add(count_work(program.traced.jaxpr), 1.0 / num_devices)
    return Compiled(program.name, program.memory(compiled), work, library_products, time.monotonic() - began)


def describe(compiled: Compiled, card: Card) -> dict[str, Any]:
    """Describe a program as JSON can hold it, with the least time that its traffic and its arithmetic take."""
    work = compiled.work
    products = sum(flops / card.matrix.get(name, card.fp32) for name, flops in work.products.items())
    bounds = {"memory": work.num_bytes / card.bandwidth, "arithmetic": products + work.elements / card.fp32}
    return {
        "memory": asdict(compiled.memory) | {"fraction_of_card": compiled.memory.peak / card.memory},
        "product_flops": {name: round(flops) for name, flops in sorted(work.products.items())},
        "element_ops": round(work.elements),
        "bytes": round(work.num_bytes),
        "loops_of_unknown_length": work.open_loops,
        "bounds_s": bounds,
        "limited_by": max(bounds, key=bounds.__getitem__),
        "library_products": compiled.library_products,
        "seconds": round(compiled.seconds, 1),
    }


def _memory_at(config: RunConfig, devices: Sequence[jax.Device], num_envs: int) -> Memory:
    trainer = config.trainer.model_copy(update={"num_envs": num_envs})
    resized = config.model_copy(update={"trainer": trainer})
    return for_each_program(lambda each: each.memory(each.compile()[0]), resized, devices, evaluation=False)[0]


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
        (n0, peak0), (n1, peak1) = points[-2:]
        slope = max((peak1 - peak0) / (n1 - n0), 1.0) if n1 != n0 else 1.0
        # a multiple where the line meets the memory; 1% below: padding bends the line
        crossing = max(int(0.99 * (n1 + (usable - peak1) / slope)) // num_envs, 1) * num_envs
        if points[-1][1] <= usable and crossing <= points[-1][0]:
            break
        size = crossing
    fitting = max((size for size, peak in points if peak <= usable), default=0)
    tried = ", ".join(f"{size:,}: {peak / 2**30:.3g} GiB" for size, peak in points)
    return Fit(fitting, f"compiled at {tried}; {USABLE:.0%} of the card's memory, JAX's default", usable)
