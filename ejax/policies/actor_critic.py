"""Networks of an actor, with a learned, state-independent log_std, and of a critic, if there is one.

A network is the config of an MLP or your own Flax Linen module ``[..., F] -> [..., size]``; ``dropout_seed`` and
``observe`` go to a ``__call__`` that takes them. Source: EmbodiChain's ActorCritic and ActorOnly.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.distributions import ActionSpec
from ejax.numerics.kernels import is_small
from ejax.numerics.platforms import by_platform
from ejax.policies.heads import action_distribution, action_head, apply_network
from ejax.policies.mlp import ACTIVATIONS, MLP, NetworkConfig
from ejax.policies.observations import network_input
from ejax.policies.record import PolicyKind
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.types import Array, PyTree


def _hash(policy: Any) -> int:
    networks = [x for x in (policy.actor, getattr(policy, "critic", None)) if not isinstance(x, nn.Module)]
    # without modules, which may hold lists, as those of nn.Sequential
    return hash((type(policy), policy.action_spec, *networks))


class ActorOnly(nn.Module):
    """Actor without a critic, ``obs -> (distribution, zeros [...])``, for GRPO and APG."""

    action_spec: ActionSpec
    actor: NetworkConfig | nn.Module
    """An MLP by its config, or a module that gives [..., ``action_spec.num_outputs``]: means, or logits."""
    initial_log_std: float = 0.0
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    """The standard deviation is exp(clip(log_std, *range)); outside the range the gradient is zero."""
    actor_obs_groups: tuple[str, ...] = ()
    actor_obs_normalization: bool = False

    @nn.compact
    def __call__(
        self, obs: PyTree, *, dropout_seed: Array | None = None, observe: bool | Array = False
    ) -> tuple[Any, Array]:
        x = network_input(self, "actor", obs, observe)
        rows = jax.tree.leaves(obs)[0].shape[:-1]  # of any leaf: all have the rows of the observation
        return action_head(self, x, dropout_seed=dropout_seed, observe=observe), jnp.zeros(rows)

    __hash__ = _hash


class ActorCritic(nn.Module):
    """Actor and critic, ``obs -> (distribution, value [...])``, with the fields of ``ActorOnly`` and the critic's."""

    action_spec: ActionSpec
    actor: NetworkConfig | nn.Module
    critic: NetworkConfig | nn.Module
    """As ``actor``; a module gives [..., 1]."""
    initial_log_std: float = 0.0
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    actor_obs_groups: tuple[str, ...] = ()
    critic_obs_groups: tuple[str, ...] = ()
    """Dotted paths of the critic's part of the observation: it may see more than the actor."""
    actor_obs_normalization: bool = False
    critic_obs_normalization: bool = False
    mirror: Any = None
    """``ejax.envs.locomotion.mirror.Mirror`` of the environment, for PPO's ``mirror_coef``; it does not act by it."""

    @nn.compact
    def __call__(
        self, obs: PyTree, *, dropout_seed: Array | None = None, observe: bool | Array = False, joint: bool = False
    ) -> tuple[Any, Array]:
        """Evaluate ``obs``, leaves [..., F]; without ``dropout_seed`` [...] uint32 there is no dropout. ``joint``: a
        GPU computes both networks as one, which pays for many rows."""
        x = {name: network_input(self, name, obs, observe) for name in ("actor", "critic")}
        if joint and are_alike(self, x):
            outputs = _joint_outputs(self, x, dropout_seed)
            return action_distribution(self, outputs["actor"]), outputs["critic"][..., 0]
        distribution = action_head(self, x["actor"], dropout_seed=dropout_seed, observe=observe)
        value = apply_network(self, "critic", 1, x["critic"], dropout_seed=dropout_seed, observe=observe)
        return distribution, value[..., 0]

    __hash__ = _hash


