"""One preflight: a config's programs compiled for cards that are not here, with their memory and work on each.

The programs are the very ones of training and evaluation, lowered from shapes; nothing runs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from ejax.algorithms.replay_buffer import take_out
from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.envs.mujoco.choice import ENGINES
from ejax.policies.heads import uses_dropout
from ejax.preflight.targets import TABLE, Card, find_card, refusal
from ejax.preflight.work import Work, count_work
from ejax.rollout import reset, unroll, with_memory
from ejax.runtime.device import jax_option, matmul_precision
from ejax.runtime.host_call import FOR_ABSENT_DEVICES
from ejax.runtime.sharding import make_mesh, replicated, shapes_on
from ejax.training.build import build
from ejax.training.environments import evaluation_env, resolve_physics
from ejax.training.evaluators import DeviceEvaluator
from ejax.training.host_steppers import HostStepper
from ejax.training.parts import Parts, replay_bytes
from ejax.training.steppers import DeviceStepper
from ejax.training.watchdog import guarded_calls
from ejax.types import HostEnv, Key, Params, Rollout

Result = TypeVar("Result")
USABLE = 0.75
"""Share of a card's memory that JAX takes by default (``XLA_PYTHON_CLIENT_MEM_FRACTION``)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, from XLA's plan."""

    arguments: int
    outputs: int
    temporaries: int
    peak: int
    """All of them: XLA allocates the temporaries of a program at once, for as long as it runs."""
    fixed: int
    """Parameters, optimizer and other state of a training that does not grow with the environments."""
    replay: int = 0
    """Rows of replay buffers, which are written where they are."""


@dataclass(frozen=True)
class Program:
    """One of a run's programs, lowered for devices that need not be here."""

    name: str
    """``train``, ``learn`` or ``evaluate``."""
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    fixed: int
    """See ``Memory``, as for ``replay``."""
    replay: int = 0

    def compile(self, dump: Path | None = None) -> tuple[jax.stages.Compiled, bool]:
        """Compile it, with XLA's account of it in the folder ``dump``; True: all products are library calls.

        Without a card XLA takes the tiles that it begins with for each product, and gives up where they do not fit what
        is fused into it, such as a transposition of an odd number of rows.
        """
        options: dict[str, str | bool] = {} if dump is None else {"xla_dump_to": str(dump)}
        try:
            return self.lowered.compile(options), False
        except jax.errors.JaxRuntimeError as error:
            if "Couldn't find output tile sizes" not in str(error):
                raise
        return self.lowered.compile({**options, "xla_gpu_enable_triton_gemm": False}), True

    def memory(self, compiled: jax.stages.Compiled) -> Memory:
        """Read XLA's plan of its memory."""
        plan: Any = compiled.memory_analysis()
        # an output that reuses a donated argument's buffer needs no further memory
        outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
        sizes = (plan.argument_size_in_bytes, outputs, plan.temp_size_in_bytes)
        return Memory(*sizes, sum(sizes), self.fixed, self.replay)


def preflight(
    config: str, overrides: Sequence[str] = (), *, target: str = "h100", gpus: int = 1, hosts: int = 1
) -> dict[str, Any]:
    """Compile what a config runs for GPUs that are not here: its memory on each, and the work of an update.

    Args:
        target: a card's short name, or a file; see ``ejax.preflight.targets``.
        gpus: on each of ``hosts`` machines.

    Returns a dict that is ready for JSON. Raises ConfigError: the config, the card, or the compiler that is missing.
    """
    began, worked = time.monotonic(), time.process_time()
    with absent_run(config, overrides, target=target, gpus=gpus, hosts=hosts) as (read, notes, card, devices):
        programs = for_each_program(partial(measure_program, card, len(devices)), read, devices)
    (name, memory, _), num_envs = programs[0], read.trainer.num_envs
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
        "programs": {name: facts for name, _, facts in programs},
        "env_steps_per_update": num_envs * len(devices) * read.trainer.buffer_size,
        "largest_num_envs": estimate(memory, num_envs, card.memory) if name == "train" else None,
        "replay": replay_facts(read, memory, len(devices), card.memory),
        "assumptions": [each.format(name=card.name, rates=rates, **numbers) for each in TABLE["assumptions"]],
        "not_known": TABLE["not_known"],
        "seconds": {name: round(number, 1) for name, number in seconds.items()},
    }


