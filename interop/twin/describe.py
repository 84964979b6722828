"""The spec of an ejax policy: everything that its twin needs except the weights."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from ejax.policies import ActorCritic, ActorOnly, NetworkConfig
from ejax.policies.vision import KERNELS, STRIDES, VisionPolicy
from ejax.types import Env, HostEnv
from interop.artefacts.cases import leaves_of
from interop.twin.spec import EncoderSpec, NetworkSpec, PolicySpec


def spec_of(policy: ActorCritic | ActorOnly | VisionPolicy, env: Env | HostEnv) -> PolicySpec:
    """
    Raises:
        ValueError: an image that is not uint8 [height, width, channels], or an observation without it.
    """
    leaves = leaves_of(_observed(env))
    action = policy.action_spec
    about_actions: dict[str, Any] = {
        "head": action.kind,
        "sizes": action.sizes,
        "low": action.low,
        "high": action.high,
        "log_std_range": policy.log_std_range,
    }
    if isinstance(policy, VisionPolicy):
        return PolicySpec(**_vision_fields(policy, leaves), **about_actions)
    observation = {name: int(x.shape[-1]) for name, x in leaves.items()}
    critic = None
    if isinstance(policy, ActorCritic):
        inputs = _inside(policy.critic_obs_groups, observation)
        critic = _network_spec(policy.critic, inputs, policy.critic_obs_normalization)
    inputs = _inside(policy.actor_obs_groups, observation)
    actor = _network_spec(policy.actor, inputs, policy.actor_obs_normalization)
    return PolicySpec(observation=observation, actor=actor, critic=critic, **about_actions)


def _vision_fields(policy: VisionPolicy, leaves: Mapping[str, Any]) -> dict[str, Any]:
    images = {}
    for name in policy.images:
        image = leaves.get(name)
        if image is None or image.dtype != np.uint8 or len(image.shape) != 3:
            what = "is not there" if image is None else f"is {image.dtype}{list(image.shape)}"
            raise ValueError(f"the image '{name}' {what}; an export takes uint8[height, width, channels]")
        images[name] = tuple(map(int, image.shape))
    numbers = {name: int(x.shape[-1]) for name, x in leaves.items() if name not in images}
    starts = np.cumsum([0, *numbers.values()]).tolist()
    unread = {
        name: tuple(sorted({i - start for i in policy.hidden_entries if start <= i < end}))
        for name, (start, end) in zip(numbers, pairwise(starts), strict=True)
    }
    read = tuple(name for name, width in numbers.items() if len(unread[name]) < width)
    critic = None if policy.critic is None else _network_spec(policy.critic, tuple(numbers), False)
    return {
        "observation": numbers,
        "images": images,
        "encoder": EncoderSpec(channels=policy.channels, kernels=KERNELS, strides=STRIDES),
        "actor": _network_spec(policy.actor, read, policy.actor_obs_normalization),
        "critic": critic,
        "unread": {name: entries for name, entries in unread.items() if entries},
    }


def _observed(env: Env | HostEnv) -> Any:
    """A pytree with the shapes of one observation."""
    if isinstance(env, HostEnv):
        return env.observation_space
    return jax.eval_shape(lambda: env.reset(jax.random.key(0))[1])


def _inside(groups: tuple[str, ...], observation: Mapping[str, int]) -> tuple[str, ...]:
    """The arrays that these groups hold, in their order."""
    inside = [[name for name in observation if name == group or name.startswith(f"{group}.")] for group in groups]
    return tuple(name for names in inside for name in names) if groups else tuple(observation)


def _network_spec(network: NetworkConfig, inputs: tuple[str, ...], normalized: bool) -> NetworkSpec:
    return NetworkSpec(
        inputs=inputs,
        normalized=normalized,
        hidden_sizes=network.hidden_sizes,
        activation=network.activation,
        last_activation=network.last_activation,
        use_layernorm=network.use_layernorm,
        dropout_p=network.dropout_p,
    )
