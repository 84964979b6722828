"""All that only a GPU can show, in one call. ``--dry-run`` tries the same on the CPU, with tiny sizes.

numerics    the same training and the same gradient on CPU and GPU, in every matmul precision: how far they part
physics     one control step of PushCube on MJX and on Warp beside the C engine's, also with randomized parameters
throughput  env steps per second of training, collection and update, over num_envs; seconds to compile, peak memory
update      one PPO update alone, beside the bound from preflight's counts and its estimate of launches
preflight   the memory and the kernels that preflight foretells, beside what happened
pictures    the ray caster's pictures per second
vla         the vision-language-action policy that one card is to carry: decisions per second, memory beside the plan
peers       Brax's own PPO, with Brax's and with Playground's environments, beside training here of the same size

Each measurement is a process of its own, since a peak of memory is one of a process and a GPU that has failed stays so.
"""

import argparse
import gzip
import importlib.util
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, get_args

CONFIGS = Path(__file__).parents[1] / "configs"
ASSETS = Path(__file__).parents[1] / "ejax" / "envs" / "assets"
REPEATS = 3
"""Timings of each measurement, of which the median is reported."""
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "mujoco", "mujoco-mjx", "warp-lang"),
    *("brax", "playground"),
)
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
"""A CUDA graph is one launch of many kernels: preflight counts without them, so what is traced runs without them."""


@dataclass(frozen=True)
class Size:
    """The size of a training. Minibatches grow with the environments, as they would in a run that is made for a GPU."""

    num_envs: tuple[int, ...]
    large: int
    """Environments where one number of them is enough."""
    num_steps: int
    n_epochs: int
    minibatches: str
    updates: int
    """Updates in one dispatch."""

    def overrides(self, device: str, num_envs: int, *more: str) -> list[str]:
        return [
            f"trainer.device={device}",
            f"trainer.num_envs={num_envs}",
            f"trainer.buffer_size={self.num_steps}",
            f"trainer.updates_per_dispatch={self.updates}",
            "trainer.enable_eval=false",
            f"algorithm.cfg.n_epochs={self.n_epochs}",
            self.minibatches,
            *more,
        ]


FULL = Size((1024, 4096, 16384, 65536), 4096, 32, 4, "algorithm.cfg.num_mini_batches=8", 4)
TINY = Size((8, 16), 8, 8, 2, "algorithm.cfg.batch_size=64", 2)


