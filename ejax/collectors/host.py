"""Rollouts of host environments: the policy is one jitted call per step, everything else about a rollout one more.

Environments may come in several groups. Each group is stepped in a thread of its own, so that one group's environments
move while the policy looks at another's; the policy is asked by one group at a time.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from ejax.distributions import executed
from ejax.envs.host.calls import call_env, waiting_for
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.policies.calls import ask, check_obs, first_memory, forget_outside
from ejax.rollout import make_rollout
from ejax.runtime.placing import own_copy
from ejax.runtime.sharding import join, sharded
from ejax.types import (
    Array,
    HostEnv,
    HostTimestep,
    Key,
    Params,
    Policy,
    PolicyWithMemory,
    PyTree,
    Rollout,
    SavableHostEnv,
)

P = ParamSpec("P")
R = TypeVar("R")
Gate = Callable[[], AbstractContextManager[bool]]
"""Entered around every call that advances an environment. True: the rollout is to be given up."""


_LAST_STEP_S = 1.0
"""Time that closing waits for a group's thread that is still in a step."""


class CollectionStopped(Exception):
    """The caller asked to stop before the rollout was complete."""


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """One step of a group of environments, for who watches. Arrays [N, ...] that the next step may overwrite: copy what
    is kept."""

    update: int
    """The update that learns from it, counted from 1."""
    group: int
    """The group's number in the run."""
    obs: PyTree
    """Before the step."""
    action: NDArray[Any]
    """As the environments were given it."""
    timestep: HostTimestep
    """``reward``, ``terminated``, ``truncated``, ``info``, and ``obs`` after the step."""


@dataclass(kw_only=True)
class Collected:
    """One rollout, and its cost."""

    rollout: Rollout
    envs: PyTree
    """The environments' state after it, where they can be saved; otherwise ()."""
    policy_s: float
    """Seconds in which some group asked the policy."""
    env_s: float
    """Seconds of environment steps, summed over the groups."""
    compile_s: float = 0.0
    """Seconds of compilation, in the first one."""
    facts: dict[str, float] = field(default_factory=dict)
    """Metrics of the collection, under their tags."""


