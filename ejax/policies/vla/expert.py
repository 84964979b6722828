"""π0 and SmolVLA: a language model reads pictures and words once, an expert with its own weights acts on its keys.

    prefix   SigLIP's tokens of each picture, the words' (SmolVLA: and the state's) through the language model
    suffix   (π0: the state's token and) K tokens of noisy actions with the time, through the expert: each of its blocks
             attends to the same block's keys and values of the prefix and to its own; every second one of SmolVLA's to
             the prefix alone

π0's actions attend to each other in both directions, SmolVLA's to earlier ones. The flow's time is what is left: 1 at
noise, 0 at actions; its velocity points from noise to actions, theirs the other way. Sources: Black et al. 2024, π0;
Shukor et al. 2025, SmolVLA; lerobot 0.6.1, with whose numbers ``tests/policies/test_lerobot_models.py`` compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from ejax.policies.mlp import MLP, widen
from ejax.policies.pretrained.transformer import Cache, Patches, Stack, Transformer, time_features
from ejax.policies.vla.network import CRITIC, Linear
from ejax.types import Array

Kind = Literal["pi0", "smolvla"]
Context: TypeAlias = tuple[tuple[Cache, ...], Array, Array, Array]
"""Keys and values of each block of the prefix, presence [B, P] bool of its tokens, π0's token of the state [B, W], and
the value [B], 0 without a critic."""


@dataclass(frozen=True)
class ExpertSpec:
    """All that the network's shapes depend on; hashable."""

    kind: Kind
    vision: Stack
    language: Stack
    expert: Stack
    patch: int
    """Edge of a square, pixels."""
    side: int
    """Squares of a picture in each direction."""
    shuffle: int
    """Squares that become one token, in each direction."""
    vocabulary: int
    chunk: int = 50
    max_state: int = 32
    max_action: int = 32
    periods: tuple[float, float] = (4e-3, 4.0)
    """The shortest and longest of the flow's time."""
    state_dim: int = 32
    """Numbers of the robot's state; those up to ``max_state`` are zeros."""
    action_dim: int = 32
    """Numbers of the robot's action; those up to ``max_action`` are not executed."""
    horizon: int = 50
    """Actions of a chunk that the environment gets."""
    torch_dtype: str = "float32"
    remat: bool = False
    critic: bool = False


