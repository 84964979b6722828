"""Asynchronous collection under faults, for some minutes: does anything hang, leak, get lost or get mixed up?

    python benchmarks/soak.py --minutes 3
    python benchmarks/soak.py --plant-all       # does this test find bugs that are planted?
    python benchmarks/soak.py --plant torn

Round after round, each with a seed of its own: environments that raise, give NaNs or are slow, in groups, under a
random schedule; a learner that pauses, and that stops at a random moment. Every transition describes itself: the
observation says which environment it is of and which of its steps comes next, the action which version of the
parameters made it, the reward is a checksum of all three. So an auditor knows of every rollout whether it is the one
that had to come. After each round every rollout, every env step, every quarantined episode and every thread must be
accounted for; a round that hangs is ended by a watchdog, with the stacks of all threads. The seed of a failed round is
printed: ``--seed`` starts with it.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.collectors import AsyncCollector, Collected, HostCollector, Schedule
from ejax.distributions import Normal
from ejax.envs.host.guarded import GuardedEnv, HostEnvError
from ejax.types import Array, HostEnv, HostTimestep, Key, Params, PyTree, Rollout

_ROUND_S = 60.0
"""A round takes a second; one that takes this long hangs."""
_LATE_THREADS_S = 10.0
_STD = 0.01
"""Spread of the actions around the number of the version that made them: no sample comes near another number."""
_WEIGHT = np.array([1.0, 64.0, 0.5], np.float32)
"""Weights of an observation's numbers in its value: no two observations of a round have the same."""


