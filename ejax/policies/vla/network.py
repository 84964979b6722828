"""The built-in model: tokens of pictures, words and joint angles, a transformer over them, and a chunk's tokens behind.

    prefix   picture tokens, word tokens, one token of the numbers: attend to each other, once for each observation
    suffix   K tokens, one for each action, to which the token of the numbers is added: attend to the prefix and to each
             other, once for each step of the flow

Both go through the same blocks; ``encode`` returns the prefix's keys and values in each. Source: the attention pattern
of π0 (Black et al. 2024), with one set of weights.
"""

import math
from functools import partial
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ejax.policies.mlp import MLP, NetworkConfig, dense_product, own_precision, widen
from ejax.policies.normalize import ObsNormalizer
from ejax.policies.observations import flatten_observation
from ejax.policies.pretrained.efficientnet import EfficientNetLite0
from ejax.policies.pretrained.token_states import TokenStates
from ejax.policies.vision import KERNELS, STRIDES, patches, spatial_softmax
from ejax.policies.vla.config import LoraConfig, ModelConfig
from ejax.policies.vla.words import UNKNOWN, Words
from ejax.types import Array, PyTree

Context: TypeAlias = tuple[tuple[tuple[Array, Array], ...], Array, Array, Array]
"""Keys and values [B, P, H, d] of each block, presence [B, P] bool of its P tokens, the numbers' token [B, W], and what
predictions are made from [B, Q, W]: of the instruction and, if it is there, of another one."""
FREQUENCIES = tuple(2.0**i * math.pi / 16 for i in range(16))
"""Angular frequencies of τ, always in float32: the highest ones enlarge rounding."""
SHARPNESS = 10.0
POINTING = 2.0
"""Five times that, and four pointers in place of 16, had learned nothing after 200 steps."""
COLOUR = 3.0
NEAREST = 0.05
"""Least 1 − τ that is divided by; matters beyond 20 steps."""
PREDICTION = "prediction"
"""Name of the layer that predicts parts of the observation for cloning."""
CRITIC = NetworkConfig(hidden_sizes=(128,), activation="silu")


class Linear(nn.Module):
    """x·W + b, in ``dtype`` (None: in theirs); with ``lora`` W and b are frozen and A·B is learned in addition."""

    features: int
    dtype: Any = None
    lora: LoraConfig | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1], self.features)
        kernel, bias = self._base("kernel", _scaled, shape), self._base("bias", _zeros, shape[1:])
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        x = x.astype(dtype)
        y = dense_product(x, kernel.astype(dtype)) + widen(bias.astype(dtype), x)
        if self.lora is not None:
            down = self.param("lora_a", _scaled, (shape[0], self.lora.rank))
            up = self.param("lora_b", _zeros, (self.lora.rank, self.features))
            scale = self.lora.alpha / self.lora.rank
            y = y + scale * dense_product(dense_product(x, down.astype(dtype)), up.astype(dtype))
        return y

    def _base(self, name: str, init: Any, shape: tuple[int, ...]) -> Array:
        if self.lora is None:
            return self.param(name, init, shape)
        return self.variable("frozen", name, lambda: init(self.make_rng("params"), shape)).value