def section_of(policy: Any, names: tuple[str, ...] = ("actor", "critic")) -> dict[str, Any]:
    """Make the section ``policy`` of a config for the like of ``policy``, with its networks ``names``, but for those
    that are modules."""
    given = {name: getattr(policy, name) for name in names}
    networks = {name: x.model_dump(mode="json") for name, x in given.items() if isinstance(x, NetworkConfig)}
    return {
        "initial_log_std": policy.initial_log_std,
        "log_std_range": list(policy.log_std_range),
        "squash_actions": policy.action_spec.kind == "tanh_normal",
        "obs_groups": {name: list(getattr(policy, f"{name}_obs_groups")) for name in names},
        **{name: {"type": "mlp", "network_cfg": network} for name, network in networks.items()},
        **{f"{name}_obs_normalization": getattr(policy, f"{name}_obs_normalization") for name in names},
    }


POLICY = PolicyKind(
    make=ActorCritic,
    with_memory=ActorCriticWithMemory,
    mlps=("actor", "critic"),
    section_of=section_of,
    exporters={
        ActorCritic: "interop.exporters.mlp:EXPORTER",
        ActorCriticWithMemory: "interop.exporters.memory:EXPORTER",
    },
)
ACTOR_ONLY = PolicyKind(
    make=ActorOnly,
    with_memory=ActorCriticWithMemory,
    mlps=("actor",),
    section_of=partial(section_of, names=("actor",)),
    exporters={ActorOnly: "interop.exporters.mlp:EXPORTER"},
)


def are_alike(policy: Any, features: dict[str, Array]) -> bool:
    """Return whether the networks of ``policy`` that ``features`` names can be computed jointly."""
    configs = [getattr(policy, name) for name in features]
    if not all(isinstance(config, NetworkConfig) for config in configs):
        return False
    return len({x.shape for x in features.values()}) == 1 and len({*map(_hidden, configs)}) == 1


def _joint_outputs(policy: Any, features: dict[str, Array], dropout_seed: Array | None) -> dict[str, Array]:
    """Compute the outputs [..., size] of networks that ``are_alike`` for features [..., F]; a GPU joins small ones."""
    sizes = {"actor": policy.action_spec.num_outputs, "critic": 1}
    configs: dict[str, NetworkConfig] = {name: getattr(policy, name) for name in sizes}
    params = {name: policy.variables["params"][name] for name in sizes}

    def apart(params: dict[str, PyTree], features: dict[str, Array]) -> dict[str, Array]:
        networks = {name: MLP(configs[name], size, parent=None) for name, size in sizes.items()}
        return {name: _apply(network, params[name], features[name], dropout_seed) for name, network in networks.items()}

    def joint(params: dict[str, PyTree], features: dict[str, Array]) -> dict[str, Array]:
        width, config = max(sizes.values()), next(iter(configs.values()))
        widened = [_widened(params[name], len(config.hidden_sizes), width) for name in sizes]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *widened)
        first = stacked["linear_0"]
        kernel = jnp.concatenate([first["kernel"], first["bias"][:, None]], axis=1)
        stacked = {**stacked, "linear_0": {"kernel": kernel, "bias": jnp.zeros_like(first["bias"])}}
        x = jnp.stack([features[name] for name in sizes])
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
        network = MLP(_hidden(config), width, parent=None)
        outputs = jax.vmap(lambda params, x: _apply(network, params, x, dropout_seed))(stacked, x)
        cut = {name: output[..., : sizes[name]] for name, output in zip(sizes, outputs, strict=True)}
        return {name: ACTIVATIONS[configs[name].last_activation or "none"](x) for name, x in cut.items()}

    outputs: dict[str, Array] = (by_platform(cpu=apart, gpu=joint) if is_small(params) else apart)(params, features)
    return outputs


def _hidden(config: NetworkConfig) -> NetworkConfig:
    """Keep of a config what concerns the hidden layers of existing parameters."""
    return config.model_copy(update={"last_activation": None, "orthogonal_init": None})


def _apply(network: MLP, params: PyTree, x: Array, dropout_seed: Array | None) -> Array:
    output: Array = network.apply({"params": params}, x, dropout_seed)  # type: ignore[assignment]  # it returns no state
    return output


def _widened(params: PyTree, last: int, width: int) -> PyTree:
    """Fill the output of an MLP's parameters up to ``width`` with zeros."""

    def widen(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    return {**params, f"linear_{last}": jax.tree.map(widen, params[f"linear_{last}"])}
