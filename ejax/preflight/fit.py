"""The largest number of environments whose training fits a card."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ejax.preflight.programs import Memory

USABLE = 0.75
"""Share of a card's memory that JAX takes by default (``XLA_PYTHON_CLIENT_MEM_FRACTION``)."""


@dataclass(frozen=True)
class Fit:
    """An answer, and where it comes from."""

    num_envs: int
    """On each GPU; 0: not even one."""
    method: str
    usable: int
    """Bytes that were there for it."""


def estimate(memory: Memory, num_envs: int, card_memory: int) -> Fit:
    """From one compilation: all memory but the fixed part is taken to grow with the environments.

    Minibatches of a size of their own do not grow with them, so that the answer is rather too small.
    """
    usable = int(USABLE * card_memory)
    fixed = 2 * memory.fixed  # what an update reads, and what it writes
    per_env = max(memory.peak - fixed, 1) / num_envs
    most = max(int((usable - fixed) / per_env), 0)
    method = (
        f"estimated from the peak at {num_envs:,}, all of it but parameters and optimizer taken to grow with num_envs; "
        f"{USABLE:.0%} of the card's memory, JAX's default; --fit compiles to find out"
    )
    return Fit(most, method, usable)


def search(memory_at: Callable[[int], Memory], first: Memory, num_envs: int, card_memory: int) -> Fit:
    """From compilations: a line through two sizes, then the size where it meets the memory, compiled as well.

    Args:
        memory_at: of the training's program at that many environments on each GPU.
        first: at ``num_envs``.
    """
    usable = int(USABLE * card_memory)
    points = [(num_envs, first.peak)]
    size = 8 * num_envs
    for _ in range(4):
        points.append((size, memory_at(size).peak))
        crossing = _crossing(points[-2:], usable, num_envs)
        if points[-1][1] <= usable and crossing <= points[-1][0]:
            break
        size = crossing
    fitting = max((size for size, peak in points if peak <= usable), default=0)
    tried = ", ".join(f"{size:,}: {peak / 2**30:.3g} GiB" for size, peak in points)
    return Fit(fitting, f"compiled at {tried}; {USABLE:.0%} of the card's memory, JAX's default", usable)


def _crossing(points: Sequence[tuple[int, int]], usable: int, multiple: int) -> int:
    """The largest multiple of the config's number below the point where the line through both meets ``usable``."""
    (n0, peak0), (n1, peak1) = points
    slope = max((peak1 - peak0) / (n1 - n0), 1.0) if n1 != n0 else 1.0
    return max(int(0.99 * (n1 + (usable - peak1) / slope)) // multiple, 1) * multiple
