"""FlashSAC's networks and exploration: batch statistics, residual blocks, weights of a fixed length, held noise."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soft_actors_in_numpy

from ejax.distributions import ActionSpec
from ejax.policies.flash import BLOCK, FlashQ, noise_repeat_start, unit_length
from ejax.types import ActionValuePolicy, ExploringPolicy

SPEC = ActionSpec("tanh_normal", (2,), (-2.0, -1.0), (2.0, 3.0))
POLICY = FlashQ(SPEC, actor_width=6, critic_width=5, num_blocks=2, expansion=2, num_bins=7)
NUM_OBS, ROWS = 3, 9


def noisy(tree: Any, size: float = 0.3) -> Any:
    """Move every number, so that scales are not 1 and biases not 0."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(x + rng.uniform(0.0, size, x.shape).astype(np.float32)), jax.device_get(tree)
    )


def make_params(policy: FlashQ = POLICY) -> Any:
    params = jax.jit(policy.init)(jax.random.key(0), jnp.zeros((1, NUM_OBS)))
    return {**params, "params": noisy(params["params"]), "batch_stats": noisy(params["batch_stats"])}


PARAMS = make_params()
OBS = jax.random.normal(jax.random.key(1), (ROWS, NUM_OBS))
UNIT_ACTION = jnp.tanh(jax.random.normal(jax.random.key(2), (ROWS, 2)))
ACTION = jnp.asarray([0.0, 1.0])[None] + 2.0 * UNIT_ACTION  # in the environment's units
values = partial(jax.jit(POLICY.apply, static_argnames=("method", "observe", "mutable")), method="action_values")


def assert_close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


def test_it_is_a_policy_with_critics_of_actions_that_explores() -> None:
    assert isinstance(POLICY, ActionValuePolicy)
    assert isinstance(POLICY, ExploringPolicy)


def test_the_critics_are_the_formulas_by_running_statistics() -> None:
    got = values(PARAMS, OBS, ACTION)
    stats = PARAMS["batch_stats"]["critic"]
    assert_close(got, soft_actors_in_numpy.critics(PARAMS["params"], stats, OBS, UNIT_ACTION))


def test_rows_that_are_observed_are_normalized_by_their_own_statistics() -> None:
    got, _ = values(PARAMS, OBS, ACTION, observe=True, mutable=("batch_stats",))
    assert_close(got, soft_actors_in_numpy.critics(PARAMS["params"], None, OBS, UNIT_ACTION))


def test_running_statistics_move_by_a_hundredth_to_the_unbiased_variance() -> None:
    _, moved = values(PARAMS, OBS, ACTION, observe=True, mutable=("batch_stats",))
    before, after = (x["critic"]["norm"] for x in (PARAMS["batch_stats"], moved["batch_stats"]))
    x = np.concatenate([OBS, UNIT_ACTION], axis=-1)
    assert_close(after["mean"], 0.99 * np.asarray(before["mean"]) + 0.01 * x.mean(0))
    assert_close(after["variance"], 0.99 * np.asarray(before["variance"]) + 0.01 * x.var(0, ddof=1))


def test_the_actor_is_the_formula_and_its_deviation_lies_in_its_range() -> None:
    distribution, value = POLICY.apply(PARAMS, OBS)
    stats = PARAMS["batch_stats"]["actor"]
    mean, log_std = soft_actors_in_numpy.actor(PARAMS["params"], stats, OBS, (-10.0, 2.0))
    assert_close(distribution.base.mean, mean)
    assert_close(distribution.base.log_std, log_std)
    np.testing.assert_array_equal(value, np.zeros(ROWS))
    assert (log_std > -10.0).all() and (log_std < 2.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"post_norm": False}, {"num_bins": None}])
def test_a_part_that_is_left_out_is_left_out_of_the_formula(change: dict[str, Any]) -> None:
    policy = POLICY.clone(**change)
    params = make_params(policy)
    expected = soft_actors_in_numpy.critics(params["params"], params["batch_stats"]["critic"], OBS, UNIT_ACTION)
    got = policy.apply(params, OBS, ACTION, method="action_values")
    assert_close(got, expected if policy.num_bins else expected[..., 0])


def test_weights_of_an_output_get_length_1_and_scale_and_bias_together_root_d() -> None:
    made = unit_length(PARAMS["params"])
    kernel, given = (
        np.asarray(made["critic"]["block_0"]["linear_0"]["kernel"]),
        np.asarray(PARAMS["params"]["critic"]["block_0"]["linear_0"]["kernel"]),
    )
    assert kernel.shape == (2, 5, 10)
    for k in range(2):
        for f in range(10):
            assert_close(kernel[k, :, f], given[k, :, f] / np.linalg.norm(given[k, :, f]))
    norm, before = made["actor"]["block_1"]["norm_0"], PARAMS["params"]["actor"]["block_1"]["norm_0"]
    length = np.sqrt((np.asarray(before["scale"]) ** 2).sum() + (np.asarray(before["bias"]) ** 2).sum())
    for name in ("scale", "bias"):
        assert_close(norm[name], np.asarray(before[name]) * np.sqrt(12) / length)
    scale = np.asarray(made["critic"]["post_norm"]["scale"])
    assert_close((scale**2).sum(-1), [5.0, 5.0])
    np.testing.assert_array_equal(made["actor"]["output"]["bias"], PARAMS["params"]["actor"]["output"]["bias"])
    np.testing.assert_array_equal(made["log_alpha"], PARAMS["params"]["log_alpha"])


