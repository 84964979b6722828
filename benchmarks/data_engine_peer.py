"""EmbodiChain's side of ``data_engine.py``: its engine's ``sample_batch`` in forked consumers, its worker left out.

Runs in an interpreter with torch, tensordict and the embodichain package. The buffer has its fields,
is full, and nothing writes to it. Prints the (calls, seconds) of each consumer as JSON.
"""

import argparse
import importlib.util
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from tensordict import TensorDict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", type=Path, required=True, help="module that makes embodichain importable")
    parser.add_argument("request", help="JSON: rows, frames, batch, chunk, joints, camera, consumers, seconds")
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # EmbodiChain prints; only the answer goes to standard output
    request = json.loads(args.request)
    spec = importlib.util.spec_from_file_location("stub", args.stub)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # type: ignore[union-attr]  # there is such a file
    engine = _engine(**{name: request[name] for name in ("rows", "frames", "joints", "camera")})
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(request["consumers"]), context.Queue()
    arguments = (engine, request["batch"], request["chunk"], request["seconds"], barrier, queue)
    processes = [context.Process(target=_draw, args=arguments) for _ in range(request["consumers"])]
    for process in processes:
        process.start()
    print(json.dumps([queue.get(timeout=120.0) for _ in processes]), file=answers)
    for process in processes:
        process.join()


def _engine(rows: int, frames: int, joints: int, camera: list[int] | None) -> Any:
    sys.modules.setdefault("tqdm", MagicMock())  # its worker's progress bar
    from embodichain.data_pipeline.engine import data

    def make(self: Any) -> TensorDict:
        shape, steps = (rows, frames), torch.arange(frames).expand(rows, frames).clone()
        robot = {name: torch.rand(*shape, joints) for name in ("qpos", "qvel", "qf")}
        obs: dict[str, Any] = {"robot": robot}
        if camera is not None:
            obs["sensor"] = {"camera": {"color": torch.randint(0, 255, (*shape, *camera), dtype=torch.uint8)}}
        fields = {"obs": obs, "actions": torch.rand(*shape, joints), "rewards": torch.rand(*shape)}
        fields |= {name: steps.clone() for name in ("episode_step", "segment_step", "task_index", "subtask_index")}
        fields |= {"segment_id": torch.zeros_like(steps), "valid": torch.ones(shape, dtype=torch.bool)}
        for name in ("segment_start", "segment_end", "terminated", "truncated"):
            fields[name] = torch.zeros(shape, dtype=torch.bool)
        return TensorDict(fields, batch_size=shape).share_memory_()

    data.OnlineDataEngine._create_buffer = make
    engine = data.OnlineDataEngine(
        data.OnlineDataEngineCfg(buffer_size=rows, max_episode_steps=frames, refill_threshold=10**6)
    )
    engine._lock_index[0] = engine._lock_index[1] = -1
    engine._set_state(data.OnlineDataEngineState.READY)
    return engine


def _draw(engine: Any, batch: int, chunk: int, seconds: float, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)  # as in a DataLoader's worker
    for _ in range(3):
        engine.sample_batch(batch, chunk)
    barrier.wait(60.0)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        engine.sample_batch(batch, chunk)
        calls += 1
    queue.put((calls, time.perf_counter() - start))


if __name__ == "__main__":
    main()
