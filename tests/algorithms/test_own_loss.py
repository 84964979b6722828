"""Updates with a loss and columns of the caller's: ``loss=`` and ``columns=`` of ``ppo_update`` and the like."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ejax.algorithms.grpo import GRPOConfig, grpo_loss, grpo_update
from ejax.algorithms.ppo import PPOConfig, ppo_loss, ppo_update
from ejax.algorithms.reppo import REPPOConfig, reppo_loss, reppo_update
from ejax.distributions import ActionSpec
from ejax.policies.actor_critic import ActorCritic
from ejax.policies.actor_q import ActorQ
from ejax.policies.mlp import NetworkConfig
from ejax.types import Rollout, make_train_state

T, N = 4, 4
NETWORK = NetworkConfig(hidden_sizes=(4,), activation="tanh")
CRITICS = ActorQ(
    ActionSpec("tanh_normal", (2,), (-1.0,) * 2, (1.0,) * 2), NETWORK, NETWORK, initial_kl_coef=0.1, num_bins=5
)
ACTOR_CRITIC = ActorCritic(ActionSpec("normal", (2,)), NETWORK, NETWORK)
ALGORITHMS: dict[str, Any] = {
    "ppo": (ppo_update, ppo_loss, PPOConfig(batch_size=8, n_epochs=1), ACTOR_CRITIC),
    "grpo": (grpo_update, grpo_loss, GRPOConfig(batch_size=8, n_epochs=1, group_size=2, kl_coef=0.0), ACTOR_CRITIC),
    "reppo": (reppo_update, reppo_loss, REPPOConfig(batch_size=8, n_epochs=1, vmin=-5.0, vmax=5.0), CRITICS),
}


def update(name: str, **door: Any) -> Any:
    run, _, config, policy = ALGORITHMS[name]
    obs = jnp.asarray(np.random.default_rng(0).normal(size=(T, N, 3)), jnp.float32)
    params, optimizer = policy.init(jax.random.key(0), obs), optax.sgd(0.1)
    distribution, value = policy.apply(params, obs)
    action, flags = distribution.sample(jax.random.key(1)), jnp.zeros((T, N), bool)
    rollout = Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=value,
        reward=obs[..., 0],
        terminated=flags,
        truncated=flags.at[-1].set(True),
        distribution=distribution,
        next_obs=obs,
    )
    state = make_train_state(params, optimizer)
    return run(state, rollout, jax.random.key(2), policy=policy, optimizer=optimizer, config=config, **door)


def first_column(rollout: Rollout) -> dict[str, Any]:
    return {"mine": rollout.obs[..., 0]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_term_of_the_callers_is_added_to_the_loss(name: str) -> None:
    loss = ALGORITHMS[name][1]

    def smaller(params: Any, batch: Any, **given: Any) -> Any:
        total, metrics = loss(params, batch, **given)
        squares = sum(jnp.square(x).sum() for x in jax.tree.leaves(params["params"]))
        return total + 0.5 * squares, {**metrics, "mine": (batch["weight"] * batch["mine"]).sum()}

    plain, _ = update(name)
    pulled, metrics = update(name, loss=smaller, columns=first_column)
    mean = np.random.default_rng(0).normal(size=(T, N, 3))[..., 0].mean()
    assert float(metrics["mine"]) == pytest.approx(mean, abs=1e-6)
    squares = [sum(float(jnp.square(x).sum()) for x in jax.tree.leaves(state.params)) for state in (plain, pulled)]
    assert squares[1] < squares[0]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("column", ["obs", "weight", "own"])
def test_a_column_whose_name_is_taken_is_refused(name: str, column: str) -> None:
    column = {"ppo": "value", "grpo": "advantage", "reppo": "value_target"}[name] if column == "own" else column
    with pytest.raises(ValueError, match=f"columns: got {column}"):
        update(name, columns=lambda rollout: {column: rollout.reward})
