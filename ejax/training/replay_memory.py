"""Memory of replay buffers: their bytes in the notes of a start, and a refusal of those that do not fit."""

import re
from pathlib import Path
from typing import Any

import jax

from ejax.collectors.replay_buffer import replays_in, row_bytes
from ejax.config import ConfigError, Problem
from ejax.schema.plain_files import read_text
from ejax.types import PyTree


def replay_bytes(state: PyTree) -> int:
    """Count the bytes of the rows of a state's replay buffers, on all devices together."""
    return sum(row_bytes(each) * each.rows.discount.size for each in replays_in(state))


def replay_notes(state: PyTree, num_devices: int) -> tuple[str, ...]:
    """Describe the replay buffers of a state: ``1,000,000 transitions x 196 B = 187 MiB on the device``."""
    where = "the device" if num_devices == 1 else f"{num_devices} devices together"
    sizes = [(each.rows.discount.size, row_bytes(each)) for each in replays_in(state)]
    return tuple(
        f"replay buffer: {rows:,} transitions x {size} B = {rows * size / 2**20:,.0f} MiB on {where}"
        for rows, size in sizes
    )


def check_fits(forms: PyTree, num_devices: int) -> None:
    """Raise a ConfigError for replay buffers of these forms that do not fit the memory of the devices."""
    device = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]  # jax defines it at run time
    free, needed = free_bytes(device), replay_bytes(forms)
    # devices of a CPU share its memory
    if free is None or needed <= (free := free if device.platform == "cpu" else free * num_devices):
        return
    size, rows = row_bytes(own := replays_in(forms)[0]), own.rows.discount.size
    largest = max(free - (needed - rows * size), 0) // size  # demonstrations keep their rows
    text = f"got {rows}: transitions of {size} bytes make {needed} bytes, and {free} are free on {device.platform}"
    raise ConfigError([Problem("algorithm.cfg.replay.capacity", f"{text}; the largest that fits is {largest}")])


def free_bytes(device: jax.Device) -> int | None:
    """Give the memory that a device has left, of a CPU the machine's; None: not known."""
    stats: dict[str, Any] = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", read_text(Path("/proc/meminfo")))
    except OSError:  # not on Linux
        return None
    return None if found is None else 1024 * int(found[1])
