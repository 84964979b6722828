"""Functions with one form for a CPU and another for a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejax.types import Array, PyTree

_STEPS_OF_A_KERNEL = 8  # of a scan, unrolled


def by_platform(*, cpu: Callable[..., Any], gpu: Callable[..., Any]) -> Callable[..., Any]:
    """Join two forms of a function, chosen where the program is lowered; ``gpu`` serves every accelerator."""
    # of a run on a CPU, device.ON_CPU; whoever has it on a GPU too gets both forms
    highest = jax.config.jax_default_matmul_precision == "highest"  # type: ignore[attr-defined]
    on_cpu = highest and jax.default_backend() == "cpu"
    return cpu if on_cpu else partial(jax.lax.platform_dependent, cpu=cpu, default=gpu)


def unrolled_scan(body: Callable[[Any, Any], tuple[Any, Any]], start: PyTree, xs: PyTree, **options: Any) -> Any:
    """Scan as ``jax.lax.scan``, with the same numbers; a GPU gets several steps in one kernel."""
    scan = partial(jax.lax.scan, body, **options)
    return by_platform(cpu=scan, gpu=partial(scan, unroll=_STEPS_OF_A_KERNEL))(start, xs)


def solve_positive(matrix: Array, vector: Array) -> Array:
    """Solve A·x = b for a symmetric, positive definite A [n, n] of a few rows, and b [n].

    A GPU computes a Cholesky factor that is written out, in one kernel; cuSOLVER and cuBLAS take seven calls.
    """
    return by_platform(cpu=jnp.linalg.solve, gpu=_solve_written_out)(matrix, vector)


def _solve_written_out(matrix: Array, vector: Array) -> Array:
    n, x = len(vector), list(vector)
    factor = [[matrix[i, j] for j in range(i + 1)] for i in range(n)]
    for j in range(n):
        factor[j][j] = jnp.sqrt(factor[j][j])
        for i in range(j + 1, n):
            factor[i][j] = factor[i][j] / factor[j][j]
            for k in range(j + 1, i + 1):
                factor[i][k] = factor[i][k] - factor[i][j] * factor[k][j]
    for i in range(n):
        x[i] = (x[i] - sum(factor[i][k] * x[k] for k in range(i))) / factor[i][i]
    for i in reversed(range(n)):
        x[i] = (x[i] - sum(factor[k][i] * x[k] for k in range(i + 1, n))) / factor[i][i]
    return jnp.stack(x)