@contextmanager
def absent_run(
    config: str, overrides: Sequence[str], *, target: str, gpus: int, hosts: int
) -> Iterator[tuple[RunConfig, tuple[str, ...], Card, Sequence[jax.Device]]]:
    """Read a config as for ``gpus`` of the card on each of ``hosts``, and trace in the block: ``(config, notes on what
    it leaves open, card, devices)``. Errors as ``preflight``."""
    if gpus < 1 or hosts < 1:
        raise refusal("--gpus", f"got {gpus} on {hosts} hosts; both must be at least 1")
    card = find_card(target)
    if problem := compiler_problem():
        raise refusal("", problem)
    read, notes = on_accelerator(load_config(config, overrides, device="cpu"))
    devices = absent_devices(card, gpus=gpus, hosts=hosts)
    with (
        guarded_calls(read.env.id, read.trainer.collector),
        without_compilation_cache(),
        matmul_precision(read.trainer.matmul_precision, "cuda"),
    ):
        yield read, notes, card, devices


def compiler_problem() -> str | None:
    """Return the reason why nothing can be compiled for a GPU here, with the remedy; None: there is none."""
    wanted = jax.__version__
    remedy = (
        "pip install -e '.[preflight]' in ejax's folder, which also brings the jax that it fits, or "
        f"pip install jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted}"
    )
    installed = {each.name: each.version for each in distributions()}
    for cuda in ("cuda12", "cuda13"):
        names = (f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt")
        found = {name: installed[name] for name in names if name in installed}
        if len(found) == len(names) and set(found.values()) == {wanted}:
            return None
        if len(found) == len(names):  # JAX does not use a plugin of another release
            have = ", ".join(f"{name} {number}" for name, number in found.items())
            return f"{have} do not fit jax {wanted}; {remedy}"
    return f"compiling for a GPU needs XLA's GPU compiler, which is not installed; {remedy}"


def absent_devices(card: Card, *, gpus: int, hosts: int) -> Sequence[jax.Device]:
    """Describe the devices of machines that are not here; needs the compiler. ConfigError: it refuses the card."""
    jax.devices()  # loads the plugin
    try:
        topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{hosts}x{gpus}", target_config=card.text)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise refusal("--target", f"XLA refuses {card.name}: {error}") from error
    return topology.devices


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Keep what is compiled for absent devices out of JAX's cache, which cannot read it; no device calls the host."""
    token = FOR_ABSENT_DEVICES.set(True)
    try:
        with jax_option("jax_enable_compilation_cache", False):
            yield
    finally:
        FOR_ABSENT_DEVICES.reset(token)


def on_accelerator(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Settle a config's physics engine as on an NVIDIA GPU, and note which and why.

    Raises ConfigError: it names the C engine, which steps on the host, or one that is not installed.
    """
    settled, notes = resolve_physics(config, platform="cuda")
    given = str(settled.env.cfg.get("physics"))
    if given in ENGINES and ENGINES[given].on_host:
        others = " or ".join(sorted(name for name, each in ENGINES.items() if not each.on_host))
        text = f"got '{given}': {ENGINES[given].title} steps on the host, not on a GPU; set env.cfg.physics to {others}"
        raise ConfigError([Problem("env.cfg.physics", text)])
    return settled, notes


def for_each_program(
    use: Callable[[Program], Result], config: RunConfig, devices: Sequence[jax.Device]
) -> list[Result]:
    """Use a training's own program, then its evaluation's, for a config from ``on_accelerator``.

    Raises ConfigError: what learns from demonstrations, or runs outside JAX, cannot be compiled.
    """
    env = config.env.id
    if config.data is not None:
        text = f"{config.algorithm.name} learns from demonstrations, whose shapes are known once they are made"
        remedy = "use an algorithm that learns from its environments, such as ppo"
        raise ConfigError([Problem("algorithm.name", f"{text}; {remedy}")])
    try:
        parts = build(config, absent=devices)
    except ImportError as error:
        raise ConfigError([Problem("env.id", f"{env} cannot be made here: {error}")]) from error
    if isinstance(parts.env, HostEnv):
        parts.env.close()
        text = f"{env} lives outside JAX: a GPU would only run the policy and the updates, as fast as its host"
        raise ConfigError([Problem("env.id", f"{text} delivers rollouts; use an environment in JAX")])
    # side by side: the compiler is one thread for the most part, and one program is traced while the other is compiled
    with ThreadPoolExecutor(2) as pool:
        fixed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.state.train))
        name = "train" if isinstance(parts.stepper, DeviceStepper) else "learn"
        traced, replay = trace_training(config, parts, devices), replay_bytes(parts.state) // len(devices)
        running = [pool.submit(use, Program(name, traced, traced.lower(), fixed, replay))]
        if config.trainer.enable_eval:
            place = SingleDeviceSharding(devices[0]) if len(devices) == 1 else replicated(make_mesh(devices))
            evaluator = DeviceEvaluator(parts.policy, evaluation_env(config, parts.env), config.trainer)
            traced = evaluator.trace(shapes_on(place, parts.state.train.params))
            running.append(pool.submit(use, Program("evaluate", traced, traced.lower(), fixed)))
        return [each.result() for each in running]


def trace_training(config: RunConfig, parts: Parts, devices: Sequence[jax.Device]) -> jax.stages.Traced:
    """Trace a run's own program: of an update with its collection, or of an update where others collect."""
    trainer, stepper = config.trainer, parts.stepper
    if isinstance(stepper, DeviceStepper):
        return stepper.trace(*stepper.shapes(parts.state, devices[0]))
    if not isinstance(stepper, HostStepper) or len(devices) > 1:
        text = f"got '{trainer.collector.mode}': its updates are compiled for one GPU; pass --gpus 1"
        raise ConfigError([Problem("trainer.collector.mode", text)])

    def collect(params: Params, key: Key) -> Rollout:
        envs = with_memory(reset(parts.env, key, trainer.num_envs), parts.policy)
        dropout = uses_dropout(parts.policy)
        return unroll(parts.policy, parts.env, params, envs, key, num_steps=trainer.buffer_size, dropout=dropout)[0]

    key = jax.random.key(trainer.seed)
    # made on the host in a run; its shapes are those of the same steps in JAX
    rollout = jax.eval_shape(collect, parts.state.train.params, key)
    # outside JAX some steps only reset: the mask is an input of the real program
    rollout = replace(rollout, valid=jax.ShapeDtypeStruct(rollout.reward.shape, bool))
    # environments on the host are not arrays of the program
    state, replays = take_out(replace(parts.state, envs=()))
    place = SingleDeviceSharding(devices[0])
    return stepper.learn.trace(*(shapes_on(place, each) for each in (state, rollout, key, replays)))


def measure_program(card: Card, num_devices: int, program: Program) -> tuple[str, Memory, dict[str, Any]]:
    """Compile a program, and count its work on each of the devices that share it: ``(its name, memory, facts)``."""
    began = time.monotonic()
    compiled, library_products = program.compile()
    memory, work = program.memory(compiled), Work()
    work.add(count_work(program.traced.jaxpr), 1.0 / num_devices)
    products = sum(flops / card.matrix.get(name, card.fp32) for name, flops in work.products.items())
    bounds = {"memory": work.num_bytes / card.bandwidth, "arithmetic": products + work.elements / card.fp32}
    facts = {
        "memory": asdict(memory) | {"fraction_of_card": memory.peak / card.memory},
        "product_flops": {name: round(flops) for name, flops in sorted(work.products.items())},
        "element_ops": round(work.elements),
        "bytes": round(work.num_bytes),
        "loops_of_unknown_length": work.open_loops,
        "bounds_s": bounds,
        "limited_by": max(bounds, key=bounds.__getitem__),
        "library_products": library_products,  # cuBLAS's, none XLA's own
        "seconds": round(time.monotonic() - began, 1),
    }
    return program.name, memory, facts


def estimate(memory: Memory, num_envs: int, card_memory: int) -> dict[str, Any]:
    """Estimate the largest ``num_envs`` from one compilation, rather low: all but the fixed memory grows with it."""
    usable = int(USABLE * card_memory)
    fixed = 2 * memory.fixed + memory.replay  # what an update reads, and what it writes
    per_env = max(memory.peak - fixed, 1) / num_envs
    method = (
        f"estimated from the peak at {num_envs:,}, all of it but parameters and optimizer taken to grow with num_envs; "
        f"{USABLE:.0%} of the card's memory, JAX's default"
    )
    return {"num_envs": max(int((usable - fixed) / per_env), 0), "method": method, "usable": usable}


def replay_facts(config: RunConfig, memory: Memory, num_devices: int, card_memory: int) -> dict[str, Any] | None:
    """Describe a replay buffer on the GPUs, and the largest that fits them. None: the run has none there."""
    if not memory.replay:
        return None
    options: Any = config.algorithm.cfg
    capacity, beside = options.replay.capacity, getattr(options, "demonstrations", None)
    demonstrated = beside.num_transitions if beside else 0
    row = memory.replay * num_devices // (capacity + demonstrated)
    room = max(int(USABLE * card_memory) - memory.peak + memory.replay, 0)
    largest = max(room * num_devices // row - demonstrated, 0)
    return {"capacity": capacity, "row_bytes": row, "bytes": memory.replay, "largest_capacity": largest}
