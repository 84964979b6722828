"""The end of a command line, with its own exit code: even after an environment left threads or called ``exit``."""

import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_GRACE_S = 10.0
"""For threads to come to an end by themselves."""
_MOST_NAMED = 4
_end_process = os._exit
"""The real one: ``leave`` replaces it for everybody else."""


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a command line and end the process with its exit code.

    Python waits for threads that are no daemons, without a bound. Where one is alive after a grace time, it is named,
    and the process ends without it. Only for ``if __name__ == "__main__"``: a library must not end its caller.
    """
    code = 1
    os._exit = functools.partial(_refuse_exit, os.getpid())
    try:
        code = main()
    except SystemExit as exit:  # argparse's
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    finally:
        # after a signal without what Python does at its end: threads that compile would be waited for, or crash it
        if code > 128:
            leave_now(code)
        if _left_behind():
            threading.Thread(target=_outlast, args=(code,), name="ejax-leave", daemon=True).start()
    sys.exit(code)


def owns_process() -> bool:
    """Recognize the process of a command line, which may end it."""
    return os._exit is not _end_process


class ProcessExit(SystemExit):
    """``os._exit`` by code that must not end the run; its exit code is never 0."""


def _refuse_exit(owner: int, code: int) -> NoReturn:
    """Raise in place of ``os._exit``, which would leave with code 0 a run that has not finished.

    A forked child, as ``multiprocessing`` has them, ends as it meant to.
    """
    if os.getpid() != owner:
        _end_process(code)
    print(f"ejax: refused os._exit({code}), which would have ended the run; it is an error there", file=sys.stderr)
    raise ProcessExit(code or 1)


def _outlast(code: int) -> None:
    """End the process, unless it ends by itself first."""
    time.sleep(_GRACE_S)
    threads = _left_behind()
    if threads:
        names = ", ".join(f"'{thread.name}' ({_place(thread)})" for thread in threads[:_MOST_NAMED])
        if len(threads) > _MOST_NAMED:
            names += f" and {len(threads) - _MOST_NAMED} more"
        print(f"ejax: leaving without threads that do not end: {names}", file=sys.stderr)
        leave_now(code)


def leave_now(code: int) -> NoReturn:
    """End the process at once, with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    _end_process(code)


def _left_behind() -> list[threading.Thread]:
    """Threads that Python waits for. A pool's idle threads are among them, and end when Python asks them to."""
    return [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def _place(thread: threading.Thread) -> str:
    """Place of a thread: the innermost line of Python."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "ended just now"
    last = traceback.extract_stack(frame, limit=1)[-1]
    return f"{last.name}, {last.filename}:{last.lineno}"
