"""Compatibility modes: which keys they set, and the numbers of the releases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.algorithms.ppo import PPOConfig, ppo_advantage
from ejax.config import ConfigError, parse_config
from ejax.types import Rollout

RAW = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 8, "buffer_size": 16},
    "policy": {
        "name": "actor_critic",
        "actor": {"type": "mlp", "hidden_sizes": [8]},
        "critic": {"type": "mlp", "hidden_sizes": [8]},
    },
    "algorithm": {"name": "ppo", "cfg": {}},
}


def test_a_mode_sets_keys_that_are_not_given_and_says_so() -> None:
    config = parse_config({**RAW, "compat": "embodichain-0.3"}, ["algorithm.cfg.clip_grad_per_network=false"])
    assert config.algorithm.cfg.timeout_bootstrap == "embodichain-0.3"
    assert config.algorithm.cfg.clip_grad_per_network is False
    assert config.trainer.eval_episode_choice == "first_finished"
    np.testing.assert_allclose(config.policy.log_std_range, np.log([1e-6, 1e6]))
    assert [notice.key for notice in config.notices] == ["compat"]
    assert parse_config(config.to_dict()) == config


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"compat: got 'embodychain-0\.2'; allowed: .* Did you mean 'embodichain-0\.2'"
    ):
        parse_config({**RAW, "compat": "embodychain-0.2"})


def rollout(rng: np.random.Generator) -> Rollout:
    value = rng.normal(size=(6, 3)).astype(np.float32)
    done = rng.random((6, 3)) < 0.3
    zeros = np.zeros((6, 3), np.float32)
    return Rollout(
        obs=zeros[..., None],
        action=zeros[..., None],
        log_prob=zeros,
        value=value,
        next_value=np.concatenate([value[1:], rng.normal(size=(1, 3)).astype(np.float32)]),
        reward=rng.normal(size=(6, 3)).astype(np.float32),
        terminated=done,
        truncated=np.zeros_like(done),
    )


def test_the_seed_version_ends_episodes_with_the_rollout_and_hardly_normalizes() -> None:
    data = rollout(np.random.default_rng(0))
    config = PPOConfig(
        gamma=0.9, gae_lambda=0.8, timeout_bootstrap="embodichain-seed", advantage_rule="embodichain-seed"
    )
    got, _ = ppo_advantage(jax.tree.map(jnp.asarray, data), config=config)
    raw, following = np.zeros((7, 3)), np.concatenate([data.value[1:], np.zeros((1, 3))])
    for t in reversed(range(6)):
        alive = 1.0 - data.terminated[t]
        delta = data.reward[t] + 0.9 * following[t] * alive - data.value[t]
        raw[t] = delta + 0.9 * 0.8 * alive * raw[t + 1]
    raw = raw[:6]
    normalized = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-8)
    expected = (raw - normalized.mean()) / (normalized.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
