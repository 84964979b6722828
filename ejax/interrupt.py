"""Signals that ask a run to end: it finishes what it is at, saves, and leaves."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C only set a flag inside; a second Ctrl-C interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield lambda: False
        return
    former = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
