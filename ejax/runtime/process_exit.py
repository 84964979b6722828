"""Ends of a process: signals that ask a run to stop, and the exit of a command line with its own code.

SIGTERM, Ctrl-C (SIGINT) and SIGHUP end a command that is importing (``exit_on_signal``), raise ``StopRequested`` while
a run is built (``until_signal``), and let one that trains finish the update, save and end (``interruptible``).
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ejax.runtime.streams import keep_streams, results_are_lost, write_stderr
from ejax.schema.messages import explain
from ejax.schema.writing import FAILED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD = 'what a script does must be under `if __name__ == "__main__":`, since worker processes import the script'
_GRACE_S = 10.0  # for threads that are about to end, such as one that writes a video
_unheeded: list[list[int]] = []  # signals that active ``until_signal`` blocks have received
_owned = False  # this process is a command line's


class StopRequested(KeyboardInterrupt):
    """Signal that ends what the main thread is at."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a command line and end the process with its exit code, even if an environment left threads.

    The exit code is 1 where something besides the result could not be written: ``ejax.schema.writing.by_product``.
    Python waits for threads that are not daemons, without a bound. Those that outlive a grace time are named, and the
    process ends without them. Only for ``if __name__ == "__main__"``: a library must not end its caller.
    """
    global _owned
    code, _owned = 1, True
    keep_streams()
    try:
        code = main() or int(bool(FAILED) or results_are_lost())
    except SystemExit as exit:  # argparse's
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    finally:
        # after a signal without what Python does at its end: threads that compile would be waited for, or crash it
        if code > 128:
            hard_exit(code)
        if _left_behind():
            threading.Thread(target=_outlast, args=(code,), name="ejax-exit", daemon=True).start()
    sys.exit(code)


def hard_exit(code: int) -> NoReturn:
    """End the process immediately, with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def owns_process() -> bool:
    """Return whether this process is a command line's, which may end it."""
    return _owned


def _outlast(code: int) -> None:
    time.sleep(_GRACE_S)
    if names := _left_behind():
        print(f"ejax: leaving without threads that do not end: {', '.join(names)}", file=sys.stderr)
        hard_exit(code)


def _left_behind() -> list[str]:
    """List the names of threads that Python waits for; idle ones of a pool end when Python wants them to."""
    return sorted({x.name for x in threading.enumerate() if not x.daemon and x is not threading.main_thread()})


def refused(command: str, why: BaseException | str, code: int = 2) -> int:
    """Print why a command did not do its work, on standard error. Returns its exit code."""
    print(f"{command}: {why if isinstance(why, str) else explain(why)}", file=sys.stderr)
    return code


def refuse_rerun() -> None:
    """End a worker that imports the main script, and would so do once more what that does. Its owner reports it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        write_stderr(f"ejax: {GUARD}")
        os._exit(1)


def exit_on_signal() -> None:
    """End the process on a signal from now on, with a line and the shell's exit code. For a command's first line.

    No exception: code that is being imported may catch that, or print it.
    """
    keep_streams()
    if threading.current_thread() is threading.main_thread():
        for number in _heeded():
            signal.signal(number, _exit_before_start)


def _exit_before_start(number: int, frame: FrameType | None) -> None:
    del frame
    command = f"ejax {Path(sys.argv[0].removesuffix('/__main__.py')).stem}"
    write_stderr(f"{command}: ended by {signal.Signals(number).name} before it began: nothing was left")
    hard_exit(128 + number)


def import_late(module: str) -> Any:
    """Import what a command needs, after its arguments and while a signal still ends the process immediately.

    No garbage is collected meanwhile, nor later of what is imported: JAX and the rest are 240,000 objects that
    live as long as the process, and looking at them took a quarter of the CPU time of ``ejax config check``.
    """
    if module not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[module]


def until_signal(command: str, body: Callable[[], int]) -> int:
    """Run a command's ``body``, ended with a last word by a signal that it does not heed itself.

    Returns its exit code; after a signal 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """
    received: list[int] = []  # kept, since compilers may swallow the exception

    def interrupt(number: int) -> None:
        received.append(number)
        raise StopRequested(number)

    _unheeded.append(received)
    try:
        with _handling(interrupt):
            return body()
    except BaseException as error:
        if not received and not isinstance(error, KeyboardInterrupt):
            raise
        number = error.number if isinstance(error, StopRequested) else next(iter(received), signal.SIGINT)
        with _handling(None):
            left = "; ".join(getattr(error, "__notes__", [])) or "no run was under way"
            write_stderr(f"{command}: ended at once by {signal.Signals(number).name}: {left}")
        return 128 + number
    finally:
        _unheeded.remove(received)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Only set a flag inside on a signal, and report it; a second Ctrl-C raises ``StopRequested``.

    The flag is set from the start where ``StopRequested`` was raised before and came to nothing.
    """
    received = [number for numbers in _unheeded for number in numbers]

    def note(number: int) -> None:
        if received and number == signal.SIGINT:
            raise StopRequested(number)
        if not received:
            text = "finishing the update under way, then saving; Ctrl-C (once more) ends at once, without saving"
            write_stderr(f"{signal.Signals(number).name}: {text}")
        received.append(number)

    with _handling(note):
        yield lambda: bool(received)


def _heeded() -> list[signal.Signals]:
    """List all but those that the process was started with ignored: SIGHUP under nohup."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handling(act: Callable[[int], None] | None) -> Iterator[None]:
    """Call ``act`` with the number of each signal that comes inside; None: ignore them."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if act is not None:
            act(number)

    if threading.current_thread() is not threading.main_thread():  # Python allows no other to set handlers
        yield
        return
    former = {number: signal.signal(number, handle) for number in _heeded()}
    try:
        yield
    finally:
        for number, before in former.items():
            # a command that has begun cannot report of itself that it has not
            signal.signal(number, signal.SIG_DFL if before in (None, _exit_before_start) else before)
