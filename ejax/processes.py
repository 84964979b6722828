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
from jax.sharding import Sharding

from ejax.types import PyTree

_BEAT_S = 1.0
_GONE_S = 15.0
"""Without a sign of life: dead, or suspended."""
_PATIENCE_MS = 1000
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
        ProcessesError: they are not all there in time, or the address is not complete.
    """
    if count() > 1 or not (address.given or _scheduled()):
        return
    try:
        jax.distributed.initialize(
            address.coordinator,
            address.num_processes,
            address.process_id,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=int(2 * _GONE_S),
            shutdown_timeout_seconds=int(_GONE_S),
        )
    except (ValueError, TypeError, RuntimeError) as error:
        who = f"{address.coordinator or 'a coordinator that is not named'}, process {address.process_id}"
        reason = str(error).splitlines()[0]
        raise ProcessesError(f"cannot join the other processes at {who}: {reason}; {JOIN}") from error


def _scheduled() -> bool:
    """Whether a scheduler started several processes that JAX can find."""
    indexed_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys()
    return _is_one_of_several(_FOUND_BY_JAX) is not None or indexed_job or "JAX_COORDINATOR_ADDRESS" in os.environ


def unjoined() -> str | None:
    """The scheduler that started several processes, of which this one knows nothing yet."""
    return None if count() > 1 else _is_one_of_several(_SIZES)


def _is_one_of_several(sizes: dict[str, str]) -> str | None:
    """The scheduler whose variable says that it started several processes."""
    return next((who for name, who in sizes.items() if int(os.environ.get(name) or 1) > 1), None)


def count() -> int:
    return jax._src.distributed.global_state.num_processes if _client() is not None else 1


def leads() -> bool:
    """Whether this process decides, writes and speaks: it is the only one, or the first."""
    return count() == 1 or jax._src.distributed.global_state.process_id == 0


def spread(tree: PyTree, places: PyTree) -> PyTree:
    """Arrays that every process has whole, as arrays of all devices: each puts what its own devices hold.

    Args:
        places: a ``Sharding`` for each leaf.
    """

    def place(x: Any, sharding: Sharding) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(x))
            return jax.random.wrap_key_data(_make(data, sharding), impl=jax.random.key_impl(x))
        return _make(np.asarray(x), sharding)

    return jax.tree.map(place, tree, places) if count() > 1 else jax.device_put(tree, places)


def _make(x: Any, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def own_copy(tree: PyTree, device: jax.Device) -> PyTree:
    """Arrays that are the same on every device, on this process's ``device`` alone."""
    mine = jax.tree.map(lambda x: x if x.is_fully_addressable else x.addressable_data(0), tree)
    return jax.device_put(mine, device)


class Channel:
    """What process 0 tells the others, in order; and, inside ``watching``, whether they are all still there."""

    def __init__(self, *, timeout_s: float, leave: Callable[[int], Any], say: Callable[[str], None] = print) -> None:
        """
        Args:
            timeout_s: how far apart the processes may be: one that has not begun what another has long done hangs.
            leave: ends this process at once.
        """
        self._timeout_s, self._leave, self._say = timeout_s, leave, say
        self._number = 0
        self._begun = time.monotonic()

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
        while True:
            with suppress(jax.errors.JaxRuntimeError):
                told = _client().blocking_key_value_get(f"ejax/told/{number}", _PATIENCE_MS)
                break
        self._number = number
        self._begun = time.monotonic()
        return dict(json.loads(told))

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
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        me, host = jax.process_index(), socket.gethostname()
        beats: dict[int, tuple[str, float]] = {}
        serial = 0
        while not stop.wait(_BEAT_S):
            serial += 1
            mine = json.dumps({"serial": serial, "number": self._number, "host": host})
            try:
                _client().key_value_set(f"ejax/beat/{me}", mine, allow_overwrite=True)
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

    def _missing(self, beats: dict[int, tuple[str, float]], now: float, me: int) -> str | None:
        facts = {process: json.loads(beat) for process, (beat, _) in beats.items()}
        for process, (_, seen) in beats.items():
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
