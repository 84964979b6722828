"""Bounds what the main thread's calls into environments may take: some simulators work in no other thread.

Another thread has an overdue call interrupted by a signal, which raises an exception inside the environment. The
last resort, for a call that is stuck in native code, is ``rescue``.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ejax.config.collector import CollectorConfig
from ejax.envs.host.calls import Call, CutOff, EnvAbandoned, exits_are_errors, under_way
from ejax.runtime.process_exit import SIGNALS, hard_exit, owns_process

_POLL_S = 0.2
_NATIVE_S = 2.0
"""After so many seconds of interruptions a call counts as stuck in native code."""
_LAST_CLOSE_S = 1.0
"""For an environment to close, once a call was cut off."""
_SIGNAL = signal.SIGURG
"""Ignored by default and rarely used; Go's runtime preempts with it for the same reason."""

Rescue = Callable[[str, bool], None]


@contextmanager
def guarded_calls(name: str, limits: CollectorConfig) -> Iterator["Watchdog"]:
    """Bound every call into an environment, its building and closing included, and keep it from ending the process."""
    rescue = _exit_stuck if owns_process() else None
    with (
        exits_are_errors(name),
        Watchdog(env_timeout_s=limits.env_timeout_s, stop_timeout_s=limits.stop_timeout_s, rescue=rescue) as watchdog,
    ):
        yield watchdog


class Watchdog:
    """A context manager. Outside the main thread it does nothing: signals reach the main thread only.

    Args:
        env_timeout_s: for a call.
        stop_timeout_s: for a call after a signal to end the run, and for ``close``.
        rescue: called as ``rescue(text, requested)`` in the watchdog's thread where a call cannot be cut off: prints
            ``text`` and ends the process. ``requested``: the user wanted the run to end. None: nothing more
            can be done. May be replaced later.
    """

    def __init__(self, *, env_timeout_s: float, stop_timeout_s: float, rescue: Rescue | None = None) -> None:
        self._env_timeout_s, self._stop_timeout_s, self.rescue = env_timeout_s, stop_timeout_s, rescue
        self._main = threading.main_thread().ident or 0
        self._asked_at: float | None = None
        self._has_cut = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ejax-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if threading.get_ident() != self._main:
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)  # a signal handler must not wait for a full pipe
        # the numbers of signals arrive here immediately, also while the main thread runs no handler
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former = signal.signal(_SIGNAL, self._cut_off)
        self._thread.start()  # only now, when both ends of the pipe are there
        return self

    def __exit__(self, *error: Any) -> None:
        if self._thread.ident is None:
            return
        self._ending.set()
        os.write(self._write, b"\0")
        self._thread.join()  # within a look, unless it ends the process
        signal.set_wakeup_fd(self._former_fd)
        signal.signal(_SIGNAL, self._former if self._former is not None else signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        cutting: Call | None = None
        since, gave_up = 0.0, False
        while not self._ending.is_set():
            if select.select([self._read], [], [], _POLL_S)[0]:
                received = os.read(self._read, 1024)
                if self._asked_at is None and any(number in SIGNALS for number in received):
                    self._asked_at = time.monotonic()
            call = under_way(self._main)
            overdue = self._overdue(call)
            if overdue is None:
                continue
            if call != cutting:
                cutting, since, gave_up = call, time.monotonic(), False
            if time.monotonic() - since < _NATIVE_S:
                signal.pthread_kill(self._main, _SIGNAL)  # again and again: an environment may swallow the exception
                self._ending.wait(_POLL_S)  # this signal has written to the pipe as well
            elif self.rescue is not None:
                self.rescue(*overdue)
            elif not gave_up:
                gave_up = True
                print(f"ejax: {overdue[0]}, and cannot be interrupted: it is stuck in native code", file=sys.stderr)

    def _cut_off(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: end the call under way, if it is overdue indeed."""
        del number, frame
        call = under_way(self._main)
        overdue = self._overdue(call)
        if call is None or overdue is None:
            return
        self._has_cut = True
        text, requested = overdue
        raise EnvAbandoned(text) if requested else CutOff(text)

    def _overdue(self, call: Call | None) -> tuple[str, bool] | None:
        """Return the fault of the call, and whether the user wanted the run to end. None: nothing yet."""
        if call is None:
            return None
        limit, stop_limit, waited = self._env_timeout_s, self._stop_timeout_s, time.monotonic() - call.since
        where, key, after = f"env '{call.name}' did not return from {call.what} within", "env_timeout_s", ""
        if call.what == "close":
            limit, key = min(_LAST_CLOSE_S, stop_limit) if self._has_cut else stop_limit, "stop_timeout_s"
            after = ", and is left open"
        elif self._asked_at is not None and time.monotonic() - max(call.since, self._asked_at) > stop_limit:
            return f"{where} {stop_limit:g} s after the signal to stop (trainer.collector.stop_timeout_s)", True
        return (f"{where} {limit:g} s (trainer.collector.{key}){after}", False) if waited > limit else None


def _exit_stuck(text: str, requested: bool) -> None:
    del requested  # nothing is saved
    print(f"ejax: {text}", file=sys.stderr)
    hard_exit(1)
