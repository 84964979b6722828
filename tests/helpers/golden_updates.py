"""Golden updates of PPO and GRPO, and GAE, beside ejax's under the options or the ``compat`` mode of their release."""

import json
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from golden_pairs import Pair, cases, load, rollout_of, under, updated

from ejax.algorithms.grpo import GRPOConfig
from ejax.algorithms.ppo import PPOConfig, ppo_advantage
from ejax.config import parse_config
from ejax.distributions import ActionSpec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import bind_schedule
from ejax.policies import ActorCritic, ActorOnly, NetworkConfig
from ejax.returns import gae
from ejax.training.policies import make_policy
from ejax.types import Rollout


def head_gae() -> Iterator[Pair]:
    """0.2.4 has no true next value and takes every end for a terminal."""
    golden = load("head_gae.npz")
    fields = {name: golden[name].T for name in ("reward", "value", "done", "truncated")}
    advantage, target = gae(
        fields["reward"][:-1],
        fields["value"][:-1],
        fields["value"][1:],
        fields["done"][:-1],
        fields["truncated"][:-1],
        gamma=float(golden["gamma"]),
        gae_lambda=float(golden["lam"]),
    )
    yield Pair("advantages", "advantage", advantage, golden["advantages"].T)
    yield Pair("advantages", "return", target, golden["returns"].T)


def head_ppo() -> Iterator[Pair]:
    """Four epochs of one minibatch."""
    golden = load("head_ppo.npz")
    spec = json.loads(str(golden["cfg_json"]))
    config = PPOConfig(**spec["cfg"], timeout_bootstrap="embodichain-0.2")
    network = NetworkConfig(hidden_sizes=spec["hidden"], activation=spec["activation"])
    policy = ActorCritic(ActionSpec("normal", (2,)), network, network)
    names = ("actor_loss", "value_loss", "entropy", "learning_rate")
    yield from updated(policy, config, golden, rollout_of(golden), names)


def head_grpo() -> Iterator[Pair]:
    """Update by groups of four, without a reference."""
    golden = load("head_grpo_kl0.npz")
    spec = json.loads(str(golden["cfg_json"]))
    network = NetworkConfig(hidden_sizes=spec["hidden"], activation=spec["activation"])
    policy = ActorOnly(ActionSpec("normal", (2,)), network)
    names = ("actor_loss", "entropy", "approx_ref_kl", "learning_rate")
    yield from updated(policy, GRPOConfig(**spec["cfg"]), golden, rollout_of(golden), names)


def options_of_0_3(case: str) -> Iterator[Pair]:
    """Loss terms, minibatch statistics, the adaptive rate, normalizers."""
    golden, spec = load("embodichain_0_3_ppo.npz"), cases("embodichain_0_3_ppo.npz")[case]
    config = PPOConfig(**spec["cfg"], timeout_bootstrap="embodichain-0.3", clip_grad_per_network=True)
    network = NetworkConfig(hidden_sizes=(8,), activation="tanh")
    wide = (math.log(1e-6), math.log(1e6))
    policy = ActorCritic(ActionSpec("normal", (2,)), network, network, log_std_range=wide, **spec.get("policy", {}))
    names = ["actor_loss", "value_loss", "entropy", "learning_rate"]
    names += {"adaptive": ["kl"], "loss_terms": ["action_bound_loss"]}.get(case, [])
    of_case = {f"init/{name}": x for name, x in under(golden, "init/").items()} | under(golden, f"{case}/")
    yield from updated(policy, config, of_case, rollout_of(golden), names)


def updates_of_0_3(case: str) -> Iterator[Pair]:
    """Update by whole configs under ``compat: embodichain-0.3``."""
    golden, spec = under(load("embodichain_0_3_updates.npz"), f"{case}/"), cases("embodichain_0_3_updates.npz")[case]
    config = parse_config({**spec["config"], "compat": "embodichain-0.3"})
    options: Any = config.algorithm.cfg
    options = options.model_copy(update={"lr_scheduler": bind_schedule(options.lr_scheduler, spec["updates"])})
    names = ["actor_loss", "entropy", "learning_rate"]
    names += ["value_loss"] if config.algorithm.name == "ppo" else ["approx_ref_kl"]
    yield from updated(make_policy(config.policy, PointMassRL()), options, golden, rollout_of(golden), names)


def seed_ppo() -> Iterator[Pair]:
    """Compute the first versions' formulas under ``compat: embodichain-seed``."""
    golden = load("seed_ppo.npz")
    spec = json.loads(str(golden["config"]))
    network = {"type": "mlp", "hidden_sizes": spec["hidden_sizes"], "activation": spec["activation"]}
    num_steps, num_envs = golden["rollout/reward"].shape
    config = parse_config(
        {
            "trainer": {"learning_env": "PointMassRL", "num_envs": num_envs, "rollout_steps": num_steps},
            "policy": {"name": "actor_critic", "actor": network, "critic": network},
            "algorithm": {"name": "ppo", "cfg": spec["cfg"]},
            "compat": "embodichain-seed",
        }
    )
    options: Any = config.algorithm.cfg
    fields = {name: jnp.asarray(x) for name, x in under(golden, "rollout/").items()}
    unknown = jnp.full((1, num_envs), jnp.nan)  # the value after the last step must not be looked at
    rollout = Rollout(**fields, next_value=jnp.concatenate([fields["value"][1:], unknown]))
    advantage, target = ppo_advantage(rollout, config=options)
    yield Pair("advantages", "advantage", advantage, golden["advantage"])
    yield Pair("advantages", "return", target, golden["return"])
    policy = make_policy(config.policy, PointMassRL())
    yield from updated(policy, options, golden, rollout, ("actor_loss", "value_loss", "entropy"))
