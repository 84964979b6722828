"""A vision-language-action policy without its weights: what ``ejax.policies.vla.network`` is, as plain data.

Weights come as a ``state_dict`` by the network's own names (``interop.exporters.vla``), words as tokens
(``interop.twin.text``). Adapters are merged into the weights: a spec knows none. No jax, no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from interop.twin.spec import DeployedForms, EncoderSpec, MemorySpec

TOKENS = "tokens"
NOISE = "noise"
TOKENIZER = "tokenizer.json"
TEXTS = "texts.json"
"""Texts with JAX's tokens, to check a tokenizer by."""
UNREAD = 1
"""Tokens up to here, padding and the unknown word, are not read."""


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """An inverted bottleneck of EfficientNet: 1×1 to ``expand`` times as many channels, depthwise, 1×1."""

    kernel: int
    stride: int
    expand: int
    channels: int


@dataclass(frozen=True, kw_only=True)
class ImageTokensSpec:
    """Encoder of a picture into tokens; see the three modules of this name in ``ejax.policies.vla.network``."""

    kind: Literal["keypoints", "patches", "efficientnet"]
    convolutions: EncoderSpec | None = None
    """keypoints"""
    colour: float = 0.0
    """keypoints: gain of the differences from grey."""
    sharpness: float = 1.0
    """keypoints: of the softmax over the pixels."""
    patch_size: int = 1
    """patches: pixels."""
    blocks: tuple[BlockSpec, ...] = ()
    """efficientnet: behind the stem, a convolution of stride 2."""

    def count(self, shape: tuple[int, int, int]) -> int:
        """Tokens of a picture [height, width, channels]."""
        if self.convolutions is not None:
            return self.convolutions.channels[-1]
        strides = [2, *(block.stride for block in self.blocks)] if self.blocks else [self.patch_size]
        height, width = shape[:2]
        for stride in strides:
            height, width = -(-height // stride), -(-width // stride)
        return height * width

    @property
    def places(self) -> int:
        """Numbers besides the joint angles."""
        return 0 if self.convolutions is None else self.convolutions.width


@dataclass(frozen=True, kw_only=True)
class VLASpec(DeployedForms):
    """The same facts as ``PolicySpec``, under the same names, and those of a vision-language-action policy."""

    images: Mapping[str, tuple[int, int, int]]
    """(height, width, channels) of each image, uint8, in the order of their tokens."""
    observation: Mapping[str, int]
    """Width of each array of numbers, in the order in which they are concatenated."""
    text: str
    """The part of an observation that is text."""
    instruction: str | None = None
    """Leaves of an observation without text."""
    max_words: int
    num_tokens: int
    """Padding, the unknown word, and the vocabulary."""
    text_mean: bool = False
    """Pictures are looked at with the average of the instruction's tokens; else with their sum."""
    sentences: tuple[str, ...] = ()
    """Those that a sentence encoder knows, which then stands in for the words; empty: words."""
    sentence_tokens: tuple[tuple[int, ...], ...] = ()
    """[S, max_words]: theirs."""
    sentence_width: int = 0
    """Numbers of a sentence's embedding."""
    image_encoder: ImageTokensSpec
    normalized: bool
    """(x − mean) / (std + 1e-2) of the numbers, by the statistics in the state_dict."""
    width: int
    depth: int
    num_heads: int
    mlp_ratio: int
    horizon: int
    """K, actions of a decision."""
    action_dim: int
    """A, numbers of an action."""
    head: Literal["flow", "normal"]
    num_steps: int = 0
    """flow: from noise to action."""
    frequencies: tuple[float, ...] = ()
    """flow: of the time's features, rad."""
    nearest: float = 0.0
    """flow: least 1 − τ that is divided by."""
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    """normal"""
    critic_sizes: tuple[int, ...] = ()
    """Hidden sizes of the value head; empty: there is none. A deployed policy has none."""
    memory: ClassVar[MemorySpec | None] = None  # type: ignore[misc]  # no field: it acts on what it sees now
    unread: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # type: ignore[misc]  # no field: it reads all

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]  # no field: it follows from others
        return (self.horizon * self.action_dim,)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.images, *self.observation, TOKENS, *((NOISE,) if self.head == "flow" else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("action", "unclipped") if self.head == "flow" else ("action", "mean", "log_std")

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *((self.text,) if self.instruction is None else ()))

    @property
    def bytes_read(self) -> tuple[str, ...]:
        return (*self.images, self.text)

    def input_shape(self, name: str) -> tuple[int, ...]:
        width = {TOKENS: self.max_words, NOISE: self.sizes[0]}.get(name)
        return super().input_shape(name) if width is None else (width,)

    def input_dtype(self, name: str) -> str:
        return "int32" if name == TOKENS else super().input_dtype(name)

    @property
    def pixels_round(self) -> bool:
        return self.image_encoder.kind != "efficientnet"

    @property
    def time(self) -> NDArray[np.float32]:
        """[S]: each step's time τ. As in JAX, this and what follows from it is rounded to float32."""
        return np.arange(self.num_steps, dtype=np.float32) * np.float32(1.0 / self.num_steps)

    @property
    def time_left(self) -> NDArray[np.float32]:
        """[S]: 1 − τ."""
        return np.maximum(np.float32(1.0) - self.time, np.float32(self.nearest))

    @property
    def time_features(self) -> NDArray[np.float32]:
        """[S, 2·frequencies]: sines, then cosines, of τ."""
        angle = (self.time[:, None] * np.asarray(self.frequencies, np.float32)).astype(np.float64)
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)

    def lacking(self) -> list[str]:
        """List the fields that the kinds of encoder and head need and the spec does not have."""
        encoder = self.image_encoder
        needed = {
            "image_encoder.convolutions": encoder.kind != "keypoints" or encoder.convolutions,
            "image_encoder.blocks": encoder.kind != "efficientnet" or encoder.blocks,
            "num_steps": self.head != "flow" or self.num_steps >= 1,
            "sentence_tokens": len(self.sentences) == len(self.sentence_tokens),
            "observation": self.observation,
        }
        return [name for name, there in needed.items() if not there]


def same_padding(length: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and behind, as TensorFlow's "SAME"."""
    missing = max((math.ceil(length / stride) - 1) * stride + kernel - length, 0)
    return missing // 2, missing - missing // 2
