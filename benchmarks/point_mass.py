"""Whole training of PointMass with PPO or APG, EmbodiChain's settings: steps per second and success over time.

PPO: 64 environments x 256 steps, 64-64 tanh, 10 epochs, batch 4096. APG: 64 environments x 100 steps, 64-64 tanh, one
segment. Evaluation, logging and checkpoints included. With ``--against embodichain`` its own trainer runs its own
config alternately with ours.

The last policy is evaluated after the clock has stopped, by the first episode of each environment: of 1,000 here, of
256 there; beside it what EmbodiChain's own ``evaluate_episodes`` says of 256 episodes: of those that end first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

CONFIGS = Path(__file__).parents[1] / "configs" / "point_mass"
THRESHOLD = 0.9
TAG = "eval/success_rate"
_OURS = """
import json, sys
from pathlib import Path
import jax
from ejax.training.environments import build_env
from ejax.config import load_config
from ejax.runtime.device import prepare_jax
from ejax.evaluation import evaluate
from ejax.run import train
config = load_config(Path(sys.argv[1]), sys.argv[2:])
prepare_jax("cpu")
result = train(config)
names = ("global_step", "num_updates", "elapsed_time_sec", "training_fps", "eval_history")
print(json.dumps({name: getattr(result, name) for name in names}), flush=True)
env, key = build_env(config, phase="eval"), jax.random.key(config.trainer.eval_seed)
episodes = evaluate(result.policy, env, result.params, key, num_envs=1000, num_episodes=1000)
print(json.dumps({"success": float(episodes["success"].mean())}))
"""


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.against and not (args.torch_python and args.stub):
        parser.error("--against needs --torch-python and --stub")
    runs: dict[str, list[dict[str, Any]]] = {"ejax": []}
    if args.against:
        runs["embodichain"] = []
    for seed in range(args.seed, args.seed + args.repeats):
        for name, done in runs.items():
            run = _ejax(args, seed) if name == "ejax" else _embodichain(args, seed)
            done.append(run)
            print(_line(name, seed, run), flush=True)
    medians = {name: {key: _median(run[key] for run in done) for key in done[0]} for name, done in runs.items()}
    print("\nmedians\n\n" + _HEAD)
    for name, values in medians.items():
        print(_line(name, "", values))
    if args.against:
        for key, text in (("steps_per_s", "after compilation"), ("steps_per_s_with_start", "from the command on")):
            print(f"\nratio {text}: {medians['ejax'][key] / medians['embodichain'][key]:.2f}x")
    if args.json:
        args.json.write_text(json.dumps({"runs": runs, "medians": medians}, indent=2))


_HEAD = (
    f"| | seed | steps/s | with start and compilation | compilation s | first success ≥ {THRESHOLD}: steps | seconds "
    "| best success | success of the last policy | by evaluate_episodes |\n|---|---|---|---|---|---|---|---|---|---|"
)


def _line(name: str, seed: object, run: dict[str, Any]) -> str:
    cells = [
        f"{run['steps_per_s']:,.0f}",
        f"{run['steps_per_s_with_start']:,.0f}",
        f"{run['compile_s']:.1f}",
        "never" if run["first_step"] is None else f"{run['first_step']:,.0f}",
        "never" if run["first_s"] is None else f"{run['first_s']:.1f}",
        "none" if run["best"] is None else f"{run['best']:.3f}",
        f"{run['success']:.3f}",
        f"{run['own_success']:.3f}" if "own_success" in run else "–",
    ]
    return f"| {name} | {seed} | {' | '.join(cells)} |"


def _ejax(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"trainer.seed={seed}", f"trainer.output_dir={folder}", "trainer.console=false"]
        if args.iterations is not None:
            overrides.append(f"trainer.iterations={args.iterations}")
        # a cache of its own, empty: compilation is part of the second figure
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        # of both the same settings
        config = CONFIGS / {"ppo": "embodichain.yaml"}.get(args.algorithm, f"{args.algorithm}.yaml")
        return _run([sys.executable, "-c", _OURS, str(config), *overrides], folder, env, compiles=True)


def _embodichain(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).resolve().with_name("embodichain_peer.py")
        command = [str(args.torch_python.absolute()), str(script), "--stub", str(args.stub.resolve())]
        command += ["train", "--algorithm", args.algorithm, "--seed", str(seed)]
        if args.iterations is not None:
            command += ["--iterations", str(args.iterations)]
        return _run(command, folder, None, compiles=False)


def _run(command: list[str], folder: str, env: dict[str, str] | None, *, compiles: bool) -> dict[str, Any]:
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = (line for line in process.stdout or () if line.startswith("{"))
        summary = next(lines, "")
        wall = time.perf_counter() - start
        evaluation = next(lines, "")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    result = json.loads(summary)
    steps = result["global_step"]
    history = [(row["global_step"], row[TAG]) for row in result["eval_history"] if TAG in row]
    first = next((step for step, success in history if success >= THRESHOLD), None)
    return {
        "steps": steps,
        "steps_per_s": result["training_fps"],
        "steps_per_s_with_start": steps / wall,
        "compile_s": max(result["elapsed_time_sec"] - steps / result["training_fps"], 0.0) if compiles else 0.0,
        "first_step": first,
        "first_s": None if first is None else first / result["training_fps"],
        "best": max((success for _, success in history), default=None),
        **json.loads(evaluation),
    }


def _median(values: Any) -> float | None:
    """Return the median of those that have a value; None where fewer than half do."""
    values = list(values)
    known = [value for value in values if value is not None]
    return median(known) if 2 * len(known) > len(values) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["ppo", "apg"], default="ppo")
    parser.add_argument("--repeats", type=int, default=3, help="seeds, one after the other (default: 3)")
    parser.add_argument("--seed", type=int, default=42, help="the first seed (default: 42)")
    parser.add_argument("--iterations", type=int, help="updates of one training (default: the config's)")
    parser.add_argument("--against", choices=["embodichain"], help="needs --torch-python and --stub")
    parser.add_argument("--torch-python", type=Path, metavar="PATH", help="interpreter with torch and embodichain")
    parser.add_argument("--stub", type=Path, metavar="PATH", help="module that makes embodichain importable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all runs there")
    return parser


if __name__ == "__main__":
    main()
