"""SAC on one Gymnasium environment: ejax's beside Stable-Baselines3's and sbx's, A B C A B C in one run.

One environment, one update of 256 rows a step (ejax's config says how many steps, and then updates, come at once), nets
of 256-256. Env steps per second over ``--steps`` steps after ``--warm`` steps, so without start and compilation, each
time in its own process that has ``--threads`` cores. Each round also times float32 products, whose rate bounds the
update.

    python benchmarks/off_policy_speed.py --sb3-python PYTHON --sbx-python PYTHON [--config configs/gymnasium/sac.yaml]

Each PYTHON is that of a virtual environment: ``pip install stable-baselines3 'gymnasium[mujoco]'`` in the one, ``pip
install sbx-rl 'gymnasium[mujoco]'`` in the other, with the gymnasium and mujoco that ejax has. Without ``--config``
ejax is left out.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

BATCH, HIDDEN = 256, 256
_OURS = """
import json, sys, tempfile
from pathlib import Path
from ejax.config import load_config
from ejax.run import train
from ejax.runtime.device import prepare_jax
path, env, warm, steps, seed, *overrides = sys.argv[1:]
warm, steps = int(warm), int(steps)
with tempfile.TemporaryDirectory() as folder:
    config = load_config(Path(path), [
        f"env.id=gymnasium:{env}", "trainer.num_envs=1", f"trainer.total_timesteps={warm + steps}",
        f"trainer.seed={seed}", f"trainer.output_dir={folder}", "trainer.enable_eval=false", "trainer.console=false",
        "trainer.log_freq_updates=10", f"algorithm.cfg.learning_starts={warm // 2}", *overrides,
    ])
    prepare_jax("cpu")
    log = train(config).run_dir / "logs" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
timed = [row for row in rows if row["step"] >= warm and "charts/SPS" in row]
if len(timed) < 2:
    sys.exit(f"the log has {len(timed)} lines from step {warm} on, and two are needed: pass a larger --steps, or --set "
             "trainer.log_freq_updates=1")
first, last = timed[0], timed[-1]
print(json.dumps({"steps_per_s": (last["step"] - first["step"]) / (last["time"] - first["time"])}))
"""
_PEER = """
import json, sys, time
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
library, env = sys.argv[1:3]
warm, steps, seed, threads, batch, hidden = map(int, sys.argv[3:])
if library == "sb3":
    import torch
    from stable_baselines3 import SAC
    torch.set_num_threads(threads)
    other = {"device": "cpu"}
else:
    from sbx import SAC
    other = {}

class Clock(BaseCallback):
    def __init__(self):
        super().__init__()
        self.at = {}
    def _on_step(self):
        self.at[self.num_timesteps] = time.perf_counter()
        return True

clock = Clock()
model = SAC("MlpPolicy", make_vec_env(env, n_envs=1, seed=seed), batch_size=batch, train_freq=1, gradient_steps=1,
            learning_starts=warm // 2, policy_kwargs={"net_arch": [hidden, hidden]}, seed=seed, **other)
model.learn(warm + steps, callback=clock)
print(json.dumps({"steps_per_s": steps / (clock.at[warm + steps] - clock.at[warm])}))
"""
_PRODUCTS = """
import json, time
import jax, jax.numpy as jnp
rates = {}
for size, count in ((256, 400), (1024, 20)):
    turn = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (size, size)))[0]
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: y @ turn, x))
    jax.block_until_ready(chain(turn))
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(chain(turn))
        seconds.append(time.perf_counter() - began)
    rates[str(size)] = 2e-9 * size**3 * count / sorted(seconds)[3]