class Block(nn.Module):
    """Attention to ``past`` and to the tokens themselves, then an MLP; both added to their input."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Array, present: Array, past: tuple[Array, Array, Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Return tokens [B, T, W] for ``x``, and their keys and values.

        ``present`` [B, T] bool marks tokens that can be attended to; ``past`` has keys, values [B, P, H, d] and
        ``present`` [B, P] of tokens before these.
        """
        c = self.config
        linear = partial(Linear, dtype=None if c.torch_dtype == "float32" else jnp.dtype(c.torch_dtype), lora=c.lora)
        heads = (*x.shape[:2], c.num_heads, c.width // c.num_heads)
        normed = nn.LayerNorm(epsilon=1e-5, name="norm_attention")(x)
        query, key, value = jnp.split(linear(3 * c.width, name="qkv")(normed), 3, axis=-1)
        query, key, value = (each.reshape(heads) for each in (query, key, value))
        keys, values, there = key, value, present
        if past is not None:
            keys = jnp.concatenate([past[0], key], axis=1)
            values = jnp.concatenate([past[1], value], axis=1)
            there = jnp.concatenate([past[2], present], axis=1)
        einsum = partial(jnp.einsum, precision=own_precision(query))
        score = einsum("bthd,bshd->bhts", query, keys).astype(x.dtype) / math.sqrt(heads[-1])
        score = jnp.where(there[:, None, None], score, -1e30)  # not −∞: where nothing is present, softmax would be NaN
        # of float32: bfloat16 has 8 bits for a sum of hundreds
        share = jax.nn.softmax(score, axis=-1).astype(values.dtype)
        mixed = einsum("bhts,bshd->bthd", share, values).reshape(*x.shape[:2], c.width)
        x = x + linear(c.width, name="out")(mixed).astype(x.dtype)
        normed = nn.LayerNorm(epsilon=1e-5, name="norm_mlp")(x)
        hidden = jax.nn.gelu(linear(c.mlp_ratio * c.width, name="mlp_in")(normed), approximate=True)
        return x + linear(c.width, name="mlp_out")(hidden).astype(x.dtype), (key, value)


class VLANetwork(nn.Module):
    """``encode`` observations, then the ``velocity`` of a flow or a ``gaussian`` for chunks of K actions."""

    config: ModelConfig
    horizon: int
    action_dim: int
    words: Words | TokenStates
    normalize: bool = False
    initial_log_std: float = 0.0
    predicted_sizes: tuple[int, ...] = ()
    """Numbers of each predicted part."""

    def setup(self) -> None:
        c = self.config
        image = c.image_encoder
        kinds: dict[str, tuple[Any, Any]] = {
            "keypoints": (KeypointTokens, image.channels),
            "pointers": (PointerTokens, image.channels),
            "patches": (PatchTokens, image.patch_size),
            "efficientnet": (EfficientNetTokens, image.stride),
        }
        tokens, option = kinds[image.type]
        self.encoders = {name: tokens(option, c.width) for name in c.images}
        if isinstance(self.words, TokenStates):
            self.sentence_tokens = Linear(c.width)
        else:
            self.word_embedding = nn.Embed(self.words.num_tokens, c.width, embedding_init=nn.initializers.normal(0.2))
            self.word_place = self.param("word_place", _normal, (self.words.max_words, c.width))
        if c.image_encoder.type == "pointers":
            self.pointers = Pointers(c.image_encoder.num_pointers, c.width)
            self.place_in, self.place_out = Linear(2 * c.width), Linear(c.width)
            if c.predicts and self.normalize:
                self.targets = ObsNormalizer()
        if self.normalize:
            self.normalizer = ObsNormalizer()
        self.number_in, self.number_out = Linear(2 * c.width), Linear(c.width)
        block = nn.remat(Block) if c.remat else Block  # activations of a block for its input: memory for time
        self.blocks = [block(c) for _ in range(c.depth)]
        self.action_place = self.param("action_place", _normal, (self.horizon, c.width))
        self.norm = nn.LayerNorm(epsilon=1e-5)
        self.action_out = nn.Dense(self.action_dim, kernel_init=nn.initializers.zeros)  # the first chunks are of mean 0
        if c.head.type == "flow":
            self.action_in, self.time_in, self.time_out = Linear(c.width), Linear(c.width), Linear(c.width)
        else:
            initial = nn.initializers.constant(self.initial_log_std)
            # one for each number of a chunk
            self.log_std = self.param("log_std", initial, (self.horizon * self.action_dim,))
        if c.critic:
            self.critic = MLP(CRITIC, 1)
        if c.predicts:
            self.prediction = nn.Dense(sum(self.predicted_sizes))

    def encode(self, obs: PyTree, observe: bool | Array = False) -> tuple[Context, Array]:
        """Compute the suffix's context of ``obs``, leaves [B, ...], and the values [B] (0 without a critic)."""
        c = self.config
        numbers = flatten_observation({name: obs[name] for name in c.numbers})
        if self.normalize:
            numbers = self.normalizer(numbers, observe=observe)
        text, read = self._text(obs[c.text])
        if points := c.image_encoder.type == "pointers":
            asked = [self._text(obs[other])] if (other := f"{c.asks}{c.text}") != c.text and other in obs else []
            summary, words = jnp.stack([self.pointers(*each) for each in ((text, read), *asked)], axis=1), []
            if observe is not False and self.normalize and c.predicts and {*c.predicts} <= obs.keys():
                targets = jnp.concatenate([obs[name] for name in c.predicts], axis=-1)
                self.targets(targets, observe=observe)
        else:
            summary = jnp.sum(text * read[..., None], axis=1)  # a plain sum: pictures need the words before the trunk
            if c.text_encoder.summary == "mean":
                summary = summary / jnp.maximum(jnp.sum(read, axis=1, keepdims=True), 1)
            words = [text]
        seen = [self.encoders[name](obs[name], summary) for name in c.images]
        tokens = [*(token for token, _ in seen), *words]
        present = [*(jnp.ones(token.shape[:2], bool) for token, _ in seen), *([read] if words else [])]
        # places, like joint angles, are numbers: they come with them too, so that a difference is one product
        places = jnp.concatenate([places for _, places in seen], axis=-1)
        own = places[:, 0] if points else places
        number = self.number_out(jax.nn.silu(self.number_in(jnp.concatenate([numbers, own], axis=-1))))
        shown = number[:, None]
        if points:  # joint angles, which reveal the goal in most frames, have no part in it
            shown = self.place_out(jax.nn.silu(self.place_in(places)))
            number = number + shown[:, 0]
        tokens.append(number[:, None])
        present.append(jnp.ones(tokens[-1].shape[:2], bool))
        x, there = jnp.concatenate(tokens, axis=1), jnp.concatenate(present, axis=1)
        caches = []
        for block in self.blocks:
            x, cache = block(x, there, None)
            caches.append(cache)
        value = jnp.zeros(x.shape[0])
        if c.critic:
            weight = there[..., None].astype(x.dtype)  # padding has no part in the critic's mean
            value = self.critic(jnp.sum(self.norm(x) * weight, axis=1) / jnp.sum(weight, axis=1))[..., 0]
        return (tuple(caches), there, number, shown), value

    def predict(self, context: Context) -> dict[str, Array]:
        """Predict the parts ``config.predicts``, [B, F] each, from the numbers' token, which goes with every action; of
        pointers from their places alone, and the same parts for the instruction of ``config.asks``."""
        c, answer = self.config, self.prediction(context[3])
        if c.image_encoder.type == "pointers" and self.normalize:  # else a network spends its start on their mean
            answer = self.targets(answer, inverse=True)
        parts = jnp.split(answer, np.cumsum(self.predicted_sizes)[:-1].tolist(), axis=-1)
        prefixes = ("", c.asks)[: answer.shape[1]]
        return {
            f"{prefix}{name}": part[:, i]
            for i, prefix in enumerate(prefixes)
            for name, part in zip(c.predicts, parts, strict=True)
        }

    def _text(self, text: Array) -> tuple[Array, Array]:
        """Return tokens of an instruction [B, T, W], and which are read, [B, T] bool: those known to training."""
        number = self.words.tokens_of(text)
        if isinstance(self.words, TokenStates):
            return self.sentence_tokens(number), (number != 0.0).any(axis=-1)
        return self.word_embedding(number) + self.word_place[None], number > UNKNOWN

    def velocity(self, context: Context, x: Array, tau: Array) -> Array:
        """Compute v(x, τ) of a flow: x [B, K, A], tau [B] -> [B, K, A]."""
        angle = tau[:, None] * jnp.asarray(FREQUENCIES, jnp.float32)[None]
        time = self.time_in(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1))
        time = self.time_out(jax.nn.silu(time))
        clean = self._suffix(context, self.action_in(x) + self.action_place[None] + time[:, None])
        # predicts the flow's end, which the observation determines, rather than its distance from the noise
        return (clean - x) / jnp.maximum(1.0 - tau, NEAREST)[:, None, None]

    def gaussian(self, context: Context) -> tuple[Array, Array]:
        """Compute mean [B, K, A] and log_std [K·A] of a Gaussian."""
        rows = context[1].shape[0]
        mean = self._suffix(context, jnp.broadcast_to(self.action_place, (rows, *self.action_place.shape)))
        return mean, self.log_std

    def _suffix(self, context: Context, x: Array) -> Array:
        caches, there, number, _ = context
        x, here = x + number[:, None], jnp.ones(x.shape[:2], bool)  # attention finds it among all others late only
        for block, (keys, values) in zip(self.blocks, caches, strict=True):
            x, _ = block(x, here, (keys, values, there))
        return self.action_out(self.norm(x))


