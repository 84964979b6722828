"""Speed of an update: GAE, and PPO with two 256-256 networks, against the machine's matrix-product rate.

With ``--against embodichain`` the same work runs in EmbodiChain too, the two timed alternately: A B A B.
"""

import argparse
import json
import subprocess
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

from ejax.algorithms.ppo import PPOConfig, ppo_loss, ppo_update
from ejax.distributions import action_spec
from ejax.optim import make_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.returns import gae
from ejax.types import Array, Rollout, make_train_state

GAMMA, GAE_LAMBDA = 0.99, 0.95
GAE_SHAPES = ((1024, 64), (256, 4096))
UPDATE: dict[str, Any] = {
    "num_steps": 1024,
    "num_envs": 64,
    "obs_size": 32,
    "action_size": 8,
    "hidden": [256, 256],
    "batch_size": 8192,
    "n_epochs": 10,
}
MATMUL = (8192, 256, 256)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.against and not (args.torch_python and args.stub):
        parser.error("--against needs --torch-python and --stub")
    programs: dict[str, tuple[Callable[[], float], int]] = {"matmul": (_timer(_matmul()), 20 * args.repeats)}
    for shape in GAE_SHAPES:
        programs[f"gae {shape} ejax"] = (_timer(_gae(*shape)), 20 * args.repeats)
        programs[f"gae {shape} numpy"] = (_timer(partial(numpy_gae, *_gae_data(*shape))), args.repeats)
    programs["update ejax"] = (_timer(_update()), args.repeats)
    peer = None
    if args.against:
        peer = _start_peer(args.torch_python, args.stub)
        for shape in GAE_SHAPES:
            programs[f"gae {shape} embodichain"] = (partial(_ask, peer, {"gae": shape}), args.repeats)
        programs["update embodichain"] = (partial(_ask, peer, {"update": UPDATE}), args.repeats)
    try:
        seconds = _interleave(programs)
    finally:
        if peer is not None:
            peer.terminate()
    result = _figures({name: median(times) for name, times in seconds.items()})
    _print(result)
    if args.json:
        args.json.write_text(json.dumps(result | {"seconds": seconds}, indent=2))


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


def _figures(seconds: dict[str, float]) -> dict[str, Any]:
    u = UPDATE
    rows = u["num_steps"] * u["num_envs"]
    per_row = sum(count_flops([u["obs_size"], *u["hidden"], out]) for out in (u["action_size"], 1))
    flops = per_row * rows * u["n_epochs"]
    rate = 2 * np.prod(MATMUL, dtype=float) / seconds["matmul"]
    return {
        "median_s": seconds,
        "matmul_gflop_per_s": rate / 1e9,
        "update_gflop": flops / 1e9,
        "update_gflop_per_s": flops / seconds["update ejax"] / 1e9,
        "update_bound_s": flops / rate,
        "fraction_of_matmul_rate": flops / rate / seconds["update ejax"],
        "minibatch_gflop": per_row * u["batch_size"] / 1e9,
        "minibatch_gflop_by_xla": _xla_flops() / 1e9,
    }


def _print(result: dict[str, Any]) -> None:
    seconds = result["median_s"]
    works = [*(f"gae {shape}" for shape in GAE_SHAPES), "update"]
    peers = ["ejax", "numpy", "embodichain"]
    print(f"| work, ms (median) | {' | '.join(peers)} | embodichain / ejax |\n|---|---|---|---|---|")
    for work in works:
        cells = [seconds.get(f"{work} {peer}") for peer in peers]
        ratio = "" if cells[2] is None else f"{cells[2] / cells[0]:.1f}x"
        print(f"| {work} | {' | '.join('' if c is None else f'{1e3 * c:.2f}' for c in cells)} | {ratio} |")
    m, k, n = MATMUL
    print(
        f"\nfloat32 product {m}x{k}x{n}: {result['matmul_gflop_per_s']:.0f} GFLOP/s. The update has "
        f"{result['update_gflop']:.0f} GFLOP ({result['minibatch_gflop']:.2f} a minibatch; XLA counts "
        f"{result['minibatch_gflop_by_xla']:.2f}) and runs at {result['update_gflop_per_s']:.0f} GFLOP/s: "
        f"{result['fraction_of_matmul_rate']:.0%} of that rate, whose bound is {result['update_bound_s']:.2f} s."
    )


def _matmul() -> Callable[[], object]:
    m, k, n = MATMUL
    product = jax.jit(jnp.matmul)
    return partial(product, jnp.ones((m, k)), jnp.ones((k, n)))


def _gae(num_steps: int, num_envs: int) -> Callable[[], object]:
    reward, value, terminated, truncated = (jnp.asarray(x.T) for x in _gae_data(num_steps, num_envs))
    return partial(gae, reward, value[:-1], value[1:], terminated, truncated, gamma=GAMMA, gae_lambda=GAE_LAMBDA)


def _gae_data(num_steps: int, num_envs: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shape = (num_envs, num_steps)
    reward, value = rng.standard_normal(shape, np.float32), rng.standard_normal((num_envs, num_steps + 1), np.float32)
    return reward, value, rng.random(shape) < 0.01, rng.random(shape) < 0.01


def _update() -> Callable[[], object]:
    policy, config, params, rollout = _update_parts()
    optimizer = make_optimizer(config.optimizer)
    state = make_train_state(params, optimizer)
    return partial(ppo_update, state, rollout, jax.random.key(1), policy=policy, optimizer=optimizer, config=config)


def _xla_flops() -> float:
    """XLA's count for the loss and gradient of one minibatch. (It counts a loop's body once, so not the update.)"""
    policy, config, params, rollout = _update_parts()
    size = UPDATE["batch_size"]
    flat = {name: getattr(rollout, name).reshape(-1, *getattr(rollout, name).shape[2:])[:size] for name in _FIELDS}
    batch = flat | {"advantage": flat["value"], "value_target": flat["value"]}
    loss = jax.grad(partial(ppo_loss, policy=policy, config=config), has_aux=True)
    return jax.jit(loss).lower(params, batch).compile().cost_analysis()["flops"]


_FIELDS = ("obs", "action", "log_prob", "value")


def _update_parts() -> tuple[ActorCritic, PPOConfig, Any, Rollout]:
    u = UPDATE
    space = gymnasium.spaces.Box(-1.0, 1.0, (u["action_size"],), np.float32)
    network = NetworkConfig(hidden_sizes=tuple(u["hidden"]), activation="relu")
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
    return policy, config, params, rollout


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
    parser.add_argument("--repeats", type=int, default=7, help="rounds; the report gives medians (default: 7)")
    parser.add_argument("--against", choices=["embodichain"], help="needs --torch-python and --stub")
    parser.add_argument("--torch-python", type=Path, metavar="PATH", help="interpreter with torch and embodichain")
    parser.add_argument("--stub", type=Path, metavar="PATH", help="module that makes embodichain importable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all timings there")
    return parser


if __name__ == "__main__":
    main()