@pytest.mark.slow
def test_fresh_parameters_have_their_length() -> None:
    fresh = POLICY.init(jax.random.key(0), OBS)["params"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), unit_length(fresh), fresh)
    assert not np.array_equal(*fresh["critic"]["embed"]["kernel"])  # each critic starts elsewhere


starts_of = jax.jit(
    lambda key, steps, exponent, longest: jax.vmap(
        lambda step: noise_repeat_start(key, step, exponent=exponent, longest=longest)
    )(steps),
    static_argnums=(2, 3),
)


@pytest.mark.slow
def test_noise_is_held_for_lengths_of_the_zeta_distribution_up_to_16() -> None:
    steps = jnp.arange(12 * BLOCK)
    starts = np.asarray(starts_of(jax.random.key(3), steps, 2.0, 16))
    assert (starts <= steps).all() and (np.diff(starts) >= 0).all()
    begins = np.flatnonzero(starts == np.arange(len(starts)))
    np.testing.assert_array_equal(np.unique(starts), begins)  # each hold's step is that of its own beginning
    assert set(range(0, 12 * BLOCK, BLOCK)) <= set(begins.tolist())  # a block begins a hold
    lengths = np.diff(begins)
    assert lengths.max() == 16
    expected = np.arange(1, 17) ** -2.0 / (np.arange(1, 17) ** -2.0).sum()
    found = np.bincount(lengths, minlength=17)[1:] / len(lengths)
    # some 5,700 holds: four standard errors are at most 0.026
    np.testing.assert_allclose(found, expected, atol=0.026)


@pytest.mark.slow
def test_a_hold_depends_on_the_step_and_the_seed_alone() -> None:
    key = jax.random.key(3)
    together = np.asarray(starts_of(key, jnp.arange(3000), 2.0, 16))
    for step in (0, 17, 1023, 1024, 2999):
        assert noise_repeat_start(key, jnp.int32(step), exponent=2.0, longest=16) == together[step]
    assert not np.array_equal(together, starts_of(jax.random.key(4), jnp.arange(3000), 2.0, 16))


def test_a_longest_hold_of_one_step_is_new_noise_at_each() -> None:
    np.testing.assert_array_equal(starts_of(jax.random.key(3), jnp.arange(50), 2.0, 1), np.arange(50))


@jax.jit
def drawn(params: Any, step: Any, group: Any = 0) -> jax.Array:
    """Draw at one observation, so that equal noise is equal actions."""
    distribution, _ = POLICY.apply(params, jnp.zeros((4, NUM_OBS)))
    return POLICY.explore(params, distribution, jax.random.key(step), jnp.asarray(step, jnp.int32), group)


LEARNS = PARAMS | {"exploration": {**PARAMS["exploration"], "uniform": jnp.zeros((), bool)}}


@pytest.mark.slow
def test_actions_have_the_same_noise_while_it_is_held_and_other_noise_after() -> None:
    seed = jax.random.key(LEARNS["exploration"]["seed"])
    starts = np.asarray(starts_of(seed, jnp.arange(40), 2.0, 16))
    actions = [np.asarray(drawn(LEARNS, step)) for step in range(40)]
    for step in range(1, 40):
        assert np.array_equal(actions[step], actions[step - 1]) == (starts[step] == starts[step - 1])
    assert len(np.unique(actions[0][:, 0])) == 4  # one hold for all environments, but noise for each
    assert not np.array_equal(drawn(LEARNS, 5, group=0), drawn(LEARNS, 5, group=1))


def test_actions_are_uniform_between_the_bounds_before_the_first_gradient_step() -> None:
    assert bool(PARAMS["exploration"]["uniform"])
    actions = np.concatenate([drawn(PARAMS, step) for step in range(250)])
    assert (actions >= [-2.0, -1.0]).all() and (actions < [2.0, 3.0]).all()
    # 1,000 draws each: five standard errors
    np.testing.assert_allclose(actions.mean(0), [0.0, 1.0], atol=5 * 4 / np.sqrt(12 * 1000))
    np.testing.assert_allclose(actions.std(0), 4 / np.sqrt(12), rtol=0.1)


def test_evaluation_takes_the_mode() -> None:
    distribution, _ = POLICY.apply(PARAMS, OBS)
    center, half_width = np.array([0.0, 1.0]), 2.0
    assert_close(distribution.mode(), center + half_width * np.tanh(np.asarray(distribution.base.mean)))
