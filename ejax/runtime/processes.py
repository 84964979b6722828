"""Several processes that train together: who they are, what the first tells the others, and when one is missing.

Process 0 leads: it decides what happens next and tells the others, which do the same. What they say to each other goes
through the coordination service of ``jax.distributed``, on the hosts; the devices' own messages are XLA's.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from numpy.typing import NDArray

from ejax.runtime.sharding import make_mesh, replicated
from ejax.schema.problems import ConfigError
from ejax.types import PyTree

_BEAT_S = 1.0
_GONE_S = 15.0
"""Without a sign of life: dead, or suspended."""
_LATE_S = 60.0
"""After so long a process says what it waits for."""
_PATIENCE_MS = 1000
_POLL_MS = 200
"""Between two looks at whether to wait any longer."""
_KEPT = 1000
"""Messages that stay with the service: far more than one process can be behind another."""
_FOUND_BY_JAX = {"SLURM_NTASKS": "SLURM", "OMPI_COMM_WORLD_SIZE": "OpenMPI"}
_SIZES = {**_FOUND_BY_JAX, "WORLD_SIZE": "torchrun or the like"}
"""Variables that say how many processes a scheduler started."""

JOIN = "start each with python -m ejax.train … --coordinator HOST:PORT --num-processes N --process-id I"
"""The remedy for processes that do not find each other."""


class ProcessesError(RuntimeError):
    """Processes that cannot train together, or no longer; the text names those that are the reason."""


@dataclass(frozen=True)
class Address:
    """Where the processes find each other, and which of them this one is. What is None is asked of the scheduler."""

    coordinator: str | None = None
    """``host:port`` of process 0."""
    num_processes: int | None = None
    process_id: int | None = None

    @property
    def given(self) -> bool:
        return (self.coordinator, self.num_processes, self.process_id) != (None, None, None)


def join(address: Address, *, timeout_s: int = 300) -> None:
    """Join the other processes, if there are any to join: named by ``address``, or found by JAX with SLURM, OpenMPI or
    Kubernetes. Before JAX looks for devices.

    Args:
        timeout_s: for all to come.

    Raises:
        ConfigError: an address that is none.
        ProcessesError: they are not all there in time, or the address is not complete.
    """
    if count() > 1 or not (address.given or _scheduled()):
        return
    if address.coordinator is not None:
        _check_coordinator(address.coordinator)
    number = "" if address.process_id is None else f", process {address.process_id}"
    who = f"{address.coordinator or 'a coordinator that is not named'}{number}"
    failures: list[Exception] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                address.coordinator,
                address.num_processes,
                address.process_id,
                initialization_timeout=timeout_s + 600,  # long after this one: XLA would abort the process
                heartbeat_timeout_seconds=int(2 * _GONE_S),
                shutdown_timeout_seconds=int(_GONE_S),
            )
        except Exception as error:
            failures.append(error)

    print(f"[processes] waiting for the others at {who}, for at most {timeout_s} s", flush=True)
    connecting = threading.Thread(target=connect, name="ejax-join", daemon=True)  # no signal gets through to XLA's wait
    connecting.start()
    connecting.join(timeout_s)
    if connecting.is_alive():
        raise ProcessesError(f"the others did not all come to {who} within {timeout_s} s; {JOIN}")
    if failures:
        reason = str(failures[0]).splitlines()[0]
        raise ProcessesError(f"cannot join the other processes at {who}: {reason}; {JOIN}") from failures[0]


def _check_coordinator(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        text = f"got the coordinator '{coordinator}', which is no HOST:PORT with a port of 1 to 65535"
        raise ConfigError([], f"{text}; {JOIN}, as in host0:12345")


def _scheduled() -> bool:
    """Whether a scheduler started several processes that JAX can find."""
    indexed_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys()
    return _is_one_of_several(_FOUND_BY_JAX) is not None or indexed_job or "JAX_COORDINATOR_ADDRESS" in os.environ


def unjoined() -> str | None:
    """The scheduler that started several processes, of which this one knows nothing yet."""
    return None if count() > 1 else _is_one_of_several(_SIZES)


def _is_one_of_several(sizes: dict[str, str]) -> str | None:
    """The scheduler whose variable says that it started several processes.

    Raises:
        ConfigError: a variable that is no number.
    """
    for name, who in sizes.items():
        size = os.environ.get(name) or "1"
        if not (size.isascii() and size.isdigit()):
            raise ConfigError(
                [], f"the environment has {name}={size[:80]!r}; unset it, or give the number of processes"
            )
        if int(size[:9]) > 1:
            return who
    return None


def count() -> int:
    return jax._src.distributed.global_state.num_processes if _client() is not None else 1


def leads() -> bool:
    """Whether this process decides, writes and speaks: it is the only one, or the first."""
    return count() == 1 or _own_number() == 0


def _own_number() -> int:
    return jax._src.distributed.global_state.process_id


def spread(tree: PyTree, places: PyTree) -> PyTree:
    """Arrays that every process has whole, as arrays of all devices: each puts what its own devices hold.

    Args:
        places: a ``Sharding`` for each leaf.
    """

    def place(x: Any, sharding: Sharding) -> Any:
        if _is_key(x):
            data = np.asarray(jax.random.key_data(x))
            return jax.random.wrap_key_data(_make(data, sharding), impl=jax.random.key_impl(x))
        return _make(np.asarray(x), sharding)

    return jax.tree.map(place, tree, places) if count() > 1 else jax.device_put(tree, places)


def _make(x: Any, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def own_copy(tree: PyTree, device: jax.Device) -> PyTree:
    """Arrays that are the same on every device, on this process's ``device`` alone."""

    def own(x: jax.Array) -> jax.Array:
        if x.is_fully_replicated:
            for shard in x.addressable_shards:
                if shard.device == device:
                    return shard.data
        return x if x.is_fully_addressable else x.addressable_data(0)

    return jax.device_put(jax.tree.map(own, tree), device)


