"""Asynchronous collection under faults, for some minutes: does anything hang, leak or get lost?

    python benchmarks/soak.py --minutes 3

Round after round, each with a seed of its own: environments that raise, give NaNs or are slow, in groups, under a
random schedule; a learner that pauses, and that stops at a random moment. After each round every rollout, every env
step, every quarantined episode and every thread must be accounted for; a round that hangs is ended by a watchdog, with
the stacks of all threads. The seed of a failed round is printed: ``--seed`` starts with it.
"""

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.collectors import AsyncCollector, HostCollector, Schedule
from ejax.distributions import Normal
from ejax.envs.guarded import GuardedEnv, HostEnvError
from ejax.types import Array, HostEnv, HostTimestep, Key, Params, PyTree

_ROUND_S = 60.0
"""A round takes a second; one that takes this long hangs."""
_LATE_THREADS_S = 10.0


class Faulty:
    """Counts steps, and fails at random: raises, gives NaNs, takes its time."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps, seeds_rows = 20, True

    def __init__(self, num_envs: int, rng: random.Random, faults: dict[str, float]) -> None:
        self.num_envs, self._rng, self._faults = num_envs, rng, faults
        self.row_seed = np.zeros(num_envs, np.uint32)
        self._length = np.zeros(num_envs, int)

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        chosen = np.ones(self.num_envs, bool) if rows is None else rows
        self.row_seed = np.where(chosen, seed, self.row_seed)
        self._length = np.where(chosen, 0, self._length)
        return self._obs()

    def step(self, action: NDArray[Any]) -> HostTimestep:
        if self._rng.random() < self._faults["slow"]:
            time.sleep(self._rng.random() * 0.02)
        if self._rng.random() < self._faults["raise"]:
            raise OSError("lost the connection")
        self._length += 1
        final_obs, truncated = self._obs(), self._length == self.max_episode_steps
        if self._rng.random() < self._faults["nan"]:
            final_obs[self._rng.randrange(self.num_envs)] = np.nan
        self._length[truncated] = 0
        obs = np.where(truncated[:, None], self._obs(), final_obs)
        nothing = np.zeros(self.num_envs, bool)
        reward = action[:, 0].astype(np.float32)
        return HostTimestep(
            obs=obs, reward=reward, terminated=nothing, truncated=truncated, info={}, final_obs=final_obs
        )

    def close(self) -> None: ...

    def _obs(self) -> NDArray[np.float32]:
        return np.stack([self._length, self.row_seed % 7, np.ones(self.num_envs)], axis=1).astype(np.float32)


class Counted:
    """Counts the steps that come back."""

    def __init__(self, env: GuardedEnv) -> None:
        self.env, self.num_envs, self.num_steps, self.closed = env, env.num_envs, 0, False
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.max_episode_steps, self.seeds_rows = env.max_episode_steps, env.seeds_rows

    @property
    def row_seed(self) -> NDArray[np.uint32]:
        return self.env.row_seed

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        return self.env.reset(seed, rows)

    def step(self, action: NDArray[Any]) -> HostTimestep:
        timestep = self.env.step(action)
        self.num_steps += 1
        return timestep

    def close(self) -> None:
        self.closed = True
        self.env.close()


@dataclass(frozen=True)
class Linear:
    """A Gaussian policy with linear mean and value."""

    def init(self, key: Key, obs: PyTree) -> Params:
        del key, obs
        return {"params": {"mean": jnp.zeros(3), "value": jnp.zeros(3)}}

    def apply(self, params: Params, obs: Array) -> tuple[Normal, Array]:
        mean = (obs @ params["params"]["mean"])[..., None]
        return Normal(mean, jnp.zeros_like(mean)), obs @ params["params"]["value"]


@partial(jax.jit, donate_argnums=0)
def learn(params: Params, rollout: Any) -> Params:
    """Donates what it was given, as a learner may."""
    return jax.tree.map(lambda x: x + 1e-3 * rollout.reward.mean(), params)


def one_round(seed: int, folder: Path) -> Counter[str]:
    """
    Raises:
        AssertionError: something is not accounted for.
    """
    rng = random.Random(seed)
    num_groups, num_steps, num_envs = rng.choice([1, 2, 3]), rng.choice([4, 16]), 2
    faults = {"raise": rng.choice([0.0, 0.002, 0.02]), "nan": rng.choice([0.0, 0.01]), "slow": rng.choice([0.0, 0.05])}
    allowed = {"max_quarantined": rng.choice([5, 1000]), "max_restarts": rng.choice([0, 3, 1000])}
    folder = folder / str(seed)

    def group(number: int) -> Counted:
        make = partial(_faulty, num_envs, random.Random(f"{seed} {number}"), faults)
        return Counted(GuardedEnv(make(), make, recipe={"id": "faulty", "cfg": {}}, folder=folder, **allowed))

    groups = [group(number) for number in range(num_groups)]
    schedule = Schedule(rng.randint(0, 3), free=rng.random() < 0.5)
    collector = HostCollector(Linear(), groups, num_steps=num_steps, seed=seed)
    running = AsyncCollector(collector, jax.random.key(seed), schedule=schedule)
    params, seen = Linear().init(jax.random.key(0), None), Counter(rounds=1)
    stops_at = time.monotonic() + rng.random()
    try:
        with running:
            running.start(params)
            for update in range(rng.randint(1, 40)):
                if rng.random() < 0.2:
                    with running.paused():
                        before = [each.num_steps for each in groups]
                        time.sleep(rng.random() * 0.005)
                        assert before == [each.num_steps for each in groups], "a step in a pause"
                        seen["pauses"] += 1
                collected = running.collect(lambda: time.monotonic() > stops_at)
                if collected is None:
                    seen["interrupted"] += 1
                    break
                version = int(collected.rollout.extras["version"][0, 0])
                assert update - schedule.max_staleness <= version <= update, "too old"
                assert np.isfinite(np.asarray(collected.rollout.obs)).all(), "a NaN in a rollout"
                params = learn(params, collected.rollout)
                running.publish(params, update + 1)
            else:
                seen["finished"] += 1
    except HostEnvError:
        seen["failed"] += 1

    account, rows = running.account, num_steps * num_envs * num_groups
    assert account.begun == account.delivered + account.queued + account.given_up, account
    taken = sum(each.num_steps * each.num_envs for each in groups)
    kept = rows * (account.delivered + account.queued)
    assert taken == kept + collector.lost_steps, (taken, kept, collector.lost_steps)
    quarantined = sum(each.env.num_quarantined for each in groups)
    assert quarantined == len(list(folder.glob("*.npz"))), "a quarantined episode without its file"
    assert all(each.closed for each in groups), "an environment left open"
    for name in ("begun", "delivered", "queued", "given_up"):
        seen[f"rollouts {name}"] += getattr(account, name)
    seen["env steps"] += taken
    seen["env steps delivered or queued"] += kept
    seen["env steps given up"] += collector.lost_steps
    seen["quarantined"] += quarantined
    seen["env restarts"] += sum(each.env.num_restarts for each in groups)
    return seen


def _faulty(num_envs: int, rng: random.Random, faults: dict[str, float]) -> HostEnv:
    return Faulty(num_envs, rng, faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: the clock's)")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    threads, total = set(threading.enumerate()), Counter[str]()
    ends = time.monotonic() + 60.0 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < ends:
            faulthandler.dump_traceback_later(_ROUND_S, exit=True)
            try:
                total += one_round(seed, Path(folder))
            except BaseException:
                print(f"round with seed {seed} failed", file=sys.stderr)
                raise
            faulthandler.cancel_dump_traceback_later()
            late = time.monotonic() + _LATE_THREADS_S
            while leaked := set(threading.enumerate()) - threads:
                assert time.monotonic() < late, f"threads left after the round with seed {seed}: {leaked}"
                time.sleep(1e-3)
            seed += 1
    print(json.dumps({"threads leaked": 0, "hangs": 0, **total}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
