"""Batches of a dataset on the device, ahead of their use."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import jax

from ejax.types import PyTree


def prefetch_to_device(
    batches: Iterable[PyTree], size: int = 2, *, device: jax.Device | jax.sharding.Sharding | None = None
) -> Iterator[PyTree]:
    """Yield ``batches`` as JAX arrays, with ``size`` of them under way to the device; ValueError for a size below 1.

    Text fields and others without a JAX dtype are an error: drop them by the dataset's ``transform``. 64-bit numbers
    become 32-bit unless ``jax_enable_x64``.

    Args:
        batches: of NumPy arrays that are not written to later.
        device: or a sharding that spreads the leading axis; None: JAX's default device.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    return _prefetch(iter(batches), size, device)


def _prefetch(batches: Iterator[PyTree], size: int, device: Any) -> Iterator[PyTree]:
    queue: deque[PyTree] = deque(jax.device_put(batch, device) for batch in islice(batches, size))
    while queue:
        yield queue.popleft()  # the device works on it while the next one is drawn
        queue.extend(jax.device_put(batch, device) for batch in islice(batches, 1))
