"""Steppers of environments outside the program: a collector and updates, one after the other or side by side."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ejax.algorithms.step import Learn, RunState, drop_episodes
from ejax.collectors import AsyncCollector, Collected, CollectionStopped, HostCollector, HostStep
from ejax.envs.host.calls import EnvAbandoned
from ejax.envs.host.guarded import GuardedEnv
from ejax.runtime.placing import at_hand, own_copy, spread
from ejax.runtime.processes import Group, leads
from ejax.runtime.sharding import make_mesh, replicated, sharded
from ejax.training.programs import jitted
from ejax.training.steppers import Interrupted, committed
from ejax.types import Key, Metrics, PyTree, Rollout

Facts = dict[str, float]
_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "collector/learner_wait_s": max,
    "collector/actor_wait_s": max,
    "collector/staleness": max,
    "collector/queued_rollouts": min,
}
"""How the metrics of several processes' collections become one; others are added up."""


class HostStepper:
    """A rollout, then an update.

    Args:
        devices: that each have a part of the rollout, of an update with the numbers of one device. For several that
            have the environments and minibatches of one device each, ``collector.mesh``.
        group: the processes that collect a part of each rollout. None: this is the only one.
        what: all that the update depends on, for ``ejax.training.programs.jitted``.
    """

    max_updates, awaited, program = 1, "update", None

    def __init__(
        self,
        collector: HostCollector,
        learn: Learn,
        key: Key,
        *,
        devices: Sequence[jax.Device] | None = None,
        group: Group | None = None,
        what: Hashable = None,
    ) -> None:
        self.collector, self._key, self._group = collector, key, group
        self.learn = jitted(what, learn)
        self._place = Placement(devices) if devices else None
        self._mesh_update = None if collector.mesh is None else MeshUpdate(learn, key, collector.mesh)
        self.notes: list[str] = []
        """Messages for ``reports`` besides those of the environments."""

    def start(self, state: RunState) -> RunState:
        """
        Args:
            state: with the environments of all groups, whichever process has them.
        """
        self._update = int(state.update)
        learner, envs = replace(state, envs=()), self.collector.own(state.envs)
        if self._update == 0:
            envs = self.collector.state()
        elif envs != ():
            self.collector.restore(envs)
        else:
            if not self.collector.restart:
                self.notes.append("not exact: these environments cannot be saved, so new episodes start")
            learner = drop_episodes(learner)
        learner = committed(learner) if self._mesh_update is None else self._mesh_update.place(learner)
        self._is_first = True
        self.collector.compile(learner.train.params)
        return replace(learner, envs=envs)

    def advance(self, state: RunState, count: int, interrupted: Interrupted) -> tuple[RunState, Metrics] | None:
        # the policy needs it to act; and an update that failed must be seen before other processes are waited for
        began = time.perf_counter()
        jax.block_until_ready(state.update)
        updated = time.perf_counter()
        del count  # is 1
        collected = self._collect(state, interrupted)
        seconds = {"time/update_s": updated - began, "time/collect_s": time.perf_counter() - updated}
        began = time.perf_counter()
        if self._mesh_update is not None and collected is not None:
            self._mesh_update.compile(replace(state, envs=()), collected.rollout)
        compile_s = time.perf_counter() - began
        facts = self._facts_of_all(collected)
        if collected is None or facts is None:
            return None
        began = time.perf_counter()
        learner, metrics = self._learn(replace(state, envs=()), collected.rollout)
        learn_s = time.perf_counter() - began
        if self._is_first:  # compiles; what it computes is not waited for
            self._is_first, collect_s = False, min(collected.compile_s, seconds["time/collect_s"])
            seconds["time/collect_s"] -= collect_s
            seconds["time/compile_s"] = collect_s + compile_s + learn_s
        else:
            seconds["time/update_s"] += learn_s
        self._update += 1
        rows: dict[str, Any] = {name: np.array([value]) for name, value in (facts | seconds).items()}
        return replace(learner, envs=collected.envs), {name: x[None] for name, x in metrics.items()} | rows

    def _facts_of_all(self, collected: Collected | None) -> Facts | None:
        """The metrics of the collection, of all processes together. None: one of them gave up its part of the rollout,
        and there is no update."""
        own = None if collected is None else _facts(collected)
        if self._group is None:
            return own
        word = None if own is None else {"facts": own, "reports": [] if leads() else self.reports()}
        words = self._group.gather(word, "have its part of the rollout")
        for process, other in enumerate(words):
            if other is None:
                self.notes += [f"process {process} gave up its rollout: it was to stop"] * (own is not None)
                return None
            self.notes += [f"process {process}: {text}" for text in other["reports"]]
        return combine_facts([other["facts"] for other in words])

    def _learn(self, learner: RunState, rollout: Rollout) -> tuple[RunState, Metrics]:
        if self._mesh_update is not None:
            return self._mesh_update.learn(learner, rollout)
        if self._place is not None:
            learner, rollout = self._place.state(learner), self._place.rollout(rollout)
        _, key_update = jax.random.split(jax.random.fold_in(self._key, self._update))
        return self.learn(learner, rollout, key_update)

    def _collect(self, state: RunState, interrupted: Interrupted) -> Collected | None:
        if interrupted():
            return None
        key, _ = jax.random.split(jax.random.fold_in(self._key, self._update))
        gate = lambda: nullcontext(interrupted())  # noqa: E731
        try:
            return self.collector.collect(state.train.params, key, index=self._update, gate=gate)
        except (CollectionStopped, EnvAbandoned):
            return None

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reports(self) -> list[str]:
        guarded = [group for group in self.collector.groups if isinstance(group, GuardedEnv)]
        notes = [self.notes.pop(0) for _ in range(len(self.notes))]
        return notes + [report for group in guarded for report in group.reports()]

    def versions(self) -> list[int] | None:
        return None

    def watch_steps(self, listeners: Sequence[Callable[[HostStep], None]]) -> None:
        self.collector.listeners = listeners

    def __enter__(self) -> "HostStepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        try:
            self.collector.close()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"while closing the collector: {problem}")


