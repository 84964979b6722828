"""Measurements of ``gpu.py``: each runs in its own process, compiles first, and waits for its turn on the GPU."""

import gzip
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, get_args

CONFIGS = Path(__file__).parents[1] / "configs"
ASSETS = Path(__file__).parents[1] / "ejax" / "envs" / "assets"
READY = "ready"
"""Line that a measurement prints once it has compiled; a line on its standard input is its turn."""
REPEATS = 3
"""Timings of each measurement, of which the median is reported."""
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "mujoco", "mujoco-mjx"),
    *("mujoco-warp", "warp-lang", "brax", "playground"),
)


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
TINY = Size((8, 16), 8, 32, 2, "algorithm.cfg.batch_size=64", 2)
# The peers' sizes: Brax's environment at FULL's, Playground's with its own parameters for it. Both as Brax names them:
# an update has batch_size · num_minibatches · unroll_length steps, num_updates_per_batch epochs.
PEER_SIZE = {
    "Brax": replace(FULL, num_envs=(2048,), large=2048),
    "Playground": Size((2048,), 2048, 480, 16, "algorithm.cfg.num_mini_batches=32", 1),
}
PEER_TINY = replace(TINY, minibatches="algorithm.cfg.num_mini_batches=2")


def _wait_for_turn() -> None:
    """Report that all is compiled, and wait until no other measurement uses the GPU."""
    print(READY, flush=True)
    sys.stdin.readline()


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


def measure_contacts(rows: list[int], device: str) -> dict[str, Any]:
    """Run ``contact_probe.py``, whose exit code decides whether Warp may sense contacts."""
    command = [sys.executable, str(Path(__file__).with_name("contact_probe.py")), "--device", device, "--rows"]
    began = time.monotonic()
    done = subprocess.run([*command, *map(str, rows)], capture_output=True, text=True)
    if done.returncode not in (0, 1):  # it could not be tried, which says nothing about the sensors
        raise RuntimeError(f"contact_probe.py ended with code {done.returncode}: {done.stderr[-500:]}")
    return {"passed": done.returncode == 0, "seconds": time.monotonic() - began, "lines": done.stdout.splitlines()}


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
        jax.block_until_ready(draw(state))  # it compiles
        _wait_for_turn()
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
    _wait_for_turn()
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        training.advance()
        seconds.append(time.perf_counter() - began)
    steps = training.rows * training.num_updates
    trained = getattr(training.state, "members", training.state)
    finite = all(bool(np.isfinite(x).all()) for x in jax.tree.leaves(trained.train.params))
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
        jax.block_until_ready(update())  # it compiles
        _wait_for_turn()
        seconds = []
        for _ in range(2 + 3 * REPEATS):
            began = time.perf_counter()
            jax.block_until_ready(update())
            seconds.append(time.perf_counter() - began)
    return {"update_s": median(seconds[2:]), "seconds": seconds}


def measure_learned(config: str, overrides: list[str], success: float) -> dict[str, Any]:
    """Seconds of ``ejax train``, compilation included, to its first evaluation of that success rate and to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ejax.train", "--config", str(CONFIGS / config), "--run", f"{folder}/run"]
        began = time.time()
        subprocess.run([*command, *overrides, "trainer.console=false"], stdout=sys.stderr, check=True)
        total = time.time() - began
        lines = map(json.loads, Path(folder, "run", "logs", "metrics.jsonl").read_text().splitlines())
        evaluated = [line for line in lines if "eval/success_rate" in line]
    rates = [line["eval/success_rate"] for line in evaluated]
    reached = [line["time"] - began for line, rate in zip(evaluated, rates, strict=True) if rate >= success]
    return {
        "reached_s": min(reached, default=None),
        "total_s": total,
        "best_success_rate": max(rates),
        "env_steps": evaluated[-1]["step"],
    }


def measure_foretold(config: str, overrides: list[str], target: str) -> dict[str, Any]:
    """Predict a config's first program by preflight, for a card that need not be here."""
    from kernel_counts.run import count_kernels as count

    found = count(str(CONFIGS / config), overrides, target=target)
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
    _wait_for_turn()
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
    size = PEER_TINY if tiny else PEER_SIZE[library]
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

        from ejax.config import bind, load_config
        from ejax.population.members import build_population
        from ejax.runtime.device import matmul_precision
        from ejax.training.build import build
        from ejax.training.parts import rows_per_update

        read = bind(load_config(CONFIGS / config, overrides))
        with matmul_precision(read.trainer.matmul_precision, read.trainer.device):
            if read.population is None:
                parts: Any = build(read)
                self.rows = rows_per_update(read, parts)
            else:
                population = build_population(read)
                parts = population.parts
                self.rows = len(population.members) * rows_per_update(population.configs[0], parts)
            self.stepper = parts.stepper
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

    from ejax.algorithms.batch import flatten_rollout
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
            return flatten_rollout(rollout, value=rollout.value, advantage=advantage, value_target=value_target)

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
    made = {
        "gradient": gradient,
        "params": state.train.params,
        "metrics": {k: x[:2] for k, x in metrics.items() if "time" not in k},
    }
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
