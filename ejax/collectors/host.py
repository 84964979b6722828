"""Rollouts of host environments: the policy is one jitted call per step, everything else about a rollout one more.

Each of several groups is stepped in its own thread, while the policy acts for one group at a time.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from ejax.collectors.group_worker import CollectionStopped, Gate, GroupWorker, HostStep, Steps
from ejax.envs.host.calls import waiting_for
from ejax.envs.host.guarded import GuardedEnv
from ejax.rollout import make_rollout
from ejax.runtime.sharding import join_shards, local_copy, sharded
from ejax.schema.messages import noting
from ejax.types import Array, HostEnv, HostTimestep, Key, Params, Policy, PyTree, Rollout

_LAST_STEP_S = 1.0  # time that closing waits for a group's thread that is still in a step


@dataclass(kw_only=True)
class Collected:
    rollout: Rollout
    envs: PyTree
    """The environments' state after it, where they can be saved; otherwise ()."""
    policy_s: float
    env_s: float
    """Seconds of policy calls and of environment steps, each summed over the groups."""
    compile_s: float = 0.0
    """Seconds of compilation, in the first one."""
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The groups of a run that one process steps, and its devices. Default: all groups, where the parameters are.

    A group acts, starts and drops units as if one process had them all.
    """

    first_group: int = 0
    num_groups: int | None = None
    devices: Sequence[jax.Device] | None = None
    """The policy acts on them, for one group after the other; the rollout lies on the first."""
    mesh: Mesh | None = None
    """Devices that the rollout is split over instead, by environment; each computes the values of its rows."""


class HostCollector:
    """A collector from groups of host environments in lockstep. Used by one thread at a time; a context manager.

    Args:
        groups: of equal numbers of environments; row i of a rollout is row i of the groups side by side.
        seed: with a rollout's index it gives the seeds of the episodes that start there.
        restart: start new episodes with every rollout; each ``group_size`` consecutive rows from the same seed.
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
        share: Share = Share(),
    ) -> None:
        sizes = {group.num_envs for group in groups}
        if len(sizes) != 1:
            raise ValueError(f"groups need equal numbers of environments, got {[g.num_envs for g in groups]}")
        self.policy, self.num_steps, self.seed = policy, num_steps, seed
        self.dropout, self.restart, self.group_size = dropout, restart, group_size
        self.devices, self.mesh = share.devices, share.mesh
        self._own = slice(share.first_group, share.first_group + len(groups))
        self._num_groups = share.num_groups or len(groups)
        self.num_envs = sum(group.num_envs for group in groups)
        turns = threading.Lock() if len(groups) > 1 else nullcontext()
        self.workers = [GroupWorker(policy, group, share.first_group + i, turns) for i, group in enumerate(groups)]
        self.doing = "nothing yet"  # the collector's current activity, for the messages of a waiting thread
        self.lost_steps = 0  # environment steps taken for rollouts that were given up, of all rows
        self.listeners: Sequence[Callable[[HostStep], None]] = ()
        """Called after each step, one at a time; in the group's thread if there are several groups."""
        self._has_begun, self._is_first = False, True

    @property
    def groups(self) -> list[HostEnv]:
        return [worker.env for worker in self.workers]

    def compile(self, params: Params) -> None:
        """Have the policy act on zeros, before a step's time is counted."""
        settled = self._settled(params)
        row = {"dropout_seed": np.zeros(self.groups[0].num_envs, np.uint32)} if self.dropout else {}
        for i, worker in enumerate(self.workers):
            worker.compile(settled[i % len(settled)], row)

    def collect(self, params: Params, key: Key, *, index: int, gate: Gate = lambda: nullcontext(False)) -> Collected:
        """Make rollout ``index`` since training began; ``key`` is its own, ``gate`` is entered around every step.

        Raises CollectionStopped: ``gate`` was true; the steps taken are given up, the episodes continue.
        """
        for worker in self.workers:
            worker.num_steps = 0
        try:
            return self._collect(params, key, index, gate)
        except BaseException:
            self.lost_steps += sum(worker.num_steps * worker.env.num_envs for worker in self.workers)
            raise

    def _collect(self, params: Params, key: Key, index: int, gate: Gate) -> Collected:
        if self.restart or not self._has_begun:
            with gate() as stop:
                if stop:
                    raise CollectionStopped
                self._start(index)
        key_rows, key_actions = jax.random.split(key)
        size = self.groups[0].num_envs
        rows: dict[str, NDArray[Any]] = {}
        if self.dropout:
            # drawn for all groups of the run, so that each has the same numbers in whichever process it is
            drawn = np.asarray(jax.random.bits(key_rows, (self.num_steps, size * self._num_groups), jnp.uint32))
            rows["dropout_seed"] = drawn[:, size * self._own.start : size * self._own.stop]
        settled = self._settled(params)

        def collect(i: int, gate: Gate) -> Steps:
            return self.workers[i].collect(
                settled[i % len(settled)],
                key_actions,
                {name: each[:, i * size : (i + 1) * size] for name, each in rows.items()},
                num_steps=self.num_steps,
                gate=gate,
                report=lambda text: setattr(self, "doing", f"rollout {index}, {text}"),
                update=index + 1,
                listeners=self.listeners,
            )

        made = self._of_all_groups(collect, gate)
        steps = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *made)
        self.doing = f"rollout {index}: values"
        began = time.perf_counter()
        rollout = self._assemble(params if self.mesh else settled[0], steps, rows)
        compile_s = time.perf_counter() - began if self._is_first else 0.0  # the computation is not waited for
        self._is_first = False
        facts: dict[str, float] = {}
        if guarded := [group for group in self.groups if isinstance(group, GuardedEnv)]:
            facts["collector/quarantined"] = float(sum(each.num_quarantined for each in guarded))
            facts["collector/env_restarts"] = float(sum(each.num_restarts for each in guarded))
        return Collected(
            rollout=rollout,
            envs=self.state(),
            policy_s=sum(worker.policy_s for worker in self.workers),
            env_s=sum(worker.env_s for worker in self.workers),
            compile_s=compile_s,
            facts=facts,
        )

    def _settled(self, params: Params) -> list[Params]:
        return [params if place is None else local_copy(params, place) for place in self.devices or (None,)]

    def state(self) -> PyTree:
        """Return ``GroupWorker.state`` of each group; () where one cannot be saved."""
        states = tuple(worker.state() for worker in self.workers)
        return () if any(state is None for state in states) else states

    def own(self, envs: PyTree) -> PyTree:
        """Pick these groups' part of the state of all the run's groups."""
        return envs[self._own]

    def restore(self, envs: PyTree) -> None:
        """Go on with saved environments: ``Collected.envs``."""
        for worker, state in zip(self.workers, envs, strict=True):
            worker.restore(state)
        self._has_begun = True

    def continue_from(self, obs: PyTree, memory: PyTree) -> None:
        """Go on with episodes that the caller has under way in the only group: what to act on next, and the policy's
        memory of them, leaves [N, ...]."""
        (worker,) = self.workers
        worker.obs, worker.memory, self._has_begun = obs, memory, True
        worker.explores = False  # the caller's steps belong to no run, and have no numbers

    def close(self) -> None:
        """Close every group, in spite of errors of the others, except those whose step never returned.

        Raises the first exception of a group, the others as notes, or TimeoutError: a thread is still in one.
        """
        problem: Exception | None = None
        for i, worker in enumerate(self.workers):
            self.doing = f"closing group {i}: {worker.name}"
            try:
                with noting(problem, "closing"):
                    worker.close(_LAST_STEP_S)
            except Exception as error:
                problem = error
        if problem is not None:
            raise problem

    def __enter__(self) -> "HostCollector":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with noting(error, "closing the collector"):
            self.close()

    def _assemble(self, params: Params, steps: Steps, rows: dict[str, NDArray[Any]]) -> Rollout:
        if self.mesh is None:
            return assemble_rollout(self.policy, params, *steps, rows)
        devices, parts = self.mesh.local_devices, []
        size = self.num_envs // len(devices)
        for i, device in enumerate(devices):
            own_steps, own_rows = jax.tree.map(lambda x, i=i: x[:, i * size : (i + 1) * size], (steps, rows))
            parts.append(assemble_rollout(self.policy, local_copy(params, device), *own_steps, own_rows))
        return join_shards(parts, sharded(self.mesh, axis=1), axis=1)

    def _start(self, index: int) -> None:
        self.doing = f"rollout {index}: reset"
        # drawn for all groups of the run, as ``dropout_seed`` is
        num_seeds = self.groups[0].num_envs * self._num_groups // self.group_size
        draw = np.random.SeedSequence([self.seed, index]).generate_state(num_seeds)
        seed = np.repeat(draw, self.group_size).astype(np.uint32)
        for worker, part in zip(self.workers, np.split(seed, self._num_groups)[self._own], strict=True):
            worker.reset(part)
        self._has_begun = True

    def _of_all_groups(self, collect: Callable[[int, Gate], Steps], gate: Gate) -> list[Steps]:
        """Collect in every group, each in a thread unless there is only one; one that fails stops the others."""
        if len(self.workers) == 1:
            return [collect(0, gate)]
        failed, errors, made = threading.Event(), list[BaseException](), dict[int, Steps]()

        @contextmanager
        def gate_of_all() -> Iterator[bool]:
            with gate() as stop:
                yield stop or failed.is_set()

        def run(i: int) -> None:
            try:
                made[i] = collect(i, gate_of_all)
            except BaseException as error:
                errors.append(error)
                failed.set()
            finally:
                self.workers[i].idle.set()

        # daemons: a step that never returns must not keep the process from ending, as a pool's threads do
        names = [f"ejax-group-{i}" for i in range(len(self.workers))]
        threads = [threading.Thread(target=run, args=(i,), name=name, daemon=True) for i, name in enumerate(names)]
        for worker, thread in zip(self.workers, threads, strict=True):
            worker.idle.clear()
            thread.start()
        try:
            with waiting_for(threads):  # so that the watchdog, or ``AsyncCollector``, bounds it
                for worker in self.workers:
                    # not ``join``, which the watchdog's exception makes take a running thread for an ended one
                    # (CPython before 3.13), so that it would be closed in the middle of its step
                    worker.idle.wait()
        except BaseException:  # cut off: a thread that returns must not step again
            failed.set()
            raise
        if errors:  # the errors of groups that were stopped say nothing
            raise next((error for error in errors if not isinstance(error, CollectionStopped)), errors[0])
        return [made[i] for i in range(len(threads))]


@partial(jax.jit, static_argnames="policy")
def assemble_rollout(
    policy: Policy, params: Params, obs: PyTree, action: Array, memory: Any, timestep: HostTimestep, rows: Any
) -> Rollout:
    """Make a rollout of recorded steps, with the policy's log-probabilities and values; leaves [T, N, ...].
    ``memory``: before and after each step. ``rows``: arguments of the policy by name."""
    return make_rollout(policy, params, obs, action, timestep, memory=memory, dropout_seed=rows.get("dropout_seed"))
