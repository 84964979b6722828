"""Steppers: advance a run by n updates. This one does everything in one program; ``host_steppers`` has the others."""

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

from ejax.algorithms.step import RunState, Step, repeat_step
from ejax.collectors import HostStep
from ejax.runtime.sharding import make_mesh, replicated, shapes_on, shard, sharded, sharded_somewhere
from ejax.training.programs import compiled
from ejax.types import Key, Metrics

ShouldStop = Callable[[], bool]
"""True once a signal wants the run to end."""
State = TypeVar("State")
S = TypeVar("S", bound="Stepper[Any]")
T = TypeVar("T")


class Stepper(Protocol[State]):
    """Owns what collects; a context manager. Update number k draws from ``fold_in(key, k)``, whichever it is."""

    max_updates: int = 1
    """Updates that one call can do."""
    timer_name: str = "update"
    """Name in the account of time: ``train`` is collection and update in one program."""

    @property
    def program(self) -> str | None:
        """The compiled program's text; None where there are several."""
        return None

    def start(self, state: State) -> State:
        """Compile, and begin to collect. The state to begin with."""
        ...

    def advance(self, state: State, count: int, should_stop: ShouldStop) -> tuple[State, Metrics] | None:
        """``count`` ≤ ``max_updates`` updates. Metrics are [≥ count]. None: stopped before there was a rollout."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is collected inside; EnvAbandoned if a step does not return and the user wants the run to stop."""
        return nullcontext()

    def reports(self) -> list[str]:
        """Messages since the last call."""
        return []

    def versions(self) -> list[int] | None:
        """Versions of the parameters that made each rollout since ``start``; None where they are always the newest."""
        return None

    def watch_steps(self, listeners: Sequence[Callable[[HostStep], None]]) -> None:
        """Call these after each step of environments outside the program; inside there is none to see."""
        return

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


def commit_to_device(state: T) -> T:
    """Bind arrays to the device they lie on, as those of a checkpoint are: else a run that goes on compiles again."""
    return cast(T, jax.tree.map(lambda x: jax.device_put(x, x.sharding) if isinstance(x, jax.Array) else x, state))


class DeviceStepper(Stepper[RunState]):
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
        # the program depends on these options besides the step's own
        self._what = None if what is None else (what, max_updates, shard_parameters)
        self.step, self._key, self.max_updates, self.timer_name = step, key, max_updates, "train"
        self._shard_parameters = shard_parameters
        self._mesh = make_mesh(devices) if devices else None

    def start(self, state: RunState) -> RunState:
        if self._mesh is None:
            state = commit_to_device(state)
        else:
            state = shard(state, shardings_of(state, self._mesh, self._shard_parameters))
            self._key = shard(self._key, replicated(self._mesh))
        self._compiled = compiled(self._what, (state, self._key), lambda: self.lower(state, self._key))
        return state

    @property
    def program(self) -> str | None:
        return str(self._compiled.as_text())

    def lower(self, state: RunState, key: Key) -> jax.stages.Lowered:
        """The program of ``advance``, not compiled yet; ``shapes`` will do for devices that are not here."""
        count = jax.ShapeDtypeStruct((), jnp.int32)
        if self._mesh is None:
            return repeat_step(self.step, self.max_updates).lower(state, key, count)
        shardings = (shardings_of(state, self._mesh, self._shard_parameters), replicated(self._mesh))
        # an environment that makes arrays at its first call, as MJX does its model, makes them on one device: that
        # must be before the mesh of several is set
        jax.eval_shape(self.step, state, key)
        with jax.set_mesh(self._mesh):
            return repeat_step(self.step, self.max_updates, out_shardings=shardings).lower(state, key, count)

    def shapes(self, state: RunState, device: jax.Device) -> tuple[RunState, Key]:
        """The shapes of state and key, and their shardings: on the devices that share the run, or on ``device``."""
        if self._mesh is None:
            # the key is not bound to its device, as when a run starts: it goes where the state is
            return shapes_on(SingleDeviceSharding(device), state), shapes_on(None, self._key)
        return shapes_on(shardings_of(state, self._mesh, self._shard_parameters), state), shapes_on(
            replicated(self._mesh), self._key
        )

    def advance(self, state: RunState, count: int, should_stop: ShouldStop) -> tuple[RunState, Metrics]:
        del should_stop  # between dispatches is soon enough
        number, began = jnp.int32(count), time.perf_counter()
        if self._mesh is not None:
            number = shard(number, replicated(self._mesh))
        state, metrics = self._compiled(state, self._key, number)
        # a program that calls back to the host, as the C engine's do, is not dispatched but run
        seconds = np.zeros(count)
        seconds[0] = time.perf_counter() - began
        return state, metrics | {"time/train_s": seconds}


def shardings_of(state: RunState, mesh: Mesh, shard_parameters: bool) -> Any:
    """The sharding of each array of the state: environments are split over the devices, and if ``shard_parameters``
    parameters and optimizer too; the rest is on every device."""
    shardings = jax.tree.map(lambda _: replicated(mesh), state)
    if shard_parameters:
        shardings = replace(shardings, train=jax.tree.map(lambda x: sharded_somewhere(mesh, x.shape), state.train))
    return replace(shardings, envs=jax.tree.map(lambda _: sharded(mesh), state.envs))