class ExpertNetwork(nn.Module):
    """``encode`` observations, then the ``velocity`` of a flow of normalized chunks [B, K, A]; ``to_env`` and
    ``to_model`` convert chunks."""

    spec: ExpertSpec

    def setup(self) -> None:
        s = self.spec
        dtype: Any = None if s.torch_dtype == "float32" else jnp.dtype(s.torch_dtype)
        self.patches = Patches(s.patch, s.side, s.vision.width, dtype)
        self.vision = Transformer(s.vision, dtype, s.remat)
        self.connector = nn.Dense(s.language.width, dtype=dtype, use_bias=s.kind == "pi0")
        self.words = nn.Embed(s.vocabulary, s.language.width)
        self.language, self.expert = (Transformer(stack, dtype, s.remat) for stack in (s.language, s.expert))
        self.state_in = Linear(s.expert.width if s.kind == "pi0" else s.language.width)
        self.action_in, self.action_out = Linear(s.expert.width), Linear(s.max_action)
        self.time_in, self.time_out = Linear(s.expert.width), Linear(s.expert.width)
        if s.critic:  # neither of the published models has one
            self.critic = MLP(CRITIC, 1)
        self.units = {
            name: tuple(self.variable("frozen", f"{name}_{part}", start, size) for part, start in _UNITS.items())
            for name, size in (("state", s.state_dim), ("action", s.action_dim))
        }

    def encode(self, pictures: tuple[Array, ...], token: Array, read: Array, state: Array) -> Context:
        """Compute the suffix's context.

        Args:
            pictures: of each camera, uint8 [B, H, W, 3].
            token: of the instruction, int [B, L]; ``read`` [B, L] bool is False for padding.
            state: [B, state_dim], in the robot's units.
        """
        prefix, there, mask, state = self.prefix(pictures, token, read, state)
        read_token, caches = self.language(prefix, mask, jnp.cumsum(there, axis=1) - 1)
        value = jnp.zeros(len(there))
        if self.spec.critic:
            weight = there[..., None].astype(prefix.dtype)  # padding has no part in the mean; π0's prefix has no state
            mean = jnp.sum(read_token * weight, axis=1) / jnp.sum(weight, axis=1)
            value = self.critic(jnp.concatenate([mean, state.reshape(len(there), -1)], axis=-1))[..., 0]
        return caches, there, state, value

    def prefix(
        self, pictures: tuple[Array, ...], token: Array, read: Array, state: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return the prefix [B, P, W], presence [B, P], which attend to which [B, P, P], π0's token of the state."""
        s = self.spec
        state = self.state_in(self._inner("state", state, s.max_state))
        gain = s.language.width**0.5
        pixels = [fit_picture(each, s.patch * s.side, centred=s.kind == "pi0") for each in pictures]
        seen = [self.look(each.astype(state.dtype)) * (1.0 if s.kind == "pi0" else gain) for each in pixels]
        parts = [*seen, self.words(token) * gain, *([] if s.kind == "pi0" else [state[:, None]])]
        x = jnp.concatenate(parts, axis=1)
        ends = x.shape[1] - sum(part.shape[1] for part in seen) - read.shape[1]
        there = jnp.pad(read, ((0, 0), (x.shape[1] - read.shape[1] - ends, ends)), constant_values=True)
        mask = jnp.broadcast_to(there[:, None], (*x.shape[:2], x.shape[1]))
        if s.kind == "smolvla":  # neither pictures nor words attend to the state
            last = jnp.arange(x.shape[1]) == x.shape[1] - 1
            mask = mask & (last[:, None] | ~last[None])[None]
        return x, there, mask, state if s.kind == "pi0" else state[:, :0]

    def look(self, pixels: Array) -> Array:
        """Turn pictures in ±1, [B, H, W, 3], into tokens [B, P, W] of the language model."""
        s = self.spec
        x, _ = self.vision(self.patches(pixels))
        if s.shuffle > 1:  # squares of tokens become one
            side = s.side // s.shuffle
            x = x.reshape(x.shape[0], side, s.shuffle, side, s.shuffle, -1).swapaxes(2, 3)
            x = x.reshape(x.shape[0], side * side, -1)
        return self.connector(x).astype(pixels.dtype)

    def suffix(self, context: Context, x: Array, time: Array) -> Array:
        """Return the expert's tokens [B, (1 +) K, W] of noisy chunks at times [B], 1 for noise."""
        action = self.action_in(x)
        times = time_features(time, self.spec.expert.width, *self.spec.periods)
        times = jnp.broadcast_to(times[:, None].astype(action.dtype), action.shape)
        token = self.time_out(jax.nn.silu(self.time_in(jnp.concatenate([action, times], axis=-1))))
        return jnp.concatenate([context[2][:, None], token], axis=1) if self.spec.kind == "pi0" else token

    def velocity(self, context: Context, x: Array, left: Array) -> Array:
        """Compute the velocity [B, K, A] of the flow at x [B, K, A], ``left`` [B] before its end: 1 at noise."""
        caches, there, *_ = context
        token = self.suffix(context, x, left)
        number = jnp.arange(token.shape[1])
        rows = (token.shape[0], token.shape[1])
        if self.spec.kind == "pi0":  # the state's token does not attend to actions
            own = (number[:, None] > 0) | (number[None] == 0)
        else:
            own = number[:, None] >= number[None]
        past = jnp.broadcast_to(there[:, None], (*rows, there.shape[1]))
        mask = jnp.concatenate([past, jnp.broadcast_to(own[None], (*rows, rows[1]))], axis=-1)
        places = jnp.broadcast_to(number[None], rows)
        out, _ = self.expert(
            token, mask, jnp.sum(there, axis=1, keepdims=True) + places, caches, cross_mask=past, cross_place=places
        )
        return -self.action_out(out[:, -x.shape[1] :])  # theirs points from actions to noise

    def to_env(self, chunk: Array) -> Array:
        """Turn the model's chunks [..., K, A] into the robot's units, [..., horizon, action_dim]."""
        chunk = chunk[..., : self.spec.horizon, : self.spec.action_dim]
        shift, scale, offset = (widen(each.value, chunk) for each in self.units["action"])
        return (chunk - offset) * scale + shift

    def to_model(self, chunk: Array) -> Array:
        """Turn chunks [..., K, action_dim] in the robot's units into the model's, with zeros up to ``max_action``."""
        return self._inner("action", chunk, self.spec.max_action)

    def _inner(self, name: str, x: Array, size: int) -> Array:
        """Turn [..., F] in the robot's units into the model's, with zeros behind: [..., size]."""
        shift, scale, offset = (widen(each.value, x) for each in self.units[name])
        x = (x - shift) / scale + offset
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


_UNITS = {"shift": jnp.zeros, "scale": jnp.ones, "offset": jnp.zeros}
"""First values of the model's units, (x − shift) / scale + offset."""


def fit_picture(image: Array, size: int, *, centred: bool) -> Array:
    """Scale uint8 [B, H, W, 3] into a square of ``size`` pixels without distortion: [B, size, size, 3] in ±1.

    What is left over is black: on both sides if ``centred`` (π0), else above and on the left (SmolVLA). Linear, without
    smoothing, as torch's ``interpolate``.
    """
    x: Any = image.astype(jnp.promote_types(jnp.result_type(float), jnp.float32)) / 255.0
    rows, height, width, depth = x.shape
    ratio = max(width / size, height / size)
    inner = int(height / ratio), int(width / ratio)
    if inner != (height, width):
        x = jax.image.resize(x, (rows, *inner, depth), "linear", antialias=False)
    spare = [size - each for each in inner]
    before = [each // 2 if centred else each for each in spare]
    pads = [(0, 0), *((b, each - b) for b, each in zip(before, spare, strict=True)), (0, 0)]
    return jnp.pad(jnp.clip(x, 0.0, 1.0), pads) * 2.0 - 1.0


def touch_all(network: ExpertNetwork, given: Mapping[str, Any]) -> None:
    """Use every parameter once, to make them."""
    spec = network.spec
    context = network.encode(**given)
    rows = context[1].shape[0]
    network.to_env(network.velocity(context, jnp.zeros((rows, spec.chunk, spec.max_action)), jnp.zeros(rows)))
