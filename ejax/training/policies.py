"""From the section ``policy`` of a config to the policy that it names."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
from flax.errors import FlaxError

from ejax.config import ConfigError, PolicyConfig, Problem
from ejax.config.environment import space_problems
from ejax.config.load import parse_policy
from ejax.distributions import action_spec
from ejax.envs.description import EnvDescription, describe
from ejax.policies.calls import apply_policy, first_memory
from ejax.policies.heads import injected, uses_dropout
from ejax.policies.normalize import PolicyStateError, update_normalizer
from ejax.policies.observations import select_observation
from ejax.policies.record import section_problems
from ejax.schema.messages import explain, short_repr
from ejax.schema.trust import trust_strings
from ejax.schema.values import plain
from ejax.training.environments import sample_obs
from ejax.types import Env, HostEnv, Key, Policy, PolicyWithMemory, PyTree


@dataclass(frozen=True)
class Spaces:
    """Spaces that a policy is made for, without the environment."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    description: EnvDescription = field(default_factory=EnvDescription)


def build_policy(
    policy_block: Mapping[str, Any] | str,
    obs_space: gymnasium.Space[Any] | Env | HostEnv,
    action_space: gymnasium.Space[Any] | None = None,
    device: None = None,
    actor: Any = None,
    critic: Any = None,
) -> Policy:
    """Make a policy from a config's section ``policy``, in any spelling, or from its name alone.

    Args:
        obs_space: of one environment; or the environment itself, without ``action_space``.
        device: of EmbodiChain's; arrays are where JAX puts them.
        actor, critic: Flax modules in place of the section's networks.

    Raises:
        ConfigError: a section or spaces that the policy cannot be made from.
        ValueError: a ``device``, or an observation space without an action space.
    """
    if device is not None:
        raise ValueError(f"device: got {device}; leave it out: parameters are made later, where JAX puts them")
    if isinstance(vector := obs_space, gymnasium.vector.VectorEnv):
        from ejax.envs.host.rows import rows_space

        obs_space, action_space = rows_space(vector.single_observation_space), vector.single_action_space
    if isinstance(obs_space, gymnasium.Space) == (action_space is None):
        raise ValueError("pass an environment, or both of its spaces, obs_space and action_space")
    if action_space is None and (isinstance(obs_space, type) or not hasattr(obs_space, "action_space")):
        raise ConfigError([Problem("env", f"got {short_repr(obs_space)}; pass an environment, not its class")])
    block = {"name": policy_block} if isinstance(policy_block, str) else plain(policy_block)
    if not isinstance(block, dict):
        raise ConfigError([Problem("policy", f"got {short_repr(block)}; must be a section with a name, or the name")])
    trust_strings(block)  # the caller's own program
    config, networks = parse_policy(block), {"actor": actor, "critic": critic}
    given = {name: made for name, made in networks.items() if made is not None}
    if problems := [x for x in section_problems(config, config.record) if x.key.removeprefix("policy.") not in given]:
        raise ConfigError(problems)
    env: Any = obs_space
    if action_space is not None:
        env = Spaces(env, action_space)
    return make_policy(config, env, **given)


