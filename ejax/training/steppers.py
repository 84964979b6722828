"""What moves a run on: programs that do everything on the device, or a collector and updates, in turn or at once."""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from ejax.algorithms.step import Learn, RunState, Step, drop_episodes, repeat_step
from ejax.collectors import AsyncCollector, Collected, CollectionStopped, HostCollector, HostStep
from ejax.envs.host.calls import EnvAbandoned
from ejax.envs.host.guarded import GuardedEnv
from ejax.runtime.processes import at_hand, own_copy, spread
from ejax.runtime.sharding import make_mesh, replicated, shapes_on, sharded, sharded_somewhere
from ejax.training.programs import compiled, jitted
from ejax.types import Key, Metrics, PyTree, Rollout

Interrupted = Callable[[], bool]
Facts = dict[str, float]
Agree = Callable[[Facts | None, Interrupted], Facts | None]
"""Several processes that each have a part of a rollout. Given the metrics of the own one, or None where there is none;
gives those of all, once each process has its part. None: one of them has none, and there is no update."""
State = TypeVar("State")
S = TypeVar("S", bound="Stepper[Any]")
T = TypeVar("T")


class Stepper(Protocol[State]):
    """Owns what collects; a context manager. Update number k draws from ``fold_in(key, k)``, whichever it is."""

    max_updates: int
    """Updates that one call can do."""
    awaited: str
    """What the host waits for when it reads the metrics: ``train`` is collection and update in one program."""

    @property
    def program(self) -> str | None:
        """The compiled program's text; None where there are several."""
        ...

    def start(self, state: State) -> State:
        """Compile, and begin to collect. The state to begin with."""
        ...

    def advance(self, state: State, count: int, interrupted: Interrupted) -> tuple[State, Metrics] | None:
        """``count`` ≤ ``max_updates`` updates. Metrics are [≥ count]. None: interrupted before there was a rollout."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is collected inside.

        Raises:
            EnvAbandoned: the user asked the run to stop, and a step does not return.
        """
        ...

    def reports(self) -> list[str]:
        """Messages since the last call."""
        ...

    def versions(self) -> list[int] | None:
        """Versions of the parameters that made each rollout since ``start``; None where they are always the newest."""
        ...

    def watch_steps(self, listeners: Sequence[Callable[[HostStep], None]]) -> None:
        """Call these after each step of environments outside the program; inside there is none to see."""
        ...

    def __enter__(self: S) -> S: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def committed(state: T) -> T:
    """Every array bound to the device it lies on, as what is read from a checkpoint is.

    Arrays that are bound and arrays that are not make two programs of one step: a run that goes on would compile again
    what the compilation cache has.
    """
    return cast(T, jax.tree.map(lambda x: jax.device_put(x, x.sharding) if isinstance(x, jax.Array) else x, state))


