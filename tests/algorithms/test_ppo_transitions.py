"""PPO on rollouts made outside the program: steps that are no transitions, and older parameters."""

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_tables import cases

from ejax.algorithms.ppo import PPOConfig, ppo_advantage, ppo_update
from ejax.distributions import ActionSpec
from ejax.optim import make_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.types import Params, Policy, Rollout, TrainState, make_train_state

KEY = jax.random.key(0)


def fresh(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return make_train_state(params, optimizer)


def random_rollout(policy: Policy, params: Params, num_envs: int = 4, num_steps: int = 6) -> Rollout:
    rng = np.random.default_rng(8)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(num_steps, num_envs, *shape)), jnp.float32)  # noqa: E731
    obs, final_obs = normal(3), normal(3)
    distribution, value = policy.apply(params, obs)
    action = distribution.sample(KEY)
    terminated, truncated = jnp.asarray(rng.random((2, num_steps, num_envs)) < 0.2)
    following = jnp.concatenate([value[1:], policy.apply(params, final_obs[-1:])[1]])
    return Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=jnp.where(terminated | truncated, policy.apply(params, final_obs)[1], following),
        reward=normal(),
        terminated=terminated,
        truncated=truncated,
    )


@pytest.fixture(scope="module")
def small() -> tuple[ActorCritic, Any, Any]:
    """Return a policy with normalizers, its parameters, and a rollout of it."""
    network = NetworkConfig(hidden_sizes=(8,), activation="tanh")
    normalized = {"actor_obs_normalization": True, "critic_obs_normalization": True}
    policy = ActorCritic(ActionSpec("normal", (2,)), network, network, **normalized)
    params = policy.init(KEY, jnp.zeros((1, 3)))
    return policy, params, random_rollout(policy, params)


def one_update(policy: Policy, params: Params, rollout: Rollout, **options: Any) -> Any:
    config = PPOConfig(**{"batch_size": 1000, "n_epochs": 2} | options)  # every minibatch is the whole batch
    optimizer = make_optimizer(config.optimizer)
    return ppo_update(fresh(params, optimizer), rollout, KEY, policy=policy, optimizer=optimizer, config=config)


def assert_same_update(one: Any, other: Any, rtol: float = 1e-4) -> None:
    for a, b in zip(one, other, strict=True):
        chex.assert_trees_all_close(a, b, rtol=rtol, atol=1e-5)


@cases(
    "options",
    {},
    {"normalize_advantage_per_mini_batch": True, "use_clipped_value_loss": True},
    {"staleness_correction": "vtrace"},
    ids=["default", "per minibatch", "vtrace"],
)
@pytest.mark.slow_cases("per minibatch", "vtrace")
def test_an_update_with_masked_garbage_is_the_update_without_it(small: tuple, options: dict) -> None:
    policy, params, rollout = small
    clean = replace(rollout, valid=jnp.ones_like(rollout.done))

    def with_garbage(x: Any) -> Any:
        return (
            jnp.concatenate([x, jnp.full_like(x[:, :2], 7)], axis=1)
            if x.dtype != bool
            else jnp.pad(x, ((0, 0), (0, 2)))
        )

    dirty = jax.tree.map(with_garbage, clean)  # two more environments, none of whose steps is a transition
    assert dirty.valid.sum() == rollout.reward.size
    assert_same_update(one_update(policy, params, clean, **options), one_update(policy, params, dirty, **options))


@pytest.mark.slow
def test_advantages_are_normalized_over_transitions_whatever_the_rule(small: tuple[ActorCritic, Any, Any]) -> None:
    *_, rollout = small
    valid = jnp.ones_like(rollout.done).at[:, -1].set(False)
    for rule in ("embodichain-0.2", "embodichain-0.3", "embodichain-seed"):
        config = PPOConfig(advantage_rule=rule)
        some, _ = ppo_advantage(replace(rollout, valid=valid), config=config)
        expected, _ = ppo_advantage(jax.tree.map(lambda x: x[:, :-1], rollout), config=config)
        np.testing.assert_allclose(some[:, :-1], expected, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_no_transition_cuts_what_is_before_it_from_what_is_after_it(small: tuple) -> None:
    *_, rollout = small
    valid = jnp.ones_like(rollout.done).at[3].set(False)
    running = jnp.zeros_like(rollout.done)
    rollout = replace(rollout, terminated=running, truncated=running, valid=valid)
    config = PPOConfig(normalize_advantage=False)
    before, _ = ppo_advantage(rollout, config=config)
    changed = replace(rollout, reward=rollout.reward.at[3:].set(1e3), next_value=rollout.next_value.at[3:].set(1e3))
    after, _ = ppo_advantage(changed, config=config)
    np.testing.assert_array_equal(before[:3], after[:3])
    last = rollout.reward[2] + 0.99 * rollout.next_value[2] - rollout.value[2]  # cut off there, with its value
    np.testing.assert_allclose(before[2], last, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["decoupled", "vtrace"])
def test_without_staleness_a_correction_changes_nothing(small: tuple[ActorCritic, Any, Any], correction: str) -> None:
    policy, params, rollout = small
    plain, corrected = (
        one_update(policy, params, rollout),
        one_update(policy, params, rollout, staleness_correction=correction),
    )
    for name in ("behave_approx_kl", "behave_weight_clipped"):
        assert corrected[1].pop(name) == pytest.approx(0.0, abs=1e-6)
    assert_same_update(plain, corrected)


@pytest.mark.slow
def test_with_staleness_the_surrogate_is_clipped_around_the_start_of_the_update(small: tuple) -> None:
    policy, params, rollout = small
    newer = {**params, "params": jax.tree.map(lambda x: x + 0.05, params["params"])}
    config = PPOConfig(staleness_correction="decoupled", batch_size=1000, n_epochs=1, behave_weight_threshold=1.5)
    _, metrics = one_update(policy, newer, rollout, **config.model_dump(exclude_unset=True))
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_fraction"] == 0.0
    distribution, value = policy.apply(newer, rollout.obs)
    log_ratio = distribution.log_prob(rollout.action) - rollout.log_prob
    following = jnp.concatenate([value[1:], rollout.next_value[-1:]])
    next_value = jnp.where(rollout.done.at[-1].set(True), rollout.next_value, following)
    advantage, _ = ppo_advantage(replace(rollout, value=value, next_value=next_value), config=config)
    weight = np.minimum(np.exp(log_ratio), 1.5)
    assert metrics["actor_loss"] == pytest.approx(-float((weight * advantage).mean()), rel=1e-3, abs=1e-6)
    assert metrics["behave_weight_clipped"] == pytest.approx(float((np.exp(log_ratio) > 1.5).mean()))
