"""Reports of consumers to the worker on their draws: a named pipe of numbers, 8 bytes each.

A write of 8 bytes is atomic and never waits. A consumer that is killed leaves nothing half done. Where the worker has
gone, the next write fails at once: the kernel notifies every consumer, even where the owner is gone too.
"""

import os
import struct
import threading
import weakref
from pathlib import Path

_NUMBER = struct.Struct("=q")


class DemandReader:
    """The worker's end."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def drain(self) -> int:
        """The sum of the reports since the last call."""
        total = 0
        while True:
            try:
                data = os.read(self._descriptor, 4096 * _NUMBER.size)
            except BlockingIOError:
                return total
            if not data:  # no consumer has it open for writing
                return total
            total += sum(number for (number,) in _NUMBER.iter_unpack(data))


class DemandWriter:
    """A consumer's end, of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._unsent = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add ``count``. Where the pipe is full (the worker's thread got no turn), it is sent with a later call.

        Raises:
            ConnectionError: the pipe has no reader: the worker has gone.
        """
        with self._lock:
            self._unsent += count
            try:
                if self._descriptor is None:
                    self._descriptor = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
                    weakref.finalize(self, os.close, self._descriptor)
                os.write(self._descriptor, _NUMBER.pack(self._unsent))
            except BlockingIOError:
                return
            except OSError as error:  # ENXIO, ENOENT: it was gone before; EPIPE: it went meanwhile
                raise ConnectionError(f"{self._path} has no reader") from error
            self._unsent = 0
