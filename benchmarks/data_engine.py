"""Rates at which consumers draw from the online data engine, beside the machine's rate of copying memory.

Each figure is of N processes at a time: chunks/s and GB/s that all of them get together. ``copy`` is the same number of
bytes per call copied by NumPy from an array as large as the buffer: the bound of any engine that hands out copies.
``idle``: the worker waits. ``refilling``: it rewrites the rows as fast as it can, so chunks are drawn again. With
``--against embodichain`` its engine (idle) is timed alternately with the others.

``--gym-config FILE`` measures an engine whose expert demonstrates in EmbodiChain's gym config instead: chunks/s of an
idle one, beside EmbodiChain's on a filled buffer of the same rows and frames, and the episodes/s of one that is
refilled all the time. EmbodiChain's worker needs its simulator, so its episodes/s are not measured. Its buffer has the
robot's state, actions and rewards; ejax's also what the config's functors observe.
"""

import argparse
import json
import multiprocessing
import subprocess
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ejax.data import Episode, EpisodeSpec, OnlineDataEngine, OnlineDataEngineCfg

ROWS, FRAMES, BATCH, CHUNK = 16, 300, 32, 64
_SHAPE = {"rows": ROWS, "frames": FRAMES, "batch": BATCH, "chunk": CHUNK}
CONSUMERS = (1, 2, 4)
WORKLOADS: dict[str, dict[str, Any]] = {
    "arm": {"joints": 14, "camera": None},
    "arm and camera": {"joints": 14, "camera": (96, 96, 3)},
}


class Random:
    """Episodes of full length, made once: what is measured is the way to the consumer."""

    def __init__(self, joints: int, camera: tuple[int, ...] | None) -> None:
        rng = np.random.default_rng(0)
        names = ("obs/robot/qpos", "obs/robot/qvel", "obs/robot/qf", "actions")
        self._frames: dict[str, Any] = {name: rng.random((FRAMES, joints), np.float32) for name in names}
        self._frames["rewards"] = rng.random(FRAMES, np.float32)
        if camera is not None:
            self._frames["obs/sensor/camera/color"] = rng.integers(0, 255, (FRAMES, *camera), np.uint8)

    def spec(self) -> EpisodeSpec:
        return EpisodeSpec({name: (array.shape[1:], str(array.dtype)) for name, array in self._frames.items()})

    def generate(self, seed: int) -> Episode:
        del seed
        return Episode(self._frames)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.against and not (args.torch_python and args.stub):
        parser.error("--against needs --torch-python and --stub")
    peer = [str(args.torch_python), str(Path(__file__).with_name("data_engine_peer.py")), "--stub", str(args.stub)]
    if args.gym_config:
        made = _measure_gym_config(args.gym_config, args.seconds, args.repeats, peer if args.against else None)
        print(json.dumps(made, indent=2))
        return
    rows: list[dict[str, Any]] = []
    for workload, task_cfg in WORKLOADS.items():
        for consumers in CONSUMERS:
            rows.append(
                _measure(workload, task_cfg, consumers, args.seconds, args.repeats, peer if args.against else None)
            )
            _print(rows[-1], head=len(rows) == 1)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def _measure(
    workload: str, task_cfg: dict[str, Any], consumers: int, seconds: float, repeats: int, peer: list[str] | None
) -> dict[str, Any]:
    """Medians over rounds; in each, copying and drawing alternate."""
    rates: dict[str, list[float]] = {"copy": [], "idle": [], "refilling": []}
    redrawn, write_ms = 0.0, 0.0
    engines = {"idle": 10**9, "refilling": 1}
    cfgs = {
        name: OnlineDataEngineCfg(
            "data_engine:Random", task_cfg, buffer_size=ROWS, max_episode_steps=FRAMES, refill_threshold=threshold
        )
        for name, threshold in engines.items()
    }
    for _ in range(repeats):
        for name, cfg in cfgs.items():
            with OnlineDataEngine(cfg) as engine:
                size = _bytes(engine.sample_batch(BATCH, CHUNK))
                answers = _run(consumers, _draw, (engine, seconds, CHUNK))
                rates[name].append(sum(calls / elapsed for calls, elapsed, _ in answers))
                if name == "refilling":
                    redrawn = sum(each[2] for each in answers) / sum(each[0] * BATCH for each in answers)
                    write_ms = 1e3 / max(engine.stats()["data/episodes_per_s"], 1e-9)
        answers = _run(consumers, _copy, (size, seconds))
        rates["copy"].append(sum(calls / elapsed for calls, elapsed, _ in answers))
        if peer is not None:
            request = {**_SHAPE, **task_cfg, "consumers": consumers, "seconds": seconds}
            answer = subprocess.run([*peer, json.dumps(request)], stdout=subprocess.PIPE, check=True, text=True).stdout
            rates.setdefault("embodichain", []).append(sum(calls / elapsed for calls, elapsed in json.loads(answer)))
    middle = {name: median(values) for name, values in rates.items()}
    return {
        "workload": workload,
        "consumers": consumers,
        "batch_mib": size / 2**20,
        "redrawn": redrawn,
        "write_ms": write_ms,
        **{f"{name}_chunks_per_s": rate * BATCH for name, rate in middle.items()},
        **{f"{name}_gb_per_s": rate * size / 1e9 for name, rate in middle.items()},
        "batches_per_s": rates,
    }


