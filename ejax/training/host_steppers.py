"""Stepper of environments outside the program: a collector and updates, one after the other or side by side."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import jax
from jax.sharding import Mesh

from ejax.algorithms.replay_buffer import Replay, put_back, take_out
from ejax.algorithms.step import Learn, RunState, drop_episodes
from ejax.collectors import AsyncCollector, Collected, CollectionStopped, HostCollector, HostStep
from ejax.envs.host.calls import EnvAbandoned
from ejax.envs.host.guarded import GuardedEnv
from ejax.runtime.processes import Group
from ejax.runtime.sharding import as_local, exchange, is_main_process, local_copy, make_mesh, replicated, shard, sharded
from ejax.training.programs import jitted
from ejax.training.steppers import Layout, ShouldStop, Stepper, commit_to_device, of_one_update, shared_environments
from ejax.types import Key, Metrics, Rollout

CollectionMetrics = dict[str, float]
_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "collector/learner_wait_s": max,
    "collector/actor_wait_s": max,
    "collector/staleness": max,
    "collector/queued_rollouts": min,
}
"""Reductions over processes; other metrics are added up."""


class HostStepper(Stepper[RunState]):
    """A rollout, then an update from it.

    Args:
        background: collects during the updates, in its thread. None: the main thread does, between them.
        devices: that each have a part of the rollout, of an update with the numbers of one device. For several that
            have the environments and minibatches of one device each, ``collector.mesh``.
        group: the processes that collect a part of each rollout. None: this is the only one.
        what: all that the update depends on, for ``ejax.training.programs.jitted``.
    """

    def __init__(
        self,
        collector: HostCollector,
        learn: Learn,
        key: Key,
        *,
        background: AsyncCollector | None = None,
        devices: Sequence[jax.Device] | None = None,
        group: Group | None = None,
        what: Hashable = None,
    ) -> None:
        self.collector, self.background, self._key, self._group = collector, background, key, group
        self.learn = jitted(what, consuming(learn), donate_argnames="replays")
        self._learners = make_mesh(devices) if devices else None
        self._mesh_update: MeshUpdate | None = None
        if collector.mesh is not None:
            layout = shared_environments(list(collector.mesh.devices.flat))

            def learn_next(state: RunState, rollout: Rollout, key: Key) -> tuple[RunState, Metrics]:
                _, key_update = jax.random.split(jax.random.fold_in(key, state.update))
                return learn(state, rollout, key_update)

            self._mesh_update = MeshUpdate(learn_next, key, layout)
        self._should_stop: ShouldStop = lambda: False
        self.notes: list[str] = []

    def start(self, state: RunState) -> RunState:
        """Take a state with the environments of all groups and processes."""
        self._update = int(state.update)
        # environments stay on the host: the program of an update takes none
        learner, envs = replace(state, envs=()), self.collector.own(state.envs)
        if self._update == 0:
            envs = self.collector.state()
        elif envs != ():
            self.collector.restore(envs)
        else:
            if not self.collector.restart:
                self.notes.append("not exact: these environments cannot be saved, so new episodes start")
            learner = drop_episodes(learner)  # their returns so far belong to episodes that are lost
        learner = commit_to_device(learner) if self._mesh_update is None else self._mesh_update.place(learner)
        self._is_first = True
        self.collector.compile(learner.train.params)
        if self.background is not None:
            stale = self.background.schedule.max_staleness
            if self._update > 0 and stale > 0:
                made = "rollout after a resume is made" if stale == 1 else f"{stale} rollouts after a resume are made"
                self.notes.append(f"not exact: the first {made} by newer parameters than without it")
            self.background.start(as_local(learner.train.params), first=self._update)
        return replace(learner, envs=envs)

    def advance(self, state: RunState, count: int, should_stop: ShouldStop) -> tuple[RunState, Metrics] | None:
        # the policy needs it to act; and an update that failed must be seen before other processes are waited for
        began = time.perf_counter()
        jax.block_until_ready(state.update)
        updated = time.perf_counter()
        del count  # is 1
        self._should_stop = should_stop
        collected = self._collect(state)
        seconds = {"time/update_s": updated - began, "time/collect_s": time.perf_counter() - updated}
        began = time.perf_counter()
        if self._mesh_update is not None and collected is not None:
            self._mesh_update.compile(replace(state, envs=()), collected.rollout)  # not while the others wait
        compile_s = time.perf_counter() - began
        # all processes agree here that there is a rollout, since all must make the update
        facts = self._metrics_of_all(collected)
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
        if self.background is not None:
            self.background.publish(as_local(learner.train.params), self._update)
        return replace(learner, envs=collected.envs), of_one_update(metrics, facts | seconds)

    def _metrics_of_all(self, collected: Collected | None) -> CollectionMetrics | None:
        """Gather the metrics of all processes' collections. None: one gave up its rollout, and there is no update."""
        own = None
        if collected is not None:
            own = collected.facts | {"collector/policy_s": collected.policy_s, "collector/env_s": collected.env_s}
        if self._group is None:
            return own
        word = None if own is None else {"facts": own, "reports": [] if is_main_process() else self.reports()}
        words = self._group.gather(word, "have its part of the rollout")
        for process, other in enumerate(words):
            if other is None:
                self.notes += [f"process {process} gave up its rollout: it was to stop"] * (own is not None)
                return None
            self.notes += [f"process {process}: {text}" for text in other["reports"]]
        return combine_metrics([other["facts"] for other in words])

    def _learn(self, learner: RunState, rollout: Rollout) -> tuple[RunState, Metrics]:
        if self._mesh_update is not None:
            return self._mesh_update.learn(learner, rollout)
        if self._learners is not None:
            learner = jax.device_put(learner, replicated(self._learners))  # after the first update it is there
            rollout = jax.device_put(rollout, sharded(self._learners, axis=1))
        # the other half is the collection's, which may run ahead in a thread
        _, key_update = jax.random.split(jax.random.fold_in(self._key, self._update))
        learner, replays = take_out(learner)
        return self.learn(learner, rollout, key_update, replays)

    def _collect(self, state: RunState) -> Collected | None:
        if self.background is not None:
            return self.background.collect(self._should_stop)
        if self._should_stop():
            return None
        key, _ = jax.random.split(jax.random.fold_in(self._key, self._update))
        gate = lambda: nullcontext(self._should_stop())  # noqa: E731
        try:
            return self.collector.collect(state.train.params, key, index=self._update, gate=gate)
        except (CollectionStopped, EnvAbandoned):
            return None

    def joined(self, state: RunState) -> RunState:
        if self._group is None or state.envs == ():
            return state
        return replace(state, envs=tuple(each for groups in exchange(state.envs) for each in groups))

    def paused(self) -> AbstractContextManager[None]:
        # collection is between updates then: nothing to pause
        return nullcontext() if self.background is None else self.background.paused(self._should_stop)

    def reports(self) -> list[str]:
        guarded = [group for group in self.collector.groups if isinstance(group, GuardedEnv)]
        notes = [self.notes.pop(0) for _ in range(len(self.notes))]
        return notes + [report for group in guarded for report in group.reports()]

    def versions(self) -> list[int] | None:
        return None if self.background is None else self.background.versions

    def watch_steps(self, listeners: Sequence[Callable[[HostStep], None]]) -> None:
        self.collector.listeners = listeners

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        (self.background or self.collector).__exit__(kind, error, traceback)