class Faulty:
    """A row observes [step, environment, step of its episode], and fails at random: raises, gives NaNs, takes its time.

    Args:
        first: number of the first environment in the run. clock: [1], steps begun so far, whoever makes them.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    max_episode_steps, seeds_rows = 20, True

    def __init__(
        self, num_envs: int, first: int, clock: NDArray[np.int64], rng: random.Random, faults: dict[str, float]
    ) -> None:
        self.num_envs, self._rng, self._faults, self._clock = num_envs, rng, faults, clock
        self._numbers = first + np.arange(num_envs)
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
        reward = checksum(self._obs(), action)
        self._clock += 1
        if self._rng.random() < self._faults["raise"]:
            raise OSError("lost the connection")
        self._length += 1
        final_obs, truncated = self._obs(), self._length == self.max_episode_steps
        if self._rng.random() < self._faults["nan"]:
            final_obs[self._rng.randrange(self.num_envs)] = np.nan
        self._length[truncated] = 0
        obs = np.where(truncated[:, None], self._obs(), final_obs)
        nothing = np.zeros(self.num_envs, bool)
        return HostTimestep(
            obs=obs, reward=reward, terminated=nothing, truncated=truncated, info={}, final_obs=final_obs
        )

    def close(self) -> None: ...

    def _obs(self) -> NDArray[np.float32]:
        return np.stack([np.full(self.num_envs, self._clock[0]), self._numbers, self._length], 1).astype(np.float32)


def checksum(obs: NDArray[Any], action: NDArray[Any]) -> NDArray[np.float32]:
    """[…]: a number of what was seen and done, exact in float32 on every device."""
    bits = np.ascontiguousarray(action[..., 0], np.float32).view(np.uint32)
    parts = obs.astype(np.uint32)
    mixed = bits ^ (parts[..., 0] * np.uint32(2654435761)) ^ (parts[..., 1] * np.uint32(40503)) ^ parts[..., 2]
    return (mixed % np.uint32(2**24)).astype(np.float32)


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
class Signed:
    """Acts around the number of its version; its value distinguishes observations."""

    def init(self, key: Key, obs: PyTree) -> Params:
        del key, obs
        return {"params": {"version": jnp.zeros(()), "value": jnp.zeros(())}}

    def apply(self, params: Params, obs: Array) -> tuple[Normal, Array]:
        p = params["params"]
        mean = jnp.broadcast_to(p["version"], (*obs.shape[:-1], 1))
        return Normal(mean, jnp.full_like(mean, np.log(_STD))), p["value"] + obs @ jnp.asarray(_WEIGHT)


@partial(jax.jit, donate_argnums=0)
def learn(params: Params, rollout: Any) -> Params:
    """Make the next version, donating the previous one, as a learner may."""
    p = params["params"]
    return {"params": {"version": p["version"] + 1.0, "value": p["value"] + 1e-9 * rollout.reward.mean()}}


@dataclass
class Auditor:
    """Knows what every rollout must say, and keeps the last two, which nobody may write over.

    Raises:
        AssertionError: from its methods; the message says in which rollout what is wrong.
    """

    num_envs: int
    max_staleness: int
    rollouts: int = 0
    values: list[float] = field(default_factory=list)
    """Offset of the value in each version."""
    length: NDArray[np.float32] | None = None
    """[N]: what the next observation must say of its episode."""
    kept: list[tuple[Rollout, Rollout]] = field(default_factory=list)
    """Rollouts as they were delivered, and copies."""

    def published(self, params: Params) -> None:
        self.values.append(float(params["params"]["value"]))

    def check(self, rollout: Rollout) -> None:
        """Check the rollout that was just delivered."""
        seen = jax.tree.map(np.array, rollout)
        self._is_what_follows(seen)
        version = self._is_by_its_version(seen)
        self._agrees_with_itself(seen, version)
        self.unchanged()
        self.kept = [*self.kept[-1:], (rollout, seen)]
        self.rollouts += 1

    def unchanged(self) -> None:
        """Check that delivered rollouts were not written over."""
        for rollout, copy in self.kept:
            same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), rollout, copy)
            self._must(all(jax.tree.leaves(same)), "was written over after it was delivered")

    def _is_what_follows(self, seen: Rollout) -> None:
        """Check that environments are in their places, and each step follows the one before, across rollouts."""
        obs = np.asarray(seen.obs)
        num_steps = len(obs)
        first = self.rollouts * num_steps
        self._must((obs[..., 1] == np.arange(self.num_envs)).all(), "has environments in wrong places")
        expected = first + np.arange(num_steps)[:, None]
        self._must((obs[..., 0] == expected).all(), f"has steps {_range(obs[..., 0])}, not {_range(expected)}")
        over = np.asarray(seen.truncated) | np.asarray(seen.terminated)
        following = np.where(over, 0.0, obs[..., 2] + 1.0)
        started = np.concatenate([obs[:1, :, 2] if self.length is None else self.length[None], following[:-1]])
        self._must((obs[..., 2] == started).all(), "has episodes that break off, or begin in their midst")
        self.length = following[-1]

    def _is_by_its_version(self, seen: Rollout) -> int:
        """Check that the actions, the label and the bound on staleness agree."""
        versions = np.unique(np.asarray(seen.version))
        self._must(len(versions) == 1, f"is labelled with versions {versions.tolist()}")
        version = int(versions[0])
        made = np.unique(np.rint(seen.action[..., 0])).astype(int)
        self._must(made.tolist() == [version], f"is labelled version {version}, was made by {made.tolist()}")
        oldest = self.rollouts - self.max_staleness
        self._must(oldest <= version <= self.rollouts, f"is by version {version}, allowed from {max(0, oldest)} on")
        return version

    def _agrees_with_itself(self, seen: Rollout, version: int) -> None:
        """Rewards, log-probabilities and values are those of the observations and actions beside them."""
        obs, action, valid = np.asarray(seen.obs), np.asarray(seen.action), np.asarray(seen.valid)
        self._must(all(np.isfinite(x).all() for x in jax.tree.leaves(seen)), "has a NaN")
        reward = np.where(valid, checksum(obs, action), 0.0)
        self._must((seen.reward == reward).all(), "has rewards of other steps")
        z = (action[..., 0].astype(np.float64) - version) / _STD
        log_prob = -0.5 * z**2 - np.log(_STD) - 0.5 * np.log(2.0 * np.pi)
        self._must(np.allclose(seen.log_prob, log_prob, atol=1e-2), "has log-probabilities of other actions")
        value = obs @ _WEIGHT + self.values[version]
        self._must(np.allclose(seen.value, value, atol=1e-1), "has values of other observations")
        after = (obs + np.array([1.0, 0.0, 1.0], np.float32)) @ _WEIGHT + self.values[version]
        after = np.where(valid, after, value)  # what broke stands for the observation before it
        self._must(np.allclose(seen.next_value, after, atol=1e-1), "has values of other next observations")

    def _must(self, holds: Any, text: str) -> None:
        if not holds:
            raise AssertionError(f"rollout {self.rollouts} {text}")


def _range(steps: NDArray[Any]) -> str:
    return f"{int(steps.min())}-{int(steps.max())}"


# Bugs to be found


class Planted(HostCollector):
    """A collector with a bug, in the rollout of index ``at``: ``repeat`` gives the one before it again, ``loss`` leaves
    one out, ``swap`` gives the next one first, ``torn`` begins with the half of the one before it, ``env`` has the
    groups in another order. With ``alias`` all rollouts lie in the same memory."""

    plant = ""
    at = 2
    former: Collected | None = None
    """The last one that was made."""
    waiting: Collected | None = None
    buffer: Rollout | None = None

    def collect(self, params: Params, key: Key, *, index: int, **options: Any) -> Collected:
        make = partial(super().collect, params, index=index, **options)
        if self.waiting is not None:
            made, self.waiting = self.waiting, None
            return made
        made = make(key)
        if index == self.at and self.former is not None:
            if self.plant == "repeat":
                made.rollout = self.former.rollout
            elif self.plant == "loss":
                made = make(key)
            elif self.plant == "swap":
                made, self.waiting = make(key), made
            elif self.plant == "torn":
                half = self.num_steps // 2
                parts = self.former.rollout, made.rollout
                made.rollout = jax.tree.map(lambda a, b: jnp.concatenate([a[:half], b[half:]]), *parts)
            elif self.plant == "env":
                one_group = self.num_envs // len(self.groups)
                made.rollout = jax.tree.map(lambda x: jnp.roll(x, one_group, axis=1), made.rollout)
        if self.plant == "alias":
            made.rollout = self._in_the_same_memory(made.rollout)
        self.former = replace(made)
        return made

    def _in_the_same_memory(self, rollout: Rollout) -> Rollout:
        if self.buffer is None:
            self.buffer = jax.tree.map(np.array, rollout)
        jax.tree.map(lambda page, x: page.__setitem__(..., x), self.buffer, rollout)
        return self.buffer


class Mislabelling(AsyncCollector):
    """Acts with older parameters than it says (``version``), or than it may (``staleness``)."""

    plant = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all: dict[int, Params] = {}

    def publish(self, params: Params, version: int) -> None:
        self._all[version] = jax.tree.map(jnp.copy, params)
        super().publish(params, version)

    def _begin(self, index: int) -> tuple[int, Params] | None:
        begun = super()._begin(index)
        older = index - self.schedule.max_staleness - 1
        if begun is None or older < 0:
            return begun
        return begun[0] if self.plant == "version" else older, self._all[older]


PLANTS = ("repeat", "loss", "swap", "alias", "version", "env", "torn", "staleness")


def _collectors(plant: str) -> tuple[type[HostCollector], type[AsyncCollector]]:
    if plant in ("version", "staleness"):
        return HostCollector, type("Planted", (Mislabelling,), {"plant": plant})
    return (type("Planted", (Planted,), {"plant": plant}) if plant else HostCollector), AsyncCollector


# Rounds


@dataclass(frozen=True)
class Round:
    """The parts of a round."""

    num_groups: int
    num_steps: int
    updates: int
    schedule: Schedule
    faults: dict[str, float]
    allowed: dict[str, int]
    seconds: float
    """After which the learner stops."""
    num_envs: int = 2
    """Environments of a group."""


def draw(rng: random.Random) -> Round:
    return Round(
        num_groups=rng.choice([1, 2, 3]),
        num_steps=rng.choice([4, 16]),
        faults={"raise": rng.choice([0, 0.002, 0.02]), "nan": rng.choice([0, 0.01]), "slow": rng.choice([0, 0.05])},
        allowed={"max_quarantined": rng.choice([5, 1000]), "max_restarts": rng.choice([0, 3, 1000])},
        schedule=Schedule(rng.randint(0, 3), free=rng.random() < 0.5),
        updates=rng.randint(1, 40),
        seconds=rng.random(),
    )


SOUND = Round(
    num_groups=2,
    num_steps=4,
    updates=12,
    schedule=Schedule(1),
    faults={"raise": 0.0, "nan": 0.0, "slow": 0.0},
    allowed={"max_quarantined": 0, "max_restarts": 0},
    seconds=_ROUND_S,
)
"""For planted bugs, which must be found though nothing else is wrong."""


def one_round(seed: int, folder: Path, what: Round | None = None, plant: str = "") -> Counter[str]:
    """Play one round.

    Raises:
        AssertionError: something is not accounted for, or not what it says.
    """
    rng = random.Random(seed)
    what = what or draw(rng)
    folder = folder / str(seed)
    clocks = [np.zeros(1, np.int64) for _ in range(what.num_groups)]

    def group(number: int) -> Counted:
        of_group = number * what.num_envs, clocks[number], random.Random(f"{seed} {number}"), what.faults
        make = partial(_faulty, what.num_envs, *of_group)
        return Counted(GuardedEnv(make(), make, recipe={"id": "faulty", "cfg": {}}, folder=folder, **what.allowed))

    groups = [group(number) for number in range(what.num_groups)]
    make_collector, make_running = _collectors(plant)
    collector = make_collector(Signed(), groups, num_steps=what.num_steps, seed=seed)
    running = make_running(collector, jax.random.key(seed), schedule=what.schedule)
    seen = Counter(rounds=1)
    auditor = Auditor(what.num_envs * what.num_groups, what.schedule.max_staleness)
    try:
        _learn_beside(running, groups, auditor, what, rng, seen)
    except HostEnvError:
        seen["failed"] += 1
    auditor.unchanged()

    stats, rows = running.stats, what.num_steps * auditor.num_envs
    assert stats.begun == stats.delivered + stats.queued + stats.given_up, stats
    assert stats.delivered == auditor.rollouts, (stats, auditor.rollouts)
    taken = sum(each.num_steps * each.num_envs for each in groups)
    kept = rows * (stats.delivered + stats.queued)
    assert taken == kept + collector.lost_steps, (taken, kept, collector.lost_steps)
    quarantined = sum(each.env.num_quarantined for each in groups)
    assert quarantined == len(list(folder.glob("*.npz"))), "a quarantined episode without its file"
    assert all(each.closed for each in groups), "an environment left open"
    for name in ("begun", "delivered", "queued", "given_up"):
        seen[f"rollouts {name}"] += getattr(stats, name)
    seen["transitions audited"] += rows * auditor.rollouts
    seen["env steps"] += taken
    seen["env steps delivered or queued"] += kept
    seen["env steps given up"] += collector.lost_steps
    seen["quarantined"] += quarantined
    seen["env restarts"] += sum(each.env.num_restarts for each in groups)
    return seen


def _learn_beside(
    running: AsyncCollector,
    groups: list[Counted],
    auditor: Auditor,
    what: Round,
    rng: random.Random,
    seen: Counter[str],
) -> None:
    params, stops_at = Signed().init(jax.random.key(0), None), time.monotonic() + what.seconds
    auditor.published(params)
    with running:
        running.start(params)
        for update in range(what.updates):
            if rng.random() < 0.2:
                with running.paused():
                    before = [each.num_steps for each in groups]
                    time.sleep(rng.random() * 0.005)
                    assert before == [each.num_steps for each in groups], "a step in a pause"
                    seen["pauses"] += 1
            collected = running.collect(lambda: time.monotonic() > stops_at)
            if collected is None:
                seen["interrupted"] += 1
                return
            time.sleep(rng.random() * 0.002)  # meanwhile the next rollout is made
            auditor.check(collected.rollout)
            params = learn(params, collected.rollout)
            auditor.published(params)
            running.publish(params, update + 1)
        seen["finished"] += 1


def _faulty(
    num_envs: int, first: int, clock: NDArray[np.int64], rng: random.Random, faults: dict[str, float]
) -> HostEnv:
    return Faulty(num_envs, first, clock, rng, faults)


def find(plant: str, folder: Path) -> str:
    """Return how a planted bug was found.

    Raises:
        AssertionError: it was not.
    """
    try:
        one_round(0, folder / plant, SOUND, plant)
    except AssertionError as error:
        return str(error)
    raise AssertionError(f"the planted bug '{plant}' was not found")


def soak(seed: int, minutes: float, folder: Path) -> Counter[str]:
    """Play rounds from this seed on.

    Raises:
        AssertionError: something is not accounted for, or a thread was left.
    """
    threads, total = set(threading.enumerate()), Counter[str]()
    ends = time.monotonic() + 60.0 * minutes
    while time.monotonic() < ends:
        faulthandler.dump_traceback_later(_ROUND_S, exit=True)
        try:
            total += one_round(seed, folder)
        except BaseException:
            print(f"round with seed {seed} failed", file=sys.stderr)
            raise
        faulthandler.cancel_dump_traceback_later()
        late = time.monotonic() + _LATE_THREADS_S
        while leaked := set(threading.enumerate()) - threads:
            assert time.monotonic() < late, f"threads left after the round with seed {seed}: {leaked}"
            time.sleep(1e-3)
        seed += 1
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: the clock's)")
    parser.add_argument("--plant", choices=PLANTS, help="is this bug found?")
    parser.add_argument("--plant-all", action="store_true", help="is every one of them found?")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.plant or args.plant_all:
            missed = 0
            for plant in PLANTS if args.plant_all else (args.plant,):
                try:
                    print(f"{plant}: found, {find(plant, folder)}")
                except AssertionError as error:
                    missed += 1
                    print(f"{plant}: {error}", file=sys.stderr)
            return 1 if missed else 0
        total = soak(int(time.time()) if args.seed is None else args.seed, args.minutes, folder)
    print(json.dumps({"threads leaked": 0, "hangs": 0, **total}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