def _measure_gym_config(file: Path, seconds: float, repeats: int, peer: list[str] | None) -> dict[str, Any]:
    """Medians over rounds, in each of which both engines draw, one after the other."""
    config, chunk = json.loads(file.read_text()), 32
    options = {"gym_config": config, "buffer_size": ROWS, "shutdown_timeout": 60.0}
    rates: dict[str, list[float]] = {
        f"{name} {count}": [] for name in ("ejax", "EmbodiChain") for count in CONSUMERS[:2]
    }
    with OnlineDataEngine(OnlineDataEngineCfg(**options, refill_threshold=10**9)) as engine:
        joints, frames = engine.shared_buffer["obs"]["robot"]["qpos"].shape[2], engine.max_episode_steps
        size = _bytes(engine.sample_batch(BATCH, chunk))
        for _ in range(repeats):
            for count in CONSUMERS[:2]:
                answers = _run(count, _draw, (engine, seconds, chunk))
                rates[f"ejax {count}"].append(sum(calls / elapsed for calls, elapsed, _ in answers) * BATCH)
                if peer is not None:
                    shape = {**_SHAPE, "frames": frames, "chunk": chunk, "joints": joints, "camera": None}
                    request = json.dumps({**shape, "consumers": count, "seconds": seconds})
                    answer = subprocess.run([*peer, request], stdout=subprocess.PIPE, check=True, text=True).stdout
                    theirs = sum(calls / elapsed for calls, elapsed in json.loads(answer))
                    rates[f"EmbodiChain {count}"].append(theirs * BATCH)
    with OnlineDataEngine(OnlineDataEngineCfg(**options, refill_threshold=1)) as engine:
        start, before = time.perf_counter(), engine.stats()["data/episodes"]
        while time.perf_counter() - start < 5 * seconds:
            engine.sample_batch(BATCH, chunk)
            time.sleep(0.001)
        made, elapsed = engine.stats(), time.perf_counter() - start
    return {
        "chunks_per_s": {name: median(values) for name, values in rates.items() if values},
        "batch_mib": size / 2**20,
        "episodes_per_s": (made["data/episodes"] - before) / elapsed,
        "success_rate": made["data/success_rate"],
    }


def _run(consumers: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[int, float, float]]:
    """Return (calls, seconds, redrawn) of each of as many fresh processes, started together."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(consumers), context.Queue()
    processes = [context.Process(target=work, args=(*arguments, barrier, queue)) for _ in range(consumers)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=120.0) for _ in processes]
    for process in processes:
        process.join()
    return answers


def _draw(engine: OnlineDataEngine, seconds: float, chunk: int, barrier: Barrier, queue: Any) -> None:
    calls, elapsed = _count(lambda: engine.sample_batch(BATCH, chunk), seconds, barrier)
    queue.put((calls, elapsed, engine.stats()["data/redrawn"]))


def _copy(size: int, seconds: float, barrier: Barrier, queue: Any) -> None:
    source = np.ones((size * ROWS * FRAMES) // (BATCH * CHUNK), np.uint8)
    rng = np.random.default_rng(0)

    def one() -> None:
        start = int(rng.integers(len(source) - size + 1))
        source[start : start + size].copy()

    queue.put((*_count(one, seconds, barrier), 0.0))


def _count(call: Callable[[], Any], seconds: float, barrier: Barrier) -> tuple[int, float]:
    for _ in range(3):
        call()
    barrier.wait(60.0)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return calls, time.perf_counter() - start


def _bytes(tree: Any) -> int:
    return sum(map(_bytes, tree.values())) if isinstance(tree, dict) else int(tree.nbytes)


def _print(row: dict[str, Any], *, head: bool) -> None:
    if head:
        print(f"{ROWS} rows of {FRAMES} frames, batches of {BATCH} chunks of {CHUNK} frames")
        print(
            "| workload | consumers | idle: chunks/s, GB/s | refilling: chunks/s, redrawn | copy GB/s | idle / copy "
            "| EmbodiChain, chunks/s |"
        )
        print("|---|---|---|---|---|---|---|")
    theirs = row.get("embodichain_chunks_per_s")
    share = row["idle_gb_per_s"] / row["copy_gb_per_s"]
    print(
        f"| {row['workload']} ({row['batch_mib']:.2f} MiB a batch) | {row['consumers']} | "
        f"{row['idle_chunks_per_s']:,.0f}, {row['idle_gb_per_s']:.2f} | "
        f"{row['refilling_chunks_per_s']:,.0f}, {row['redrawn']:.2%} | {row['copy_gb_per_s']:.2f} | {share:.0%} | "
        f"{'' if theirs is None else f'{theirs:,.0f}'} |",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each timing (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the report gives medians (default: 3)")
    parser.add_argument("--against", choices=["embodichain"], help="needs --torch-python and --stub")
    parser.add_argument("--torch-python", type=Path, metavar="PATH", help="interpreter with torch and embodichain")
    parser.add_argument("--stub", type=Path, metavar="PATH", help="module that makes embodichain importable")
    parser.add_argument("--gym-config", type=Path, metavar="FILE", help="EmbodiChain's, loaded as it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rates there")
    return parser


if __name__ == "__main__":
    main()
