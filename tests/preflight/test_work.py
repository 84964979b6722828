"""Operations and bytes of traced programs, against counts by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from case_tables import cases

from ejax.preflight.work import Work, count_work

X, W = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)


def work_of(function: Any, *shapes: Any) -> Work:
    return count_work(jax.jit(function).trace(*shapes).jaxpr)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def test_a_product_has_two_operations_a_term_and_reads_its_operands_once() -> None:
    work = work_of(layer, X, W)
    assert work.products == {"f32": 2 * 4 * 8 * 8}
    assert work.elements == 4 * 8  # of tanh, which is fused: it moves nothing
    assert work.num_bytes == 4 * (4 * 8 + 8 * 8 + 4 * 8)


def test_a_scan_counts_as_often_as_it_repeats_and_an_open_loop_once() -> None:
    one = work_of(layer, X, W)
    scanned = work_of(lambda x, w: jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, length=5)[0], X, W)
    assert scanned.products["f32"] == 5 * one.products["f32"] and scanned.num_bytes == 5 * one.num_bytes
    opened = work_of(lambda x, w: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: layer(c, w), x), X, W)
    assert opened.products == one.products and opened.open_loops == 1


def test_of_branches_the_one_with_most_operations_counts() -> None:
    work = work_of(lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: layer(layer(x, w), w), lambda: x), X, W)
    assert work.products["f32"] == 2 * (2 * 4 * 8 * 8)


def test_a_convolution_has_two_operations_a_weight_of_each_output() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 3, 10, 10), (5, 3, 3, 3))]
    work = work_of(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"), *shapes)
    assert work.products == {"f32": 2 * (5 * 8 * 8) * (3 * 3 * 3)}


def test_of_what_is_gathered_from_only_the_rows_move() -> None:
    table, rows = jax.ShapeDtypeStruct((1000, 8), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    assert work_of(lambda t, i: t.at[i].get(mode="clip"), table, rows).num_bytes == 4 * (2 + 2 * 8)


@pytest.mark.parametrize("way", ["set", "add", "max", "min", "multiply"])
def test_of_what_is_scattered_into_only_the_rows_move(way: str) -> None:
    table, rows = jax.ShapeDtypeStruct((1000, 8), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    work = work_of(lambda t, i: getattr(t.at[i], way)(jnp.ones((2, 8)), mode="drop"), table, rows)
    assert work.num_bytes == 4 * (2 + 2 * 8)


@pytest.mark.parametrize("way", ["cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"])
def test_what_runs_along_an_axis_reads_and_writes_it(way: str) -> None:
    assert work_of(getattr(jax.lax, way), X).num_bytes == 4 * 2 * X.size


@cases("precision name", ("float32", "f32 exact"), ("TF32_TF32_F32", "f32"), ("BF16_BF16_F32", "bf16"))
def test_products_go_by_the_precision_that_is_wanted(precision: str, name: str) -> None:
    with jax.default_matmul_precision(precision):
        assert set(work_of(lambda x, w: x @ w, X, W).products) == {name}
