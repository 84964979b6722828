"""Shares of policy, environments and update in a trace: the program's text names the function of each operation."""

import bisect
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

_PARTS = (
    ("jit(_act)", "policy"),
    ("jit(_step_all)", "environments"),
    ("jit(reset)", "environments"),
    ("jit(unroll)", "the rest of collecting"),
    ("_update)", "update"),
)
"""The first of these functions in an operation's path decides what it is part of."""
_OTHER = "other"


class Operation(NamedTuple):
    start_ns: float
    duration_ns: float
    name: str


def named_scopes(program: str) -> dict[str, str]:
    """Find the part of the training that each operation belongs to, from a compiled program's text."""
    found = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.MULTILINE)
    return {name: next((part for function, part in _PARTS if function in path), _OTHER) for name, path in found}


def thread_operations(trace: Path) -> Iterator[list[Operation]]:
    """Yield the operations of each thread or stream of a trace."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            with warnings.catch_warnings():
                # Python 3.13 warns of the type of jaxlib's stats; as an error it would end the process
                warnings.simplefilter("ignore", DeprecationWarning)
                operations = [
                    Operation(event.start_ns, event.duration_ns, event.name)
                    for event in line.events
                    if any(name == "hlo_op" for name, _ in event.stats)
                ]
            if operations:
                yield operations


def time_shares(threads: Iterable[list[Operation]], parts: dict[str, str]) -> dict[str, float]:
    """Add up the nanoseconds of each part's operations themselves, without the operations inside them.

    An operation that is not in ``parts``, such as a copy by the compiler, belongs to the one around it.
    """
    taken: dict[str, float] = defaultdict(float)
    for operations in threads:
        around: list[tuple[float, str]] = []  # ends, and parts, of those that are not over
        for start, duration, name in sorted(operations, key=lambda each: (each.start_ns, -each.duration_ns)):
            # those that ended before this one starts
            del around[bisect.bisect_left([-end for end, _ in around], -start) :]
            part = parts.get(name) or (around[-1][1] if around else _OTHER)
            taken[part] += duration
            if around:
                taken[around[-1][1]] -= duration
            around.append((start + duration, part))
    return taken