def consuming(learn: Learn) -> Callable[..., tuple[RunState, Metrics]]:
    """Pass the replay buffers of the state to ``learn`` as a separate argument, which a program may overwrite."""

    def learn_apart(state: RunState, rows: Any, key: Key, replays: Sequence[Replay] = ()) -> tuple[RunState, Metrics]:
        return learn(put_back(state, replays), rows, key)

    return learn_apart


class MeshUpdate:
    """An update on all devices of a layout, each with the rows and minibatches of one device.

    It is ``update(state, rows, key)``, of the run's ``key``; rows are a rollout or demonstrations.
    """

    def __init__(self, update: Callable[..., tuple[RunState, Metrics]], key: Key, layout: Layout) -> None:
        self._update, self._layout, self._mesh = update, layout, cast(Mesh, layout.mesh)
        self._key = shard(key, layout.key)
        self._compiled: Any = None

    def place(self, state: RunState) -> RunState:
        return cast(RunState, shard(state, self._layout.shardings(state)))

    def compile(self, state: RunState, rows: Any) -> None:
        """Compile before the processes agree on an update: they wait for each other for a limited time only."""
        if self._compiled is None:
            places = self._layout.shardings(state), self._layout.rest
            program = jax.jit(consuming(self._update), out_shardings=places, donate_argnames="replays")
            state, replays = take_out(state)
            with jax.set_mesh(self._mesh):
                self._compiled = program.lower(state, rows, self._key, replays).compile()

    def learn(self, state: RunState, rows: Any) -> tuple[RunState, Metrics]:
        """Make the update; the metrics are this process's own."""
        state, replays = take_out(state)
        state, metrics = self._compiled(state, rows, self._key, replays)
        return state, local_copy(metrics, self._mesh.local_devices[0])


def combine_metrics(parts: Sequence[CollectionMetrics]) -> CollectionMetrics:
    """Combine the metrics of all processes' collections: work and counts add up; of waiting, the longest counts."""
    return {name: _COMBINED.get(name, sum)([part[name] for part in parts]) for name in parts[0]}
