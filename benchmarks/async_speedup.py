"""Speed-up of asynchronous collection where stages take given times, beside the most that is possible.

Stages are modelled by sleeping: one step of the environments takes E for any number of them (they run in parallel
elsewhere), the policy takes P for all rows and proportionally less for fewer (one accelerator), an update U for each
collected step. With the real collectors, queues and policy calls around them. Per collected step:

    alternately           P + E + U
    two stages at once    max(P + E, U)                  ceiling 1 + min/max
    three, in G groups    max(P, P/G + E, U)

    python benchmarks/async_speedup.py [--steps 24] [--rollouts 12] [--json FILE]
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from numpy.typing import NDArray

from ejax.collectors import AsyncCollector, HostCollector, Schedule
from ejax.distributions import action_spec
from ejax.policies import ActorOnly, NetworkConfig
from ejax.types import HostTimestep, PyTree

NUM_ENVS = 16
CASES_MS = ((20, 5, 25), (5, 20, 25), (40, 2, 10), (10, 10, 10), (20, 20, 20), (2, 40, 40), (50, 50, 5))
"""P, E, U."""


class SleepingEnv:
    """Environments that do nothing, at leisure."""

    seeds_rows = True
    max_episode_steps = 0
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, num_envs: int, seconds: float) -> None:
        self.num_envs, self.seconds = num_envs, seconds
        self.row_seed = np.zeros(num_envs, np.uint32)
        self._obs = np.zeros((num_envs, 8), np.float32)

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        del seed, rows
        return self._obs

    def step(self, action: NDArray[Any]) -> HostTimestep:
        del action
        time.sleep(self.seconds)
        never = np.zeros(self.num_envs, bool)
        return HostTimestep(
            obs=self._obs,
            reward=np.zeros(self.num_envs, np.float32),
            terminated=never,
            truncated=never,
            info={"valid": ~never},
            final_obs=self._obs,
        )

    def close(self) -> None: ...


class SleepingTurns:
    """The groups' turns to ask a policy that takes ``seconds`` for one of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._lock = seconds, threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        time.sleep(self.seconds)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def make_collector(policy: Any, policy_s: float, env_s: float, groups: int, steps: int) -> HostCollector:
    envs = [SleepingEnv(NUM_ENVS // groups, env_s) for _ in range(groups)]
    collector = HostCollector(policy, envs, num_steps=steps, seed=0)
    turns = SleepingTurns(policy_s / groups)
    for worker in collector.workers:
        worker.turns = turns
    return collector


def in_turn(collector: HostCollector, params: Any, update_s: float, rollouts: int) -> float:
    """Seconds for each rollout and its update."""
    key = jax.random.key(0)
    return clocked(lambda i: jax.block_until_ready(collector.collect(params, key, index=i).rollout), update_s, rollouts)


def at_once(collector: HostCollector, params: Any, update_s: float, rollouts: int) -> float:
    with AsyncCollector(collector, jax.random.key(0), schedule=Schedule(1)) as background:
        background.start(params)

        def next_rollout(index: int) -> None:
            collected = background.collect()
            assert collected is not None
            jax.block_until_ready(collected.rollout)

        return clocked(next_rollout, update_s, rollouts, after=lambda index: background.publish(params, index + 1))


def clocked(
    collect: Callable[[int], Any], update_s: float, rollouts: int, after: Callable[[int], None] = lambda i: None
) -> float:
    """Time the rollouts, without the first two, which compile and fill the pipeline."""
    began = 0.0
    for i in range(rollouts + 2):
        if i == 2:
            began = time.perf_counter()
        collect(i)
        time.sleep(update_s)
        after(i)
    return (time.perf_counter() - began) / rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=24, help="T, steps of one rollout")
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = action_spec(SleepingEnv.action_space)
    policy = ActorOnly(spec, NetworkConfig(hidden_sizes=(64, 64), activation="tanh"))
    params = policy.init(jax.random.key(0), np.zeros((NUM_ENVS, 8), np.float32))
    rows = []
    print("| P ms | E ms | U ms | alternately, s | two stages | ceiling | reached | 4 groups | ceiling | reached |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES_MS:
        p, e, u = (ms / 1000 for ms in case)
        update = u * args.steps
        turn = in_turn(make_collector(policy, p, e, 1, args.steps), params, update, args.rollouts)
        two = at_once(make_collector(policy, p, e, 1, args.steps), params, update, args.rollouts)
        three = at_once(make_collector(policy, p, e, 4, args.steps), params, update, args.rollouts)
        ceilings = (p + e + u) / max(p + e, u), (p + e + u) / max(p, p / 4 + e, u)
        speedups = turn / two, turn / three
        rows.append({"ms": case, "in_turn_s": turn, "speedups": speedups, "ceilings": ceilings})
        parts = " | ".join(f"{s:.2f}x | {c:.2f}x | {s / c:.0%}" for s, c in zip(speedups, ceilings, strict=True))
        print(f"| {case[0]} | {case[1]} | {case[2]} | {turn:.3f} | {parts} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
