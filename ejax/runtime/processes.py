"""Several processes that train together: who they are, and the words that they exchange between their updates.

Every process runs the same loop, and the first one writes. They agree, such as on when to stop, through the
coordination service of ``jax.distributed``, on the hosts, which ends the others where one dies or is suspended.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from ejax.runtime.sharding import process_count
from ejax.schema.messages import explain
from ejax.schema.problems import ConfigError

_DEAD_AFTER_S = 15
_LATE_S = 60.0  # a process prints then what it waits for
_RESCUE = "rescue"
_POLL_MS = 1000
_FOUND_BY_JAX = {"SLURM_NTASKS": "SLURM", "OMPI_COMM_WORLD_SIZE": "OpenMPI"}
# variables with the number of processes that a scheduler started
_SIZES = {**_FOUND_BY_JAX, "WORLD_SIZE": "torchrun or the like"}
JOIN = "start each with ejax train … --coordinator HOST:PORT --num-processes N --process-id I"
_AGAIN = "start all of them again: ejax train … --resume latest"


class ProcessesError(RuntimeError):
    """Processes that cannot train together, or no longer; the text names those that are the reason."""


class RescueCall(ProcessesError):
    """Another process hangs, and saves the last state, of which this one has to write its part."""


def join_group(
    coordinator: str | None, num_processes: int | None, process_id: int | None, *, timeout_s: int = 300
) -> None:
    """Join the other processes, at the host:port of process 0; None: as JAX finds it with SLURM, OpenMPI or Kubernetes.

    Call it before JAX looks for devices; without others it does nothing. ConfigError: an address that is none.
    ProcessesError: they are not all there in time, or the address is not complete.
    """
    if jax.distributed.is_initialized():
        return
    address = coordinator, num_processes, process_id
    if address == (None, None, None) and _is_one_of_several(_FOUND_BY_JAX) is None:
        indexed_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys()
        if not indexed_job and "JAX_COORDINATOR_ADDRESS" not in os.environ:
            return
    host, _, port = (coordinator or "scheduler:1").rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        text = f"got the coordinator '{coordinator}', which is not a HOST:PORT with a port of 1 to 65535"
        raise ConfigError([], f"{text}; {JOIN}, as in host0:12345")
    number = "" if process_id is None else f", process {process_id}"
    who = f"{coordinator or 'a coordinator that is not named'}{number}"
    failures: list[Exception] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                *address,
                initialization_timeout=timeout_s + 600,  # long after this one: XLA would abort the process
                heartbeat_timeout_seconds=_DEAD_AFTER_S,
                shutdown_timeout_seconds=_DEAD_AFTER_S,
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
        reason = explain(failures[0]).splitlines()[0]
        raise ProcessesError(f"cannot join the other processes at {who}: {reason}; {JOIN}") from failures[0]


def unjoined() -> str | None:
    """Name the scheduler that started several processes, of which this one knows nothing yet."""
    return None if process_count() > 1 else _is_one_of_several(_SIZES)


def _is_one_of_several(sizes: dict[str, str]) -> str | None:
    """Find the scheduler that started several processes. ConfigError: its variable is not a number."""
    for name, who in sizes.items():
        size = os.environ.get(name) or "1"
        if not (size.isascii() and size.isdigit()):
            text = f"the environment has {name}={size[:80]!r}; unset it, or set it to the number of processes"
            raise ConfigError([], text)
        if int(size[:9]) > 1:
            return who
    return None


_rounds = itertools.count(1)  # numbers the exchanges of this process; all processes make the same ones


class Group:
    """The processes that train together. One that has not come after ``timeout_s`` hangs."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def gather(self, mine: Any, what: str, *, timeout_s: float | None = None) -> list[Any]:
        """Return each process's word, in their order. All of them call it, at the same place of their loops.

        ``mine``: of this process; of JSON. ``what``: the doing that is waited for, for messages: "begin an update".
        ProcessesError: another one failed, or does not come. RescueCall: another one hangs, and saves.
        """
        number, me = self._speak(mine), jax.process_index()
        words = [self._wait_for(number, process, what, timeout_s) for process in range(process_count())]
        if number > 1:  # all are here, so that all have read the words of the round before
            with suppress(jax.errors.JaxRuntimeError):
                _client().key_value_delete(f"ejax/word/{number - 1}/{me}")
        given = [json.loads(word) for word in words]
        if _RESCUE in given:
            raise RescueCall(f"process {given.index(_RESCUE)} hangs in an environment; {_AGAIN}")
        return given

    def call_for_rescue(self) -> None:
        """Make the others' exchange raise ``RescueCall``: this process hangs and saves. In any thread."""
        self._speak(_RESCUE)

    def _speak(self, word: Any) -> int:
        number = next(_rounds)
        _client().key_value_set(f"ejax/word/{number}/{jax.process_index()}", json.dumps(word))
        return number

    def _wait_for(self, number: int, process: int, what: str, timeout_s: float | None) -> str:
        began, limit = time.monotonic(), self._timeout_s if timeout_s is None else timeout_s
        late = False
        # in steps of a second: a process that fails brings no word, and its failure is to be seen immediately
        while True:
            try:
                return str(_client().blocking_key_value_get(f"ejax/word/{number}/{process}", _POLL_MS))
            except jax.errors.JaxRuntimeError as error:
                _raise_failure()
                if "DEADLINE_EXCEEDED" not in str(error):  # no word yet is one thing, nobody to bring it another
                    reason = str(error).partition("\n")[0]
                    raise ProcessesError(f"the messages of process 0 do not arrive: {reason}; {_AGAIN}") from error
            waited = time.monotonic() - began
            if waited > limit:
                text = f"process {process} has not come to {what} for {limit:.0f} s (trainer.process_timeout_s)"
                raise ProcessesError(f"{text}: it hangs; {_AGAIN}")
            if waited > _LATE_S and not late:
                late = True
                me = jax.process_index()
                print(f"[processes] process {me} waits for process {process} to {what}, for {_LATE_S:g} s", flush=True)


def report_failure(reason: str) -> None:
    """Have the other processes end, and pass them the reason."""
    words = json.dumps({"host": socket.gethostname(), "reason": reason})
    with suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(f"ejax/failed/{jax.process_index()}", words, allow_overwrite=True)


@contextmanager
def failing_together() -> Iterator[None]:
    """Make an error of this process inside the end of the others too, and name it there.

    An error of the devices' messages becomes a ProcessesError where another process had failed before.
    """
    try:
        yield
    except ProcessesError:
        raise
    except jax.errors.JaxRuntimeError as error:
        if process_count() > 1:
            print(f"ejax: {str(error).partition(chr(10))[0]}; looking whether another process is gone", flush=True)
            until = time.monotonic() + _DEAD_AFTER_S + 3.0
            while time.monotonic() < until:
                _raise_failure()
                time.sleep(0.2)
            report_failure(explain(error, typed=True))
        raise
    except BaseException as error:
        if process_count() > 1:
            report_failure(explain(error, typed=True))
        raise


def _raise_failure() -> None:
    failed = []
    with suppress(jax.errors.JaxRuntimeError):  # none has
        failed = _client().key_value_dir_get("ejax/failed/")
    for key, words in sorted(failed):
        process, failure = int(key.rsplit("/", 1)[1]), json.loads(words)
        if process != jax.process_index():
            raise ProcessesError(f"process {process} on {failure['host']} failed: {failure['reason']}; {_AGAIN}")


def _client() -> Any:
    # JAX has no public name for it; orbax uses it like this too
    return jax._src.distributed.global_state.client
