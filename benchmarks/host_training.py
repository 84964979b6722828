"""Whole PPO training on a Gymnasium environment, beside Stable-Baselines3's and sbx's on the same machine, alternately.

Same hyperparameters: 64-64 tanh, Adam 3e-4, 10 epochs, minibatches of 64, 2,048 rows per update, no reward or
observation normalization, environments in one process. Steps per second after the first update, and with start and
compilation; the mean return of the last episodes.

    python benchmarks/host_training.py --peer-python PYTHON [--num-envs 8 64] [--steps 100000]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs" / "gymnasium" / "half_cheetah.yaml"
ROWS = 2048
_OURS = """
import json, sys, time
began = time.perf_counter()
from pathlib import Path
from ejax.config import load_config
from ejax.runtime.device import prepare_jax
from ejax.run import train
config = load_config(Path(sys.argv[1]), sys.argv[2:])
prepare_jax("cpu")
result = train(config)
rows = [json.loads(line) for line in (result.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
rows = [row for row in rows if "charts/SPS" in row]
seconds = rows[-1]["time"] - rows[0]["time"]
print(json.dumps({
    "steps_per_s": (rows[-1]["step"] - rows[0]["step"]) / seconds,
    "total_s": time.perf_counter() - began,
    "return": rows[-1].get("charts/episode_reward_avg_100"),
}))
"""
_PEER = """
import json, sys, time
began = time.perf_counter()
library, env, num_envs, rows, steps, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
if library == "sb3":
    import torch
    from stable_baselines3 import PPO
    net = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]), activation_fn=torch.nn.Tanh)
else:
    import flax.linen as nn
    from sbx import PPO
    net = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]), activation_fn=nn.tanh)

class Clock(BaseCallback):
    def __init__(self):
        super().__init__()
        self.marks = []
    def _on_rollout_start(self):
        self.marks.append((self.num_timesteps, time.perf_counter()))
    def _on_step(self):
        return True

clock = Clock()
model = PPO("MlpPolicy", make_vec_env(env, n_envs=num_envs, seed=seed), n_steps=rows // num_envs, batch_size=64,
            n_epochs=10, learning_rate=3e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.0, policy_kwargs=net, seed=seed,
            **({"device": "cpu"} if library == "sb3" else {}))
model.learn(steps, callback=clock)
(first, t0), (last, t1) = clock.marks[1], (model.num_timesteps, time.perf_counter())
returns = [each["r"] for each in model.ep_info_buffer]
print(json.dumps({"steps_per_s": (last - first) / (t1 - t0), "total_s": time.perf_counter() - began,
                  "return": sum(returns) / max(1, len(returns))}))
"""


def ours(mode: str, num_envs: int, steps: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"trainer.num_envs={num_envs}",
            f"trainer.buffer_size={ROWS // num_envs}",
            f"trainer.total_timesteps={steps}",
            f"trainer.seed={seed}",
            f"trainer.collector.mode={mode}",
            f"trainer.output_dir={folder}",
            "trainer.enable_eval=false",
            "trainer.console=false",
        ]
        return run([sys.executable, "-c", _OURS, str(CONFIG), *overrides])


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[:2]} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer-python", help="a Python that has stable-baselines3 and sbx-rl")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    print("| envs | | steps/s | whole command, s | mean return of the last 100 episodes | beside SB3 |")
    print("|---|---|---|---|---|---|")
    for num_envs in args.num_envs:
        for seed in range(1, args.repeats + 1):
            trainings = {}
            if args.peer_python:
                for library in ("sb3", "sbx"):
                    numbers = [num_envs, ROWS, args.steps, seed]
                    command = [args.peer_python, "-c", _PEER, library, "HalfCheetah-v5", *map(str, numbers)]
                    trainings[library] = run(command)
            trainings["ejax, alternating"] = ours("host", num_envs, args.steps, seed)
            trainings["ejax, async"] = ours("async", num_envs, args.steps, seed)
            base = trainings.get("sb3", {}).get("steps_per_s")
            for name, each in trainings.items():
                ratio = f"{each['steps_per_s'] / base:.2f}x" if base else ""
                results.append({"num_envs": num_envs, "seed": seed, "name": name, **each})
                print(
                    f"| {num_envs} | {name} | {each['steps_per_s']:,.0f} | {each['total_s']:.1f} | "
                    f"{each['return'] if each['return'] is not None else float('nan'):.0f} | {ratio} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