def at_hand(tree: PyTree) -> PyTree:
    """Arrays that are the same on every device, on those of this process alone: it may compute with them by itself."""

    if count() == 1:
        return tree
    here = replicated(make_mesh([shard.device for shard in jax.tree.leaves(tree)[0].addressable_shards]))

    def own(x: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, here, [shard.data for shard in x.addressable_shards])

    return jax.tree.map(own, tree)


def exchange(tree: PyTree) -> list[PyTree]:
    """What each process gives, in their order, as NumPy's arrays; the same shapes in each. All of them call it.

    As bytes, since JAX has no numbers of 64 bits. Keys come as arrays of all devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    mine = [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in leaves]
    packed = np.frombuffer(b"".join(x.tobytes() for x in mine), np.uint8)
    everywhere = replicated(make_mesh(jax.devices()))

    def unpack(packed: NDArray[np.uint8]) -> PyTree:
        parts = np.split(packed, np.cumsum([x.nbytes for x in mine])[:-1])
        arrays = [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, mine, strict=True)]
        return jax.tree.unflatten(structure, [as_given(x, array) for x, array in zip(leaves, arrays, strict=True)])

    def as_given(x: Any, array: NDArray[Any]) -> Any:
        if not _is_key(x):
            return array
        return jax.random.wrap_key_data(_make(array, everywhere), impl=jax.random.key_impl(x))

    return [unpack(each) for each in multihost_utils.process_allgather(packed)]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


class Channel:
    """What process 0 tells the others, in order; and, inside ``watching``, whether they are all still there."""

    def __init__(self, *, timeout_s: float, leave: Callable[[int], Any], say: Callable[[str], None] = print) -> None:
        """
        Args:
            timeout_s: how far apart the processes may be: one that has not begun what another has long done hangs.
            leave: ends this process at once.
        """
        self._timeout_s, self._leave, self._say = timeout_s, leave, say
        self._number = self._ahead = self._serial = 0
        self._begun = time.monotonic()
        self._failure: str | None = None

    def tell(self, kind: str, **facts: Any) -> None:
        """Process 0: what comes next."""
        self._number += 1
        self._begun = time.monotonic()
        _client().key_value_set(f"ejax/told/{self._number}", json.dumps({"kind": kind, **facts}))
        if self._number > _KEPT:
            _client().key_value_delete(f"ejax/told/{self._number - _KEPT}")

    def hear(self) -> dict[str, Any]:
        """The others: wait for what comes next."""
        number = self._number + 1
        told = self._wait_for(f"ejax/told/{number}", _PATIENCE_MS, "what process 0 does next")
        self._number = number
        self._begun = time.monotonic()
        return dict(json.loads(told or ""))

    def unhear(self) -> None:
        """The others: what was heard last is yet to be done, so ``hear`` gives it again."""
        self._number -= 1

    def overtaken(self) -> bool:
        """The others: process 0 has told something new, and does not wait for what it told before. A second late."""
        return self._ahead > self._number

    def answer(self, said: Any) -> None:
        """The others: to what was heard last."""
        _client().key_value_set(f"ejax/answer/{self._number}/{_own_number()}", json.dumps(said))

    def answers(self, interrupted: Callable[[], bool]) -> dict[int, Any] | None:
        """Process 0: wait for the answer of each of the others to what was told last. None: interrupted before."""
        said: dict[int, Any] = {}
        for process in range(1, count()):
            whom = f"process {process} to have its part of the rollout"
            answer = self._wait_for(f"ejax/answer/{self._number}/{process}", _POLL_MS, whom, interrupted)
            if answer is None:
                return None
            said[process] = json.loads(answer)
        _client().key_value_delete(f"ejax/answer/{self._number}")
        return said

    def _wait_for(
        self, key: str, patience_ms: int, whom: str, interrupted: Callable[[], bool] = lambda: False
    ) -> str | None:
        """A message, or None: interrupted before. ``watching`` ends this process where the other is gone, and the
        other's own watchdog ends what hangs there."""
        late = time.monotonic() + _LATE_S
        while not interrupted():
            with suppress(jax.errors.JaxRuntimeError):
                return str(_client().blocking_key_value_get(key, patience_ms))
            if time.monotonic() > late:
                late = float("inf")
                self._say(f"[processes] process {_own_number()} has waited for {whom} for {_LATE_S:g} s")
        return None

    def fail(self, reason: str) -> None:
        """This process is about to end for this reason: the others say so, and end too."""
        self._failure = reason
        with suppress(jax.errors.JaxRuntimeError):
            self._beat()

    def look_for_missing(self, error: BaseException) -> None:
        """Inside ``watching``, after an error that another process's end may have caused: give the time in which it
        would be missed, and this process ended with its name."""
        self._say(f"ejax: {str(error).partition(chr(10))[0]}; looking whether another process is gone")
        time.sleep(_GONE_S + 3 * _BEAT_S)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, this process ends, with a message that names whom it missed, where another is dead or hangs.

        A thread does it: the main one may wait for a message of the other's devices that never comes.
        """
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), name="ejax-processes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()  # within a beat: the service answers or is known to be gone

    def _watch(self, stop: threading.Event) -> None:
        me = _own_number()
        beats: dict[int, tuple[str, float]] = {}
        while not stop.wait(_BEAT_S):
            try:
                self._beat()
                if not leads():
                    self._look_ahead()
                seen = {int(key.rsplit("/", 1)[1]): beat for key, beat in _client().key_value_dir_get("ejax/beat/")}
            except jax.errors.JaxRuntimeError:
                if not stop.is_set():
                    self._end("process 0 does not answer any more: it has ended, or its host is out of reach")
                return
            now = time.monotonic()
            for process, beat in seen.items():
                if beats.get(process, ("", 0.0))[0] != beat:
                    beats[process] = beat, now
            if (missing := self._missing(beats, now, me)) and not stop.is_set():
                self._end(missing)
                return

    def _beat(self) -> None:
        self._serial += 1
        facts = {"serial": self._serial, "number": self._number, "host": socket.gethostname()}
        mine = json.dumps(facts | ({"failure": self._failure} if self._failure else {}))
        _client().key_value_set(f"ejax/beat/{_own_number()}", mine, allow_overwrite=True)

    def _look_ahead(self) -> None:
        following = self._number + 1
        with suppress(jax.errors.JaxRuntimeError):  # there is none
            _client().key_value_try_get(f"ejax/told/{following}")
            self._ahead = following

    def _missing(self, beats: dict[int, tuple[str, float]], now: float, me: int) -> str | None:
        facts = {process: json.loads(beat) for process, (beat, _) in beats.items()}
        for process, (_, seen) in beats.items():
            if process != me and (failure := facts[process].get("failure")):
                return f"process {process} on {facts[process]['host']} failed: {failure}"
            if process != me and now - seen > _GONE_S:
                return f"process {process} on {facts[process]['host']} has given no sign of life for {_GONE_S:.0f} s"
        if now - self._begun > self._timeout_s:
            for process, fact in facts.items():
                if fact["number"] < self._number:
                    where = f"process {process} on {fact['host']}"
                    return f"{where} has not followed for {self._timeout_s:.0f} s (trainer.process_timeout_s): it hangs"
        return None

    def _end(self, reason: str) -> None:
        self._say(f"ejax: {reason}; this process ends. Start all of them again: python -m ejax.train … --resume latest")
        self._leave(1)


def _client() -> Any:
    # JAX has no public name for it; orbax uses it like this too
    return jax._src.distributed.global_state.client
