"""Densities against NumPy formulas and quadrature; entropies and divergences against sums over the density."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from gymnasium import spaces

from ejax.distributions import ActionSpec, Categorical, MultiCategorical, Normal, TanhNormal, action_spec

pytestmark = pytest.mark.usefixtures("strict_dtypes")

MEAN, LOG_STD = np.array([[0.3, -1.2], [0.0, 2.0]]), np.array([[-0.5, 0.4], [0.1, -1.0]])
MEAN_2, LOG_STD_2 = np.array([[0.1, -1.0], [1.0, 1.5]]), np.array([[-0.2, 0.0], [0.3, -0.8]])
LOW, HIGH = np.array([-2.0, 0.0]), np.array([1.0, 5.0])
LOGITS, LOGITS_2 = np.array([[0.1, 2.0, -1.0], [0.0, 0.0, 0.0]]), np.array([[1.0, -1.0, 0.5], [3.0, 0.0, 0.0]])


def normal(mean: Any = MEAN, log_std: Any = LOG_STD) -> Normal:
    return Normal(jnp.asarray(mean, jnp.float32), jnp.asarray(log_std, jnp.float32))


def squashed(mean: Any = MEAN, log_std: Any = LOG_STD) -> Any:
    spec = ActionSpec("tanh_normal", (2,), tuple(LOW), tuple(HIGH))
    return spec.distribution(jnp.asarray(mean, jnp.float32), jnp.asarray(log_std, jnp.float32))


def normal_pdf(x: Any, mean: Any, log_std: Any) -> np.ndarray:
    return np.exp(-0.5 * ((x - mean) / np.exp(log_std)) ** 2 - log_std) / np.sqrt(2 * np.pi)


def softmax(x: Any) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def log_prob() -> Callable[..., Any]:
    return jax.jit(lambda distribution, action: distribution.log_prob(action))


@pytest.fixture(scope="module")
def sample() -> Callable[..., Any]:
    return jax.jit(lambda distribution, key: distribution.sample(key))


def test_normal_log_prob_sums_the_log_densities(log_prob: Callable[..., Any]) -> None:
    action = np.array([[0.0, 1.0], [-2.0, 2.5]])
    np.testing.assert_allclose(
        log_prob(normal(), jnp.asarray(action)), np.log(normal_pdf(action, MEAN, LOG_STD)).sum(-1), rtol=1e-5
    )


def test_normal_entropy_is_the_closed_form() -> None:
    expected = (0.5 + 0.5 * np.log(2 * np.pi) + LOG_STD).sum(-1)
    np.testing.assert_allclose(jax.jit(Normal.entropy)(normal()), expected, rtol=1e-6)


def test_normal_kl_is_the_integral() -> None:
    x = np.linspace(-25.0, 25.0, 200_001)[:, None, None]
    p, q = normal_pdf(x, MEAN, LOG_STD), normal_pdf(x, MEAN_2, LOG_STD_2)
    integrand = np.where(p > 1e-300, p * (np.log(p + 1e-300) - np.log(q + 1e-300)), 0.0)
    expected = (integrand.sum(0) * (x[1, 0, 0] - x[0, 0, 0])).sum(-1)
    np.testing.assert_allclose(jax.jit(Normal.kl)(normal(), normal(MEAN_2, LOG_STD_2)), expected, rtol=1e-4)


def test_normal_samples_have_its_mean_and_std(sample: Callable[..., Any]) -> None:
    wide = Normal(jnp.full((100_000, 1), 3.0), jnp.full((100_000, 1), np.log(2.0)))
    x = sample(wide, jax.random.key(0))
    assert float(x.mean()) == pytest.approx(3.0, abs=0.03)
    assert float(x.std()) == pytest.approx(2.0, abs=0.03)


def test_normal_samples_are_reparameterized() -> None:
    key = jax.random.key(1)
    noise = (normal().sample(key) - MEAN) / np.exp(LOG_STD)
    slope = jax.grad(lambda d: d.sample(key).sum())(normal())
    np.testing.assert_allclose(slope.mean, np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(slope.log_std, noise * np.exp(LOG_STD), rtol=1e-4, atol=1e-6)


def test_the_mode_of_a_normal_is_its_mean_squashed_where_squashed() -> None:
    np.testing.assert_array_equal(normal().mode(), MEAN.astype(np.float32))
    expected = (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * np.tanh(MEAN)
    np.testing.assert_allclose(squashed().mode(), expected, rtol=1e-5)


def test_tanh_normal_density_integrates_to_one(log_prob: Callable[..., Any]) -> None:
    # one dimension; midpoints, so that no point lies on a bound
    spec = ActionSpec("tanh_normal", (1,), (-2.0,), (1.0,))
    num_points = 30_000
    x = -2.0 + 3.0 * (np.arange(num_points) + 0.5) / num_points
    one = spec.distribution(jnp.full((num_points, 1), 0.3), jnp.full((num_points, 1), -0.5))
    density = np.exp(np.asarray(log_prob(one, jnp.asarray(x[:, None], jnp.float32)), np.float64))
    assert density.sum() * 3.0 / num_points == pytest.approx(1.0, abs=1e-3)


def test_tanh_normal_log_prob_is_the_change_of_variables(log_prob: Callable[..., Any]) -> None:
    u = np.array([[0.2, -2.0], [1.0, 3.0]])
    half = (HIGH - LOW) / 2
    expected = (np.log(normal_pdf(u, MEAN, LOG_STD)) - np.log(half * (1 - np.tanh(u) ** 2))).sum(-1)
    action = (LOW + HIGH) / 2 + half * np.tanh(u)
    np.testing.assert_allclose(log_prob(squashed(), jnp.asarray(action, jnp.float32)), expected, rtol=1e-3)


def test_tanh_normal_stays_in_its_bounds_with_a_finite_log_prob(sample: Callable, log_prob: Callable) -> None:
    far = squashed(np.full((1000, 2), 8.0), np.full((1000, 2), 1.0))
    x = sample(far, jax.random.key(0))
    assert ((x >= LOW[None]) & (x <= HIGH[None])).all()
    assert jnp.isfinite(log_prob(far, x)).all()


def test_tanh_normal_means_beyond_the_last_action_are_not_told_apart(log_prob: Callable[..., Any]) -> None:
    # 9 and 12 are many deviations apart, and each of their samples is the bound: a ratio of the two is 1
    here, there = (squashed(np.full((4, 2), mean), np.full((4, 2), -3.0)) for mean in (9.0, 12.0))
    x = here.sample(jax.random.key(0))
    np.testing.assert_allclose(x, np.broadcast_to(HIGH, (4, 2)), rtol=1e-6)
    np.testing.assert_array_equal(log_prob(here, x), log_prob(there, x))
    slope = jax.grad(lambda mean: squashed(mean, np.full((4, 2), -3.0)).log_prob(x).sum())(jnp.full((4, 2), 9.0))
    assert not slope.any()


def test_the_torch_twin_has_the_log_prob_of_saturated_means_too(log_prob: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    twin = pytest.importorskip("interop.twin.distributions")
    mean = np.float32([[9.0, -12.0], [7.0, 0.5]])
    log_std, action = np.full((2, 2), -1.0, np.float32), np.float32([HIGH, LOW])
    base = twin.Normal(torch.tensor(mean), torch.tensor(log_std))
    its = twin.TanhNormal(base, torch.tensor(np.float32(LOW)), torch.tensor(np.float32(HIGH))).log_prob(
        torch.tensor(action)
    )
    np.testing.assert_allclose(log_prob(squashed(mean, log_std), action), its, rtol=1e-5)


def test_tanh_normal_kl_is_that_of_the_bases() -> None:
    np.testing.assert_allclose(
        jax.jit(TanhNormal.kl)(squashed(), squashed(MEAN_2, LOG_STD_2)),
        normal().kl(normal(MEAN_2, LOG_STD_2)),
        rtol=1e-5,
    )


def test_tanh_normal_entropy_adds_the_log_slope_at_the_mean() -> None:
    slope = np.log((HIGH - LOW) / 2 * (1 - np.tanh(MEAN) ** 2)).sum(-1)
    expected = (0.5 + 0.5 * np.log(2 * np.pi) + LOG_STD).sum(-1) + slope
    np.testing.assert_allclose(jax.jit(TanhNormal.entropy)(squashed()), expected, rtol=1e-4)


def test_tanh_normal_leaves_carry_all_batch_axes() -> None:
    # a rollout stacks and flattens the leaves of a distribution alike
    assert {leaf.shape for leaf in jax.tree.leaves(squashed())} == {(2, 2)}


def test_categorical_matches_its_table(log_prob: Callable[..., Any]) -> None:
    p, q = softmax(LOGITS), softmax(LOGITS_2)
    one, two = Categorical(jnp.asarray(LOGITS)), Categorical(jnp.asarray(LOGITS_2))
    np.testing.assert_allclose(log_prob(one, jnp.array([2, 0])), np.log(p[[0, 1], [2, 0]]), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(Categorical.entropy)(one), -(p * np.log(p)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(Categorical.kl)(one, two), (p * np.log(p / q)).sum(-1), rtol=1e-4)
    assert one.mode().tolist() == [1, 0]


def test_categorical_samples_follow_its_probabilities(sample: Callable[..., Any]) -> None:
    many = Categorical(jnp.broadcast_to(jnp.asarray(LOGITS[0]), (100_000, 3)))
    counts = np.bincount(np.asarray(sample(many, jax.random.key(0))), minlength=3)
    np.testing.assert_allclose(counts / 100_000, softmax(LOGITS[0]), atol=0.006)


def test_multi_categorical_is_a_product_of_independent_categoricals(log_prob: Callable[..., Any]) -> None:
    both = ActionSpec("multi_categorical", (3, 2)).distribution(
        jnp.asarray(np.concatenate([LOGITS, LOGITS_2[:, :2]], axis=-1)), None
    )
    other = ActionSpec("multi_categorical", (3, 2)).distribution(jnp.zeros((2, 5)), None)
    p, q = softmax(LOGITS), softmax(LOGITS_2[:, :2])
    expected = np.log(p[[0, 1], [2, 0]]) + np.log(q[[0, 1], [1, 1]])
    np.testing.assert_allclose(log_prob(both, jnp.array([[2, 1], [0, 1]])), expected, rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(MultiCategorical.entropy)(both), -(p * np.log(p)).sum(-1) - (q * np.log(q)).sum(-1), rtol=1e-5
    )
    np.testing.assert_allclose(
        jax.jit(MultiCategorical.kl)(both, other),
        (p * np.log(3 * p)).sum(-1) + (q * np.log(2 * q)).sum(-1),
        rtol=1e-4,
        atol=1e-6,
    )
    assert both.mode().tolist() == [[1, 0], [0, 0]]


def test_multi_categorical_samples_its_parts_independently(sample: Callable[..., Any]) -> None:
    spec = ActionSpec("multi_categorical", (2, 2))
    x = sample(spec.distribution(jnp.zeros((100_000, 4)), None), jax.random.key(0))
    assert x.shape == (100_000, 2) and x.dtype == jnp.int32
    table = np.bincount(np.asarray(x[:, 0] * 2 + x[:, 1]), minlength=4) / 100_000
    np.testing.assert_allclose(table, np.full(4, 0.25), atol=0.01)


def test_action_spec_reads_every_supported_space() -> None:
    box = spaces.Box(-2.0, 1.0, (3,))
    assert action_spec(box) == ActionSpec("normal", (3,))
    assert action_spec(box, squash=True) == ActionSpec("tanh_normal", (3,), (-2.0,) * 3, (1.0,) * 3)
    assert action_spec(spaces.Discrete(4)) == ActionSpec("categorical", (4,))
    assert action_spec(spaces.MultiDiscrete([3, 2])) == ActionSpec("multi_categorical", (3, 2))
    assert action_spec(spaces.MultiDiscrete([3, 2])).num_outputs == 5


def test_action_spec_is_hashable() -> None:
    assert len({action_spec(spaces.Discrete(4)), action_spec(spaces.Discrete(4))}) == 1


@cases(
    "space squash widths",
    (spaces.Box(-1.0, 1.0, (2,)), False, (1, 3)),
    (spaces.Box(-1.0, 1.0, (2,)), True, (1, 3)),
    (spaces.MultiDiscrete([2, 3]), False, (1, 3)),
)
def test_an_action_of_another_width_is_refused(space: spaces.Space[Any], squash: bool, widths: tuple[int, ...]) -> None:
    """Repeated or cut off, it would train."""
    spec = action_spec(space, squash=squash)
    log_std = None if isinstance(space, spaces.MultiDiscrete) else jnp.zeros(2)
    distribution = spec.distribution(jnp.zeros((4, spec.num_outputs)), log_std)
    for width in widths:
        action = jnp.zeros((4, width))
        refused(distribution.log_prob, action, match=rf"have 2 numbers in their last axis; got shape \(4, {width}\)")


@cases(
    "space squash text",
    (spaces.Box(-1.0, 1.0, (2, 3)), False, r"\(2, 3\)"),
    (spaces.Box(-np.inf, np.inf, (2,)), True, "finite bounds"),
    (spaces.MultiBinary(3), False, "Box.*Discrete.*MultiDiscrete"),
)
def test_action_spec_refuses_a_space_it_cannot_act_in(
    space: spaces.Box | spaces.MultiBinary, squash: bool, text: str
) -> None:
    refused(action_spec, space, squash=squash, match=text)


@pytest.mark.slow
def test_a_normal_without_log_std_is_refused() -> None:
    refused(lambda: ActionSpec("normal", (2,)).distribution(jnp.zeros((1, 2)), None), match="log_std")
