"""Squashed Gaussian actor whose deviation depends on the observation, and critics of actions, for off-policy learning.

Parameters: ``actor`` (an MLP with 2·A outputs: means, then log-deviations), ``critic`` (an MLP, its leaves stacked
[critics, ...]), and the logarithms of weights that an algorithm may learn: ``log_alpha``, the entropy's, and
``log_kl_coef``, of the divergence from the policy that acted.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.typing import NDArray

from ejax.distributions import ActionSpec
from ejax.policies.actor_critic import section_of
from ejax.policies.heads import clip_like_torch
from ejax.policies.mlp import MLP, NetworkConfig
from ejax.policies.observations import network_input
from ejax.policies.record import PolicyKind
from ejax.schema.problems import Problem
from ejax.types import Array, Params, PyTree

_DENSE = ("kernel", "bias")


class ActorQ(nn.Module):
    """Actor and critics of actions: ``obs -> (distribution, zeros [...])``, an ``ActionValuePolicy``."""

    action_spec: ActionSpec
    """Bounded, squashed actions."""
    actor: NetworkConfig
    critic: NetworkConfig
    initial_log_std: float = 0.0
    """Added to the network's output for the log-deviation."""
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    """Bounds of the log-deviation; outside them its gradient is zero."""
    initial_alpha: float = 1.0
    """The entropy's weight at the start, where an algorithm learns it."""
    initial_kl_coef: float | None = None
    """The divergence's weight at the start. None: no algorithm learns it."""
    num_critics: int = 2
    num_bins: int | None = None
    """Outputs of a critic: logits of a distribution over returns. None: one value."""
    actor_obs_groups: tuple[str, ...] = ()
    critic_obs_groups: tuple[str, ...] = ()
    """Dotted paths of the critics' part of the observation: they may see more than the actor."""
    actor_obs_normalization: bool = False
    critic_obs_normalization: bool = False

    @nn.compact
    def __call__(self, obs: PyTree, *, observe: bool | Array = False) -> tuple[Any, Array]:
        """Return the distribution of actions [..., A] for observations with leaves [..., F], and zeros [...]."""
        x = network_input(self, "actor", obs, observe)
        output = MLP(self.actor, 2 * self.action_spec.num_outputs, name="actor")(x)
        mean, log_std = jnp.split(output, 2, axis=-1)
        log_std = clip_like_torch(log_std + self.initial_log_std, *self.log_std_range)
        self.param("log_alpha", nn.initializers.constant(math.log(self.initial_alpha)), ())
        if self.initial_kl_coef is not None:
            self.param("log_kl_coef", nn.initializers.constant(math.log(self.initial_kl_coef)), ())
        if self.is_initializing() or observe is not False:  # the critics' parameters, and their normalizer
            self.action_values(obs, jnp.zeros_like(mean), observe=observe)
        return self.action_spec.distribution(mean, log_std), jnp.zeros(mean.shape[:-1])

    @nn.compact
    def action_values(self, obs: PyTree, action: Array, *, observe: bool | Array = False) -> Array:
        """Evaluate ``action`` [..., A], in the environment's units, by each critic: [critics, ...], of distributional
        ones logits [critics, ..., bins]."""
        x = network_input(self, "critic", obs, observe)
        x = jnp.concatenate([x, self.action_spec.unit_action(action)], axis=-1)
        stacked = nn.vmap(
            MLP, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=self.num_critics
        )
        output = stacked(self.critic, self.num_bins or 1, name="critic")(x)
        return output[..., 0] if self.num_bins is None else output


def load_actor_from(policy: ActorQ, params: Params, saved: Mapping[str, NDArray[Any]], *, squashed: bool) -> Params:
    """Take over the actor of an ``actor_critic`` or ``actor_only``, with its deviation and its normalizer.

    Args:
        saved: its parameters by name, such as ``params.actor.linear_0.kernel``, without a memory.
        squashed: its actions are; else tanh bends those that come near the bounds.

    Raises:
        ValueError: arrays of other names or shapes than this actor's.
    """
    last = f"linear_{len(policy.actor.hidden_sizes)}"
    wanted = {f"params.{name}": x for name, x in flatten_dict({"actor": params["params"]["actor"]}, sep=".").items()}
    statistics = params.get("normalizer", {}).get("actor_obs_normalizer", {})
    normalizer = {f"normalizer.actor_obs_normalizer.{name}": x for name, x in statistics.items()}
    size = policy.action_spec.num_actions
    heads = {
        f"params.actor.{last}.{name}": (*wanted[f"params.actor.{last}.{name}"].shape[:-1], size) for name in _DENSE
    }
    shapes = {name: x.shape for name, x in (wanted | normalizer).items()} | heads | {"params.log_std": (size,)}
    own = {name: x for name, x in saved.items() if not name.split(".")[1].startswith("critic")}
    there = {name: x.shape for name, x in own.items()}
    if differing := sorted(name for name in there.keys() | shapes.keys() if there.get(name) != shapes.get(name)):
        each = (f"{name} is {there.get(name, 'missing')}, needed {shapes.get(name, 'none')}" for name in differing)
        raise ValueError("; ".join(each))
    low, high = (np.asarray(bound, np.float32) for bound in (policy.action_spec.low, policy.action_spec.high))
    center, width = (0.0, 1.0) if squashed else ((low + high) / 2.0, (high - low) / 2.0)
    kernel, bias = (own.pop(f"params.actor.{last}.{name}") for name in _DENSE)
    log_std = own.pop("params.log_std") - np.log(width) - policy.initial_log_std
    own[f"params.actor.{last}.kernel"] = np.concatenate([kernel / width, np.zeros_like(kernel)], axis=-1)
    own[f"params.actor.{last}.bias"] = np.concatenate([(bias - center) / width, log_std])
    flat = flatten_dict(params, sep=".")
    return unflatten_dict(flat | {name: jnp.asarray(x, flat[name].dtype) for name, x in own.items()}, sep=".")


def loaded_actor_note(*, squashed: bool) -> str:
    """Write a message about what ``load_actor_from`` leaves out."""
    bent = "" if squashed else ", whose actions tanh bends where they come near the bounds"
    return f"only its actor{bent}: the critics start afresh"


def _problems(section: Any) -> Iterator[Problem]:
    if not section.squash_actions:
        text = "got false; actor_q acts between the bounds of the action space: set it to true"
        yield Problem("policy.squash_actions", text)
    for name in ("actor", "critic"):
        network = getattr(section, name) and getattr(section, name).network_cfg
        if network is not None and network.dropout_p > 0.0:
            text = f"got {network.dropout_p}; actor_q has no dropout: leave it out"
            yield Problem(f"policy.{name}.network_cfg.dropout_p", text)


def _section_of(policy: ActorQ) -> dict[str, Any]:
    options = ("initial_alpha", "initial_kl_coef", "num_critics", "num_bins")
    return {**section_of(policy), "cfg": {name: getattr(policy, name) for name in options}}


POLICY = PolicyKind(
    make=ActorQ,
    mlps=("actor", "critic"),
    takes_cfg=True,
    problems=_problems,
    section_of=_section_of,
    load_actor=load_actor_from,
    loaded_actor_note=loaded_actor_note,
    exporters={ActorQ: "interop.exporters.mlp:ACTOR_Q"},
)
