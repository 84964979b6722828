"""Speed figures of this machine: matrix products, updates, and the share of the products' rate that training reaches.

    python benchmarks/figures.py [--against embodichain --torch-python PATH --stub PATH]

Four tables, whose ratios come from this one run:

1. products: what a dense layer multiplies, x·W, dy·Wᵀ and xᵀ·dy, by JAX, by NumPy's BLAS and, with a peer, by torch's.
   The best of them is the rate that the other tables are shares of.
2. GAE and PPO's update with two networks of 64-64, 128-128 and 256-256, in EmbodiChain too: A B A B.
3. shipped configs, as ``ejax train`` runs them: operations of their products, counted in the program that is trained,
   and seconds of the update or of the training without physics.
4. whole trainings of PointMass: ``point_mass.py``, with a peer only.
"""

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TextIO, cast

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flash_step import STEPS, make_update

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.config import load_config
from ejax.distributions import action_spec
from ejax.optim import make_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.preflight.run import trace_training
from ejax.preflight.work import count_work
from ejax.returns import gae
from ejax.training.build import build
from ejax.types import Array, Rollout, make_train_state

GAMMA, GAE_LAMBDA = 0.99, 0.95
GAE_SHAPES = ((1024, 64), (256, 4096))
WIDTHS = (64, 128, 256)
UPDATE: dict[str, Any] = {
    "num_steps": 1024,
    "num_envs": 64,
    "obs_size": 32,
    "action_size": 8,
    "batch_size": 8192,
    "n_epochs": 10,
}
PRODUCTS = ((8192, 256), (1024, 256), (2048, 128), (4096, 64))
"""Rows and width of the layers whose products are timed."""
FORMS = ("x·W", "dy·Wᵀ", "xᵀ·dy")
CONFIGS = {
    "point_mass/ppo": 100,
    "point_mass/gru": 20,
    "point_mass/reppo": 20,
    "point_mass/shac": 200,
    "point_mass/apg": 200,
    "push_cube/ppo": 40,
    "push_cube/sac": 300,
    "locomotion/quadruped": 100,
}
"""Shipped config -> updates of the timed training."""
FOLDER = Path(__file__).parents[1] / "configs"


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.against and not (args.torch_python and args.stub):
        parser.error("--against needs --torch-python and --stub")
    peer = _start_peer(args.torch_python, args.stub) if args.against else None
    try:
        print(machine())
        result: dict[str, Any] = {"machine": machine(), "products": products(args.repeats, peer)}
        best = max(rate for row in result["products"] for rate in row["rates"].values())
        result |= {"best_gflop_per_s": best, "updates": updates(args.repeats, peer, best)}
    finally:
        if peer is not None:
            peer.terminate()
    result["configs"] = [share(name, best) for name in args.configs]
    _table(
        ["config", "products of an update, GFLOP", "update, ms", "GFLOP/s", "share of the best product, %"],
        [[each[key] for key in ("config", "gflop", "ms", "rate", "share")] for each in result["configs"]],
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    if args.against:
        command = [sys.executable, str(Path(__file__).with_name("point_mass.py")), "--repeats", "1"]
        command += ["--against", args.against, "--torch-python", str(args.torch_python), "--stub", str(args.stub)]
        subprocess.run([*command, "--iterations", "200"], check=True)


def machine() -> str:
    """Name the machine's class and the versions."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", facts)
    vector = "AVX-512" if "avx512f" in facts else "AVX2" if "avx2" in facts else platform.machine()
    versions = f"jax {jax.__version__}, NumPy {np.__version__}, Python {platform.python_version()}"
    return f"{name[1] if name else platform.processor()}, {len(os.sched_getaffinity(0))} cores, {vector}; {versions}"


def products(repeats: int, peer: subprocess.Popen[str] | None) -> list[dict[str, Any]]:
    """Time the three products of a dense layer by each library; GFLOP/s of the fastest call.

    One library after the other: the threads of one wait busily for a while, and would slow the next one's calls.
    """
    rows = []
    for m, n in PRODUCTS:
        for form in FORMS:
            left, right = (np.ones(shape, np.float32) for shape in operands(form, m, n))
            programs = {"JAX": _timer(partial(jax.jit(jnp.matmul), jnp.asarray(left), jnp.asarray(right)))}
            programs["NumPy"] = _timer(partial(np.matmul, left, right))
            if peer is not None:
                programs["torch"] = partial(_ask, peer, {"product": [form, m, n]})
            rates = dict[str, float]()
            for name, timed in programs.items():
                time.sleep(0.3)
                rates[name] = 2e-9 * m * n * n / min(timed() for _ in range(20 * repeats))
            rows.append({"rows": m, "width": n, "form": form, "rates": rates})
    names = list(rows[0]["rates"])
    _table(
        ["rows", "width", "product", *(f"{name}, GFLOP/s" for name in names)],
        [[row["rows"], row["width"], row["form"], *(row["rates"][name] for name in names)] for row in rows],
    )
    return rows


def operands(form: str, rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the operands, the transposed one as it lies in memory once it is transposed."""
    if form == "xᵀ·dy":
        return (width, rows), (rows, width)
    return (rows, width), (width, width)


def updates(repeats: int, peer: subprocess.Popen[str] | None, best: float) -> list[dict[str, Any]]:
    """Time GAE and PPO's updates, EmbodiChain's alternately with ejax's."""
    works: dict[str, tuple[dict[str, Any], Callable[[], object], float]] = {}
    for shape in GAE_SHAPES:
        works[f"GAE, [{shape[0]}, {shape[1]}]"] = ({"gae": shape}, _gae(*shape), math.nan)
    for width in WIDTHS:
        sizes = [UPDATE["obs_size"], width, width]
        flops = sum(count_flops([*sizes, out]) for out in (UPDATE["action_size"], 1))
        flops *= UPDATE["num_steps"] * UPDATE["num_envs"] * UPDATE["n_epochs"]
        request = {"update": UPDATE | {"hidden": [width, width]}}
        works[f"PPO, two networks of {width}-{width}"] = (request, _update(width), flops / 1e9)
    flash, gflop = make_update()
    works[f"FlashSAC, {STEPS} gradient steps"] = ({}, flash, STEPS * gflop)
    rows = []
    for name, (request, work, gflop) in works.items():
        count = repeats if gflop > 0 else 20 * repeats
        programs = {"ejax": (_timer(work), count)}
        if peer is not None and request:
            programs["embodichain"] = (partial(_ask, peer, request), repeats)
        medians = {side: median(times) for side, times in _interleave(programs).items()}
        rate = gflop / medians["ejax"]
        ratio = medians.get("embodichain", math.nan) / medians["ejax"]
        rows.append({"work": name, "s": medians, "ratio": ratio, "rate": rate, "share": 100.0 * rate / best})
    _table(
        ["work", "ejax, ms", "EmbodiChain, ms", "ratio", "GFLOP/s", "share of the best product, %"],
        [
            [
                row["work"],
                *(1e3 * row["s"].get(side, math.nan) for side in ("ejax", "embodichain")),
                *(row[key] for key in ("ratio", "rate", "share")),
            ]
            for row in rows
        ],
    )
    return rows


def share(name: str, best: float) -> dict[str, Any]:
    """Train a shipped config as users do; seconds of an update, without the physics that C computes."""
    iterations = CONFIGS.get(name, 20)
    overrides = ["trainer.enable_eval=false", "trainer.save_freq=1000000000", "trainer.device=cpu"]
    config = load_config(FOLDER / f"{name}.yaml", [*overrides, "trainer.updates_per_dispatch=1"])
    work = count_work(trace_training(config, build(config, absent=jax.devices()), jax.devices()).jaxpr)
    rows = config.trainer.buffer_size * config.trainer.num_envs
    skipped = getattr(config.algorithm.cfg, "learning_starts", 0) // rows  # updates that only collect
    overrides.append(f"trainer.iterations={iterations + skipped}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ejax.train", "--config", str(FOLDER / f"{name}.yaml"), *overrides]
        out = subprocess.run([*command, f"trainer.output_dir={folder}"], check=True, stdout=subprocess.PIPE, text=True)
    line = re.search(r"time by part: (.*)", out.stdout)
    seconds = {what: float(s) for what, s in re.findall(r"(\w+) ([\d.]+) s", line[1] if line else "")}
    spent = seconds.get("update", seconds.get("train", math.nan) - seconds.get("physics", 0.0)) / iterations
    gflop = sum(work.products.values()) / 1e9
    return {
        "config": name,
        "gflop": gflop,
        "ms": 1e3 * spent,
        "rate": gflop / spent,
        "share": 100.0 * gflop / spent / best,
        "seconds": seconds,
    }


def _table(columns: list[str], rows: list[list[Any]]) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(_cell, row))} |", flush=True)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def numpy_gae(reward: np.ndarray, value: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """EmbodiChain's loop over env-major columns: value is [N, T + 1], the others [N, T]."""
    advantage, last = np.zeros_like(reward), np.zeros(len(reward), np.float32)
    for t in reversed(range(reward.shape[1])):
        going_on = (~(terminated[:, t] | truncated[:, t])).astype(np.float32)
        delta = reward[:, t] + GAMMA * value[:, t + 1] * going_on - value[:, t]
        last = delta + GAMMA * GAE_LAMBDA * going_on * last
        advantage[:, t] = last
    return advantage


