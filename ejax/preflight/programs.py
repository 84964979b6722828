"""The programs that a config would run on GPUs: the very ones of training and evaluation, lowered from shapes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

from ejax.collectors.replay_buffer import take_out
from ejax.config import ConfigError, Problem, RunConfig
from ejax.envs.mujoco.choice import ENGINES
from ejax.policies.heads import uses_dropout
from ejax.rollout import reset, unroll, with_memory
from ejax.runtime.sharding import make_mesh, replicated, shapes_on
from ejax.training.build import build
from ejax.training.environments import evaluation_env, resolve_physics
from ejax.training.evaluators import DeviceEvaluator
from ejax.training.host_steppers import HostStepper
from ejax.training.parts import Parts
from ejax.training.replay_memory import replay_bytes
from ejax.training.steppers import DeviceStepper
from ejax.types import HostEnv, Key, Params, Rollout

Result = TypeVar("Result")
_NO_TILES = "Couldn't find output tile sizes"


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
    replay_on_host: int = 0
    """Rows that are on no device."""


@dataclass(frozen=True)
class Program:
    """One of a run's programs, lowered for devices that need not be here."""

    name: str
    """``train``, ``learn`` or ``evaluate``."""
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    fixed: int
    """See ``Memory``."""
    replay: int = 0
    replay_on_host: int = 0

    def compile(self, dump: Path | None = None) -> tuple[jax.stages.Compiled, bool]:
        """Compile it, with XLA's account of it in the folder ``dump``; the flag is True if all products are library
        calls.

        Without a card XLA takes the tiles that it begins with for each product, and gives up where they do not fit what
        is fused into it, such as a transposition of an odd number of rows.
        """
        options: dict[str, str | bool] = {} if dump is None else {"xla_dump_to": str(dump)}
        try:
            return self.lowered.compile(options), False
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
        return self.lowered.compile({**options, "xla_gpu_enable_triton_gemm": False}), True

    def memory(self, compiled: jax.stages.Compiled) -> Memory:
        """Read XLA's plan of its memory."""
        plan: Any = compiled.memory_analysis()
        # an output that reuses a donated argument's buffer needs no further memory
        arguments, outputs = plan.argument_size_in_bytes, plan.output_size_in_bytes - plan.alias_size_in_bytes
        return Memory(
            arguments=arguments,
            outputs=outputs,
            temporaries=plan.temp_size_in_bytes,
            peak=arguments + outputs + plan.temp_size_in_bytes,
            fixed=self.fixed,
            replay=self.replay,
            replay_on_host=self.replay_on_host,
        )


def on_accelerator(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Settle a config's physics engine as on an NVIDIA GPU, and note which and why.

    Raises:
        ConfigError: it names the C engine, which steps on the host, or one that is not installed.
    """
    settled, notes = resolve_physics(config, platform="cuda")
    engine = ENGINES.get(str(settled.env.cfg.get("physics")))
    if engine is not None and engine.on_host:
        others = " or ".join(sorted(name for name, each in ENGINES.items() if not each.on_host))
        given = settled.env.cfg["physics"]
        text = f"got '{given}': {engine.title} steps on the host, not on a GPU; give env.cfg.physics={others}"
        raise ConfigError([Problem("env.cfg.physics", text)])
    return settled, notes


def for_each_program(
    use: Callable[[Program], Result], config: RunConfig, devices: Sequence[jax.Device], *, evaluation: bool = True
) -> list[Result]:
    """Use a training's own program, then its evaluation's, for a config from ``on_accelerator``.

    Raises:
        ConfigError: what runs outside JAX cannot be compiled.
    """
    # side by side: the compiler is one thread for the most part, and one program is traced while the other is compiled
    with ThreadPoolExecutor(2) as pool:
        parts = _parts(config, devices)
        fixed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.state.train))
        name = "train" if isinstance(parts.stepper, DeviceStepper) else "learn"
        rows = replay_bytes(parts.state) // len(devices), replay_bytes(parts.state, on_host=True)
        running = [pool.submit(use, _program(name, _training(config, parts, devices), fixed, *rows))]
        if evaluation and config.trainer.enable_eval:
            running.append(pool.submit(use, _program("evaluate", _evaluation(config, parts, devices), fixed)))
        return [each.result() for each in running]


def _program(name: str, traced: jax.stages.Traced, *sizes: int) -> Program:
    return Program(name, traced, traced.lower(), *sizes)


def _parts(config: RunConfig, devices: Sequence[jax.Device]) -> Parts:
    if config.data is not None:
        text = (
            f"{config.algorithm.name} learns from demonstrations, whose shapes are known once they are made; "
            "preflight needs an algorithm that learns from its environments, such as ppo"
        )
        raise ConfigError([Problem("algorithm.name", text)])
    try:
        parts = build(config, absent=devices)
    except ImportError as error:
        raise ConfigError([Problem("env.id", f"{config.env.id} cannot be made here: {error}")]) from error
    if isinstance(parts.env, HostEnv):
        parts.env.close()
        text = (
            f"{config.env.id} lives outside JAX: a GPU would only run the policy and the updates, as fast as its host "
            "delivers rollouts; give an environment in JAX"
        )
        raise ConfigError([Problem("env.id", text)])
    return parts


def _training(config: RunConfig, parts: Parts, devices: Sequence[jax.Device]) -> jax.stages.Traced:
    if isinstance(parts.stepper, DeviceStepper):
        return parts.stepper.trace(*parts.stepper.shapes(parts.state, devices[0]))
    if not isinstance(parts.stepper, HostStepper) or len(devices) > 1:
        text = f"got '{config.trainer.collector.mode}': its updates are compiled for one GPU; give --gpus 1"
        raise ConfigError([Problem("trainer.collector.mode", text)])
    return _learning(config, parts, parts.stepper, devices[0])


def _learning(config: RunConfig, parts: Parts, stepper: HostStepper, device: jax.Device) -> jax.stages.Traced:
    trainer, dropout = config.trainer, uses_dropout(parts.policy)

    def collect(params: Params, key: Key) -> Rollout:
        envs = with_memory(reset(parts.env, key, trainer.num_envs), parts.policy)
        steps = trainer.buffer_size
        return unroll(parts.policy, parts.env, params, envs, key, num_steps=steps, dropout=dropout)[0]

    key = jax.random.key(trainer.seed)
    # made on the host in a run; its shapes are those of the same steps in JAX
    rollout = jax.eval_shape(collect, parts.state.train.params, key)
    # outside JAX some steps only reset: the mask is an input of the real program
    rollout = replace(rollout, valid=jax.ShapeDtypeStruct(rollout.reward.shape, bool))
    # environments on the host are no arrays of the program
    state, replays = take_out(replace(parts.state, envs=()))
    given = (state, rollout, key, replays)
    return stepper.learn.trace(*(shapes_on(SingleDeviceSharding(device), each) for each in given))


def _evaluation(config: RunConfig, parts: Parts, devices: Sequence[jax.Device]) -> jax.stages.Traced:
    place = SingleDeviceSharding(devices[0]) if len(devices) == 1 else replicated(make_mesh(devices))
    evaluator = DeviceEvaluator(parts.policy, evaluation_env(config, parts.env), config.trainer)
    return evaluator.trace(shapes_on(place, parts.state.train.params))
