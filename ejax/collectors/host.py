"""Rollouts of host environments: the policy is one jitted call per step, everything else about a rollout one more.

Environments may come in several groups. Each group is stepped in a thread of its own, so that one group's environments
move while the policy looks at another's; the policy is asked by one group at a time.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.types import Array, HostEnv, HostTimestep, Key, Params, Policy, PyTree, Rollout, SavableHostEnv


class CollectionStopped(Exception):
    """The caller asked to stop before the rollout was complete."""


@dataclass(kw_only=True)
class Collected:
    """One rollout, and what it took."""

    rollout: Rollout
    envs: PyTree
    """The environments' state after it, where they can be saved; otherwise ()."""
    policy_s: float
    """Seconds in which some group asked the policy."""
    env_s: float
    """Seconds of environment steps, summed over the groups."""
    facts: dict[str, float] = field(default_factory=dict)
    """Metrics of the collection, under their tags."""


class HostCollector:
    """Plays groups of host environments in lockstep. Used by one thread at a time; a context manager.

    Args:
        groups: of equal numbers of environments; row i of a rollout is row i of the groups side by side.
        num_steps: T.
        seed: with a rollout's index it gives the seeds of the episodes that start there.
        dropout: as in ``ejax.unroll.unroll``.
        restart: start new episodes with every rollout; each ``group_size`` consecutive rows from the same seed.
        devices: where the policy acts, group by group in turn; the rollout lies on the first. None: where the
            parameters are.
    """

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[HostEnv],
        *,
        num_steps: int,
        seed: int,
        dropout: bool = False,
        restart: bool = False,
        group_size: int = 1,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        sizes = {group.num_envs for group in groups}
        if len(sizes) != 1:
            raise ValueError(f"groups need equal numbers of environments, got {[g.num_envs for g in groups]}")
        self.policy, self.groups, self.num_steps, self.seed = policy, list(groups), num_steps, seed
        self.dropout, self.restart, self.group_size = dropout, restart, group_size
        self.devices = devices
        self.num_envs = sum(group.num_envs for group in groups)
        self.doing = "nothing yet"
        """What the collector is at, for whoever waits for it."""
        self._obs: list[PyTree] | None = None
        self._asking = threading.Lock()
        self._threads = ThreadPoolExecutor(len(groups), "ejax-group") if len(groups) > 1 else None

    def collect(
        self, params: Params, key: Key, *, index: int, stopping: Callable[[], bool] = lambda: False
    ) -> Collected:
        """One rollout with these parameters.

        Args:
            key: of this rollout alone.
            index: of the rollout since the start of training.
            stopping: asked before every step.

        Raises:
            CollectionStopped: ``stopping`` was true; the steps taken are given up, the episodes go on.
        """
        if self._obs is None or self.restart:
            self._start(index)
        key_rows, key_actions = jax.random.split(key)
        rows: dict[str, NDArray[Any]] = {}
        if self.dropout:
            shape = (self.num_steps, self.num_envs)
            rows["dropout_seed"] = np.asarray(jax.random.bits(key_rows, shape, jnp.uint32))
        play = partial(self._play, key=key_actions, rows=rows, index=index, stopping=stopping)
        places = self.devices or (None,)
        settled = [params if place is None else jax.device_put(params, place) for place in places]
        numbers = range(len(self.groups))
        given = [settled[i % len(settled)] for i in numbers]
        if self._threads is None:
            played = [play(0, given[0])]
        else:
            futures = [self._threads.submit(play, i, given[i]) for i in numbers]
            errors = [future.exception() for future in futures]  # all of them have ended before any is raised
            for error in errors:
                if error is not None and not isinstance(error, CollectionStopped):
                    raise error
            played = [future.result() for future in futures]
        steps = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *(each.steps for each in played))
        self.doing = f"rollout {index}: values"
        return Collected(
            rollout=assemble(self.policy, settled[0], *steps, rows),
            envs=self._state(),
            policy_s=sum(each.policy_s for each in played),
            env_s=sum(each.env_s for each in played),
        )

    def restore(self, envs: PyTree) -> None:
        """Go on with saved environments: ``Collected.envs``."""
        self._obs = [
            group.set_state(state)
            for group, state in zip(self.groups, envs, strict=True)
            if isinstance(group, SavableHostEnv)
        ]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for group in self.groups:
            group.close()

    def __enter__(self) -> "HostCollector":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, index: int) -> None:
        self.doing = f"rollout {index}: reset"
        draw = np.random.SeedSequence([self.seed, index])
        seed = np.repeat(draw.generate_state(self.num_envs // self.group_size), self.group_size)
        parts = np.split(seed.astype(np.uint32), len(self.groups))
        self._obs = [group.reset(part) for group, part in zip(self.groups, parts, strict=True)]

    def _state(self) -> PyTree:
        if not all(isinstance(group, SavableHostEnv) for group in self.groups):
            return ()
        return tuple(group.get_state() for group in self.groups if isinstance(group, SavableHostEnv))

    def _play(
        self,
        number: int,
        params: Params,
        *,
        key: Key,
        rows: dict[str, NDArray[Any]],
        index: int,
        stopping: Callable[[], bool],
    ) -> "_Played":
        """T steps of one group."""
        group, current = self.groups[number], self._current()
        key = jax.random.fold_in(key, number)
        mine = slice(number * group.num_envs, (number + 1) * group.num_envs)
        seen: list[tuple[PyTree, NDArray[Any], HostTimestep]] = []
        policy_s = env_s = 0.0
        for t in range(self.num_steps):
            if stopping():
                raise CollectionStopped
            obs = current[number]
            with self._asked():
                began = time.perf_counter()
                row = {name: each[t, mine] for name, each in rows.items()}
                action = np.asarray(act(self.policy, params, obs, key, np.int32(t), row))
                policy_s += time.perf_counter() - began
            self.doing = f"rollout {index}, step {t + 1} of {self.num_steps}, group {number}: {type(group).__name__}"
            began = time.perf_counter()
            timestep = group.step(action)
            env_s += time.perf_counter() - began
            seen.append((obs, action, timestep))
            current[number] = timestep.obs
        steps = jax.tree.map(lambda *each: np.stack(each), *seen)
        return _Played(steps, policy_s, env_s)

    def _current(self) -> list[PyTree]:
        if self._obs is None:
            raise RuntimeError("no episode has started")
        return self._obs

    @contextmanager
    def _asked(self) -> Iterator[None]:
        if self._threads is None:
            yield
        else:
            with self._asking:
                yield


@dataclass
class _Played:
    steps: tuple[PyTree, NDArray[Any], HostTimestep]
    """Observations, actions, timesteps; leaves [T, n, ...]."""
    policy_s: float
    env_s: float


@partial(jax.jit, static_argnames="policy")
def act(policy: Policy, params: Params, obs: PyTree, key: Key, t: Array, rows: dict[str, Array]) -> Array:
    """The actions of step t: [N, ...]."""
    return policy.apply(params, obs, **rows)[0].sample(jax.random.fold_in(key, t))


@partial(jax.jit, static_argnames="policy")
def assemble(
    policy: Policy, params: Params, obs: PyTree, action: Array, timestep: HostTimestep, rows: dict[str, Array]
) -> Rollout:
    """A rollout from what was seen, with the policy's log-probabilities and values; leaves [T, N, ...]."""
    distribution, value = policy.apply(params, obs, **rows)
    info = dict(timestep.info)
    extras = {"distribution": distribution, "info": info, **rows}
    if "valid" in info:
        extras["valid"] = info.pop("valid")
    return Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=policy.apply(params, timestep.final_obs, **rows)[1],
        reward=jnp.asarray(timestep.reward),
        terminated=jnp.asarray(timestep.terminated),
        truncated=jnp.asarray(timestep.truncated),
        extras=extras,
    )
