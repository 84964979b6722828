"""Wall-time accounting of a process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by name, added up until they are taken. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since they were last taken."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds


ENGINE = Stopwatch()  # Stopwatch of MuJoCo's C engine, for all environments of the process: physics
