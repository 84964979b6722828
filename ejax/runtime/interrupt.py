"""Signals that ask a run to end: SIGTERM, Ctrl-C (SIGINT), and SIGHUP of a terminal that is closed.

Three times, three answers. While a command imports what it needs, a signal ends the process with a line that says so:
``leave_at_once``. While a run is built, it raises ``Interrupted``, so that what was begun is put away:
``interrupting``. While a run trains, the first one lets it finish what it is at, save, and leave: ``interruptible``.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ejax.runtime.process_exit import leave_now

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
"""A platform may lack SIGHUP."""


_UNHEEDED: list[list[int]] = []
"""Signals that active ``interrupting`` blocks have received."""


class Interrupted(KeyboardInterrupt):
    """A signal ends what the main thread is at."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def leave_at_once() -> None:
    """From now on a signal ends the process, with a line and the shell's exit code. For the first line of a command.

    By the end of the process and not by an exception: code that is being imported may catch that, or print it.
    """
    if _reaches_this_thread():
        for number in _heeded():
            signal.signal(number, _leave)


def until_signal(command: str, body: Callable[[], int]) -> int:
    """Run a command's ``body``: a signal that it does not heed itself ends it with a last word and the shell's code.

    Returns:
        The exit code: the body's; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
    """
    received: list[int] = []
    try:
        with interrupting(received):
            return body()
    except BaseException as error:
        if not received and not isinstance(error, KeyboardInterrupt):
            raise
        number = error.number if isinstance(error, Interrupted) else next(iter(received), signal.SIGINT)
        with _handling(signal.SIG_IGN):
            left = "; ".join(getattr(error, "__notes__", [])) or "no run was under way"
            say(f"{command}: ended at once by {signal.Signals(number).name}: {left}")
        return 128 + number


@contextmanager
def interrupting(received: list[int]) -> Iterator[None]:
    """A signal raises ``Interrupted`` inside, and is kept in ``received``: compilers may swallow what is raised."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        _let_go_of_closed_terminal()
        received.append(number)
        raise Interrupted(number)

    _UNHEEDED.append(received)
    try:
        with _handling(interrupt):
            yield
    finally:
        _UNHEEDED.remove(received)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A signal only sets a flag inside, and says so; a second Ctrl-C raises ``Interrupted``.

    The flag is set from the start where ``Interrupted`` was raised before and came to nothing.
    """
    received = [number for numbers in _UNHEEDED for number in numbers]

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        _let_go_of_closed_terminal()
        if received and number == signal.SIGINT:
            raise Interrupted(number)
        if not received:
            name = signal.Signals(number).name
            say(f"{name}: finishing the update under way, then saving; Ctrl-C (once more) ends at once, without saving")
        received.append(number)

    with _handling(note):
        yield lambda: bool(received)


def say(text: str) -> None:
    """A line on standard error, also from a signal handler, where ``print`` may be in use already."""
    with suppress(OSError):  # nobody may read it any more
        os.write(2, f"{text}\n".encode())


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    command = f"ejax.{Path(sys.argv[0]).stem}"
    say(f"{command}: ended by {signal.Signals(number).name} before it began: nothing was left")
    leave_now(128 + number)


def _let_go_of_closed_terminal() -> None:
    """Discard output once the terminal is closed: printing would raise, before the run is saved."""
    for descriptor in (1, 2):
        try:
            os.ttyname(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)


def _reaches_this_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _heeded() -> list[int]:
    """All but those that the process was started with ignored: SIGHUP under nohup."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """``handler`` inside, the former ones after it; signals reach the main thread only."""
    if not _reaches_this_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number in _heeded()}
    try:
        yield
    finally:
        for number, before in former.items():
            # a command that has begun cannot say of itself that it has not
            signal.signal(number, signal.SIG_DFL if before in (None, _leave) else before)
