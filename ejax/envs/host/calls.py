"""The one place from which environments outside JAX are called.

All that an environment raises is its error: ``SystemExit`` would otherwise end a training with its own exit code,
possibly 0. The call that each thread is in is recorded, so that a watchdog (``ejax.training.watchdog``) can cut it off.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, ParamSpec, TypeVar

from ejax.schema.messages import explain, noting, place, shorten

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAX_CHARS = 500  # most characters of an environment's own text in a message


class HostEnvError(RuntimeError):
    """A host environment failed, more often than allowed; the message names it and the step."""


class EnvExit(HostEnvError):
    """An environment raised something that would have silently ended or unwound the process."""

    def __init__(self, name: str, what: str, error: BaseException) -> None:
        self.raised = f"{short_error(error)}, which ends a process and must not leave an environment"
        super().__init__(f"env '{name}' raised {self.raised}; it was in {what}")


class EnvOverdue(HostEnvError):
    """A call into an environment was cut off: it took too long."""


class CutOff(BaseException):
    """Raised by the watchdog in the environment, past its ``except Exception``; outside it becomes ``EnvOverdue``."""


class EnvAbandoned(BaseException):
    """Raised likewise where the user stops the run and the call does not return: the run's end, and no error."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str  # the environment's name
    what: str  # make, reset, step, pictures, get_state, set_state or close
    since: float  # ``time.monotonic()``


_UNDER_WAY: dict[int, Call | tuple[threading.Thread, ...]] = {}
"""By thread: the call that it is in, or the threads that it waits for."""


def call_env(name: str, what: str, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call ``function(*args, **kwargs)``, recorded as ``what`` of the environment ``name``.

    Raises:
        Exception: the environment's own.
        EnvExit: anything else that the environment raised, except the user's Ctrl-C, which passes through.
        EnvOverdue, EnvAbandoned: cut off by the watchdog.
    """
    with _recorded(Call(name, what, time.monotonic())):
        try:
            return function(*args, **kwargs)
        except (Exception, CutOff, EnvAbandoned):
            raise
        except BaseException as error:
            if _is_the_users(error):
                raise
            raise EnvExit(name, what, error) from error


@contextmanager
def closing(env: Any) -> Iterator[None]:
    """Close an environment at the end. An error of that hides no earlier one, and costs nothing that was computed."""
    name = type(env).__name__
    try:
        yield
    except BaseException as error:
        with noting(error, "closing the environment"):
            call_env(name, "close", env.close)
        raise
    try:
        call_env(name, "close", env.close)
    except Exception as late:
        print(f"ejax: {explain(late)}", file=sys.stderr)


def waiting_for(threads: Sequence[threading.Thread]) -> AbstractContextManager[None]:
    """Count the calls of these threads as this thread's own. Raises EnvOverdue, EnvAbandoned: cut off, yet running."""
    return _recorded(tuple(threads))


def under_way(thread: int) -> Call | None:
    """Return the call that a thread is in; the oldest one, where it waits for others."""
    entry = _UNDER_WAY.get(thread)
    if not isinstance(entry, tuple):
        return entry
    calls = [_UNDER_WAY.get(each.ident or 0) for each in entry]
    return min((call for call in calls if isinstance(call, Call)), key=lambda call: call.since, default=None)


@contextmanager
def exits_are_errors(name: str) -> Iterator[None]:
    """Turn ``SystemExit`` and ``GeneratorExit`` into EnvExit, for code that ``call_env`` does not call."""
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        raise EnvExit(name, "code that the config names", error) from error


def short_error(error: BaseException) -> str:
    """Return ``repr(error)``, short, and even where that fails itself."""
    if isinstance(error, EnvExit | EnvOverdue):
        return error.raised if isinstance(error, EnvExit) else str(error)
    try:
        text = repr(error)
    except BaseException:  # of the environment too
        text = f"{type(error).__name__}(…)"
    return shorten(text, _MAX_CHARS) + (place(error) if text.endswith("()") else "")


@contextmanager
def _recorded(entry: Call | tuple[threading.Thread, ...]) -> Iterator[None]:
    thread = threading.get_ident()
    outer = _UNDER_WAY.get(thread)
    _UNDER_WAY[thread] = entry
    try:
        yield
    except CutOff as cut:
        raise EnvOverdue(str(cut)) from cut
    finally:
        if outer is None:
            del _UNDER_WAY[thread]
        else:
            _UNDER_WAY[thread] = outer


def _is_the_users(error: BaseException) -> bool:
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False  # Python raises Ctrl-C in the main thread only
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    # ejax's own handler raises it too, in ``process_exit``; any other frame is the environment's code
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == "ejax.runtime.process_exit"