def with_colour(image: Array) -> Array:
    """Return uint8 [B, H, W, 3] as float32 [B, H, W, 6] in ±1 and, enlarged, each channel's difference from their mean.

    Brightness is nearly all of a picture's variance, and instructions name colours.
    """
    x = image.astype(jnp.float32) / 127.5 - 1.0
    return jnp.concatenate([x, COLOUR * (x - x.mean(axis=-1, keepdims=True))], axis=-1)


class KeypointTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, channels, width], places [B, 2·channels]: a token for where each channel is active.

    The later convolutions are scaled and shifted per channel by a function of the instruction's words. Places are
    E_softmax[(x, y)] in ±1, of a softmax that is sharp at the start: under a flat one small things hardly move a place.
    Sources: ``ejax.policies.vision``; Perez et al. 2018, FiLM.
    """

    channels: tuple[int, int, int]
    width: int

    @nn.compact
    def __call__(self, image: Array, text: Array) -> tuple[Array, Array]:
        """Encode pictures for ``text`` [B, F]."""
        x = with_colour(image)
        for i, (size, kernel, stride) in enumerate(zip(self.channels, KERNELS, STRIDES, strict=True)):
            x = patches(nn.relu(x) if i > 0 else x, kernel, stride)
            x = nn.Dense(size, dot_general=dense_product, name=f"conv_{i}")(x)
            if i > 0:
                scale, shift = jnp.split(nn.Dense(2 * size, name=f"film_{i}")(text), 2, axis=-1)
                x = x * (1.0 + scale)[:, None, None] + shift[:, None, None]
        count = self.channels[-1]
        places = spatial_softmax(SHARPNESS * x)  # all rows, then all columns
        place = jnp.stack([places[..., :count], places[..., count:]], axis=-1)
        matrix = self.param("kernel", nn.initializers.normal(1.0), (count, 2, self.width))
        tokens = jnp.einsum("bcp,cpw->bcw", place, matrix) + self.param("bias", _normal, (count, self.width))[None]
        return tokens, places


class Pointers(nn.Module):
    """Tokens of an instruction [B, T, W] and those that are read [B, T] -> [B, P, W]: P parts of it, each an average
    that learned attention weights. The parts are linear in the tokens, so that a known word in an unknown pair does as
    in the known ones."""

    count: int
    width: int

    @nn.compact
    def __call__(self, text: Array, read: Array) -> Array:
        query = self.param("query", nn.initializers.normal(1.0), (self.count, self.width))
        score = jnp.einsum("pw,btw->bpt", query, Linear(self.width, name="key")(text)) / math.sqrt(self.width)
        share = jax.nn.softmax(jnp.where(read[:, None], score, -1e30), axis=-1)
        return jnp.einsum("bpt,btw->bpw", share, Linear(self.width, name="value")(text))


class PointerTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, P, width], places [B, Q, 2·P]: where each part of Q instructions points, and a token
    for each of the first.

    The place is E_softmax[(x, y)] in ±1 of the product of a part and the picture's features, which know where they are
    and nothing of the instruction. Source: the attention of Bahdanau et al. 2015, its average a place.
    """

    channels: tuple[int, int, int]
    width: int

    @nn.compact
    def __call__(self, image: Array, parts: Array) -> tuple[Array, Array]:
        """Encode pictures for the ``parts`` [B, Q, P, F] of instructions."""
        x = with_colour(image)
        for i, (size, kernel, stride) in enumerate(zip(self.channels, KERNELS, STRIDES, strict=True)):
            x = nn.Dense(size, dot_general=dense_product, name=f"conv_{i}")(patches(x, kernel, stride))
            if i == 2:  # what is left, right or between is so by its place
                x = x + self.param("place", _normal, (*x.shape[1:3], size))[None]
            x = nn.relu(x)
        x = Linear(self.width, name="feature")(x)
        (_, num_asked, count, _), size = parts.shape, x.shape[-1]
        parts = Linear(size, name="part")(parts).reshape(x.shape[0], -1, size)
        places = spatial_softmax(POINTING * jnp.einsum("bhwf,bpf->bhwp", x, parts))  # all rows, then all columns
        places = places.reshape(-1, 2, num_asked, count).swapaxes(1, 2).reshape(-1, num_asked, 2 * count)
        place = jnp.stack([places[:, 0, :count], places[:, 0, count:]], axis=-1)
        matrix = self.param("kernel", nn.initializers.normal(1.0), (count, 2, self.width))
        tokens = jnp.einsum("bpc,pcw->bpw", place, matrix) + self.param("bias", _normal, (count, self.width))[None]
        return tokens, places


class PatchTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, H/p·W/p, width]: a token for each square of p pixels. Raises ValueError if the squares
    do not fill the picture."""

    patch_size: int
    width: int

    @nn.compact
    def __call__(self, image: Array, text: Array) -> tuple[Array, Array]:
        del text
        *_, height, width, depth = image.shape
        size = self.patch_size
        if height % size or width % size:
            raise ValueError(f"image_encoder.patch_size {size} must divide the picture's {height}x{width} pixels")
        x = image.astype(jnp.float32) / 127.5 - 1.0
        x = x.reshape(x.shape[0], height // size, size, width // size, size, depth).swapaxes(2, 3)
        x = x.reshape(x.shape[0], -1, size * size * depth)
        tokens = Linear(self.width, name="patch")(x) + self.param("place", _normal, (x.shape[1], self.width))[None]
        return tokens, jnp.zeros((x.shape[0], 0))


class EfficientNetTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, ⌈H/stride⌉·⌈W/stride⌉, width]: a token for each place of frozen features."""

    stride: Literal[8, 16, 32]
    width: int

    @nn.compact
    def __call__(self, image: Array, text: Array) -> tuple[Array, Array]:
        del text
        encoder = EfficientNetLite0(self.stride)
        weights = self.variable(
            "frozen", "features", lambda: encoder.init(self.make_rng("params"), image[:1])["params"]
        )
        x: Any = encoder.apply({"params": jax.lax.stop_gradient(weights.value)}, image)
        x = x.reshape(image.shape[0], -1, x.shape[-1])
        tokens = Linear(self.width, name="project")(x) + self.param("place", _normal, (x.shape[1], self.width))[None]
        return tokens, jnp.zeros((x.shape[0], 0))


_normal = nn.initializers.normal(0.02)
_scaled = nn.initializers.lecun_normal()
_zeros = nn.initializers.zeros