class HostCollector:
    """Plays groups of host environments in lockstep. Used by one thread at a time; a context manager.

    Args:
        groups: of equal numbers of environments; row i of a rollout is row i of the groups side by side.
        num_steps: T.
        seed: with a rollout's index it gives the seeds of the episodes that start there.
        dropout: as in ``ejax.rollout.unroll``.
        restart: start new episodes with every rollout; each ``group_size`` consecutive rows from the same seed.
        devices: where the policy acts, group by group in turn; the rollout lies on the first. None: where the
            parameters are.
        mesh: devices that the rollout is split over instead, by environment; each computes the values of its rows. Of
            several processes each has the rows of its own devices.
        first_group: number of the first of these groups in the run.
        num_groups: of the run, where several processes have some each. None: these. A group acts, starts and drops
            units as it would if one process had them all.
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
        mesh: Mesh | None = None,
        first_group: int = 0,
        num_groups: int | None = None,
    ) -> None:
        sizes = {group.num_envs for group in groups}
        if len(sizes) != 1:
            raise ValueError(f"groups need equal numbers of environments, got {[g.num_envs for g in groups]}")
        self.policy, self.groups, self.num_steps, self.seed = policy, list(groups), num_steps, seed
        self.dropout, self.restart, self.group_size = dropout, restart, group_size
        self.devices, self.mesh = devices, mesh
        self.first_group = first_group
        self._num_groups = len(groups) if num_groups is None else num_groups
        self.num_envs = sum(group.num_envs for group in groups)
        self._num_envs_of_all = groups[0].num_envs * self._num_groups
        self.doing = "nothing yet"
        """The collector's current activity, for the messages of a waiting thread."""
        self.lost_steps = 0
        """Environment steps taken for rollouts that were given up, of all rows."""
        self.listeners: Sequence[Callable[[HostStep], None]] = ()
        """Called after each step, one at a time; in the group's thread if there are several groups."""
        self._listening = threading.Lock()
        self._obs: list[PyTree] | None = None
        self._memory = self._first_memory()
        """What the policy remembers of the episodes under way, group by group."""
        self._asking = threading.Lock()
        self._taken = [0] * len(groups)
        """Steps of the rollout under way, group by group."""
        self._is_first = True
        self._threads: dict[int, threading.Thread] = {}
        """The groups' threads in the last rollout, where there are several groups."""

    def compile(self, params: Params) -> None:
        """Have the policy act on zeros, before anybody counts the time that a step takes."""
        settled = self._settled(params)
        for number, group in enumerate(self.groups):
            mine, memory = settled[number % len(settled)], self._memory[number]
            row = {"dropout_seed": np.zeros(group.num_envs, np.uint32)} if self.dropout else {}
            key, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), number))  # programs, as ``collect``'s are
            obs = _zeros(group.observation_space, group.num_envs)
            for t in range(2):  # the second time with a memory that a step has made
                drawn, part, memory = act(self.policy, mine, obs, memory, key, np.int32(t), row)
            if isinstance(group, PureHostEnv):
                group.compile(np.asarray(drawn if part is None else part))

    def collect(self, params: Params, key: Key, *, index: int, gate: Gate = lambda: nullcontext(False)) -> Collected:
        """One rollout with these parameters.

        Args:
            key: of this rollout alone.
            index: of the rollout since the start of training.
            gate: entered around every reset and step.

        Raises:
            CollectionStopped: ``gate`` was true; the steps taken are given up, the episodes go on.
        """
        self._taken = [0] * len(self.groups)
        try:
            return self._collect(params, key, index, gate)
        except BaseException:
            self.lost_steps += sum(n * group.num_envs for n, group in zip(self._taken, self.groups, strict=True))
            raise

    def _collect(self, params: Params, key: Key, index: int, gate: Gate) -> Collected:
        if self._obs is None or self.restart:
            with gate() as stop:
                if stop:
                    raise CollectionStopped
                self._start(index)
        key_rows, key_actions = jax.random.split(key)
        rows: dict[str, NDArray[Any]] = {}
        if self.dropout:
            shape = (self.num_steps, self._num_envs_of_all)
            before = self.first_group * self.groups[0].num_envs
            drawn = np.asarray(jax.random.bits(key_rows, shape, jnp.uint32))
            rows["dropout_seed"] = drawn[:, before : before + self.num_envs]
        settled = self._settled(params)
        play = partial(self._play, key=key_actions, rows=rows, index=index)
        played = self._play_all(lambda i, gate: play(i, settled[i % len(settled)], gate=gate), gate)
        steps = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *(each.steps for each in played))
        self.doing = f"rollout {index}: values"
        began = time.perf_counter()
        rollout = self._assemble(params if self.mesh else settled[0], steps, rows)
        compile_s = time.perf_counter() - began if self._is_first else 0.0  # what it computes is not waited for
        self._is_first = False
        return Collected(
            rollout=rollout,
            envs=self.state(),
            policy_s=sum(each.policy_s for each in played),
            env_s=sum(each.env_s for each in played),
            compile_s=compile_s,
            facts=self._failures(),
        )

    def _settled(self, params: Params) -> list[Params]:
        """The parameters where the policy acts."""
        return [params if place is None else own_copy(params, place) for place in self.devices or (None,)]

    def state(self) -> PyTree:
        """The state of the environments, group by group, with the policy's memory of their episodes where it has one;
        () where they cannot be saved."""
        groups = [_savable(group) for group in self.groups]
        if None in groups:
            return ()
        states = tuple(call_env(_name(group), "get_state", group.get_state) for group in groups if group is not None)
        if not isinstance(self.policy, PolicyWithMemory):
            return states
        memories = jax.tree.map(np.asarray, self._memory)
        return tuple({"env": env, "memory": memory} for env, memory in zip(states, memories, strict=True))

    def own(self, envs: PyTree) -> PyTree:
        """Of the state of all the run's groups what ``state`` gives of these."""
        return envs[self.first_group :][: len(self.groups)]

    def restore(self, envs: PyTree) -> None:
        """Go on with saved environments: ``Collected.envs``."""
        self._obs = []
        if isinstance(self.policy, PolicyWithMemory):
            self._memory = [jax.tree.map(jnp.asarray, state["memory"]) for state in envs]
            envs = [state["env"] for state in envs]
        for group, state in zip(self.groups, envs, strict=True):
            savable = _savable(group)
            if savable is None:
                raise ValueError(
                    f"{type(group).__name__} has no state to set; the environments of a run must not change"
                )
            obs = call_env(_name(group), "set_state", savable.set_state, state)
            if isinstance(group, GuardedEnv):
                group.adopt(obs)
            self._obs.append(obs)

    def close(self) -> None:
        """Close every group, whatever the others raise, except those whose step never returned.

        Raises:
            Exception: the first that a group raised, with the others as notes.
            TimeoutError: a group was left open, since a thread is still in it.
        """
        problems: list[Exception] = []
        for number, group in enumerate(self.groups):
            self.doing = f"closing group {number}: {_name(group)}"
            thread = self._threads.get(number)
            if thread is not None:
                thread.join(_LAST_STEP_S)
            try:
                if thread is not None and thread.is_alive():
                    raise TimeoutError(f"env '{_name(group)}' of group {number} is left open: its step goes on")
                _call(group, "close", group.close)
            except Exception as error:
                problems.append(error)
        if problems:
            for other in problems[1:]:
                problems[0].add_note(f"while closing: {other}")
            raise problems[0]

    def __enter__(self) -> "HostCollector":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _assemble(
        self, params: Params, steps: tuple[Any, Any, Any, HostTimestep], rows: dict[str, NDArray[Any]]
    ) -> Rollout:
        if self.mesh is None:
            return assemble(self.policy, params, *steps, rows)
        devices = self.mesh.local_devices
        size = self.num_envs // len(devices)
        parts = []
        for i, device in enumerate(devices):
            mine = slice(i * size, (i + 1) * size)
            own_steps, own_rows = jax.tree.map(lambda x: x[:, mine], (steps, rows))  # noqa: B023  (used at once)
            parts.append(assemble(self.policy, own_copy(params, device), *own_steps, own_rows))
        return join(parts, sharded(self.mesh, axis=1), axis=1)

    def _start(self, index: int) -> None:
        self.doing = f"rollout {index}: reset"
        draw = np.random.SeedSequence([self.seed, index])
        seed = np.repeat(draw.generate_state(self._num_envs_of_all // self.group_size), self.group_size)
        parts = np.split(seed.astype(np.uint32), self._num_groups)[self.first_group :][: len(self.groups)]
        self._obs = [_call(group, "reset", group.reset, part) for group, part in zip(self.groups, parts, strict=True)]
        self._memory = self._first_memory()

    def _first_memory(self) -> list[PyTree]:
        return [first_memory(self.policy, group.num_envs) for group in self.groups]

    def _failures(self) -> dict[str, float]:
        guarded = [group for group in self.groups if isinstance(group, GuardedEnv)]
        if not guarded:
            return {}
        return {
            "collector/quarantined": float(sum(each.num_quarantined for each in guarded)),
            "collector/env_restarts": float(sum(each.num_restarts for each in guarded)),
        }

    def _play_all(self, play: Callable[[int, Gate], "_Played"], gate: Gate) -> list["_Played"]:
        """All groups to their end; one that fails stops the others."""
        if len(self.groups) == 1:
            return [play(0, gate)]
        failed = threading.Event()

        @contextmanager
        def gate_of_all() -> Iterator[bool]:
            with gate() as stop:
                yield stop or failed.is_set()

        def fulfil(future: "Future[_Played]", number: int) -> None:
            try:
                future.set_result(play(number, gate_of_all))
            except BaseException as error:
                failed.set()
                future.set_exception(error)

        # daemons: a step that never returns must not keep the process from ending, as a pool's threads do
        futures: list[Future[_Played]] = [Future() for _ in self.groups]
        for number, future in enumerate(futures):
            thread = threading.Thread(target=fulfil, args=(future, number), name=f"ejax-group-{number}", daemon=True)
            thread.start()
            self._threads[number] = thread
        try:
            with waiting_for(list(self._threads.values())):  # so that the watchdog, or ``AsyncCollector``, bounds it
                errors = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:  # cut off: a thread that returns must not step again
            failed.set()
            raise
        for error in errors:
            if not isinstance(error, CollectionStopped):
                raise error
        return [future.result() for future in futures]

    def _play(
        self, number: int, params: Params, *, key: Key, rows: dict[str, NDArray[Any]], index: int, gate: Gate
    ) -> "_Played":
        """T steps of one group."""
        group, current = self.groups[number], self._current()
        which = self.first_group + number
        key = jax.random.fold_in(key, which)
        mine = slice(number * group.num_envs, (number + 1) * group.num_envs)
        before, after = _Pages(self.num_steps), _Pages(self.num_steps)
        policy_s = env_s = 0.0
        for t in range(self.num_steps):
            obs = current[number]
            with self._asked():
                began = time.perf_counter()
                row = {name: each[t, mine] for name, each in rows.items()}
                memory = self._memory[number]
                check_obs(self.policy, obs)
                drawn, part, remembered = act(self.policy, params, obs, memory, key, np.int32(t), row)
                action = np.asarray(drawn)
                given = action if part is None else np.asarray(part)
                policy_s += time.perf_counter() - began
            # now: an environment may write the next observation over this one
            before.write(t, (obs, action, (memory, remembered)))
            with gate() as stop:
                if stop:
                    raise CollectionStopped
                self.doing = f"rollout {index}, step {t + 1} of {self.num_steps}, group {which}: {_name(group)}"
                began = time.perf_counter()
                timestep = _call(group, "step", group.step, given)
                env_s += time.perf_counter() - began
            after.write(t, timestep)
            if self.listeners:
                seen = jax.tree.map(lambda page: page[t], before.pages[0])  # noqa: B023  (used at once)
                step = HostStep(update=index + 1, group=which, obs=seen, action=given, timestep=timestep)
                with self._listening:
                    for listener in self.listeners:
                        listener(step)
            current[number] = timestep.obs
            # a step that only reset is none of an episode
            ended = timestep.terminated | timestep.truncated | ~np.asarray(timestep.info.get("valid", True))
            self._memory[number] = forget_outside(self.policy, remembered, ended)
            self._taken[number] = t + 1
        return _Played((*before.pages, after.pages), policy_s, env_s)

    def _current(self) -> list[PyTree]:
        if self._obs is None:
            raise RuntimeError("no episode has started")
        return self._obs

    @contextmanager
    def _asked(self) -> Iterator[None]:
        with self._asking if len(self.groups) > 1 else nullcontext():
            yield


class _Pages:
    """A copy of one pytree for each of T steps, in arrays [T, ...]."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.pages: Any = None

    def write(self, t: int, tree: PyTree) -> None:
        if self.pages is None:
            self.pages = jax.tree.map(lambda x: np.empty((self._num_steps, *np.shape(x)), np.asarray(x).dtype), tree)
        jax.tree.map(lambda page, x: page.__setitem__(t, x), self.pages, tree)


def _zeros(space: gymnasium.Space[Any], num_rows: int) -> PyTree:
    """An observation of ``space``, without content."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _zeros(part, num_rows) for name, part in space.spaces.items()}
    return np.zeros((num_rows, *(space.shape or ())), space.dtype)


def _savable(group: HostEnv) -> SavableHostEnv | None:
    inner = group.inner if isinstance(group, GuardedEnv) else group
    return inner if isinstance(inner, SavableHostEnv) else None


def _call(group: HostEnv, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function`` of ``group``. A ``GuardedEnv`` records its environment's calls itself."""
    if isinstance(group, GuardedEnv):
        return function(*args, **kwargs)
    return call_env(_name(group), what, function, *args, **kwargs)


def _name(group: HostEnv) -> str:
    if isinstance(group, GuardedEnv):
        return group.name
    return type(group.env if isinstance(group, PureHostEnv) else group).__name__


@dataclass
class _Played:
    steps: tuple[PyTree, NDArray[Any], tuple[PyTree, PyTree], HostTimestep]
    """Observations, actions, memories before and after them, timesteps; leaves [T, n, ...]."""
    policy_s: float
    env_s: float


@partial(jax.jit, static_argnames="policy")
def act(
    policy: Policy, params: Params, obs: PyTree, memory: PyTree, key: Key, t: Array, rows: dict[str, Array]
) -> tuple[Array, Array | None, PyTree]:
    """The actions of step t, [N, ...], what the environments are given of them (None: all), and the memory after it."""
    distribution, _, remembered = ask(policy, params, obs, memory, **rows)
    action = distribution.sample(jax.random.fold_in(key, t))
    given = executed(distribution, action)
    return action, None if given is action else given, remembered


@partial(jax.jit, static_argnames="policy")
def assemble(
    policy: Policy,
    params: Params,
    obs: PyTree,
    action: Array,
    memory: tuple[PyTree, PyTree],
    timestep: HostTimestep,
    rows: dict[str, Array],
) -> Rollout:
    """A rollout from recorded steps, with the policy's log-probabilities and values; leaves [T, N, ...]."""
    seed = rows.get("dropout_seed")
    return make_rollout(policy, params, obs, action, timestep, memory=memory, dropout_seed=seed)
