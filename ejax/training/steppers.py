"""Steppers: advance a run by n updates. This one does everything in one program; ``host_steppers`` has the others."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from ejax.algorithms.replay_buffer import put_back, take_out
from ejax.algorithms.step import RunState, repeat_step
from ejax.runtime.sharding import make_mesh, replicated, shapes_on, shard, sharded, sharded_somewhere
from ejax.training.programs import kept, key_of
from ejax.types import Array, Key, Metrics

if TYPE_CHECKING:
    from ejax.collectors import HostStep

ShouldStop = Callable[[], bool]
"""True once a signal wants the run to end."""
State = TypeVar("State")
T = TypeVar("T")


class Stepper(AbstractContextManager[Any], Protocol[State]):
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
        """Make ``count`` ≤ ``max_updates`` updates. Metrics are [≥ count]. None: stopped before there was a rollout.

        Replay buffers of the state given are overwritten: nobody may read them afterwards.
        """
        ...

    def joined(self, state: State) -> State:
        """Join what each process has outside the program, for a checkpoint; all of them call it."""
        return state

    def paused(self) -> AbstractContextManager[None]:
        """Collect nothing inside; EnvAbandoned if a step does not return and the user wants the run to stop."""
        return nullcontext()

    def reports(self) -> list[str]:
        """Return the messages since the last call."""
        return []

    def versions(self) -> list[int] | None:
        """List the parameters' versions that made each rollout since ``start``; None: always the newest."""
        return None

    def watch_steps(self, listeners: Sequence[Callable[["HostStep"], None]]) -> None:
        """Call these after each step of environments outside the program; inside there is none to see."""
        return

    def __exit__(self, *error: Any) -> None:
        return


def of_one_update(metrics: Metrics, facts: Mapping[str, float]) -> Metrics:
    """Return the metrics of an update's program, and facts of the host, as ``advance`` does for several updates."""
    rows: dict[str, Any] = {name: np.array([value]) for name, value in facts.items()}
    return {name: x[None] for name, x in metrics.items()} | rows


def commit_to_device(state: T) -> T:
    """Bind arrays to the device they lie on, as those of a checkpoint are: else a run that continues compiles again."""
    return cast(T, jax.tree.map(lambda x: jax.device_put(x, x.sharding) if isinstance(x, jax.Array) else x, state))


@dataclass(frozen=True)
class Layout:
    """The places of a run's arrays on several devices."""

    shardings: Callable[[Any], Any]
    """State -> the sharding of each of its arrays."""
    key: Sharding
    rest: Sharding
    """The place of metrics and counts."""
    mesh: Mesh | None = None
    """The one that the program is traced in. None: it names its own."""


class DeviceStepper(Stepper[State]):
    """Collection and update in one program, several updates in one dispatch.

    Args:
        step: an update of the state, ``(state, key) -> (state, metrics)``.
        layout: of several devices. None: all is where the state lies.
        fold: gives the key of an update from ``key``.
        what: all that the step depends on, for ``ejax.training.programs``.
    """

    def __init__(
        self,
        step: Callable[[State, Key], tuple[State, Metrics]],
        key: Key,
        max_updates: int,
        *,
        layout: Layout | None = None,
        fold: Callable[[Key, Array], Key] = jax.random.fold_in,
        what: Hashable = None,
    ) -> None:
        self.step, self._key, self._layout, self._fold = step, key, layout, fold
        self.max_updates, self.timer_name = max_updates, "train"
        self._what = None if what is None else (what, max_updates)

    def start(self, state: State) -> State:
        if self._layout is None:
            state = commit_to_device(state)
        else:
            state = cast(State, shard(state, self._layout.shardings(state)))
            self._key = shard(self._key, self._layout.key)
        program = key_of(self._what, (state, self._key))
        self._compiled = kept(program, lambda: self.trace(state, self._key).lower().compile())
        return state

    @property
    def program(self) -> str | None:
        return str(self._compiled.as_text())

    def trace(self, state: State, key: Key) -> jax.stages.Traced:
        """Trace the program of ``advance``; ``shapes`` will do for devices that are not here."""
        # traced, so that one program serves every length
        count, layout = jax.ShapeDtypeStruct((), jnp.int32), self._layout
        placed = {} if layout is None else {"out_shardings": (layout.shardings(state), layout.rest)}
        program, (rest, replays) = repeat_step(self.step, self.max_updates, fold=self._fold, **placed), take_out(state)
        if layout is None or layout.mesh is None:
            return program.trace(rest, key, count, replays)
        # an environment that makes arrays at its first call, as MJX does its model, makes them on one device: that
        # must be before the mesh of several is set
        jax.eval_shape(self.step, state, key)
        with jax.set_mesh(layout.mesh):
            return program.trace(rest, key, count, replays)

    def shapes(self, state: State, device: jax.Device) -> tuple[State, Key]:
        """Return the shapes of state and key, with their places: on the layout's devices, or on ``device``."""
        if self._layout is None:
            # the key is not bound to its device, as when a run starts: it goes where the state is
            return shapes_on(SingleDeviceSharding(device), state), shapes_on(None, self._key)
        return shapes_on(self._layout.shardings(state), state), shapes_on(self._layout.key, self._key)

    def advance(self, state: State, count: int, should_stop: ShouldStop) -> tuple[State, Metrics]:
        del should_stop  # between dispatches is soon enough
        number, began = jnp.int32(count), time.perf_counter()
        if self._layout is not None:
            number = shard(number, self._layout.rest)
        rest, replays = take_out(state)
        state, metrics = self._compiled(rest, self._key, number, replays)
        # a program that calls back to the host, as the C engine's do, is not dispatched but run
        seconds = np.zeros(count)
        seconds[0] = time.perf_counter() - began
        return state, metrics | {"time/train_s": seconds}


def shared_environments(devices: Sequence[jax.Device], *, share: int = 1) -> Layout:
    """Split the environments over the devices, and the parameters over each ``share`` of them, which gather them when
    they are needed. The rest is on every device."""
    mesh = make_mesh(devices, share=share)
    everywhere = replicated(mesh)

    def shardings(state: RunState) -> Any:
        places = jax.tree.map(lambda _: everywhere, state)
        if share > 1:  # moments of the optimizer have the parameters' shapes, and their places
            places = replace(places, train=jax.tree.map(lambda x: sharded_somewhere(mesh, x.shape), state.train))
        split, rest = sharded(mesh), take_out(places.own)
        rings = [
            replace(each, rows=jax.tree.map(lambda _: split, each.rows), tail=jax.tree.map(lambda _: split, each.tail))
            for each in rest[1]
        ]
        own = put_back(rest[0], rings)
        return replace(places, envs=jax.tree.map(lambda _: split, state.envs), own=own)

    return Layout(shardings, everywhere, everywhere, mesh)
