"""Standard output and error that end nothing: behind a closed pipe, a full disk or a lost terminal they go quiet.

A write that fails leads its descriptor to nowhere, for threads, children and C libraries too; a run's log notes it.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, a lost terminal, closed from the start
_lost: dict[int, OSError] = {}
_keepers: list[Callable[[str], object]] = []  # the log of the run under way, if any


class _Lasting(io.FileIO):
    """Descriptor whose writes do not fail."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # it does not block, and its reader is slow
                select.select([], [self], [])
            return written
        except OSError as error:
            _lose(self.fileno(), error)
            return len(data)


def keep_streams() -> None:
    """Make standard output and error end nothing from now on, also where they were closed from the start.

    A stream that is not the descriptor's, such as a notebook's, stays as it is.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        former = stream = cast(Any, getattr(sys, name))
        try:
            os.fstat(number)
        except OSError:  # the next file that is opened would be what is printed to
            _lose(number, OSError(errno.EBADF, "closed from the start"))
        if former is None:  # closed from the start: the number may be another file's by now
            stream = os.fdopen(number if number in _lost else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
            _lost.setdefault(number, OSError(errno.EBADF, "closed from the start"))
        if not number or type(stream) is not io.TextIOWrapper or stream.closed:
            continue
        raw: Any = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer
        if isinstance(raw, _Lasting) or (former is not None and raw.fileno() != number):
            continue
        try:
            stream.flush()
        except OSError as error:
            _lose(number, error)
        lasting: Any = _Lasting(raw.fileno(), "wb", closefd=False)
        lasting = lasting if raw is stream.buffer else io.BufferedWriter(lasting)
        options = {each: getattr(stream, each) for each in ("line_buffering", "write_through")}
        # nor does a letter end anything that the terminal lacks
        lasting = io.TextIOWrapper(lasting, stream.encoding, "backslashreplace", **options)
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)


def note_losses(keep: Callable[[str], object]) -> None:
    """Hand the note of each stream that went quiet, or will, to ``keep``: the log of the run that begins here."""
    _keepers[:] = [keep]
    for number in _lost:
        keep(_note(number))


def results_are_lost() -> bool:
    """Return whether the disk behind standard output is full, and no run has noted it."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    return 1 in _lost and _lost[1].errno not in _NOBODY_READS and not _keepers


def write_stderr(text: str) -> None:
    """Write a line on standard error, also from a signal handler, where ``print`` may be in use already."""
    with suppress(OSError):  # nobody may read it any more
        os.write(2, f"{text}\n".encode())


def _lose(number: int, error: OSError) -> None:
    with suppress(OSError):  # no descriptor is left: the next write fails, too
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
    if number not in _lost:
        _lost[number] = error
        for keep in _keepers:
            keep(_note(number))
        if _keepers or error.errno not in _NOBODY_READS:
            write_stderr(f"ejax: {_note(number)}")


def _note(number: int) -> str:
    name = ("input", "output", "error")[number]
    return f"standard {name} is lost ({_lost[number].strerror}): it is quiet{', the run continues' * len(_keepers)}"
