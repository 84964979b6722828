"""The spec of an ejax policy: everything that its twin needs except the weights."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import jax
import numpy as np

from ejax.policies import ActorCritic, ActorOnly, NetworkConfig
from ejax.policies.pretrained.efficientnet import BLOCKS, blocks_to
from ejax.policies.recurrence import MemoryConfig
from ejax.policies.vision import KERNELS, STRIDES, VisionPolicy
from ejax.policies.vla.network import COLOUR, CRITIC, FREQUENCIES, NEAREST, SENTENCE_FEATURES, SHARPNESS
from ejax.policies.vla.policy import LOG_STD_RANGE, VLAPolicy
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.types import Env, HostEnv
from interop.artefacts.cases import leaves_of
from interop.twin.spec import MEMORY, NEXT_MEMORY, EncoderSpec, MemorySpec, NetworkSpec, PolicySpec
from interop.twin.vla_spec import NOISE, TOKENS, BlockSpec, ImageTokensSpec, VLASpec


def spec_of(policy: ActorCritic | ActorOnly | ActorCriticWithMemory | VisionPolicy, env: Env | HostEnv) -> PolicySpec:
    """
    Raises:
        ValueError: an image that is not uint8 [height, width, channels], or an observation without it; with a memory,
            a part of a name that an export has for something else.
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
    critic = memory = critic_memory = None
    if isinstance(policy, ActorCriticWithMemory):
        if taken := {MEMORY, NEXT_MEMORY} & observation.keys():
            raise ValueError(
                f"an export has inputs of its own called {', '.join(sorted(taken))}; rename the observation's"
            )
        memory = _memory_spec(policy.actor_memory, policy.actor_width)
        if policy.critic is not None and policy.critic_memory.type != "none":
            critic_memory = _memory_spec(policy.critic_memory, policy.critic_width)
    if isinstance(policy, ActorCritic | ActorCriticWithMemory) and policy.critic is not None:
        inputs = _inside(policy.critic_obs_groups, observation)
        critic = _network_spec(policy.critic, inputs, policy.critic_obs_normalization)
    inputs = _inside(policy.actor_obs_groups, observation)
    actor = _network_spec(policy.actor, inputs, policy.actor_obs_normalization)
    memories: dict[str, Any] = {"memory": memory, "critic_memory": critic_memory}
    return PolicySpec(observation=observation, actor=actor, critic=critic, **memories, **about_actions)


def vla_spec_of(policy: VLAPolicy, env: Env | HostEnv) -> VLASpec:
    """
    Raises:
        ValueError: an image that is not uint8 [height, width, channels], an observation without a part, or a part of a
            name that an export has for something else.
    """
    leaves, model = leaves_of(_observed(env)), policy.model
    if taken := {TOKENS, NOISE} & {*model.images, *model.numbers}:
        raise ValueError(f"an export has inputs of its own called {', '.join(sorted(taken))}; rename the observation's")
    sentence = bytes(policy.instruction).decode() if policy.instruction is not None else None
    flow = model.head.type == "flow"
    return VLASpec(
        images=_image_shapes(model.images, leaves),
        observation={name: int(leaves[name].shape[-1]) for name in sorted(model.numbers)},
        text=model.text,
        instruction=sentence,
        max_words=policy.words.max_words,
        num_tokens=policy.words.num_tokens,
        text_mean=model.text_encoder.summary == "mean",
        sentences=policy.sentences,
        sentence_tokens=tuple(tuple(policy.words.encode(sentence).tolist()) for sentence in policy.sentences),
        sentence_width=SENTENCE_FEATURES if policy.sentences else 0,
        image_encoder=_image_tokens_spec(policy),
        normalized=policy.normalize,
        width=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        mlp_ratio=model.mlp_ratio,
        horizon=policy.horizon,
        action_dim=policy.action_dim,
        head="flow" if flow else "normal",
        num_steps=model.head.num_steps if flow else 0,
        frequencies=FREQUENCIES if flow else (),
        nearest=NEAREST,
        log_std_range=LOG_STD_RANGE,
        critic_sizes=CRITIC.hidden_sizes if model.critic else (),
    )


def _image_tokens_spec(policy: VLAPolicy) -> ImageTokensSpec:
    config = policy.model.image_encoder
    if config.type == "patches":
        return ImageTokensSpec(kind="patches", patch_size=config.patch_size)
    if config.type == "efficientnet":
        blocks = tuple(BlockSpec(**block._asdict()) for block in BLOCKS[: blocks_to(config.stride)])
        return ImageTokensSpec(kind="efficientnet", blocks=blocks)
    convolutions = EncoderSpec(channels=config.channels, kernels=KERNELS, strides=STRIDES)
    return ImageTokensSpec(kind="keypoints", convolutions=convolutions, colour=COLOUR, sharpness=SHARPNESS)


def _image_shapes(names: tuple[str, ...], leaves: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    images = {}
    for name in names:
        image = leaves.get(name)
        if image is None or image.dtype != np.uint8 or len(image.shape) != 3:
            what = "is not there" if image is None else f"is {image.dtype}{list(image.shape)}"
            raise ValueError(f"the image '{name}' {what}; an export takes uint8[height, width, channels]")
        height, width, channels = map(int, image.shape)
        images[name] = (height, width, channels)
    return images


def _vision_fields(policy: VisionPolicy, leaves: Mapping[str, Any]) -> dict[str, Any]:
    images = _image_shapes(policy.images, leaves)
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


def _memory_spec(config: MemoryConfig, num_observed: int) -> MemorySpec:
    if not config.remembers:
        return MemorySpec(type="actor")
    if config.type == "history":
        return MemorySpec(type="history", size=config.size(num_observed), length=config.length or 0)
    encoder = None if config.encoder is None else _network_spec(config.encoder, (), False)
    kind: Literal["gru", "lstm"] = "gru" if config.type == "gru" else "lstm"
    return MemorySpec(
        type=kind, size=config.size(num_observed), width=config.width, depth=config.depth, encoder=encoder
    )


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
