"""All that only a GPU can show, in one call; cut short, it goes on where it stopped.

    python benchmarks/gpu.py --json gpu.json --page docs/gpu.md

contacts    does Warp read contact sensors right (``contact_probe.py``)
throughput  env steps per second of training over num_envs; seconds to compile, peak of memory
graphs      the same with other CUDA graphs, for MLPs and a GRU
population  many members by ``vmap``
update      one PPO update alone in each precision, beside the bound from preflight's counts
configs     the configs made for this card: throughput, and the peak of memory beside preflight's
learned     a whole training of PushCube, until it succeeds
numerics    the same training and the same gradient on CPU and GPU, in every matmul precision: how far they part
physics     one control step of PushCube on MJX and on Warp beside the C engine's, also with randomized parameters
peers       Brax's own PPO, with Brax's and with Playground's environments, beside training here of the same size

and by ``--parts`` alone: ``preflight`` (the kernels that preflight counts, beside the profiler's), ``pictures`` (the
ray caster's), ``vla`` (the policy of 302 million parameters that one card is to carry).

Each measurement is a process of its own, since a peak of memory is one of a process and a GPU that has failed stays so.
Several compile at once; they are timed one after the other, with nothing beside them. What ``--json FILE`` holds
is not done again, so that a call that was cut short goes on. ``--dry-run`` tries the same on the CPU, with tiny sizes.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Timer
from typing import Any

import gpu_measures
from gpu_measures import CONFIGS, FULL, PEER_SIZE, PEER_TINY, READY, TINY, Size

NO_GRAPHS = "--xla_gpu_enable_command_buffer="
"""A CUDA graph is one launch of many kernels: preflight counts without them, so what is traced runs without them."""
GRAPHS = {
    "XLA's CUDA graphs": "",
    "loops in CUDA graphs": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL,+DYNAMIC_SLICE_FUSION",
    "no CUDA graphs": NO_GRAPHS,
}
_MEDIAN_WORST = ("median", "worst")
TABLES = ("<!-- tables of benchmarks/gpu.py -->", "<!-- end of the tables -->")


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
    alone: bool = False
    """It compiles and runs in one go, so nothing may run beside it."""

    @property
    def entry(self) -> dict[str, Any]:
        return {"part": self.part, "label": self.label, **self.arguments}


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.one:
        return _measure_here(json.loads(args.one))
    if args.dry_run and args.num_envs:
        parser.error(f"--dry-run has sizes of its own, {TINY.num_envs}; leave out --num-envs")
    size = TINY if args.dry_run else replace(FULL, num_envs=tuple(args.num_envs or FULL.num_envs))
    device = "cpu" if args.dry_run else "cuda"
    [machine] = _run_batch([Measurement("machine", "", "machine", {"device": device})], device, args.limit)
    if "error" in machine:
        print(f"no GPU that JAX can use: {machine['error']}\n--dry-run tries the script on the CPU", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    found: dict[str, Any] = {"dry_run": args.dry_run, "machine": machine, "measurements": []}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
        if found["machine"] != machine:
            print(f"{args.json} is of another machine or other versions; name another file", file=sys.stderr)
            return 2
        found["measurements"] = [each for each in found["measurements"] if "error" not in each["result"]]
    done = [{**each, "result": None} for each in found["measurements"]]
    target = args.target or _target(machine["device"])
    todo = [each for each in plan(args.parts, size, device, target) if any(text in each.label for text in args.only)]
    for batch in _batches([each for each in todo if {**each.entry, "result": None} not in done], args.together):
        for each, result in zip(batch, _run_batch(batch, device, args.limit), strict=True):
            found["measurements"].append({**each.entry, "result": result})
            print(f"{each.part}: {each.label}: {_line(result)}", flush=True)
        if args.json:  # after each of them: a machine that goes away leaves what was measured
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.page:
        before, after = (args.page.read_text().partition(mark)[i] for mark, i in zip(TABLES, (0, 2), strict=True))
        args.page.write_text(f"{before}{TABLES[0]}\n\n{tables(found)}\n{TABLES[1]}{after}")
    failed = sum("error" in each["result"] for each in found["measurements"])
    print(f"{len(found['measurements'])} measurements, {failed} failed")
    return int(failed > 0)


def plan(parts: list[str], size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    """List every measurement of the parts, in order; also those that cannot be done here, and why."""
    for part in parts:
        yield from PLANS[part](size, device, target)


def _plan_contacts(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    arguments = {"rows": [8] if size is TINY else [8, 16, 4096], "device": device}
    yield Measurement("contacts", "probe", "contacts", arguments, skipped=_lacking("warp"), alone=True)


def _plan_throughput(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    for name, config, engine, counts in _ENVS:
        for num_envs in size.num_envs[:1] if size is TINY else counts or size.num_envs:
            yield _throughput("throughput", f"{name}, {num_envs:,} envs", config, engine, size, device, num_envs)


def _plan_graphs(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    for name, config in (("PointMass", "point_mass/ppo.yaml"), ("PointMass with a GRU", "point_mass/gru.yaml")):
        for how, flags in GRAPHS.items():
            label = f"{name}, {size.num_envs[0]:,} envs, {how}"
            each = _throughput("graphs", label, config, None, size, device, size.num_envs[0])
            yield replace(each, env={"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"})


def _plan_population(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    del target
    for members in (2,) if size is TINY else (16, 64):
        more = [f"population.seeds={members}"]
        label = f"PointMass, {members} x {size.num_envs[0]:,} envs"
        yield _throughput("population", label, "point_mass/ppo.yaml", None, size, device, size.num_envs[0], *more)


def _plan_update(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    config = "point_mass/ppo.yaml"
    works = [(64, size.num_envs[0], "tf32")]
    works += [(256, size.num_envs[-1], precision) for precision in ("float32", "tf32", "bf16")]
    if size is TINY:  # one, in float32: XLA's compiler for GPUs fails on TF32 products of so few rows
        works = [(64, size.num_envs[0], "float32")]
    for hidden, num_envs, precision in works:
        networks = [f"policy.{each}.network_cfg.hidden_sizes=[{hidden},{hidden}]" for each in ("actor", "critic")]
        more = [*networks, f"trainer.matmul_precision={precision}", "trainer.collector.mode=host"]
        label = f"{hidden}-{hidden}, {num_envs:,} x {size.num_steps}, {precision}"
        timed = {"config": config, "overrides": size.overrides(device, num_envs, *more)}
        yield Measurement("update", f"{label}, measured", "update", timed)
        yield _foretell("update", f"{label}, bound", config, size.overrides("cpu", num_envs, *more), target)


def _plan_configs(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    suffix = "_24gb" if target in ("rtx4090", "l40s") else "_h100"
    more = ["trainer.enable_eval=false", "trainer.updates_per_dispatch=4", *(_TINY_CONFIG if size is TINY else [])]
    for path in sorted(CONFIGS.glob(f"*/*{suffix}.yaml")):
        config = str(path.relative_to(CONFIGS))
        if path.parent.name == "instructed_place":  # compiles for minutes: the part vla
            continue
        needs = {"point_mass": None, "playground": "mujoco_playground"}.get(path.parent.name, "warp")
        lacking = None if needs is None else _lacking(needs)
        if path.name.startswith("go1") and not importlib.util.find_spec("mjlab"):
            lacking = "mjlab is not installed, which has the robot"
        foretold = _foretell("configs", f"{config}, foretold", config, ["trainer.device=cpu", *more], target)
        yield replace(foretold, skipped=lacking or foretold.skipped)
        arguments = {"config": config, "overrides": [f"trainer.device={device}", *more]}
        yield Measurement("configs", f"{config}, happened", "throughput", arguments, skipped=lacking)


def _plan_learned(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    suffix = "_24gb" if target in ("rtx4090", "l40s") else "_h100"
    overrides = [f"trainer.device={device}", "trainer.eval_freq=2621440"]
    arguments = {"config": f"push_cube/ppo{suffix}.yaml", "overrides": overrides, "success": 0.95}
    skipped = "too long for a CPU" if size is TINY else _lacking("warp")
    yield Measurement("learned", arguments["config"], "learned", arguments, skipped=skipped, alone=True)


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


def _plan_preflight(size: Size, device: str, target: str | None) -> Iterator[Measurement]:
    without_graphs = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}"}
    tasks = (("PointMass", "point_mass/ppo.yaml", None), ("PushCube", "push_cube/ppo_embodichain.yaml", "mjx"))
    for name, config, engine in tasks:
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
    arguments = {"config": config, "overrides": [f"trainer.device={device}", *more], "repeats": 1}
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
        yield Measurement("peers", f"{library}'s PPO", "peer", own, skipped=lacking, alone=True)
        shape = PEER_TINY if size is TINY else PEER_SIZE[library]
        overrides = shape.overrides(device, shape.large, tf32)
        arguments = {"config": config, "overrides": overrides + _PEER_NETWORKS[library]}
        yield Measurement("peers", f"{library}'s environment here", "throughput", arguments, skipped=lacking)


def _throughput(
    part: str, label: str, config: str, engine: str | None, size: Size, device: str, num_envs: int, *more: str
) -> Measurement:
    physics = [] if engine is None else [f"env.cfg.physics={engine}"]
    arguments = {"config": config, "overrides": size.overrides(device, num_envs, *physics, *more)}
    return Measurement(part, label, "throughput", arguments, skipped=_lacking(engine))


def _foretell(part: str, label: str, config: str, overrides: list[str], target: str | None) -> Measurement:
    from ejax.preflight.run import compiler_problem

    skipped = compiler_problem() or (None if target else "the card is not known to preflight; name one with --target")
    arguments = {"config": config, "overrides": overrides, "target": target}
    return Measurement(part, label, "foretold", arguments, {"JAX_PLATFORMS": "cpu"}, skipped)


_ENVS: tuple[tuple[str, str, str | None, tuple[int, ...]], ...] = (
    ("PointMass", "point_mass/ppo.yaml", None, ()),
    ("PushCube on warp", "push_cube/ppo_embodichain.yaml", "warp", (4096, 16384, 32768)),
    ("PushCube randomized on warp", "push_cube/ppo_randomized.yaml", "warp", (4096,)),
    ("Quadruped on warp", "locomotion/quadruped.yaml", "warp", (4096, 16384)),
    ("PointMass with a GRU", "point_mass/gru.yaml", None, (4096,)),
)
"""Name, config, engine, environments; without a number, those of the size."""
PLANS: dict[str, Callable[[Size, str, str | None], Iterator[Measurement]]] = {
    "contacts": _plan_contacts,
    "throughput": _plan_throughput,
    "graphs": _plan_graphs,
    "population": _plan_population,
    "update": _plan_update,
    "configs": _plan_configs,
    "learned": _plan_learned,
    "numerics": _plan_numerics,
    "physics": _plan_physics,
    "peers": _plan_peers,
    "preflight": _plan_preflight,
    "pictures": _plan_pictures,
    "vla": _plan_vla,
}
DEFAULT_PARTS = [part for part in PLANS if part not in ("preflight", "pictures", "vla")]
_TINY_CONFIG = ["trainer.num_envs=8", "trainer.buffer_size=8", "algorithm.cfg.batch_size=64"]
_VLA_TINY = [
    *("trainer.num_envs=8", "trainer.buffer_size=2", "algorithm.cfg.batch_size=8", "env.wrappers.RenderedEnv.width=32"),
    *(
        "env.wrappers.RenderedEnv.height=32",
        "env.wrappers.RenderedEnv.wrist={width: 32, height: 32}",
        "policy.vla_config.model_config.width=32",
    ),
    *("policy.vla_config.model_config.depth=1", "policy.vla_config.model_config.num_heads=2"),
]
_PEER_NETWORKS = {
    "Brax": [f"policy.{each}.network_cfg.hidden_sizes=[64,64]" for each in ("actor", "critic")],
    "Playground": [  # Brax's default: 4 layers of 32 for the policy, 5 of 256 for the value
        "policy.actor.network_cfg={hidden_sizes: [32, 32, 32, 32], activation: tanh}",
        "policy.critic.network_cfg={hidden_sizes: [256, 256, 256, 256, 256], activation: tanh}",
        "policy.actor_obs_normalization=true",
        "policy.critic_obs_normalization=true",
    ],
}


def tables(found: Mapping[str, Any]) -> str:
    """Write what was found as Markdown, a table for each kind of figure."""
    machine = dict(found["machine"])
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "driver"))
    text = [f"{machine['device']}, driver {str(machine['driver']).partition(',')[0]}, {versions}.\n"]
    for part, (title, columns) in _TABLES.items():
        named = {each["label"]: each["result"] for each in found["measurements"] if each["part"] == part}
        rows = list(_rows(part, named))
        if rows:
            text += [f"**{title}**\n", _row(["", *columns]), _row(["---"] * (1 + len(columns))), *map(_row, rows), ""]
    return "\n".join(text)


_TABLES: dict[str, tuple[str, list[str]]] = {
    "throughput": ("Training, updates included", ["env steps/s", "compile, s", "peak of JAX's pool, MiB"]),
    "graphs": ("CUDA graphs", ["env steps/s", "compile, s", "peak of JAX's pool, MiB"]),
    "population": ("Members in one program", ["env steps/s", "compile, s", "peak of JAX's pool, MiB"]),
    "update": ("One update of PointMass", ["measured, ms", "bound, ms", "measured / bound"]),
    "configs": ("Configs for this card", ["env steps/s", "peak of JAX's pool, MiB", "preflight's, MiB"]),
    "learned": ("A whole training", ["success 0.95 after, s", "in all, s", "best success", "env steps"]),
    "numerics": ("Largest relative difference from the CPU's float32", ["gradient", "parameters", "metrics"]),
    "physics": (
        "Differences from the C engine",
        [f"{x}, {y}" for x in ("m, rad", "m/s, rad/s") for y in _MEDIAN_WORST],
    ),
    "peers": ("Beside Brax's PPO", ["env steps/s", "compile, s", "peak of JAX's pool, MiB"]),
    "vla": ("302 million parameters", ["decisions/s", "peak of JAX's pool, MiB", "preflight's, MiB"]),
}
"""Title and columns of each part."""


def _rows(part: str, named: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for label, result in named.items():
        kind = label.rpartition(", ")[2]
        if kind in ("foretold", "bound") or "skipped" in result:  # beside what was measured, or not at all
            continue
        if "error" in result:
            yield [label, "failed"]
        elif part == "update":
            foretold = named.get(label.replace("measured", "bound"), {})
            bound = foretold.get("bound_s")
            both = ["", ""] if bound is None else [f"{1e3 * bound:.3g}", f"{result['update_s'] / bound:.2f}"]
            yield [label.removesuffix(", measured"), f"{1e3 * result['update_s']:.3g}", *both]
        elif part in ("configs", "vla"):
            foretold = named.get(label.replace("happened", "foretold"), {})
            own = [_number(result["steps_per_s"]), _mebibytes(result), _mebibytes(foretold)]
            yield [f"`{label.removesuffix(', happened')}`", *own]
        elif part == "learned":
            seconds = [_number(result[name]) for name in ("reached_s", "total_s")]
            yield [f"`{label}`", *seconds, f"{result['best_success_rate']:.3f}", _number(result["env_steps"])]
        elif part == "numerics":
            for precision, apart in result.items():
                worst = {name.partition("/")[0]: f"{x:.1e}" for name, x in apart["worst"].items()}
                yield [precision, *(worst.get(name, "") for name in ("gradient", "params", "metrics"))]
        elif part == "physics":
            yield [label, *(f"{result[f'{x}_{y}']:.1e}" for x in ("qpos", "qvel") for y in _MEDIAN_WORST)]
        else:
            compiled = _number(result["compile_s"]) if "compile_s" in result else ""
            yield [label, _number(result["steps_per_s"]), compiled, _mebibytes(result)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"


def _mebibytes(result: Mapping[str, Any]) -> str:
    peak = result.get("peak_bytes")
    return "" if peak is None else f"{peak / 2**20:,.0f}"


def _batches(todo: Iterable[Measurement], together: int) -> Iterator[list[Measurement]]:
    """Group what may compile at the same time: neighbours, ``together`` of them at most."""
    for alone, neighbours in groupby(todo, lambda each: each.alone):
        each = list(neighbours)
        step = 1 if alone else together
        yield from (each[i : i + step] for i in range(0, len(each), step))


def _run_batch(batch: list[Measurement], device: str, limit: float) -> list[dict[str, Any]]:
    """Start all, wait until all have compiled, and give each its turn on the GPU."""
    running = [None if each.skipped else _Process(each, device, limit) for each in batch]
    for process in running:
        if process:
            process.read_line()
    return [
        {"skipped": each.skipped} if process is None else process.result()
        for each, process in zip(batch, running, strict=True)
    ]


class _Process:
    """One measurement, which ends by itself or at its limit."""

    def __init__(self, each: Measurement, device: str, limit: float) -> None:
        request = json.dumps({"what": each.what, "arguments": each.arguments})
        # compiled programs are not kept: how long they take is measured. Several processes share the GPU's memory
        env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        env |= {"JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu", **(each.env or {})}
        self.limit, self.line = limit, ""
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--one", request],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.timer = Timer(limit, self.process.kill)
        self.timer.start()

    def read_line(self) -> None:
        """Wait until it is ready or done."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == READY or line.startswith("{"):
                self.line = line
                return
        self.line = ""

    def result(self) -> dict[str, Any]:
        """Give it its turn. The result; how it ended, if there is none."""
        with self.process, self.errors:  # which close its pipes
            if self.line.strip() == READY and self.process.stdin is not None:
                with suppress(BrokenPipeError), self.process.stdin as turn:  # broken: it was at its limit
                    turn.write("go\n")
                self.read_line()
            code = self.process.wait()
            was_late = not self.timer.is_alive()
            self.timer.cancel()
            if self.line.startswith("{"):
                return json.loads(self.line)
            if was_late:
                return {"error": f"not done after {self.limit:.0f} s; --limit gives it more"}
            self.errors.seek(0)
            return {"error": f"its process ended with code {code}: {' / '.join(self.errors.read().splitlines()[-3:])}"}


def _measure_here(request: dict[str, Any]) -> int:
    """Measure in its own process: the last line that it prints is the result."""
    try:
        result = getattr(gpu_measures, f"measure_{request['what']}")(**request["arguments"])
    except Exception as error:  # of any kind: it is this measurement's result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(result), flush=True)
    return 0


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=list(PLANS), default=DEFAULT_PARTS, help=f"default: {' '.join(DEFAULT_PARTS)}"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only those with one of them in their label"
    )
    parser.add_argument("--num-envs", nargs="+", type=int, metavar="N", help=f"default: {FULL.num_envs}")
    parser.add_argument("--target", metavar="CARD", help="as in ejax preflight (default: the card that is here)")
    parser.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="S",
        help="of one measurement, its wait for others included (default: 600)",
    )
    together = max(1, (os.cpu_count() or 1) // 3)
    parser.add_argument("--together", type=int, default=together, metavar="N", help=f"to compile (here: {together})")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes: does the script work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep everything there, and go on from it")
    parser.add_argument("--page", type=Path, metavar="FILE", help="rewrite the tables of this page")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a measurement's own process does
    return parser


if __name__ == "__main__":
    sys.exit(main())
