"""PPO's ``mirror_coef``: mean actions of mirrored observations are to be the mirrored mean actions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.algorithms.ppo import ALGORITHM, PPOConfig, ppo_loss
from ejax.distributions import ActionSpec
from ejax.envs.locomotion.mirror import Mirror
from ejax.policies.actor_critic import ActorCritic
from ejax.policies.mlp import NetworkConfig

NETWORK = NetworkConfig(hidden_sizes=(), activation="tanh")  # linear: a = W·s
MIRROR = Mirror(obs={"policy": ((1, 0, 2), (1.0, 1.0, -1.0))}, action=((1, 0), (-1.0, -1.0)), feet=())
GROUPS: Any = {"actor_obs_groups": ("policy",), "critic_obs_groups": ("policy",)}
POLICY = ActorCritic(ActionSpec("normal", (2,)), NETWORK, NETWORK, mirror=MIRROR, **GROUPS)
OBS = {"policy": jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)}
SYMMETRIC = [[1.0, -3.0], [3.0, -1.0], [2.0, 2.0]]
"""W^T: swapping the first two numbers of s and turning the third's sign swaps both actions and turns their signs."""


def loss_of(weights: Any, coefficient: float) -> tuple[float, dict[str, Any]]:
    params = POLICY.init(jax.random.key(0), OBS)
    own = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(weights, x.dtype) if x.shape == (3, 2) else jnp.zeros_like(x), params
    )
    ones = jnp.ones(5)
    batch = {"obs": OBS, "action": jnp.zeros((5, 2)), "log_prob": ones, "value": ones, "advantage": ones}
    batch |= {"value_target": ones, "weight": jnp.array([0.5, 0.5, 0.0, 0.0, 0.0])}
    loss, metrics = ppo_loss(own, batch, policy=POLICY, config=PPOConfig(mirror_coef=coefficient))
    return float(loss), metrics


def test_the_loss_is_the_weighted_square_of_what_the_two_sides_differ_by() -> None:
    weights = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.5]])
    s = np.asarray(OBS["policy"])[:2]
    ours, theirs = s @ weights, np.stack([s[:, 1], s[:, 0], -s[:, 2]], axis=1) @ weights
    wanted = ((theirs - -ours[:, ::-1]) ** 2).mean()
    loss, metrics = loss_of(weights, 2.0)
    assert float(metrics["mirror_loss"]) == pytest.approx(wanted, rel=1e-5)
    without, metrics = loss_of(weights, 0.0)
    assert loss - without == pytest.approx(2.0 * wanted, rel=1e-4) and "mirror_loss" not in metrics


def test_a_symmetric_policy_loses_nothing() -> None:
    assert float(loss_of(SYMMETRIC, 1.0)[1]["mirror_loss"]) == pytest.approx(0.0, abs=1e-10)


def test_a_policy_that_knows_no_mirror_image_is_refused() -> None:
    options = PPOConfig(mirror_coef=0.5)
    (problem,) = ALGORITHM.policy_problems(options, POLICY.clone(mirror=None))
    assert problem.key == "algorithm.cfg.mirror_coef" and "in VelocityRL" in problem.text
    assert not list(ALGORITHM.policy_problems(options, POLICY))
    assert not list(ALGORITHM.policy_problems(PPOConfig(), POLICY.clone(mirror=None)))