class AsyncStepper(HostStepper):
    """Updates beside a collector that runs by itself."""

    def __init__(
        self,
        collector: AsyncCollector,
        learn: Learn,
        *,
        devices: Sequence[jax.Device] | None = None,
        group: Group | None = None,
        what: Hashable = None,
    ) -> None:
        super().__init__(collector.collector, learn, collector.key, devices=devices, group=group, what=what)
        self.background = collector
        self._interrupted: Interrupted = lambda: False

    def start(self, state: RunState) -> RunState:
        state = super().start(state)
        most = self.background.schedule.max_staleness
        if self._update > 0 and most > 0:
            which = "first rollout after a resume is" if most == 1 else f"first {most} rollouts after a resume are"
            self.notes.append(f"not exact: the {which} made by newer parameters than without it")
        self.background.start(at_hand(state.train.params), first=self._update)
        return state

    def advance(self, state: RunState, count: int, interrupted: Interrupted) -> tuple[RunState, Metrics] | None:
        self._interrupted = interrupted
        moved = super().advance(state, count, interrupted)
        if moved is not None:
            self.background.publish(at_hand(moved[0].train.params), self._update)
        return moved

    def _collect(self, state: RunState, interrupted: Interrupted) -> Collected | None:
        del state
        return self.background.collect(interrupted)

    def paused(self) -> AbstractContextManager[None]:
        return self.background.paused(self._interrupted)

    def versions(self) -> list[int] | None:
        return self.background.versions

    def __enter__(self) -> "AsyncStepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.background.__exit__(kind, error, traceback)


class MeshUpdate:
    """An update that all devices of a mesh make, of one process or of several: each has the numbers of one device of
    environments and minibatches."""

    def __init__(self, learn: Learn, key: Key, mesh: Mesh) -> None:
        self._mesh, self._here = mesh, mesh.local_devices[0]
        self._key = spread(key, replicated(mesh))

        def learn_next(state: RunState, rollout: Rollout, key: Key) -> tuple[RunState, Metrics]:
            _, key_update = jax.random.split(jax.random.fold_in(key, state.update))
            return learn(state, rollout, key_update)

        self._program = jax.jit(learn_next, out_shardings=replicated(mesh))
        self._compiled: Any = None

    def place(self, state: RunState) -> RunState:
        return spread(state, jax.tree.map(lambda _: replicated(self._mesh), state))

    def compile(self, state: RunState, rollout: Rollout) -> None:
        """The first time: before the processes agree on an update, since one that runs it waits for the others for a
        limited time only."""
        if self._compiled is None:
            with jax.set_mesh(self._mesh):
                self._compiled = self._program.lower(state, rollout, self._key).compile()

    def learn(self, state: RunState, rollout: Rollout) -> tuple[RunState, Metrics]:
        """The metrics are this process's own."""
        state, metrics = self._compiled(state, rollout, self._key)
        return state, own_copy(metrics, self._here)


class Placement:
    """The learner's devices: states on all of them, rollouts split by environment."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = make_mesh(devices)

    def state(self, state: PyTree) -> Any:
        return jax.device_put(state, replicated(self._mesh))

    def rollout(self, rollout: PyTree) -> Any:
        return jax.device_put(rollout, sharded(self._mesh, axis=1))


def _facts(collected: Collected) -> Facts:
    return collected.facts | {"collector/policy_s": collected.policy_s, "collector/env_s": collected.env_s}


def combine_facts(parts: Sequence[Facts]) -> Facts:
    """The metrics of all processes' collections: seconds of work and counts add up; of waiting, the longest counts."""
    return {name: _COMBINED.get(name, sum)([part[name] for part in parts]) for name in parts[0]}
