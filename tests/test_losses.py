"""The terms of the losses, row by row, against their equations in NumPy."""

import jax
import numpy as np
import pytest
from case_tables import refused

from ejax.losses import clipped_surrogate, clipped_value_loss, kl_k3, value_loss, weighted_sums

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def rows(seed: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32)


def test_clipped_surrogate_is_the_smaller_objective_negated() -> None:
    log_ratio, advantage, _ = rows(0)
    expected = []
    for r, a in zip(np.exp(log_ratio), advantage, strict=True):
        expected.append(-min(r * a, min(max(r, 0.8), 1.2) * a))
    np.testing.assert_allclose(jax.jit(clipped_surrogate)(log_ratio, advantage, 0.2), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "flows"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False), (0.05, 1.0, True)],
)
def test_the_surrogates_gradient_stops_where_the_step_already_helped_enough(
    log_ratio: float, advantage: float, flows: bool
) -> None:
    gradient = jax.grad(clipped_surrogate)(log_ratio, advantage, 0.2)
    assert gradient == pytest.approx(-advantage * np.exp(log_ratio) if flows else 0.0)


def test_value_loss_is_the_squared_error_without_a_half() -> None:
    value, target, _ = rows(1)
    np.testing.assert_allclose(jax.jit(value_loss)(value, target), (value - target) ** 2, rtol=1e-6)


def test_clipped_value_loss_is_the_larger_of_both_errors() -> None:
    value, old, target = rows(2)
    expected = []
    for v, o, t in zip(value, old, target, strict=True):
        clipped = min(max(v, o - 0.2), o + 0.2)
        expected.append(max((v - t) ** 2, (clipped - t) ** 2))
    np.testing.assert_allclose(jax.jit(clipped_value_loss)(value, old, target, 0.2), expected, rtol=1e-4, atol=1e-6)


def test_k3_is_never_negative_and_zero_only_for_equal_policies() -> None:
    log_ratio, *_ = rows(3)
    estimate = jax.jit(kl_k3)(log_ratio)
    np.testing.assert_allclose(estimate, np.exp(log_ratio) - 1.0 - log_ratio, rtol=1e-4, atol=1e-6)
    assert (estimate > 0.0).all()
    assert kl_k3(0.0) == 0.0


def test_the_mean_of_k3_over_samples_of_old_is_the_kl() -> None:
    # old = N(0, 1), new = N(½, 1): KL(old ‖ new) = ½·½² = 1/8
    x = np.random.default_rng(4).normal(size=200_000)
    log_ratio = -0.5 * (x - 0.5) ** 2 + 0.5 * x**2
    assert float(kl_k3(log_ratio).mean()) == pytest.approx(0.125, abs=0.003)


def test_weighted_sums_are_those_of_each_term_and_the_loss_is_made_of_some() -> None:
    a, b, c = rows(5)
    weight = np.linspace(0.0, 1.0, 64, dtype=np.float32)
    loss, sums = jax.jit(weighted_sums)({"a": a, "b": b, "c": c}, weight, {"c": -0.5, "a": 2.0})
    expected = {name: np.dot(weight, x) for name, x in (("a", a), ("b", b), ("c", c))}
    assert {name: float(x) for name, x in sums.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss) == pytest.approx(2.0 * expected["a"] - 0.5 * expected["c"], rel=1e-4)


def test_a_term_that_is_not_of_the_loss_has_no_gradient_even_where_it_overflows() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return weighted_sums({"of_loss": x, "beside": jax.numpy.exp(x)}, jax.numpy.ones(2), {"of_loss": 3.0})[0]

    assert jax.grad(loss)(jax.numpy.array([1.0, 1e3])).tolist() == [3.0, 3.0]


def test_arrays_that_would_broadcast_are_refused() -> None:
    flat, column = np.zeros(3), np.zeros((3, 1))
    with pytest.raises(ValueError, match=r"arrays of one shape.*got log_ratio \(3,\), advantage \(3, 1\)"):
        clipped_surrogate(flat, column, 0.2)
    refused(value_loss, column, flat, match=r"got value \(3, 1\), target \(3,\)")
    refused(clipped_value_loss, flat, flat, column, 0.2, match=r"got value \(3,\), old_value \(3,\), target \(3, 1\)")
