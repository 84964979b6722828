"""Scans whose every step is little work."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ejax.types import PyTree

_STEPS_OF_A_KERNEL = 8


def short_steps(body: Callable[[Any, Any], tuple[Any, Any]], start: PyTree, xs: PyTree, **options: Any) -> Any:
    """``jax.lax.scan`` where a step costs less than its launch: a GPU gets several steps in one kernel.

    A CPU has no launches, and the longer body would cost it more than the loop. The numbers are the same.
    """
    unrolled = partial(jax.lax.scan, body, unroll=_STEPS_OF_A_KERNEL, **options)
    return jax.lax.platform_dependent(start, xs, cpu=partial(jax.lax.scan, body, **options), default=unrolled)
