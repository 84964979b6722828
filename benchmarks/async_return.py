"""Return over wall time of PPO whose rollouts alternate with the updates, or overlap them and older.

PointMass (256 environments behind the host interface, a step of them takes ``--env-ms``), a million steps' worth of
learning rate. Each variant trains for the same wall time; success is evaluated on fixed episodes.

    python benchmarks/async_return.py --seconds 60 [--env-ms 2] [--plot docs/async_return.png] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from plots import finish, panels

from ejax.collectors import HostCollector
from ejax.config import load_config
from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.evaluation import evaluate
from ejax.runtime.device import prepare_jax
from ejax.training.build import build
from ejax.training.host_steppers import HostStepper
from ejax.training.parts import Parts
from ejax.types import HostTimestep

CONFIG = Path(__file__).parents[1] / "configs" / "torch" / "point_mass.yaml"
VARIANTS = {
    "alternately": ("host", 0, "none"),
    "lag 1": ("async", 1, "none"),
    "lag 4": ("async", 4, "none"),
    "lag 4, decoupled": ("async", 4, "decoupled"),
    "lag 4, V-trace": ("async", 4, "vtrace"),
}


class SlowHostEnv(PureHostEnv):
    """A host environment whose steps take a while, elsewhere."""

    seconds = 0.0

    def step(self, action: NDArray[Any]) -> HostTimestep:
        time.sleep(self.seconds)
        return super().step(action)


def train(name: str, seconds: float, env_ms: float, seed: int, folder: str) -> list[dict[str, float]]:
    mode, lag, correction = VARIANTS[name]
    config = load_config(
        CONFIG,
        [
            f"trainer.seed={seed}",
            f"trainer.output_dir={folder}",
            f"trainer.collector.mode={mode}",
            f"trainer.collector.max_staleness={lag}",
            f"algorithm.cfg.staleness_correction={correction}",
        ],
    )
    parts = build(config)
    stepper = parts.stepper
    assert isinstance(stepper, HostStepper)
    slow_down(stepper.collector, env_ms / 1000)
    history = []
    with stepper:
        stepper.start(parts.state)
        state, update = parts.state, 0
        began = paused = time.perf_counter()
        spent = 0.0
        while spent < seconds:
            moved = stepper.advance(state, 1, lambda: False)
            assert moved is not None
            state, metrics = moved
            update += 1
            if update == 3:  # compiled by now
                began, spent = time.perf_counter(), 0.0
                paused = 0.0
            if update % 4 == 0:
                jax.block_until_ready(state.train.params)  # the update is training time, not evaluation's
            if update > 3:
                spent = time.perf_counter() - began - paused
            if update % 4 == 0:
                stop = time.perf_counter()
                with stepper.paused():
                    success = success_of(parts, state.train.params)
                paused += time.perf_counter() - stop
                kl = float(metrics.get("train/behave_approx_kl", metrics["train/approx_kl"])[0])
                history.append({"seconds": spent, "updates": update, "success": success, "kl": kl})
    return history


def slow_down(collector: HostCollector, seconds: float) -> None:
    for worker in collector.workers:
        worker.env = slow = SlowHostEnv(PointMassRL(success_bonus=20.0), worker.env.num_envs)
        slow.seconds = seconds


def success_of(parts: Parts, params: Any) -> float:
    env = PointMassRL(success_bonus=20.0)
    episodes = evaluate(parts.policy, env, params, jax.random.key(9), num_envs=128, num_episodes=256)
    return float(np.mean(episodes["success"]))


def plot(results: dict[str, list[dict[str, float]]], path: Path, env_ms: float) -> None:
    figure, (axes,) = panels([f"PointMass, PPO, environment steps of {env_ms:g} ms, one seed"])
    for name, history in results.items():
        axes.plot([h["seconds"] for h in history], [h["success"] for h in history], label=name, linewidth=1.6)
    finish(figure, [axes], path, x="seconds of training (evaluation not counted)", y="success")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--env-ms", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prepare_jax("cpu")
    results = {}
    print("| variant | updates | env steps/s | first success ≥ 0.9, s | last success | KL to what acted |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in VARIANTS:
            history = results[name] = train(name, args.seconds, args.env_ms, args.seed, folder)
            last = history[-1]
            reached = next((f"{h['seconds']:.0f}" for h in history if h["success"] >= 0.9), "not")
            rate = (last["updates"] - 3) * 256 * 64 / last["seconds"]
            print(
                f"| {name} | {last['updates']:.0f} | {rate:,.0f} | {reached} | {last['success']:.2f} | "
                f"{np.mean([h['kl'] for h in history]):.4f} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    if args.plot:
        plot(results, args.plot, args.env_ms)


if __name__ == "__main__":
    main()
