"""Refusals of counts, seeds and words."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_count(name: str, value: Any, allowed: str = "an int") -> None:
    """Raise TypeError or ValueError unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be {allowed}, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_choice(name: str, value: Any, allowed: Sequence[str], where: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"no {name} {value!r}{where}; there is {', '.join(allowed)}")


def check_seed(seed: Any) -> int:
    """Return ``seed`` if it is an int of at least 0; else raise ValueError."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be an int of at least 0, got {seed!r}")
    return int(seed)
