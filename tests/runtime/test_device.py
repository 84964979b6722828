"""Precision of matrix products: its value, its scope and its end."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejax.runtime.device import matmul_precision


def lowered(platform: str) -> str:
    x = jnp.ones((4, 4))
    return jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("precision", "where", "shown"),
    [
        ("float32", "cuda", "precision = [HIGHEST, HIGHEST]"),
        ("tf32", "cuda:1", "lhs_precision_type = tf32"),
        ("bf16", "cuda", "lhs_precision_type = bf16"),
        ("float32", "cpu", "precision = [HIGHEST, HIGHEST]"),
        ("tf32", "cpu", "precision = [HIGHEST, HIGHEST]"),
        ("bf16", "cpu", "precision = [HIGHEST, HIGHEST]"),
    ],
)
def test_the_precision_is_that_of_every_product_in_the_program(precision: Any, where: str, shown: str) -> None:
    with matmul_precision(precision, where):
        assert shown in lowered(where.partition(":")[0])


def test_it_holds_in_all_threads_and_ends_with_the_run() -> None:
    before = lowered("cuda")
    seen: list[str] = []
    with matmul_precision("tf32", "cuda"):
        thread = threading.Thread(target=lambda: seen.append(lowered("cuda")))
        thread.start()
        thread.join()
    assert "tf32" in seen[0]
    assert lowered("cuda") == before