@dataclass(frozen=True)
class Measurement:
    """One process: the name of a ``measure_`` function and its arguments."""

    part: str
    label: str
    what: str
    arguments: dict[str, Any]
    env: Mapping[str, str] | None = None
    skipped: str | None = None
    """Reason that it is not done."""


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.one:
        return _measure_here(json.loads(args.one))
    if args.dry_run and args.num_envs:
        parser.error(f"--dry-run has sizes of its own, {TINY.num_envs}; leave out --num-envs")
    size = TINY if args.dry_run else replace(FULL, num_envs=tuple(args.num_envs or FULL.num_envs))
    device = "cpu" if args.dry_run else "cuda"
    machine = _run(Measurement("machine", "", "machine", {"device": device}), device, args.limit)
    if "error" in machine:
        print(f"no GPU that JAX can use: {machine['error']}\n--dry-run tries the script on the CPU", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    target = args.target or _target(machine["device"])
    found: dict[str, Any] = {"dry_run": args.dry_run, "machine": machine, "measurements": []}
    for each in plan(args.parts, size, device, target):
        if not any(text in each.label for text in args.only):
            continue
        result = {"skipped": each.skipped} if each.skipped else _run(each, device, args.limit)
        found["measurements"].append({"part": each.part, "label": each.label, **each.arguments, "result": result})
        print(f"{each.part}: {each.label}: {_line(result)}", flush=True)
        if args.json:  # after each of them: a machine that goes away leaves what was measured
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    failed = sum("error" in each["result"] for each in found["measurements"])
    print(f"{len(found['measurements'])} measurements, {failed} failed")
    return int(failed > 0)


def plan(parts: list[str], size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    """List every measurement of the parts, in order; also those that cannot be done here, and why."""
    for part in parts:
        yield from PLANS[part](size, device, target)


def _plan_numerics(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    arguments = {"config": "point_mass/ppo.yaml", "overrides": size.overrides(device, size.num_envs[0])}
    yield Measurement("numerics", f"PointMass, {size.num_envs[0]} envs", "numerics", arguments)
    if device == "cpu":
        yield Measurement("numerics", "CPU against GPU", "numerics", {}, skipped="needs a GPU; the CPU stood in for it")


def _plan_physics(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    for engine in ("mjx", "warp"):
        for randomized in (False, True):
            arguments = {"engine": engine, "randomized": randomized, "num_rows": size.large, "device": device}
            label = f"{engine}{', randomized' if randomized else ''}, {size.large:,} rows"
            yield Measurement("physics", label, "physics", arguments, skipped=_lacking(engine))


def _plan_throughput(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    for name, config, engine in _ENVS:
        for num_envs in size.num_envs if engine is None or size is not TINY else size.num_envs[:1]:
            more = [] if engine is None else [f"env.cfg.physics={engine}"]
            arguments = {"config": config, "overrides": size.overrides(device, num_envs, *more)}
            label = f"{name}, {num_envs:,} envs"
            yield Measurement("throughput", label, "throughput", arguments, skipped=_lacking(engine))


def _plan_update(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    config = "point_mass/ppo.yaml"
    shapes = [(hidden, num_envs) for hidden in (64, 256) for num_envs in (size.num_envs[0], size.num_envs[-1])]
    works = list(product(shapes, ("float32", "tf32")))
    if size is TINY:  # one, in float32: XLA's compiler for GPUs fails on TF32 products of so few rows
        works = works[:1]
    for (hidden, num_envs), precision in works:
        networks = [f"policy.{each}.network_cfg.hidden_sizes=[{hidden},{hidden}]" for each in ("actor", "critic")]
        more = [*networks, f"trainer.matmul_precision={precision}", "trainer.collector.mode=host"]
        label = f"{hidden}-{hidden}, {num_envs:,} x {size.num_steps}, {precision}"
        timed = {"config": config, "overrides": size.overrides(device, num_envs, *more)}
        yield Measurement("update", f"{label}, measured", "update", timed)
        yield _foretell("update", f"{label}, bound", config, size.overrides("cpu", num_envs, *more), target)


def _plan_preflight(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    without_graphs = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}"}
    for name, config, engine in (_ENVS[0], _ENVS[3]):
        more = [] if engine is None else [f"env.cfg.physics={engine}"]
        label = f"{name}, {size.large:,} envs"
        yield _foretell("preflight", f"{label}, foretold", config, size.overrides("cpu", size.large, *more), target)
        arguments = {"config": config, "overrides": size.overrides(device, size.large, *more)}
        yield Measurement("preflight", f"{label}, happened", "traced", arguments, without_graphs, _lacking(engine))


def _plan_pictures(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    for pixels in (64, 128):
        arguments = {"num_rows": size.large, "pixels": pixels, "device": device}
        yield Measurement("pictures", f"{size.large:,} of {pixels} x {pixels}", "pictures", arguments)


def _plan_vla(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    config = "instructed_place/grpo_h100.yaml"
    more = ["trainer.enable_eval=false", "trainer.updates_per_dispatch=1", *(_VLA_TINY if size is TINY else [])]
    yield _foretell("vla", "302 M, foretold", config, ["trainer.device=cpu", *more], target)
    arguments = {"config": config, "overrides": [f"trainer.device={device}", *more], "repeats": 2}
    yield Measurement("vla", "302 M, happened", "throughput", arguments)


def _plan_peers(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    # ``float32`` is TF32 to JAX on a GPU, and so to the peers
    tf32 = "trainer.matmul_precision=tf32"
    for library, package, config in (
        ("Brax", "brax", "brax/inverted_pendulum.yaml"),
        ("Playground", "mujoco_playground", "playground/cartpole_balance.yaml"),
    ):
        lacking = None if importlib.util.find_spec(package) else f"{package} is not installed"
        own = {"library": library, "tiny": size is TINY}
        yield Measurement("peers", f"{library}'s PPO", "peer", own, skipped=lacking)
        shape = _PEER_TINY if size is TINY else _PEER_SIZE[library]
        overrides = shape.overrides(device, shape.large, tf32)
        arguments = {"config": config, "overrides": overrides + _PEER_NETWORKS[library]}
        yield Measurement("peers", f"{library}'s environment here", "throughput", arguments, skipped=lacking)


def _foretell(part: str, label: str, config: str, overrides: list[str], target: str | None) -> Measurement:
    from ejax.preflight.plugin import compiler_problem

    skipped = compiler_problem() or (None if target else "the card is not known to preflight; name one with --target")
    arguments = {"config": config, "overrides": overrides, "target": target}
    return Measurement(part, label, "foretold", arguments, {"JAX_PLATFORMS": "cpu"}, skipped)


_ENVS: tuple[tuple[str, str, str | None], ...] = (
    ("PointMass", "point_mass/ppo.yaml", None),
    ("CartPole on mjx", "cart_pole/ppo.yaml", "mjx"),
    ("CartPole on warp", "cart_pole/ppo.yaml", "warp"),
    ("PushCube on mjx", "push_cube/ppo.yaml", "mjx"),
    ("PushCube on warp", "push_cube/ppo.yaml", "warp"),
    ("PushCube randomized on mjx", "push_cube/ppo_randomized.yaml", "mjx"),
    ("PushCube randomized on warp", "push_cube/ppo_randomized.yaml", "warp"),
    ("Quadruped on warp", "locomotion/quadruped.yaml", "warp"),
)
PLANS: dict[str, Callable[[Size, str, str | None], Iterator[Measurement]]] = {
    "numerics": _plan_numerics,
    "physics": _plan_physics,
    "throughput": _plan_throughput,
    "update": _plan_update,
    "preflight": _plan_preflight,
    "pictures": _plan_pictures,
    "vla": _plan_vla,
    "peers": _plan_peers,
}
# The peers' sizes: Brax's environment at FULL's, Playground's with its own parameters for it. Both as Brax names them:
# an update has batch_size · num_minibatches · unroll_length steps, num_updates_per_batch epochs.
_PEER_SIZE = {
    "Brax": replace(FULL, num_envs=(2048,), large=2048),
    "Playground": Size((2048,), 2048, 480, 16, "algorithm.cfg.num_mini_batches=32", 1),
}
_VLA_TINY = [
    *("trainer.num_envs=8", "trainer.buffer_size=2", "algorithm.cfg.batch_size=8", "env.cfg.width=32"),
    *("env.cfg.height=32", "env.cfg.wrist={width: 32, height: 32}", "policy.vla_config.model_config.width=32"),
    *("policy.vla_config.model_config.depth=1", "policy.vla_config.model_config.num_heads=2"),
]
_PEER_TINY = replace(TINY, minibatches="algorithm.cfg.num_mini_batches=2")
_PEER_NETWORKS = {
    "Brax": [f"policy.{each}.network_cfg.hidden_sizes=[64,64]" for each in ("actor", "critic")],
    "Playground": [  # Brax's default: 4 layers of 32 for the policy, 5 of 256 for the value
        "policy.actor.network_cfg={hidden_sizes: [32, 32, 32, 32], activation: tanh}",
        "policy.critic.network_cfg={hidden_sizes: [256, 256, 256, 256, 256], activation: tanh}",
        "policy.actor_obs_normalization=true",
        "policy.critic_obs_normalization=true",
    ],
}


def measure_machine(device: str) -> dict[str, Any]:
    import jax

    first = jax.devices(device)[0]
    packages = {name: _version(name) for name in PACKAGES}
    return {
        "device": first.device_kind if device != "cpu" else f"CPU, {os.cpu_count()} cores",
        "driver": _driver(),
        "python": platform.python_version(),
        **{name: number for name, number in packages.items() if number is not None},
    }


def measure_numerics(config: str, overrides: list[str]) -> dict[str, Any]:
    """Largest |difference| / largest |reference| within each array; the reference is the CPU's in float32."""
    import jax

    from ejax.config import load_config
    from ejax.runtime.device import MatmulPrecision

    read = load_config(CONFIGS / config, overrides)
    cpu, other = jax.devices("cpu")[0], jax.devices(read.trainer.device)[0]
    batch = _minibatch(read, cpu)
    reference = _arrays(read, cpu, "float32", batch)
    result: dict[str, Any] = {}
    for precision in get_args(MatmulPrecision):
        apart = {name: _relative(x, reference[name]) for name, x in _arrays(read, other, precision, batch).items()}
        result[precision] = {"worst": _worst(apart), "arrays": apart}
    return result


def measure_physics(engine: Any, randomized: bool, num_rows: int, device: str) -> dict[str, Any]:
    """Measure each row's largest difference from the C engine after one control step, in eight steps to random targets.

    The solver may iterate until it is done: the task's own 5 iterations are too few at times, and each engine stops
    elsewhere.
    """
    import jax
    import jax.numpy as jnp
    import mujoco
    import numpy as np

    from ejax.envs.mujoco.engine import Physics, load_model
    from ejax.envs.tasks.push_cube import PushCubeRL
    from ejax.rollout import reset

    cpu, other = jax.devices("cpu")[0], jax.devices(device)[0]
    names = ("body_mass", "body_inertia", "geom_friction", "dof_damping", "dof_armature") if randomized else ()
    with jax.default_device(cpu):
        env = PushCubeRL(physics="mujoco")
        spec = mujoco.MjSpec.from_file(str(ASSETS / "push_cube.xml"))
        spec.option.iterations = spec.option.ls_iterations = 20
        spec.compile()
        physics = Physics(str(spec.to_xml()), "mujoco", env.sim_steps_per_control)
        start = reset(env, jax.random.key(0), num_rows).state.physics
        key = jax.random.key(1)
        factors = {}
        for name in names:
            key, drawn = jax.random.split(key)
            base = jnp.asarray(getattr(load_model(physics.asset), name), jnp.float32)
            factors[name] = base * jax.random.uniform(drawn, (num_rows, *[1] * base.ndim), minval=0.7, maxval=1.4)
        start = start.replace(parameters=factors)
        ranges = load_model(physics.asset).actuator_ctrlrange
        ctrl = jax.random.uniform(jax.random.key(2), (num_rows, len(ranges)), minval=-0.5, maxval=0.5)
        ctrl = jnp.clip(ctrl + start.qpos[:, : len(ranges)], *ranges.T)
        states = [start]
        for _ in range(8):
            states.append(jax.jit(jax.vmap(physics.step))(states[-1], ctrl))
    step = jax.jit(jax.vmap(replace(physics, engine=engine).step))
    apart: dict[str, list[Any]] = {"qpos": [], "qvel": []}
    for before, after in pairwise(states):
        found = step(*jax.device_put((before, ctrl), other))
        for name, differences in apart.items():
            differences.append(np.abs(np.asarray(getattr(found, name)) - np.asarray(getattr(after, name))).max(axis=1))
    return {
        f"{name}_{which}": float(take(np.concatenate(found)))
        for name, found in apart.items()
        for which, take in (("median", np.median), ("p99", lambda x: np.quantile(x, 0.99)), ("worst", np.max))
    }


def measure_pictures(num_rows: int, pixels: int, device: str) -> dict[str, Any]:
    """Pictures per second of PickPlaceRL, each state drawn at once."""
    import jax

    from ejax.envs.tasks.pick_place import PickPlaceRL
    from ejax.envs.wrappers.rendered import draw_state
    from ejax.experts.pick_place import CAMERA

    with jax.default_device(jax.devices(device)[0]):
        env = PickPlaceRL(physics="mjx")
        state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_rows))
        draw = jax.jit(jax.vmap(lambda state: draw_state(env, state, pixels, pixels, CAMERA)))
        seconds = []
        for _ in range(2 + 3 * REPEATS):
            began = time.perf_counter()
            jax.block_until_ready(draw(state))
            seconds.append(time.perf_counter() - began)
    return {"pictures_per_s": num_rows / median(seconds[2:]), "seconds": seconds, "peak_bytes": _peak_bytes()}


def measure_throughput(config: str, overrides: list[str], repeats: int = REPEATS) -> dict[str, Any]:
    """Env steps (with chunks: decisions) per second of training, after one dispatch to warm up."""
    import jax
    import numpy as np

    training = _Training(config, overrides)
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        training.advance()
        seconds.append(time.perf_counter() - began)
    steps = training.rows * training.num_updates
    finite = all(bool(np.isfinite(x).all()) for x in jax.tree.leaves(training.state.train.params))
    return {
        "steps_per_s": steps / median(seconds[1:]),
        "seconds": seconds,
        "compile_s": training.compile_s,
        "peak_bytes": _peak_bytes(),
        "finite": finite,
    }


def measure_update(config: str, overrides: list[str]) -> dict[str, Any]:
    """Seconds of one update from a rollout that lies on the device."""
    import jax
    import jax.numpy as jnp

    from ejax.config import load_config
    from ejax.rollout import reset, unroll
    from ejax.runtime.device import matmul_precision
    from ejax.training.build import build

    read = load_config(CONFIGS / config, overrides)
    trainer = read.trainer
    with matmul_precision(trainer.matmul_precision, trainer.device):
        parts: Any = build(read)

        @jax.jit
        def collect(params: Any, key: Any) -> Any:
            envs = reset(parts.env, key, trainer.num_envs)
            return unroll(parts.policy, parts.env, params, envs, key, num_steps=trainer.buffer_size, dropout=False)[0]

        rollout = collect(parts.state.train.params, jax.random.key(0))
        rollout = replace(rollout, valid=jnp.ones(rollout.reward.shape, bool))  # as a collector's have it
        update = partial(parts.stepper.learn, replace(parts.state, envs=()), rollout, jax.random.key(1))
        seconds = []
        for _ in range(2 + 3 * REPEATS):
            began = time.perf_counter()
            jax.block_until_ready(update())
            seconds.append(time.perf_counter() - began)
    return {"update_s": median(seconds[2:]), "seconds": seconds}


def measure_foretold(config: str, overrides: list[str], target: str) -> dict[str, Any]:
    """Predict a config's first program by preflight, for a card that need not be here."""
    from ejax.preflight.run import preflight

    found = preflight(str(CONFIGS / config), overrides, target=target)
    name, program = next(iter(found["programs"].items()))
    update = program["units"]["update"]
    seconds = update["bounds_s"]
    return {
        "program": name,
        "card": found["card"]["name"],
        "peak_bytes": program["memory"]["peak"],
        "kernels": update["kernels"],
        "loops_of_unknown_length": [each["path"] for each in program["loops"] if each["trips"] is None],
        "bound_s": max(seconds["memory"], seconds["arithmetic"], seconds["links"]),
        "launches_s": seconds["launches"],  # an assumption for each kernel, and without CUDA graphs: no bound
        "estimates_s": seconds,
    }


def measure_traced(config: str, overrides: list[str]) -> dict[str, Any]:
    """Measure the peak of memory and the kernels of one update, as the profiler saw them."""
    import jax

    training = _Training(config, overrides)
    training.advance()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0  # their events would crowd the device's out
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            training.advance(1)
        [path] = Path(folder).rglob("*.trace.json.gz")
        counts = count_kernels(json.loads(gzip.decompress(path.read_bytes())))
    unseen = None if counts else "no stream of a GPU in the trace"
    return {"peak_bytes": _peak_bytes(), "kernels": sum(counts.values()) or unseen, "of_these": counts}


def count_kernels(trace: Mapping[str, Any]) -> Counter[str]:
    """Count what ran on the streams of GPUs: ``kernels`` and, as preflight counts them too, ``copies``.

    Args:
        trace: the profiler's, in the trace event format. It shows each kernel once more in lines of its own making,
            which are named otherwise (``XLA Ops``, ``XLA Modules``).
    """
    events = trace["traceEvents"]
    named = [each for each in events if each.get("ph") == "M"]
    gpus = {each["pid"] for each in named if each["name"] == "process_name" and "/device:GPU" in each["args"]["name"]}
    streams = {
        (each["pid"], each["tid"])
        for each in named
        if each["name"] == "thread_name" and each["pid"] in gpus and each["args"]["name"].startswith("Stream")
    }
    ran = (each["name"].lower() for each in events if each.get("ph") == "X" and (each["pid"], each["tid"]) in streams)
    return Counter("copies" if name.startswith(("memcpy", "memset")) else "kernels" for name in ran)


def measure_peer(library: str, tiny: bool) -> dict[str, Any]:
    """Env steps per second of Brax's PPO, without the stretch in which it compiles."""
    import jax
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as ppo

    if not hasattr(jax, "device_put_replicated"):  # Brax 0.14.2 calls it, jax 0.10 has it no longer
        jax.device_put_replicated = _put_replicated  # type: ignore[assignment]  # of the two arguments that Brax gives
    size = _PEER_TINY if tiny else _PEER_SIZE[library]
    environment, options = _peer_options(library)
    minibatches = int(size.minibatches.rpartition("=")[2])
    unroll_length = min(size.num_steps, 30 if library == "Playground" else size.num_steps)
    per_update = size.large * size.num_steps
    options |= {
        "num_envs": size.large,
        "unroll_length": unroll_length,
        "num_minibatches": minibatches,
        "batch_size": per_update // (minibatches * unroll_length),
        "num_updates_per_batch": size.n_epochs,
        "max_devices_per_host": 1,
    }
    rates: list[float] = []

    def note(step: int, metrics: Mapping[str, Any]) -> None:
        if step > 0:
            rates.append(float(metrics["training/sps"]))

    allowed = inspect.signature(ppo.train).parameters
    stretches = 1 + REPEATS
    began = time.perf_counter()
    ppo.train(
        environment=environment,
        num_timesteps=stretches * size.updates * per_update,
        num_evals=1 + stretches,
        run_evals=False,
        progress_fn=note,
        network_factory=partial(networks.make_ppo_networks, **_peer_networks(library)),
        **{name: value for name, value in options.items() if name in allowed},
    )
    return {
        "steps_per_s": median(rates[1:]),
        "rates": rates,
        "total_s": time.perf_counter() - began,
        "peak_bytes": _peak_bytes(),
    }


def _put_replicated(tree: Any, devices: Any) -> Any:
    """Stack one more axis, with a copy for each device, as jax's function of that name did."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)


def _peer_options(library: str) -> tuple[Any, dict[str, Any]]:
    """Its environment, and what of the options is not a matter of size."""
    if library == "Brax":
        from brax import envs

        options = {"episode_length": 1000, "reward_scaling": 0.1, "discounting": 0.99, "learning_rate": 5e-4}
        return envs.get_environment("inverted_pendulum", backend="generalized"), options
    from mujoco_playground import registry, wrapper
    from mujoco_playground.config import dm_control_suite_params

    name = "CartpoleBalance"
    options = dict(dm_control_suite_params.brax_ppo_config(name))
    options["wrap_env_fn"] = wrapper.wrap_for_brax_training
    for word in ("num_timesteps", "num_evals", "network_factory", "num_resets_per_eval"):
        options.pop(word, None)
    config = registry.get_default_config(name)
    config.impl = "jax"
    return registry.load(name, config=config), options


def _peer_networks(library: str) -> dict[str, Any]:
    return {"policy_hidden_layer_sizes": (64, 64), "value_hidden_layer_sizes": (64, 64)} if library == "Brax" else {}


class _Training:
    """One training, compiled and ready to go on."""

    def __init__(self, config: str, overrides: list[str]) -> None:
        import jax

        from ejax.config import load_config
        from ejax.runtime.device import matmul_precision
        from ejax.training.build import build
        from ejax.training.parts import rows_per_update

        read = load_config(CONFIGS / config, overrides)
        with matmul_precision(read.trainer.matmul_precision, read.trainer.device):
            parts = build(read)
            self.rows, self.stepper = rows_per_update(read, parts), parts.stepper
            self.num_updates = parts.stepper.max_updates
            state = parts.state
            del parts  # or the first state would lie in memory beside the newest
            began = time.perf_counter()
            self.state = jax.block_until_ready(self.stepper.start(state))
            self.compile_s = time.perf_counter() - began

    def advance(self, count: int | None = None) -> None:
        import jax

        after: Any = self.stepper.advance(self.state, count or self.num_updates, lambda: False)
        self.state = jax.block_until_ready(after[0])


def _minibatch(config: Any, device: Any) -> dict[str, Any]:
    """Make the rows of a rollout, as an update sees them."""
    import jax

    from ejax.algorithms.batch import flatten
    from ejax.algorithms.ppo import ppo_advantage
    from ejax.rollout import unroll
    from ejax.runtime.device import matmul_precision
    from ejax.training.build import build

    with jax.default_device(device), matmul_precision("float32", device.platform):
        parts = build(config)
        key, num_steps = jax.random.key(0), config.trainer.buffer_size

        @jax.jit
        def collect(params: Any, envs: Any) -> Any:
            rollout, _ = unroll(parts.policy, parts.env, params, envs, key, num_steps=num_steps, dropout=False)
            advantage, value_target = ppo_advantage(rollout, config=config.algorithm.cfg)
            return flatten(rollout, value=rollout.value, advantage=advantage, value_target=value_target)

        return jax.device_get(collect(parts.state.train.params, parts.state.envs))


def _arrays(config: Any, device: Any, precision: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the gradient of one minibatch, and parameters and metrics after two updates, by name."""
    import jax
    import numpy as np

    from ejax.algorithms.ppo import ppo_loss
    from ejax.runtime.device import matmul_precision
    from ejax.training.build import build

    with jax.default_device(device), matmul_precision(precision, "cpu" if device.platform == "cpu" else "cuda"):
        parts: Any = build(config)
        loss = partial(ppo_loss, policy=parts.policy, config=config.algorithm.cfg)
        gradient, _ = jax.jit(jax.grad(loss, has_aux=True))(parts.state.train.params, batch)
        state, metrics = parts.stepper.advance(parts.stepper.start(parts.state), 2, lambda: False)
    made = {"gradient": gradient, "params": state.train.params, "metrics": {k: x[:2] for k, x in metrics.items()}}
    named = jax.tree_util.tree_flatten_with_path(jax.device_get(made))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64) for path, x in named}


def _relative(x: Any, reference: Any) -> float:
    import numpy as np

    same = np.isnan(x) & np.isnan(reference)  # a mean over no episodes
    scale = np.abs(np.where(same, 0.0, reference)).max(initial=0.0)
    apart = np.abs(np.where(same, 0.0, x - reference)).max(initial=0.0)
    return float(apart / scale) if scale > 0.0 else float(apart)


def _worst(apart: dict[str, float]) -> dict[str, float]:
    """Return the array of each group that differs most."""
    groups = sorted({name.partition("/")[0] for name in apart})
    worst = [max((name for name in apart if name.startswith(group)), key=apart.__getitem__) for group in groups]
    return {name: apart[name] for name in worst}


def _peak_bytes() -> int | None:
    """Return the peak of JAX's own pool in this process, without Warp's and CUDA's. None: a CPU, which has none."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _measure_here(request: dict[str, Any]) -> int:
    """Measure in a process of its own: the last line that it prints is the result."""
    try:
        result = globals()[f"measure_{request['what']}"](**request["arguments"])
    except Exception as error:  # of any kind: it is this measurement's result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(result))
    return 0


def _run(each: Measurement, device: str, limit: float) -> dict[str, Any]:
    """Return the result of a process; how it ended, if there is none."""
    request = json.dumps({"what": each.what, "arguments": each.arguments})
    # compiled programs are not kept: how long they take is measured
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env |= {"JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu", **(each.env or {})}
    command = [sys.executable, str(Path(__file__).resolve()), "--one", request]
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {limit:.0f} s; --limit gives it more"}
        errors.seek(0)
        complaints = errors.read().splitlines()
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": f"its process ended with code {done.returncode}: {' / '.join(complaints[-3:])}"}
    return json.loads(lines[-1])


def _line(result: dict[str, Any]) -> str:
    """Print the figures of a result in one line; lists and what lies deeper are in the JSON."""
    if "error" in result or "skipped" in result:
        [(how, why)] = result.items()
        return f"{'FAILED' if how == 'error' else how}: {' '.join(str(why).split())[:300]}"
    return ", ".join(text for name, value in result.items() if (text := _figure(name, value)))


def _figure(name: str, value: Any) -> str:
    if isinstance(value, dict):
        worst = value.get("worst")
        return f"{name}: {', '.join(f'{array} {x:.1e}' for array, x in worst.items())}" if worst else ""
    if value is None or isinstance(value, list):
        return ""
    if name == "peak_bytes":
        return f"peak {value / 2**20:,.1f} MiB"
    if name in ("update_s", "bound_s", "launches_s"):
        return f"{name.removesuffix('_s')} {1e3 * value:.3g} ms"
    if name.startswith(("qpos_", "qvel_")):
        return f"{name} {value:.1e}"
    return f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}"


def _lacking(engine: Any) -> str | None:
    from ejax.envs.mujoco.choice import how_to_install

    how = None if engine is None else how_to_install(engine)
    return how and f"{engine} is not installed: {how}"


def _target(device: str) -> str | None:
    """Preflight's short name of a card; None: it knows none like it."""
    from ejax.preflight.targets import CARDS

    if device.startswith("CPU"):
        return "h100"
    return next((name for name in CARDS if name in device.lower().replace(" ", "")), None)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PLANS), default=list(PLANS), help="default: all, in order")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only those with one of them in their label"
    )
    parser.add_argument("--num-envs", nargs="+", type=int, metavar="N", help=f"default: {FULL.num_envs}")
    parser.add_argument("--target", metavar="CARD", help="as in ejax.preflight (default: the card that is here)")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="of one measurement (default: 600)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes: does the script work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a measurement's own process does
    return parser


if __name__ == "__main__":
    sys.exit(main())
