"""Rollouts made in a background thread while the learner updates: bounded, lossless, reproducible.

    rollout k is for update k; version v of the parameters is that after v updates; staleness = k − v

The thread makes rollout k as soon as the schedule allows a published version for it. Every rollout that was begun is
delivered, in order, once. Source of the bound: staleness-limited asynchronous PPO (AReaL, Fu et al. 2025).
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ejax.collectors.host import Collected, CollectionStopped, HostCollector
from ejax.envs.host.calls import EnvAbandoned, under_way
from ejax.schema.messages import noting
from ejax.types import Key, Params

_POLL_S = 0.2  # interval at which a waiting learner checks for an interrupt, in s


@dataclass(frozen=True)
class Schedule:
    """The assignment of parameter versions to rollouts.

    Rollout k is made by exactly version k − ``max_staleness``, at any timing; under ``free`` by the newest version when
    it begins. ``recorded`` versions are replayed: a free run is reproduced bit for bit.
    """

    max_staleness: int = 1
    free: bool = False
    recorded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {self.max_staleness}")
        for index, version in enumerate(self.recorded or ()):
            oldest = max(0, index - self.max_staleness)
            if not oldest <= version <= index:
                text = f"rollout {index} can have {oldest} to {index} with max_staleness {self.max_staleness}"
                raise ValueError(f"recorded[{index}] is version {version}: {text}; use that of the recorded run")

    def version(self, index: int, *, first: int, newest: int) -> int | None:
        """Return the version for rollout ``index``; None: wait for a newer one. ``first``: the oldest published."""
        if self.recorded is not None:
            if index >= len(self.recorded):
                raise IndexError(f"the recorded schedule ends with rollout {len(self.recorded) - 1}; no {index}")
            wanted = max(first, self.recorded[index])
            return wanted if wanted <= newest else None
        oldest = max(first, index - self.max_staleness)
        if newest < oldest:
            return None
        return newest if self.free else oldest


@dataclass(kw_only=True)
class CollectorStats:
    """The fate of every rollout that was begun: ``begun`` = ``delivered`` + ``queued`` + ``given_up``."""

    begun: int = 0
    delivered: int = 0
    queued: int = 0
    given_up: int = 0  # rollouts stopped half-way, by ``close`` or an error: at most one


class AsyncCollector:
    """A maker of rollouts in a thread next to the learner's, which alone uses it, once. A context manager.

    Args:
        key: ``fold_in(key, k)``'s first half is rollout k's.
        stop_timeout_s: time that ``close`` waits for the step under way.
        env_timeout_s: time limit of one call into an environment.
    """

    def __init__(
        self,
        collector: HostCollector,
        key: Key,
        *,
        schedule: Schedule,
        stop_timeout_s: float = 10.0,
        env_timeout_s: float = 300.0,
    ) -> None:
        self.collector, self.key, self.schedule, self.first = collector, key, schedule, 0
        self.stop_timeout_s, self.env_timeout_s = stop_timeout_s, env_timeout_s
        self.versions: list[int] = []  # the version of every delivered rollout, for ``Schedule.recorded``
        self.stats = CollectorStats()
        self._changed = threading.Condition()
        self._published: dict[int, Params] = {}
        self._made: deque[tuple[int, Collected]] = deque()  # rollouts that wait, with their versions
        self._error: BaseException | None = None
        self._closing_error: BaseException | None = None
        self._stopping = self._pausing = False
        self._moving = 0  # groups whose environments are moving right now
        self._wait_s = 0.0
        self._thread = threading.Thread(target=self._run, name="ejax-collector", daemon=True)

    def start(self, params: Params, *, first: int = 0) -> None:
        """Publish version ``first`` and begin with the rollout of that index. Raises RuntimeError: started before."""
        if self._thread.ident is not None:
            raise RuntimeError("this collector was started before; make a new one")
        self.first = first
        self.publish(params, first)
        self._thread.start()

    def publish(self, params: Params, version: int) -> None:
        """Hand over a copy of the parameters after ``version`` updates. Raises ValueError: not the next version."""
        copy = jax.tree.map(jnp.copy, params)  # the learner's own may be donated to the next update
        with self._changed:
            newest = max(self._published, default=version - 1)
            if version != newest + 1:
                raise ValueError(f"version {version} published after {newest}; publish one version after the other")
            self._published[version] = copy
            self._changed.notify_all()

    def collect(self, interrupted: Callable[[], bool] = lambda: False) -> Collected | None:
        """Return the next rollout, in order; None if ``interrupted`` first. It has its ``version`` [T, N].

        Raises:
            Exception: the one that ended the thread, with its traceback, and a note of where it was.
            TimeoutError: a call took longer than ``env_timeout_s``; the message names it.
            RuntimeError: not started, or closed.
        """
        if self._thread.ident is None or self._stopping:
            raise RuntimeError(f"the collector is {'closed' if self._stopping else 'not started'}")
        began = time.perf_counter()
        with self._changed:
            while not self._made:
                if self._error is not None:
                    raise self._error
                if interrupted():
                    return None
                self._changed.wait(_POLL_S)
                call = under_way(self._thread.ident or 0)
                if call is not None and time.monotonic() - call.since > self.env_timeout_s:
                    raise TimeoutError(f"nothing happened for {self.env_timeout_s:.0f} s at {self.collector.doing}")
            version, collected = self._made.popleft()
            self._changed.notify_all()
            index = self.first + len(self.versions)
            self.versions.append(version)
            self.stats.delivered += 1
            queued = self.stats.queued = len(self._made)
            waited, self._wait_s = self._wait_s, 0.0
            # no schedule asks for an older version; ``publish`` counts from the newest
            oldest = min(max(self._published), self.first + self.stats.begun - self.schedule.max_staleness)
            self._published = {v: params for v, params in self._published.items() if v >= oldest}
        rollout = collected.rollout
        tag = jnp.full_like(rollout.reward, version, dtype=jnp.int32)  # where the rollout is
        collected.rollout = replace(rollout, version=tag)
        collected.facts |= {
            "collector/staleness": float(index - version),
            "collector/queued_rollouts": float(queued),
            "collector/learner_wait_s": time.perf_counter() - began,
            "collector/actor_wait_s": waited,
        }
        return collected

    @contextmanager
    def paused(self, interrupted: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Let no environment step inside; the rollout under way continues afterwards.

        Raises TimeoutError: a step takes ``env_timeout_s``; EnvAbandoned: ``stop_timeout_s``, and ``interrupted``.
        """
        ends, stops = time.monotonic() + self.env_timeout_s, float("inf")
        with self._changed:
            self._pausing = True
            while not self._changed.wait_for(lambda: self._moving == 0, _POLL_S):
                now = time.monotonic()
                if interrupted():
                    stops = min(stops, now + self.stop_timeout_s)
                if now > stops:
                    raise EnvAbandoned(f"no pause within {self.stop_timeout_s:g} s; at {self.collector.doing}")
                if now > ends:
                    raise TimeoutError(f"no pause within {self.env_timeout_s:.0f} s; at {self.collector.doing}")
        try:
            yield
        finally:
            with self._changed:
                self._pausing = False
                self._changed.notify_all()

    def close(self) -> None:
        """Stop within ``stop_timeout_s``, inside a rollout too; close environments in the thread that stepped them.
        Raises TimeoutError: a step under way, or a ``close``, does not return; they are left to that thread.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is None:
            self.collector.close()
            return
        self._thread.join(self.stop_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"not stopped within {self.stop_timeout_s:.0f} s; at {self.collector.doing}")
        error, self._closing_error = self._closing_error, None  # raised once
        if error is not None:
            raise error

    def __enter__(self) -> "AsyncCollector":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with noting(error, "closing the collector"):
            self.close()

    def _run(self) -> None:
        try:
            for index in itertools.count(self.first):
                self._make_rollout(index)
        except CollectionStopped:
            pass
        except BaseException as error:
            error.add_note(f"in the collecting thread, at {self.collector.doing}")
            with self._changed:
                self._error = error
                self._changed.notify_all()
        try:
            self.collector.close()
        except BaseException as error:
            self._closing_error = error

    def _make_rollout(self, index: int) -> None:
        version, params = self._begin(index)
        # the first half: the other is the update's, which has the same index
        key, _ = jax.random.split(jax.random.fold_in(self.key, index))
        try:
            collected = self.collector.collect(params, key, index=index, gate=self._gate)
        except BaseException:
            with self._changed:
                self.stats.given_up += 1
            raise
        with self._changed:
            self._made.append((version, collected))
            self.stats.queued = len(self._made)
            self._changed.notify_all()

    def _begin(self, index: int) -> tuple[int, Params]:
        began = time.perf_counter()
        with self._changed:
            while not self._stopping:
                version = self.schedule.version(index, first=self.first, newest=max(self._published))
                # there is room for it later too: only this thread adds
                if version is not None and len(self._made) <= self.schedule.max_staleness:
                    self.stats.begun += 1
                    self._wait_s += time.perf_counter() - began
                    return version, self._published[version]
                self._changed.wait()  # for the learner, who notifies: ``publish``, ``collect`` and ``close``
        raise CollectionStopped

    @contextmanager
    def _gate(self) -> Iterator[bool]:
        with self._changed:
            # for the learner, which notifies at the end of ``paused``, or at the latest in ``close``
            self._changed.wait_for(lambda: self._stopping or not self._pausing)
            self._moving += 1
        try:
            yield self._stopping
        finally:
            with self._changed:
                self._moving -= 1
                if self._pausing and self._moving == 0:
                    self._changed.notify_all()
