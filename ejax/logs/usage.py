"""The time and memory that a run uses: the ``time/`` and ``memory/`` numbers of its log."""

import resource
import sys
from collections.abc import Mapping

import jax

TIME = "time/"
_MIB = 2.0**20
_OF_MAXRSS = 1.0 if sys.platform == "darwin" else 1024.0
"""Bytes in its unit."""


def times(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{TIME}{name}_s": value for name, value in seconds.items()}


def memory_in_use(first: jax.Device) -> dict[str, float]:
    """Return the peak MiB of this process, and those in use and at peak of its devices of ``first``'s kind."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _OF_MAXRSS
    found = {"memory/host_peak_mib": most / _MIB}
    for device in jax.local_devices(backend=first.platform):
        stats = device.memory_stats() or {}  # a CPU has none
        for name, key in (("in_use", "bytes_in_use"), ("peak", "peak_bytes_in_use")):
            if key in stats:
                found[f"memory/{device.platform}{device.local_hardware_id}_{name}_mib"] = stats[key] / _MIB
    return found


def breakdown(seconds: Mapping[str, float]) -> str:
    """List the longest activities first, in one line; those of less than a percent are left out."""
    # physics is inside other activities
    total = sum(value for name, value in seconds.items() if name != "physics") or 1.0
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.1f} s" for name, value in longest if value >= 0.01 * total)
