"""``build_policy``: a policy from a section of a config and spaces, by EmbodiChain's signature."""

from typing import Any

import flax.linen as nn
import gymnasium
import jax
import numpy as np
from case_tables import cases, refused
from helpers.tiny import NETWORK, tiny

import ejax
from ejax.config import parse_config
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies import ActorCritic, ActorOnly
from ejax.training.build import build
from ejax.training.policies import build_policy

ENV = PointMassRL()
SPACES = ENV.observation_space, ENV.action_space


def test_a_section_makes_the_policy_of_a_run() -> None:
    config = tiny(env_cfg={})
    block = {"actor_obs_normalization": True, "actor": NETWORK, "critic": NETWORK, "name": "actor_critic"}
    assert build_policy(block, *SPACES) == build_policy(block, ENV) == build(parse_config(config)).policy


def test_a_section_has_any_spelling() -> None:
    flat = {"name": "Actor_Only", "initial_action_std": 1.0, "actor": {"type": "mlp", "hidden_sizes": [8]}}
    made: Any = build_policy(flat, *SPACES)
    assert isinstance(made, ActorOnly) and made.initial_log_std == 0.0 and made.actor.hidden_sizes == (8,)


def test_networks_may_be_objects() -> None:
    made: Any = build_policy("actor_critic", *SPACES, actor=nn.Dense(2), critic=nn.Dense(1))
    assert isinstance(made, ActorCritic)
    params = made.init(jax.random.key(0), np.zeros((3, 14), np.float32))
    assert made.apply(params, np.zeros((3, 14), np.float32))[1].shape == (3,)


@cases(
    "arguments text",
    (("actor_critic", *SPACES), r"policy\.actor: is missing: actor_critic needs"),
    (({"name": "actor_only", "actor": {"hidden": [8]}}, *SPACES), r"policy\.actor\.hidden"),
    (("actor_critics", *SPACES), r"policy\.name: .*Did you mean 'actor_critic'"),
    ((3, *SPACES), "policy: got 3; must be a section with a name, or the name"),
    (("actor_critic", SPACES[0]), "pass an environment, or both of its spaces, obs_space and action_space"),
    (("actor_critic", ENV, SPACES[1]), "pass an environment, or both of its spaces"),
    (("actor_critic", *SPACES, "cuda"), "device: got cuda; leave it out: parameters are made later"),
    (({"name": "actor_only", "actor": NETWORK}, SPACES[0], gymnasium.spaces.Dict()), "env: .*action space"),
    *(
        (({"name": "actor_only", "actor": NETWORK}, space, SPACES[1]), "env: .*needs at least one number")
        for space in (
            gymnasium.spaces.Dict(),
            gymnasium.spaces.Dict(a=SPACES[0], b=gymnasium.spaces.Dict()),
            gymnasium.spaces.Box(-1.0, 1.0, (0,)),
        )
    ),
    ids=[
        "no networks",
        "unknown key",
        "unknown name",
        "no section",
        "one space",
        "both",
        "device",
        "odd actions",
        "empty",
        "empty part",
        "no numbers",
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    refused(build_policy, *arguments, match=text)


def test_the_documents_names_are_ejaxs() -> None:
    assert (
        ejax.PPOCfg is ejax.PPOConfig and ejax.GRPOCfg is ejax.GRPOConfig and ejax.AlgorithmCfg is ejax.GradientOptions
    )
    assert ejax.register_algo is ejax.register_algorithm and ejax.build_policy is build_policy
    assert {"actor_critic", "actor_only", "vla"} <= set(ejax.get_registered_policy_names())
    assert {"ppo", "grpo", "apg"} <= set(ejax.get_registered_algo_names())
    assert issubclass(ejax.PPOConfig, ejax.AlgorithmCfg) and issubclass(ejax.PPO, ejax.BaseAlgorithm)
