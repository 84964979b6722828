"""Advantages against NumPy loops, their limits, and what happens at the end of an episode."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from ejax.returns import discounted_returns, explained_variance, gae, group_advantages, normalize, vtrace

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def arrays(rng: np.random.Generator, T: int, N: int) -> tuple[Any, Any, Any, Any, Any]:
    """reward, value, next_value, terminated, truncated; within an episode a next value is the following step's."""
    reward, value, next_value = rng.normal(size=(3, T, N)).astype(np.float32)
    terminated, truncated = rng.random((2, T, N)) < 0.25
    continues = ~(terminated | truncated)[:-1]
    next_value[:-1][continues] = value[1:][continues]
    return reward, value, next_value, terminated, truncated


def gae_by_definition(
    reward: np.ndarray,
    value: np.ndarray,
    next_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Σₗ (γλ)ˡ δₜ₊ₗ up to the end of the episode: O(T²), and no recursion."""
    T, N = reward.shape
    delta = reward + gamma * next_value * ~terminated - value
    advantage = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                advantage[t, n] += (gamma * gae_lambda) ** (k - t) * delta[k, n]
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantage


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(1, 1), (7, 3)]))
def test_gae_is_the_discounted_sum_of_td_errors(seed: int, shape: tuple[int, int]) -> None:
    given = arrays(np.random.default_rng(seed), *shape)
    advantage, target = gae(*given, gamma=0.97, gae_lambda=0.9)
    expected = gae_by_definition(*given, 0.97, 0.9)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target, expected + given[1], rtol=1e-4, atol=1e-5)


def test_lambda_0_gives_the_td_error() -> None:
    reward, value, next_value, terminated, truncated = arrays(np.random.default_rng(0), 6, 4)
    advantage, _ = gae(reward, value, next_value, terminated, truncated, gamma=0.9, gae_lambda=0.0)
    np.testing.assert_allclose(advantage, reward + 0.9 * next_value * ~terminated - value, atol=1e-6)


def test_lambda_1_makes_the_target_the_bootstrapped_return() -> None:
    reward, value, next_value, terminated, truncated = arrays(np.random.default_rng(1), 6, 4)
    _, target = gae(reward, value, next_value, terminated, truncated, gamma=0.9, gae_lambda=1.0)
    done, expected = terminated | truncated, np.zeros((6, 4))
    following = next_value[-1]
    for t in reversed(range(6)):
        following = np.where(done[t], next_value[t], following)
        expected[t] = reward[t] + 0.9 * np.where(terminated[t], 0.0, following)
        following = expected[t]
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-5)


@cases(
    "terminated truncated expected",
    (True, False, 1.0 - 2.0),  # nothing follows
    (False, True, 1.0 + 0.5 * 10.0 - 2.0),  # value follows, the next episode's advantage does not
    (True, True, 1.0 - 2.0),
    (False, False, 1.0 + 0.5 * 10.0 - 2.0 + 0.5 * 0.5 * (3.0 + 0.5 * 8.0 - 4.0)),
)
def test_an_end_cuts_the_value_or_only_the_trace(terminated: bool, truncated: bool, expected: float) -> None:
    column = lambda *x: np.array(x, np.float32)[:, None]  # noqa: E731
    flags = (np.array([[terminated], [False]]), np.array([[truncated], [False]]))
    advantage, _ = gae(column(1, 3), column(2, 4), column(10, 8), *flags, gamma=0.5, gae_lambda=0.5)
    assert advantage[0, 0] == pytest.approx(expected)


def test_what_an_end_cuts_off_may_be_nan() -> None:
    """A value behind a terminal step, and every number of the steps after an end, such as padding."""
    column = lambda *x: np.array(x, np.float32)[:, None]  # noqa: E731
    nan, zeros, ended = np.nan, np.zeros((2, 1), np.float32), np.array([[True], [False]])
    numbers = column(1, nan), column(2, nan), column(nan, nan)
    expected = [np.float32(-1.0), np.float32(1.0)]
    for found in (
        gae(*numbers, ended, ~ended, gamma=0.5, gae_lambda=0.5),
        vtrace(*numbers, ended, ~ended, zeros, gamma=0.5, gae_lambda=0.5),
    ):
        assert [each[0, 0] for each in found] == expected
    assert discounted_returns(numbers[0], ended, gamma=0.5)[0, 0] == 1.0


def test_the_gradient_of_the_advantage_is_the_discounted_one_of_the_rewards() -> None:
    _, value, next_value, *_ = arrays(np.random.default_rng(2), 4, 1)
    running = np.zeros((4, 1), bool)

    def first(reward: jax.Array) -> Any:
        return gae(reward, value, next_value, running, running, gamma=0.9, gae_lambda=0.8)[0][0, 0]

    np.testing.assert_allclose(jax.grad(first)(jnp.zeros((4, 1)))[:, 0], 0.72 ** np.arange(4), rtol=1e-6)


def test_arrays_that_are_not_time_by_envs_are_refused_by_shape() -> None:
    good, flat = jnp.zeros((4, 2)), jnp.zeros(4)
    no = jnp.zeros((4, 2), bool)
    refused(gae, good, flat, good, no, no, gamma=0.9, gae_lambda=0.9, match=r"\[T, N\].*value \(4,\)")
    refused(gae, flat, flat, flat, flat > 0, flat > 0, gamma=0.9, gae_lambda=0.9, match=r"reward \(4,\), value \(4,\)")
    refused(gae, good, good, good[:3], no, no, gamma=0.9, gae_lambda=0.9, match=r"next_value \(3, 2\)")
    refused(
        gae, good, good, [[0.0] * 2] * 4, no, None, gamma=0.9, gae_lambda=0.9, match="a list for next_value, a None"
    )
    refused(gae, *[good[:0]] * 3, no[:0], no[:0], gamma=0.9, gae_lambda=0.9, match=r"at least one step.* \[0, 2\]")
    refused(group_advantages, good, good, group_size=0, eps=0.0, match="divisible by group_size")


def test_numbers_and_flags_of_other_types_give_the_same() -> None:
    reward, *values, terminated, truncated = arrays(np.random.default_rng(6), 5, 6)
    steps, rates = (reward.round(), *values, terminated, truncated), {"gamma": 0.5, "gae_lambda": 0.9}
    with jax.numpy_dtype_promotion("standard"):
        given = (reward.round().astype(int), *values, terminated.astype(np.float32), 2 * truncated)
        np.testing.assert_array_equal(gae(*given, **rates), gae(*steps, **rates))
        np.testing.assert_array_equal(
            vtrace(*given, 0 * reward.astype(int), **rates), vtrace(*steps, 0 * reward, **rates)
        )
        alike = [
            group_advantages(x, y, group_size=3, eps=0.0) for x, y in ((steps[0], ~truncated), (given[0], 2 - given[4]))
        ]
        assert gae(*(x.astype(jnp.bfloat16) for x in steps[:3]), *steps[3:], **rates)[0].dtype == jnp.float32
    np.testing.assert_array_equal(*alike)


def test_members_that_do_not_count_may_be_nan() -> None:
    advantage = group_advantages(
        jnp.array([[1.0, 3.0, jnp.nan]]), jnp.array([[True, True, False]]), group_size=3, eps=0.0
    )
    assert advantage.tolist() == [[-1.0, 1.0, 0.0]]


def vtrace_by_definition(
    given: Any, log_ratio: Any, gamma: float, gae_lambda: float, rho_clip: float, c_clip: float
) -> tuple[Any, Any]:
    """vₜ = V(sₜ) + Σₖ γᵏ⁻ᵗ (Πᵢ cᵢ) δₖ up to the end of the episode, i from t to k − 1: no recursion."""
    reward, value, next_value, terminated, truncated = given
    T, N = reward.shape
    ratio = np.exp(log_ratio)
    delta = np.minimum(rho_clip, ratio) * (reward + gamma * next_value * ~terminated - value)
    c = gae_lambda * np.minimum(c_clip, ratio)
    target, advantage = value.astype(np.float64).copy(), np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                target[t, n] += gamma ** (k - t) * np.prod(c[t:k, n]) * delta[k, n]
                if terminated[k, n] or truncated[k, n]:
                    break
    for n in range(N):
        for t in range(T):
            following = next_value[t, n]
            if t + 1 < T and not (terminated[t, n] or truncated[t, n]):
                following += gae_lambda * (target[t + 1, n] - value[t + 1, n])
            advantage[t, n] = reward[t, n] + gamma * following * (not terminated[t, n]) - value[t, n]
    return advantage, target


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(1, 1), (7, 3)]))
def test_vtrace_is_its_sum(seed: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    given, log_ratio = arrays(rng, *shape), rng.normal(size=shape).astype(np.float32)
    clips = {"rho_clip": 1.3, "c_clip": 0.9}
    expected = vtrace_by_definition(given, log_ratio, 0.97, 0.9, **clips)
    result = vtrace(*given, log_ratio, gamma=0.97, gae_lambda=0.9, **clips)
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
def test_vtrace_on_policy_is_gae(gae_lambda: float) -> None:
    given = arrays(np.random.default_rng(3), 9, 4)
    rates = {"gamma": 0.95, "gae_lambda": gae_lambda}
    for got, wanted in zip(vtrace(*given, np.zeros((9, 4), np.float32), **rates), gae(*given, **rates), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_vtrace_of_actions_that_the_policy_never_takes_learns_no_value_from_them() -> None:
    given = arrays(np.random.default_rng(4), 6, 2)
    _, target = vtrace(*given, np.full((6, 2), -np.inf, np.float32), gamma=0.9, gae_lambda=0.9)
    np.testing.assert_array_equal(target, given[1])


def test_vtrace_clips_what_the_policy_takes_more_often() -> None:
    given = arrays(np.random.default_rng(5), 6, 2)
    rates = {"gamma": 0.9, "gae_lambda": 0.9}
    for got, wanted in zip(
        vtrace(*given, np.full((6, 2), 50.0, np.float32), **rates), gae(*given, **rates), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)  # ratios beyond 1 count as 1


@pytest.fixture(scope="module")
def jitted_normalize() -> Callable[..., Any]:
    return jax.jit(normalize)


def test_normalize_uses_the_unbiased_std(jitted_normalize: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).normal(3.0, 2.0, (5, 4)).astype(np.float32)
    np.testing.assert_allclose(jitted_normalize(x), (x - x.mean()) / x.std(ddof=1), rtol=1e-4, atol=1e-5)


def test_normalize_turns_a_single_element_into_zero(jitted_normalize: Callable[..., Any]) -> None:
    assert jitted_normalize(jnp.full((1, 1), 7.0)).tolist() == [[0.0]]


@pytest.mark.parametrize("size", [2, 3, 7, 1000])
@pytest.mark.parametrize("value", [0.0, 7.0, 1.7, 33.3, -0.1, 1e-30, 3.3e7])
def test_equal_elements_teach_nothing(value: float, size: int, jitted_normalize: Callable[..., Any]) -> None:
    """Their mean is rounded, which leaves up to ±1 of them: 1.7 in a group of three, 33.3 in a thousand."""
    equal = jnp.full(size, value, jnp.float32)
    assert not jitted_normalize(equal).any()
    rounded = equal.at[0].set(np.nextafter(np.float32(value), np.float32(np.inf)) if value else 0.0)
    assert not jitted_normalize(rounded).any()
    assert not group_advantages(equal[None], jnp.ones((1, size)), group_size=size, eps=1e-8).any()
    assert not group_advantages(rounded[None], jnp.ones((1, size)), group_size=size, eps=1e-8).any()


def test_elements_that_differ_by_more_than_rounding_are_normalized(jitted_normalize: Callable[..., Any]) -> None:
    x = np.array([1.0, 1.0 + 1e-5, 1.0 - 1e-5], np.float32)
    np.testing.assert_allclose(jitted_normalize(x), [0.0, 1.0, -1.0], atol=0.02)
    advantage = group_advantages(jnp.asarray(x)[None], jnp.array([[1.0, 1.0, 0.0]]), group_size=3, eps=1e-8)
    np.testing.assert_allclose(advantage, [[-1.0, 1.0, 0.0]], atol=0.02)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(broken: float, jitted_normalize: Callable[..., Any]) -> None:
    x = jnp.array([1.0, broken, 1.0])
    assert jnp.isnan(jitted_normalize(x)).any()
    assert jnp.isnan(group_advantages(x[None], jnp.ones((1, 3)), group_size=3, eps=1e-8)).any()


def test_normalize_leaves_padding_out(jitted_normalize: Callable[..., Any]) -> None:
    x = np.array([1.0, 2.0, 6.0, 1e6], np.float32)
    counted = x[:3]
    expected = [*((counted - counted.mean()) / counted.std(ddof=1)), 0.0]
    for padding in (1e6, np.nan, np.inf):
        x[3] = padding
        np.testing.assert_allclose(jitted_normalize(x, jnp.array([1.0, 1.0, 1.0, 0.0])), expected, rtol=1e-5)


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1.0, 1e6])
def test_normalization_and_explained_variance_are_the_same_in_every_unit(
    jitted_normalize: Callable[..., Any], unit: float
) -> None:
    x, y = np.random.default_rng(0).normal(3.0, 1.0, (2, 50)).astype(np.float32)
    np.testing.assert_allclose(jitted_normalize(unit * x), jitted_normalize(x), rtol=1e-4, atol=1e-6)
    expected = 1.0 - np.var(x - y) / np.var(x)
    assert explained_variance(unit * y, unit * x) == pytest.approx(expected, rel=1e-4)
    assert explained_variance(np.zeros_like(x), unit * x) == pytest.approx(0.0, abs=1e-5)  # of a useless critic
    assert jnp.isnan(explained_variance(x, np.full_like(x, unit)))  # of targets that do not vary
