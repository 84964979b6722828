"""Export of ``VisionPolicy``: actor and critic share the encoders and the normalizer of all numbers."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejax.policies.vision import KERNELS, STRIDES, VisionPolicy, encoder_name
from ejax.types import Array, PyTree
from interop.artefacts.cases import nest_inputs
from interop.exporters.entries import Entry
from interop.exporters.mlp import action_fields, actor_fields, network_entries, network_spec
from interop.exporters.record import Exporter
from interop.twin.spec import EncoderSpec, Paths, PolicySpec


def _describe(policy: VisionPolicy, leaves: Mapping[str, Any], paths: Paths) -> tuple[Any, PolicySpec]:
    images = image_shapes(policy.images, leaves)
    numbers = {name: int(x.shape[-1]) for name, x in leaves.items() if name not in images}
    if not numbers:
        policy = policy.clone(actor_obs_normalization=False)  # it is for numbers, and there are none
    starts = np.cumsum([0, *numbers.values()]).tolist()
    unread = {
        name: tuple(sorted({i - start for i in policy.hidden_entries if start <= i < end}))
        for name, (start, end) in zip(numbers, pairwise(starts), strict=True)
    }
    read = tuple(name for name, width in numbers.items() if len(unread[name]) < width)
    spec = PolicySpec(
        observation=numbers,
        images=images,
        encoder=EncoderSpec(channels=policy.channels, kernels=KERNELS, strides=STRIDES),
        actor=network_spec(policy.actor, read, policy.actor_obs_normalization),
        critic=None if policy.critic is None else network_spec(policy.critic, tuple(numbers), False),
        unread={name: entries for name, entries in unread.items() if entries},
        paths=paths,
        **action_fields(policy),
    )
    return policy, spec


def image_shapes(names: tuple[str, ...], leaves: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Height, width and channels of images. Raises ValueError: one that is not there, or not uint8 [height, width,
    channels]."""
    images = {}
    for name in names:
        image = leaves.get(name)
        if image is None or image.dtype != np.uint8 or len(image.shape) != 3:
            what = "is not there" if image is None else f"is {image.dtype}{list(image.shape)}"
            raise ValueError(f"the image '{name}' {what}; an export takes uint8[height, width, channels]")
        height, width, channels = map(int, image.shape)
        images[name] = (height, width, channels)
    return images


def _policy_of(spec: PolicySpec) -> VisionPolicy | None:
    if spec.encoder is None:
        return None
    unread = set(range(sum(spec.observation.values()))) - set(spec.read_of_all)
    channels: Any = spec.encoder.channels
    fields = {"images": tuple(spec.images), "channels": channels, "hidden_entries": tuple(sorted(unread))}
    return VisionPolicy(**actor_fields(spec), **fields)


def _tensors(policy: VisionPolicy) -> Iterator[Entry]:
    encoders = [e for name in policy.images for e in _encoder_entries(encoder_name(name), policy.channels)]
    # actor and critic share the encoders, which stand in front of both
    return network_entries(policy, lambda network: encoders if network == "actor" else ())


def _encoder_entries(name: str, channels: tuple[int, ...]) -> Iterator[Entry]:
    inputs: int | None = None
    for i, (outputs, size) in enumerate(zip(channels, KERNELS, strict=True)):
        module = ("params", name, f"conv_{i}", "linear_0")  # a product with patches in Flax
        yield Entry(f"{name}.{i}.weight", (*module, "kernel"), "convolution", (outputs, inputs, size, size))
        yield Entry(f"{name}.{i}.bias", (*module, "bias"), "vector", (outputs,))
        inputs = outputs


def _observation(spec: PolicySpec, inputs: dict[str, Array]) -> PyTree:
    """Make the observation, with zeros for the numbers that the actor does not read."""
    leaves = {name: inputs[name] for name in spec.images}
    rows = next(iter(inputs.values())).shape[:1]
    for name, width in spec.observation.items():
        leaves[name] = jnp.zeros((*rows, width))
        if name in inputs:
            leaves[name] = leaves[name].at[:, np.array(spec.read(name))].set(inputs[name])
    return nest_inputs(leaves, spec.paths)


EXPORTER = Exporter(
    describe=_describe,
    actor_of=lambda policy: policy.clone(critic=None),
    tensors=_tensors,
    observation=_observation,
    policy_of=_policy_of,
)