print(json.dumps(rates))
"""
_SIZES = """
import json, sys, gymnasium
env = gymnasium.make(sys.argv[1])
print(json.dumps([env.observation_space.shape[0], env.action_space.shape[0]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sb3-python", metavar="PYTHON")
    parser.add_argument("--sbx-python", metavar="PYTHON")
    parser.add_argument("--config", type=Path, help="ejax's SAC; without it the others run alone")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="change ejax's config")
    parser.add_argument("--env", default="HalfCheetah-v4")
    parser.add_argument("--warm", type=int, default=2000, help="steps before the clock starts; updates begin halfway")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    numbers = [str(each) for each in (args.warm, args.steps)]
    sizes = [str(each) for each in (args.threads, BATCH, HIDDEN)]
    programs: dict[str, list[str]] = {}
    for library, python in (("sb3", args.sb3_python), ("sbx", args.sbx_python)):
        if python:
            programs[library] = [python, "-W", "ignore", "-c", _PEER, library, args.env, *numbers, "SEED", *sizes]
    if args.config:
        ours = [sys.executable, "-W", "ignore", "-c", _OURS]
        programs["ejax"] = [*ours, str(args.config), args.env, *numbers, "SEED", *args.set]
    if not programs:
        parser.error("nothing to time: pass --config, --sb3-python or --sbx-python")
    ran = partial(last_json, threads=args.threads)
    rates: dict[str, list[float]] = {name: [] for name in programs}
    products: dict[str, list[float]] = {}
    loads = []
    for seed in range(1, args.rounds + 1):
        loads.append(os.getloadavg()[0])
        for size, rate in ran([sys.executable, "-c", _PRODUCTS]).items():
            products.setdefault(size, []).append(rate)
        for name, command in programs.items():
            found = ran([str(seed) if part == "SEED" else part for part in command])
            rates[name].append(found["steps_per_s"])
            print(f"round {seed}: {name} {rates[name][-1]:,.1f} steps/s", file=sys.stderr, flush=True)
    gflop = update_flops(*ran([sys.executable, "-W", "ignore", "-c", _SIZES, args.env])) / 1e9
    show(rates, products, gflop)
    print(f"\nLoad of the machine as the rounds began: {', '.join(f'{each:.1f}' for each in loads)}.")
    if args.json:
        facts = {"steps_per_s": rates, "product_gflop_per_s": products, "update_gflop": gflop, "load": loads}
        args.json.write_text(json.dumps(vars(args) | facts, indent=2, default=str))


def update_flops(obs: int, action: int, batch: int = BATCH, hidden: int = HIDDEN) -> int:
    """Count the products of one SAC update; the critics' weights get no gradient from the actor's loss.

    A row goes forward through the actor twice and through six critics, and back through the actor, through two critics
    for their weights, and through two for their inputs.
    """
    first_actor, first_critic = obs * hidden, (obs + action) * hidden
    actor = first_actor + hidden * hidden + hidden * 2 * action
    critic = first_critic + hidden * hidden + hidden
    forward = 2 * actor + 6 * critic
    back = (2 * actor - first_actor) + 2 * (2 * critic - first_critic) + 2 * critic
    return 2 * batch * (forward + back)


def show(rates: dict[str, list[float]], products: dict[str, list[float]], gflop: float) -> None:
    """Print medians, their ratios, and how near an update a step comes to the rate of the products."""
    medians = {name: median(each) for name, each in rates.items()}
    small, large = (median(products[size]) for size in ("256", "1024"))
    print("| library | env steps/s of each round | median | beside SB3 | beside sbx | GFLOP/s | of the product rate |")
    print("|---|---|---|---|---|---|---|")
    for name, each in rates.items():
        rounds, rate = ", ".join(f"{each:,.0f}" for each in each), medians[name]
        ratios = " | ".join(f"{rate / medians[peer]:.2f}x" if peer in medians else "" for peer in ("sb3", "sbx"))
        print(f"| {name} | {rounds} | {rate:,.0f} | {ratios} | {rate * gflop:.1f} | {rate * gflop / small:.0%} |")
    print(
        f"\nfloat32 products: {small:.0f} GFLOP/s of 256 x 256 by 256 x 256, which the last column is of, and "
        f"{large:.0f} of 1024 x 1024 by 1024 x 1024. An update has {gflop:.2f} GFLOP: at these rates at most "
        f"{small / gflop:,.0f} and {large / gflop:,.0f} updates/s. The time of a step includes the environment's."
    )


def last_json(command: list[str], threads: int) -> Any:
    """Run a command on so many cores, and return the JSON that it prints last.

    Raises:
        RuntimeError: it failed.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | counts,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )
    if done.returncode:
        arguments = [part for part in command if "\n" not in part]
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
