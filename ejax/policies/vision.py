"""A policy that sees images and numbers: a small convolutional encoder with a spatial softmax, then MLPs.

Each channel of the last convolution becomes E_softmax[(x, y)] in ±1, the place of its activity.
Source: Levine et al. 2016, End-to-End Training of Deep Visuomotor Policies.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from pydantic import NonNegativeInt, PositiveInt

from ejax.distributions import ActionSpec
from ejax.policies.heads import action_head
from ejax.policies.mlp import MLP, NetworkConfig
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.observations import flatten_observation, part_of, without
from ejax.policies.record import PolicyKind
from ejax.schema.paths import unique
from ejax.types import Array, PyTree

KERNELS = (4, 3, 3)
STRIDES = (2, 2, 1)
_LINEAR = NetworkConfig(hidden_sizes=())


class VisionPolicy(nn.Module):
    """Actor and critic that read pictures, ``obs -> (distribution, value [...])``.

    Observations are ``{name: image or numbers}``. Numbers [..., F] are concatenated with the encoders' features.
    Actions may be chunks (``ejax.envs.wrappers.action_chunk``). Raises ValueError for an observation without one of
    ``images``, or not one number in ``channels`` for each convolution.
    """

    action_spec: ActionSpec
    actor: NetworkConfig
    critic: NetworkConfig | None = None
    """None: the value is 0."""
    images: tuple[str, ...] = ("image",)
    """Dotted paths of uint8 [..., H, W, 3] (``sensor.cam.color``); each has a separate encoder."""
    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 32, 32)
    hidden_entries: tuple[NonNegativeInt, ...] = ()
    """Entries of the concatenated numbers that the critic reads, and the actor must find in the image."""
    initial_log_std: float = 0.0
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    actor_obs_normalization: bool = False

    @nn.compact
    def __call__(
        self, obs: PyTree, *, dropout_seed: Array | None = None, observe: bool | Array = False
    ) -> tuple[Any, Array]:
        if len(self.channels) != len(KERNELS):
            text = f"policy.cfg.channels needs {len(KERNELS)} numbers, one a convolution; got {self.channels}"
            raise ValueError(text)
        encoders = unique(((encoder_name(image), image) for image in self.images), "encoders")
        seen = [ImageEncoder(self.channels, name=name)(part_of(obs, image)) for name, image in encoders.items()]
        others = without(obs, self.images)
        # of pictures alone, none
        numbers = flatten_observation(others) if others else jnp.zeros((*seen[0].shape[:-1], 0))
        if self.actor_obs_normalization and others:
            numbers = ObsNormalizer(name="actor_obs_normalizer")(numbers, observe=observe)
        # static: entries that are not read cost nothing
        kept = [i for i in range(numbers.shape[-1]) if i not in self.hidden_entries]
        known = jnp.concatenate([*seen, numbers[..., jnp.array(kept, int)]], axis=-1)
        distribution = action_head(self, known, dropout_seed=dropout_seed)
        if self.critic is None:
            return distribution, jnp.zeros(known.shape[:-1])
        known = jnp.concatenate([*seen, numbers], axis=-1)
        return distribution, MLP(self.critic, 1, name="critic")(known, dropout_seed=dropout_seed)[..., 0]


def encoder_name(image: str) -> str:
    """Name the module of an image's encoder; in torch, no module has a dot in its name."""
    return f"encoder_{image.replace('.', '_')}"


class ImageEncoder(nn.Module):
    """uint8 [..., H, W, 3] -> [..., 2·channels], float32."""

    channels: tuple[int, int, int]

    @nn.compact
    def __call__(self, image: Array) -> Array:
        x = image.astype(jnp.float32) / 127.5 - 1.0
        for i, (size, kernel, stride) in enumerate(zip(self.channels, KERNELS, STRIDES, strict=True)):
            x = nn.relu(MLP(_LINEAR, size, name=f"conv_{i}")(patches(x, kernel, stride)))
        return spatial_softmax(x)


def patches(x: Array, kernel: int, stride: int) -> Array:
    """Cut the patches of a convolution: [..., H, W, C] -> [..., H/stride, W/stride, kernel²·C], zeros outside. The
    convolution is then a matrix product; XLA's gradient of a convolution takes a CPU 26 times as long."""
    *_, height, width, _ = x.shape
    before = (kernel - 1) // 2  # as TensorFlow's "SAME" for a stride of 1
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(before, kernel - 1 - before)] * 2 + [(0, 0)])
    shifts = [(i, j) for i in range(kernel) for j in range(kernel)]
    return jnp.concatenate([x[..., i : i + height : stride, j : j + width : stride, :] for i, j in shifts], axis=-1)


def spatial_softmax(x: Array) -> Array:
    """Compute each channel's expected row and column in ±1: [..., H, W, C] -> [..., 2·C]."""
    *batch, height, width, channels = x.shape
    share = jax.nn.softmax(x.reshape(*batch, height * width, channels), axis=-2).reshape(x.shape)
    row = jnp.einsum("...hwc,h->...c", share, jnp.linspace(-1.0, 1.0, height))
    column = jnp.einsum("...hwc,w->...c", share, jnp.linspace(-1.0, 1.0, width))
    return jnp.concatenate([row, column], axis=-1)


POLICY = PolicyKind(
    make=VisionPolicy,
    images=lambda section: section.cfg.get("images", ("image",)),
    exporters={VisionPolicy: "interop.exporters.vision:EXPORTER"},
)