def count_flops(sizes: list[int]) -> int:
    """FLOPs of one row through an MLP and back: x·W, dy·Wᵀ, xᵀ·dy for each layer; no dy·Wᵀ for the first."""
    products = [i * o for i, o in pairwise(sizes)]
    return 2 * (3 * sum(products) - products[0])


def _gae(num_steps: int, num_envs: int) -> Callable[[], object]:
    reward, value, terminated, truncated = (jnp.asarray(x.T) for x in _gae_data(num_steps, num_envs))
    return partial(gae, reward, value[:-1], value[1:], terminated, truncated, gamma=GAMMA, gae_lambda=GAE_LAMBDA)


def _gae_data(num_steps: int, num_envs: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shape = (num_envs, num_steps)
    reward, value = rng.standard_normal(shape, np.float32), rng.standard_normal((num_envs, num_steps + 1), np.float32)
    return reward, value, rng.random(shape) < 0.01, rng.random(shape) < 0.01


def _update(width: int) -> Callable[[], object]:
    u = UPDATE
    space = gymnasium.spaces.Box(-1.0, 1.0, (u["action_size"],), np.float32)
    network = NetworkConfig(hidden_sizes=(width, width), activation="relu")
    policy = ActorCritic(action_spec(space), network, network)
    config = PPOConfig(batch_size=u["batch_size"], n_epochs=u["n_epochs"])
    shape = (u["num_steps"], u["num_envs"])
    keys = jax.random.split(jax.random.key(0), 7)
    obs = jax.random.normal(keys[0], (*shape, u["obs_size"]))
    action = jax.random.normal(keys[1], (*shape, u["action_size"]))
    params = policy.init(keys[2], obs[0])
    distribution, value = policy.apply(params, obs)
    flags: list[Array] = [jax.random.bernoulli(key, 0.01, shape) for key in keys[3:5]]
    rollout = Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=jnp.roll(value, -1, axis=0),
        reward=jax.random.normal(keys[5], shape),
        terminated=flags[0],
        truncated=flags[1],
    )
    optimizer = make_optimizer(config.optimizer)
    state = make_train_state(params, optimizer)
    return partial(ppo_update, state, rollout, jax.random.key(1), policy=policy, optimizer=optimizer, config=config)