def make_policy(config: PolicyConfig, env: Env | HostEnv, **networks: Any) -> Policy:
    """Make the policy that the config names, for this environment's spaces. ``networks``: in place of the config's.

    Your own policy class is called with ``policy.cfg`` and whichever of ``action_spec``, ``observation_space``,
    ``action_space``, ``actor``, ``critic`` its constructor takes.

    Raises:
        ConfigError: the action dimension is not the env's, or the constructor refuses the arguments.
    """
    if problems := space_problems(config, env.action_space, env.observation_space):
        raise ConfigError(problems)
    # texts and bounds that a policy may want
    spec, about = action_spec(env.action_space, squash=config.squash_actions), describe(env)
    offered = {
        "action_spec": spec,
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "actor": config.actor and config.actor.network_cfg,
        "critic": config.critic and config.critic.network_cfg,
        "initial_log_std": config.initial_log_std,
        "log_std_range": config.log_std_range,
        "actor_obs_groups": config.obs_groups.actor,
        "critic_obs_groups": config.obs_groups.critic,
        "actor_obs_normalization": config.actor_obs_normalization,
        "critic_obs_normalization": config.critic_obs_normalization,
        "vla_config": config.vla_config,
        "mirror": getattr(env, "mirror", None),
        **config.memories,
        "instructions": about.instructions,
        **networks,
    }
    make = config.record.make
    if config.memories and config.record.with_memory is not None:
        make = config.record.with_memory
        offered |= {f"{name}_width": _width(env, getattr(config.obs_groups, name)) for name in ("actor", "critic")}
        offered |= {} if config.record.has_critic else {"critic": None}  # of such a policy the critic has no network
    accepted = inspect.signature(make).parameters
    if ignored := config.memories.keys() - accepted.keys():
        text = f"{config.name} takes no {', '.join(sorted(ignored))}; leave it out, or use actor_critic or actor_only"
        raise ConfigError([Problem("policy.actor.memory", text)])
    try:
        return make(**{name: value for name, value in offered.items() if name in accepted}, **config.cfg)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("policy", f"{config.name} refuses it: {explain(error)}")]) from error


def check_is_policy(name: str, policy: Any) -> None:
    """Raise ConfigError unless ``policy`` is an object with a callable ``init``, as Flax Linen's modules are."""
    if isinstance(policy, type) or not callable(getattr(policy, "init", None)):
        kind = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        text = f"got {kind}; must be a module of Flax Linen, or ejax.policies.nnx.NnxPolicy(make)"
        raise ConfigError([Problem(name, text)])


def check_own_policy(config: PolicyConfig, policy: Policy, env: Env | HostEnv) -> None:
    """Try all calls of a run on a policy that is not ejax's, by shapes, before anything is compiled.
    Raises ConfigError: random numbers or variables that would be lost, repeated, or never move."""
    if config.record.built_in and not injected(policy):  # ejax's own are tested
        return
    check_is_policy("policy.name", policy)

    def ask_all(key: Key, obs: PyTree) -> None:
        params = policy.init(key, obs)
        memory = {"memory": first_memory(policy, 1)} if isinstance(policy, PolicyWithMemory) else {}
        answer = policy.apply(params, obs, **memory)
        parts = answer if isinstance(answer, tuple | list) else (answer,)
        if len(parts) != 2 + len(memory) or not hasattr(parts[0], "sample") or getattr(parts[1], "shape", ()) != (1,):
            given = ", ".join(f"array {list(x.shape)}" if hasattr(x, "shape") else type(x).__name__ for x in parts)
            text = f"{config.name} gives ({given}) of one row; must give (distribution, value), the value [N]"
            raise ConfigError([Problem("policy.name", text)])
        if uses_dropout(policy):
            apply_policy(policy, params, obs, first_memory(policy, 1), dropout_seed=jnp.zeros(1, jnp.uint32))
        update_normalizer(policy, params, jax.tree.map(lambda x: x[None], obs))

    try:
        jax.eval_shape(ask_all, jax.random.key(0), sample_obs(env, 1))
    except (FlaxError, PolicyStateError) as error:
        remedy = "let its __call__ take dropout_seed or observe; " if isinstance(error, FlaxError) else ""
        text = f"{config.name} keeps or draws what would be lost: {error}; {remedy}see docs/reference/policies.md"
        raise ConfigError([Problem("policy.name", text)]) from error
    except TypeError as error:
        # an error of another kind is the policy's own bug
        if not re.search("unexpected keyword argument '(observe|dropout_seed)'", str(error)):
            raise
        text = f"{config.name} has statistics or dropout that would never be used ({error}); let its __call__ take it"
        raise ConfigError([Problem("policy.name", text)]) from error


def _width(env: Env | HostEnv, groups: tuple[str, ...]) -> int:
    return int(jax.eval_shape(lambda: select_observation(sample_obs(env, 1), groups)).shape[-1])
