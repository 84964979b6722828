"""Distributions over returns, against loops over bins."""

import math

import jax
import numpy as np
import pytest

from ejax.numerics.value_bins import bin_values, expected_value, hl_gauss


def by_hand(value: float, low: float, high: float, num_bins: int, sigma: float) -> list[float]:
    """Integrate a normal over each bin, and divide by what lies in all."""
    width = (high - low) / (num_bins - 1)
    value, deviation = min(max(value, low), high), sigma * width
    below = lambda x: 0.5 * (1.0 + math.erf((x - value) / (math.sqrt(2.0) * deviation)))  # noqa: E731
    shares = []
    for k in range(num_bins):
        middle = low + k * width
        shares.append(below(middle + width / 2) - below(middle - width / 2))
    return [share / sum(shares) for share in shares]


@pytest.mark.parametrize("value", [-7.0, -1.0, 0.2, 1.4, 3.0, 9.0])
@pytest.mark.parametrize("sigma", [0.75, 0.2])
def test_hl_gauss_is_the_share_of_a_normal_in_each_bin(value: float, sigma: float) -> None:
    found = jax.jit(lambda x: hl_gauss(x, -1.0, 3.0, 9, sigma=sigma))(np.float32(value))
    np.testing.assert_allclose(found, by_hand(value, -1.0, 3.0, 9, sigma), rtol=1e-4, atol=1e-6)


def test_the_expectation_of_a_projection_is_the_number_where_no_border_is_near() -> None:
    value = np.linspace(20.0, 130.0, 40, dtype=np.float32)
    logits = np.log(hl_gauss(value, 0.0, 150.0, 151) + 1e-30)
    np.testing.assert_allclose(expected_value(logits, 0.0, 150.0), value, rtol=1e-4)


def test_the_expectation_is_the_sum_of_probabilities_times_values() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 2, 5)).astype(np.float32)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(bin_values(-2.0, 2.0, 5), [-2.0, -1.0, 0.0, 1.0, 2.0])
    np.testing.assert_allclose(expected_value(logits, -2.0, 2.0), weights @ np.arange(-2.0, 3.0), rtol=1e-5, atol=1e-6)