def _timer(work: Callable[[], object]) -> Callable[[], float]:
    """Compile and warm up; then each call is one timing in seconds."""

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(work())
        return time.perf_counter() - start

    timed()
    timed()
    return timed


def _interleave(programs: dict[str, tuple[Callable[[], float], int]]) -> dict[str, list[float]]:
    """Time every program round by round, the short ones several times a round."""
    rounds = min(count for _, count in programs.values())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (timed, count) in programs.items():
            seconds[name] += [timed() for _ in range(count // rounds)]
    return seconds


def _start_peer(python: Path, stub: Path) -> subprocess.Popen[str]:
    command = [str(python), str(Path(__file__).with_name("embodichain_peer.py")), "--stub", str(stub), "serve"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(peer: subprocess.Popen[str], request: dict[str, Any]) -> float:
    requests, answers = cast(TextIO, peer.stdin), cast(TextIO, peer.stdout)  # both are pipes
    requests.write(json.dumps(request) + "\n")
    requests.flush()
    answer = answers.readline()
    if not answer:
        raise RuntimeError(f"EmbodiChain's process ended while it worked on {request}; its message is above")
    return float(answer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds, of which medians are given (default: 7)")
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS), metavar="NAME", help="shipped configs to train")
    parser.add_argument("--against", choices=["embodichain"], help="needs --torch-python and --stub")
    parser.add_argument("--torch-python", type=Path, metavar="PATH", help="interpreter with torch and embodichain")
    parser.add_argument("--stub", type=Path, metavar="PATH", help="module that makes embodichain importable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all timings there")
    return parser


if __name__ == "__main__":
    main()
