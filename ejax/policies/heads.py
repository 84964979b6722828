"""Networks of policies, as a config or as your own Flax modules, and the action distribution at the actor's end."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.distributions import ActionSpec, action_spec
from ejax.policies.calls import DroppingPolicy, takes
from ejax.policies.mlp import MLP, NetworkConfig
from ejax.policies.normalize import PolicyStateError
from ejax.schema.problems import Problem
from ejax.types import Array, Policy


def action_head(module: Any, x: Array, *, dropout_seed: Array | None, observe: bool | Array = False) -> Any:
    """Make the distribution for features [..., F], with fields and parameters of ``module``, such as ``ActorOnly``."""
    size = module.action_spec.num_outputs
    return action_distribution(
        module, apply_network(module, "actor", size, x, dropout_seed=dropout_seed, observe=observe)
    )


def action_distribution(module: Any, output: Array) -> Any:
    """Make the distribution for outputs [..., size] of the actor, with ``log_std`` of ``module``."""
    if not module.action_spec.continuous:
        return module.action_spec.distribution(output, None)
    log_std = module.param("log_std", nn.initializers.constant(module.initial_log_std), module.action_spec.sizes)
    return module.action_spec.distribution(output, clip_like_torch(log_std, *module.log_std_range))


def apply_network(
    policy: Any, name: str, size: int, x: Array, *, dropout_seed: Array | None, observe: bool | Array = False
) -> Array:
    """Compute the output [..., size] of the network that the field ``name`` of ``policy`` is, for features [..., F].

    Raises TypeError for a field of another kind, ValueError for a module's output of another shape, PolicyStateError
    for a module's statistics that would never move.
    """
    network = getattr(policy, name)
    if isinstance(network, NetworkConfig):
        return MLP(network, size, name=name)(x, dropout_seed=dropout_seed)
    if not isinstance(network, nn.Module):
        text = f"{name} must be a NetworkConfig or a Flax Linen module, got a {type(network).__name__}"
        raise TypeError(f"{text}; for NNX, pass flax.nnx.bridge.to_linen(Module, *arguments)")
    kind: Any = type(network)
    given = {"dropout_seed": dropout_seed, "observe": observe}
    output = network(x, **{keyword: value for keyword, value in given.items() if takes(kind, keyword)})
    kept = sorted({"normalizer", "batch_stats"} & network.variables.keys())
    if observe is not False and kept and not takes(kind, "observe"):
        text = f"{name}, a {type(network).__name__}, has statistics ({', '.join(kept)}) that would never move"
        raise PolicyStateError(f"{text}: let its __call__ take observe, and move them where that is given")
    if output.shape != (*x.shape[:-1], size):
        text = f"{name}, a {type(network).__name__}, gives {list(output.shape)} for features {list(x.shape)}"
        raise ValueError(f"{text}, must give {[*x.shape[:-1], size]}: {size} numbers for each row")
    return output


def injected(policy: Any) -> dict[str, nn.Module]:
    """Find the networks of a policy that are Flax modules of the caller's, by name."""
    networks = {name: getattr(policy, name, None) for name in ("actor", "critic")}
    return {name: network for name, network in networks.items() if isinstance(network, nn.Module)}


def uses_dropout(policy: Any) -> bool:
    """Return whether a policy drops units in training; your own then takes ``dropout_seed``."""
    if isinstance(policy, DroppingPolicy):
        return policy.drops
    kind: Any = type(policy)
    if not kind.__module__.startswith("ejax."):
        return takes(kind, "dropout_seed")
    memories = [getattr(policy, f"{name}_memory", None) for name in ("actor", "critic")]
    networks = [getattr(policy, name, None) for name in ("actor", "critic")]
    networks += [memory.encoder for memory in memories if memory is not None]
    return any(map(_drops, networks))


def _drops(network: NetworkConfig | nn.Module | None) -> bool:
    config = network.config if isinstance(network, MLP) else network
    if isinstance(config, NetworkConfig):
        return config.dropout_p > 0.0
    kind: Any = type(config)
    return config is not None and takes(kind, "dropout_seed")


def clip_like_torch(x: Array, low: float, high: float) -> Array:
    """Clip as torch.clamp: the gradient is 1 on the bounds too; ``jnp.clip`` halves it."""
    outside = (x < low) | (x > high)
    return jnp.where(outside, jax.lax.stop_gradient(jnp.clip(x, low, high)), x)  # outside, the gradient is 0


def acting_problems(policy: Policy, space: Any) -> Iterator[Problem]:
    """Refuse a policy that was made for actions of another space; one without an ``action_spec`` may act in any."""
    made_for = getattr(policy, "action_spec", None)
    if not isinstance(made_for, ActionSpec):
        return
    wanted = action_spec(space)
    kinds = {"continuous" if each.continuous else each.kind for each in (made_for, wanted)}
    if len(kinds) > 1 or made_for.sizes != wanted.sizes:
        gives = f"{made_for.num_actions} numbers" if made_for.continuous else f"choices among {made_for.sizes}"
        text = f"got {type(policy).__name__}, which acts by {gives}, but actions are of {space}; build it for them"
        yield Problem("policy", text)
