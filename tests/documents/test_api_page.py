"""EmbodiChain's page of ``embodichain.agents.rl``, name by name: what its classes and functions do, with JAX arrays."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases
from tiny import NETWORK

import ejax
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.learner import GRPO, PPO

N, F, A = 4, 3, 2
KEY = jax.random.key(0)
OBS_SPACE = gymnasium.spaces.Box(-np.inf, np.inf, (F,), np.float32)
ACTION_SPACE = gymnasium.spaces.Box(-1.0, 1.0, (A,), np.float32)
SHARED = ("learning_rate", "batch_size", "gamma", "gae_lambda", "max_grad_norm")
PPOS = (*SHARED, "n_epochs", "clip_coef", "ent_coef", "vf_coef")
GRPOS = (*SHARED, "n_epochs", "clip_coef", "ent_coef", "kl_coef", "group_size", "eps", "reset_every_rollout")


@cases(
    "Cfg fields",
    (ejax.AlgorithmCfg, ("learning_rate", "max_grad_norm")),
    (ejax.PPOCfg, PPOS),
    (ejax.GRPOCfg, tuple(name for name in (*GRPOS, "truncate_at_first_done") if name != "gae_lambda")),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_configs_have_their_fields_and_methods(Cfg: Any, fields: tuple[str, ...]) -> None:
    cfg = Cfg()
    assert all(hasattr(cfg, name) for name in fields)
    for change in (cfg.replace, cfg.copy):
        other = change(learning_rate=1e-5, max_grad_norm=1.0)
        assert (other.learning_rate, other.max_grad_norm) == (1e-5, 1.0) and cfg.max_grad_norm == 0.5
    assert cfg.to_dict()["max_grad_norm"] == 0.5 and cfg.validate() == cfg.validate("cfg.") == []
    assert isinstance(cfg, ejax.AlgorithmCfg)


def policy_of(name: str = "actor_critic") -> Any:
    block = {"name": name, "actor": NETWORK, **({"critic": NETWORK} if name == "actor_critic" else {})}
    return ejax.build_policy(block, OBS_SPACE, ACTION_SPACE)


@pytest.mark.parametrize("name", ["actor_critic", "actor_only"])
def test_a_policy_answers_three_questions(name: str) -> None:
    policy, obs = policy_of(name), jnp.ones((N, F))
    params = policy.init(KEY, obs)
    action, log_prob, value = ejax.get_action(policy, params, obs, KEY)
    assert action.shape == (N, A) and log_prob.shape == value.shape == (N,)
    mean, _, _ = ejax.get_action(policy, params, obs, KEY, deterministic=True)
    np.testing.assert_array_equal(mean, policy.apply(params, obs)[0].mode())
    again, entropy, same = ejax.evaluate_actions(policy, params, obs, action)
    np.testing.assert_allclose(again, log_prob, rtol=1e-5)
    assert entropy.shape == same.shape == (N,)
    np.testing.assert_array_equal(ejax.get_value(policy, params, obs), value)
    assert (name == "actor_only") == bool((value == 0.0).all())


@pytest.mark.slow
@pytest.mark.parametrize("Algorithm", [PPO, GRPO])
def test_an_algorithm_initializes_collects_and_updates(Algorithm: Any) -> None:
    env = PointMassRL(max_episode_steps=5)
    policy = ejax.build_policy({"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}, env)
    algorithm: ejax.BaseAlgorithm = Algorithm({"learning_rate": 1e-3, "batch_size": 16, "n_epochs": 1}, policy)
    algorithm.initialize_buffer(num_steps=8, num_envs=4, obs_dim=14, action_dim=2)
    steps: list[Any] = []
    logged = algorithm.collect_rollout(env, policy, None, 8, on_step_callback=lambda *step: steps.append(step))
    obs, actions, reward, done, info, next_obs = steps[0]
    assert len(steps) == 8 and actions.shape == (4, 2) and reward.shape == done.shape == (4,)
    assert obs.shape == next_obs.shape and "metrics" in info and "reward" in logged
    losses = algorithm.update()
    assert all(isinstance(x, float) for x in losses.values()) and np.isfinite(losses["loss"])
    assert algorithm.device in jax.devices()
