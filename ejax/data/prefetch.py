"""Batches drawn by threads ahead of their use, and put onto the device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Self, TypeVar

import jax

from ejax.types import PyTree

T = TypeVar("T")
_LOOK_S = 0.1
"""s between two checks of a wait."""


def prefetch_to_device(
    batches: Iterable[PyTree], size: int = 2, *, device: jax.Device | jax.sharding.Sharding | None = None
) -> Iterator[PyTree]:
    """Yield ``batches`` as JAX arrays, with ``size`` of them under way to the device; ValueError for a size below 1.

    Text fields and others without a JAX dtype are an error: drop them by the dataset's ``transform``. 64-bit numbers
    become 32-bit unless ``jax_enable_x64``.

    Args:
        batches: of NumPy arrays that are not written to later; drawn from in another thread.
        device: or a sharding that spreads the leading axis; None: JAX's default device.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    return _prefetch(iter(batches), size, device)


def _prefetch(batches: Iterator[PyTree], size: int, device: Any) -> Iterator[PyTree]:
    end = object()

    def draw(number: int) -> PyTree:
        del number
        batch = next(batches, end)
        return batch if batch is end else jax.device_put(batch, device)

    with Ahead(draw, size) as ahead:
        while (batch := ahead.next()) is not end:
            yield batch


class Ahead(Generic[T]):
    """The results of ``make(first)``, ``make(first + 1)``, …, in order, ``size`` of them ready or being made by
    ``num_workers`` threads: drawing is NumPy and disk, which let other threads run.

    A context manager: leaving it ends the threads, once what they make is made.
    """

    def __init__(self, make: Callable[[int], T], size: int, *, first: int = 0, num_workers: int = 1) -> None:
        self._pool = ThreadPoolExecutor(num_workers, "ejax-draw")
        self._make, self._next = make, first
        self._made: deque[Future[T]] = deque()
        for _ in range(size):
            self._make_one_more()

    def next(self, should_stop: Callable[[], bool] = lambda: False) -> T | None:
        """Wait for the next result, or until ``should_stop``: None. Raises what ``make`` raised, each time."""
        while not should_stop():
            if wait([self._made[0]], _LOOK_S).done:
                made = self._made[0].result()
                self._made.popleft()
                self._make_one_more()
                return made
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _make_one_more(self) -> None:
        self._made.append(self._pool.submit(self._make, self._next))
        self._next += 1