class DeviceStepper:
    """Collection and update in one program, several updates in one dispatch.

    Args:
        devices: that share the environments; they must divide their number. None: where the state lies.
        shard_parameters: they share the parameters too, and gather what they need when they need it.
        what: all that the step depends on, for ``ejax.training.programs.compiled``.
    """

    def __init__(
        self,
        step: Step,
        key: Key,
        max_updates: int,
        *,
        devices: Sequence[jax.Device] | None = None,
        shard_parameters: bool = False,
        what: Hashable = None,
    ) -> None:
        self._what = None if what is None else (what, max_updates, shard_parameters)
        self.step, self._key, self.max_updates, self.awaited = step, key, max_updates, "train"
        self._shard_parameters = shard_parameters
        self._mesh = make_mesh(devices) if devices else None
        self.announce: Callable[[int], None] = lambda count: None
        """Called before each dispatch with its number of updates."""

    def start(self, state: RunState) -> RunState:
        if self._mesh is None:
            state = committed(state)
        else:
            state = spread(state, _places(state, self._mesh, self._shard_parameters))
            self._key = spread(self._key, replicated(self._mesh))
        self._compiled = compiled(self._what, (state, self._key), lambda: self.lower(state, self._key))
        return state

    @property
    def program(self) -> str | None:
        return str(self._compiled.as_text())

    def lower(self, state: RunState, key: Key) -> jax.stages.Lowered:
        """The program of ``advance``, not compiled yet.

        Args:
            state, key: as they lie on the devices. Their shapes will do, for devices that are not here; see ``shapes``.
        """
        count = jax.ShapeDtypeStruct((), jnp.int32)
        if self._mesh is None:
            return repeat_step(self.step, self.max_updates).lower(state, key, count)
        places = (_places(state, self._mesh, self._shard_parameters), replicated(self._mesh))
        # an environment that makes arrays when it is first asked, as MJX does its model, makes them on one device: that
        # must be before the mesh of several is set
        jax.eval_shape(self.step, state, key)
        with jax.set_mesh(self._mesh):
            return repeat_step(self.step, self.max_updates, out_shardings=places).lower(state, key, count)

    def shapes(self, state: RunState, device: jax.Device) -> tuple[RunState, Key]:
        """The shapes of state and key, and where they lie: on the devices that share the run, or on ``device``."""
        if self._mesh is None:
            # the key is not bound to its device, as when a run starts: it goes where the state is
            return shapes_on(SingleDeviceSharding(device), state), shapes_on(None, self._key)
        return shapes_on(_places(state, self._mesh, self._shard_parameters), state), shapes_on(
            replicated(self._mesh), self._key
        )

    def advance(self, state: RunState, count: int, interrupted: Interrupted) -> tuple[RunState, Metrics]:
        del interrupted  # between dispatches is soon enough
        self.announce(count)
        number, began = jnp.int32(count), time.perf_counter()
        if self._mesh is not None:
            number = spread(number, replicated(self._mesh))
        state, metrics = self._compiled(state, self._key, number)
        # a program that calls back to the host, as the C engine's do, is not dispatched but run
        seconds = np.zeros(count)
        seconds[0] = time.perf_counter() - began
        return state, metrics | {"time/train_s": seconds}

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reports(self) -> list[str]:
        return []

    def versions(self) -> list[int] | None:
        return None

    def watch_steps(self, listeners: Sequence[Callable[[HostStep], None]]) -> None:
        del listeners  # its environments step inside the program

    def __enter__(self) -> "DeviceStepper":
        return self

    def __exit__(self, *error: object) -> None:
        del error


class HostStepper:
    """A rollout, then an update, in turn.

    Args:
        devices: that each have a part of the rollout, of an update with the numbers of one device. For several that
            have the environments and minibatches of one device each, ``collector.mesh``.
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
        what: Hashable = None,
    ) -> None:
        self.collector, self._key = collector, key
        self.learn = jitted(what, learn)
        self._place = Placement(devices) if devices else None
        self._together = None if collector.mesh is None else _Together(learn, key, collector.mesh)
        self.notes: list[str] = []
        """Messages for ``reports`` besides those of the environments."""
        self.announce: Callable[[int], None] = lambda count: None
        """Called before each rollout with its number of updates, which is 1."""
        self.agree: Agree = lambda facts, interrupted: facts

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
        learner = committed(learner) if self._together is None else self._together.place(learner)
        self._is_first = True
        self.collector.compile(learner.train.params)
        return replace(learner, envs=envs)

    def advance(self, state: RunState, count: int, interrupted: Interrupted) -> tuple[RunState, Metrics] | None:
        # the policy needs it to act; and an update that failed must be seen before other processes are waited for
        began = time.perf_counter()
        jax.block_until_ready(state.update)
        updated = time.perf_counter()
        self.announce(count)
        collected = self._collect(state, interrupted)
        seconds = {"time/update_s": updated - began, "time/collect_s": time.perf_counter() - updated}
        began = time.perf_counter()
        if self._together is not None and collected is not None:
            self._together.compile(replace(state, envs=()), collected.rollout)
        compile_s = time.perf_counter() - began
        facts = self.agree(None if collected is None else _facts(collected), interrupted)
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

    def _learn(self, learner: RunState, rollout: Rollout) -> tuple[RunState, Metrics]:
        if self._together is not None:
            return self._together.learn(learner, rollout)
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
        what: Hashable = None,
    ) -> None:
        super().__init__(collector.collector, learn, collector.key, devices=devices, what=what)
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


class _Together:
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


def _places(state: RunState, mesh: Mesh, shard_parameters: bool) -> Any:
    """Where each array of the state lies: the environments are split, the parameters and what the optimizer keeps of
    them too if that is asked for, the rest is on every device."""
    places = jax.tree.map(lambda _: replicated(mesh), state)
    if shard_parameters:
        places = replace(places, train=jax.tree.map(lambda x: sharded_somewhere(mesh, x.shape), state.train))
    return replace(places, envs=jax.tree.map(lambda _: sharded(mesh), state.envs))
