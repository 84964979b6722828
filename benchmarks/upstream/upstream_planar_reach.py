"""``embodichain.learning.rl.experimental.newton.train_planar_reach``: its training, of ejax's arm by ejax's APG."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import ejax
from ejax.algorithms.apg import APGConfig, apg_update
from ejax.algorithms.differentiable import play
from ejax.distributions import action_spec
from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.policies import ActorOnly
from ejax.policies.mlp import NetworkConfig


@dataclass
class NewtonPlanarReachTrainingCfg:
    device: str = "cpu"
    seed: int = 29
    eval_batches: int = 4
    num_envs: int = 128
    num_updates: int = 600
    horizon: int = 32


def _evaluate(*args: Any) -> Any:
    raise NotImplementedError("torch's train and eval modes: ejax's policies are functions, and have none")


def train_planar_reach(cfg: NewtonPlanarReachTrainingCfg) -> dict[str, Any]:
    """Train ejax's APG on ejax's arm with EmbodiChain's settings, and measure it before and after."""
    make = partial(PlanarReachRL, action_scale=0.25, success_threshold=0.0)
    env, eval_env = make(max_episode_steps=cfg.horizon), make(max_episode_steps=cfg.horizon + 1)
    scales = (2**0.5, 2**0.5, 0.01)
    network = NetworkConfig(hidden_sizes=(64, 64), activation="tanh", last_activation="tanh", orthogonal_init=scales)
    policy = ActorOnly(action_spec(env.action_space), actor=network)
    options = {"optimizer": {"learning_rate": 3e-3}, "gamma": 0.99, "max_grad_norm": 10.0}
    config = APGConfig(segment_length=cfg.horizon, deterministic_actions=True, **options)
    optimizer = ejax.make_optimizer(config.optimizer)
    key, key_env, key_eval = jax.random.split(jax.random.key(cfg.seed), 3)
    carry, held_out = (ejax.reset(*each, cfg.num_envs) for each in ((env, key_env), (eval_env, key_eval)))
    state = ejax.init_train_state(policy, optimizer, key, carry.obs)
    measure = jax.jit(partial(_measure, held_out, policy, eval_env, config))
    before, skipped = measure(state.params), 0.0
    for update in range(cfg.num_updates):
        static = {"policy": policy, "env": env, "optimizer": optimizer, "config": config}
        state, carry, metrics = apg_update(state, carry, jax.random.fold_in(key, update), **static)
        skipped += float(metrics["skipped_update"])
    after = measure(state.params)
    counts = {"num_updates": int(state.step), "global_step": int(state.step) * cfg.horizon * cfg.num_envs}
    measured = {
        f"{when}_{name}": float(x) for when, each in (("initial", before), ("final", after)) for name, x in each.items()
    }
    return measured | counts | {"skipped_updates": skipped}


def _measure(carry: Any, policy: Any, env: Any, config: APGConfig, params: Any) -> dict[str, Any]:
    taps = jnp.zeros((config.horizon, 4))
    _, made, _ = play(params, taps, carry, jax.random.key(0), policy=policy, env=env, options=config)
    nearest = jnp.sqrt(-made.reward).min(axis=0)  # the reward is minus the squared distance
    success = (nearest < 0.05).mean()
    return {"return": made.reward.sum(axis=0).mean(), "mean_min_distance": nearest.mean(), "success_rate": success}
