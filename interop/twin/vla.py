"""The torch twin of ``ejax.policies.vla``: module by module, with the same names and the adapters merged. No jax.

policy = interop.policy.load_policy("exported")
policy.act({"image": image, "state": state, "instruction": "put the red cube in the left zone"})
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from interop.twin.acting import Twin
from interop.twin.networks import ToAction, checked_image
from interop.twin.spec import EncoderSpec
from interop.twin.vla_spec import UNREAD, BlockSpec, ImageTokensSpec, VLASpec, same_padding

Context: TypeAlias = tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]
"""Keys and values [B, H, P, d] of each block, which of the P tokens there are, [B, P] bool, and the token of the
numbers [B, W]."""
_EPSILON = 1e-2
"""Parameters of the normalizer."""


class TorchVLA(Twin):
    """A deployed policy: ``forward`` takes ``spec.inputs`` and gives ``spec.outputs``; ``act`` takes an observation and
    needs the ``tokenizer``."""

    spec: VLASpec
    _time: Tensor
    _left: Tensor

    def __init__(self, spec: VLASpec) -> None:
        super().__init__()
        self.spec = spec
        width, size = spec.width, spec.sizes[0]
        for name, shape in spec.images.items():
            self.add_module(f"encoders_{name}", _image_tokens(spec.image_encoder, shape, width))
        if spec.sentences:
            self.sentence_tokens = SentenceTokens(spec)
        else:
            self.word_embedding = nn.Embedding(spec.num_tokens, width)
            self.word_place = nn.Parameter(torch.zeros(spec.max_words, width))
        numbers = sum(spec.observation.values())
        if spec.normalized:
            self.normalizer = NumberNormalizer(numbers)
        numbers += len(spec.images) * spec.image_encoder.places
        self.number_in, self.number_out = nn.Linear(numbers, 2 * width), nn.Linear(2 * width, width)
        for i in range(spec.depth):
            self.add_module(f"blocks_{i}", Block(spec))
        self.action_place = nn.Parameter(torch.zeros(spec.horizon, width))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.action_out = nn.Linear(width, spec.action_dim)
        if spec.head == "flow":
            self.action_in = nn.Linear(spec.action_dim, width)
            self.time_in, self.time_out = nn.Linear(2 * len(spec.frequencies), width), nn.Linear(width, width)
            self.register_buffer("_time", torch.from_numpy(spec.time_features), persistent=False)
            self.register_buffer("_left", torch.from_numpy(spec.time_left), persistent=False)
        else:
            self.log_std = nn.Parameter(torch.zeros(size))
        if spec.critic_sizes:  # its weights come with the others, and nothing deployed asks for its value
            self.critic = _critic(width, spec.critic_sizes)
        self.to_action = ToAction(spec)

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Compute ``spec.outputs`` from ``spec.inputs``. ``leaves``: ``spec.inputs`` [B, ...], in that order."""
        given = dict(zip(self.spec.inputs, leaves, strict=True))
        context = self.encode(given)
        if self.spec.head == "flow":
            end = self.from_noise(context, given["noise"])
            return self.to_action(end), end
        mean = self._suffix(context, self.action_place[None].expand(context[1].shape[0], -1, -1)).flatten(1)
        return self.to_action(mean), mean, self.log_std.clamp(*self.spec.log_std_range).expand_as(mean)

    def encode(self, given: dict[str, Tensor]) -> Context:
        """Compute the suffix's inputs from an observation."""
        numbers = torch.cat([given[name].float() for name in self.spec.observation], dim=-1)
        if self.spec.normalized:
            numbers = self.normalizer(numbers)
        text, mask = self._text(given["tokens"])
        summary = (text * mask[..., None]).sum(1)
        if self.spec.text_mean:
            # an empty instruction has no word
            summary = summary / mask.sum(1, keepdim=True).clamp(min=1)
        seen = [self.get_submodule(f"encoders_{name}")(given[name], summary) for name in self.spec.images]
        numbers = torch.cat([numbers, *(places for _, places in seen)], dim=-1)
        number = self.number_out(functional.silu(self.number_in(numbers)))
        tokens = [*(token for token, _ in seen), text, number[:, None]]
        present = [torch.ones_like(token[..., 0], dtype=torch.bool) for token in tokens]
        # of the words alone some are padding; pictures and numbers are always there
        present[-2] = mask
        x, there = torch.cat(tokens, dim=1), torch.cat(present, dim=1)
        caches = []
        for block in self._blocks:
            x, cache = block(x, there, None)
            caches.append(cache)
        return caches, there, number

    def from_noise(self, context: Context, noise: Tensor) -> Tensor:
        """[B, K·A]: where the flow leads from ``noise`` [B, K·A], without noise on the way."""
        x = noise.reshape(-1, self.spec.horizon, self.spec.action_dim)
        time = self.time_out(functional.silu(self.time_in(self._time)))
        for number in range(self.spec.num_steps):
            tokens = self.action_in(x) + self.action_place[None] + time[number][None, None]
            # the network gives where the flow ends; 1 − τ is left until then
            velocity = (self._suffix(context, tokens) - x) / self._left[number]
            x = x + (1.0 / self.spec.num_steps) * velocity
        return x.flatten(1)

    def _text(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.spec.sentences:
            token = self.sentence_tokens(tokens)
            return token, torch.ones_like(token[..., 0], dtype=torch.bool)
        return self.word_embedding(tokens) + self.word_place[None], tokens > UNREAD

    def _suffix(self, context: Context, x: Tensor) -> Tensor:
        caches, there, number = context
        x, here = x + number[:, None], torch.ones_like(x[..., 0], dtype=torch.bool)
        for block, (keys, values) in zip(self._blocks, caches, strict=True):
            x, _ = block(x, here, (keys, values, there))
        return self.action_out(self.norm(x))

    @property
    def _blocks(self) -> list[nn.Module]:
        return [self.get_submodule(f"blocks_{i}") for i in range(self.spec.depth)]


class Block(nn.Module):
    """Attention to ``past`` and to the tokens themselves, then an MLP; both added to their input."""

    def __init__(self, spec: VLASpec) -> None:
        super().__init__()
        width, inside = spec.width, spec.mlp_ratio * spec.width
        self.num_heads, self.size = spec.num_heads, width // spec.num_heads
        self.norm_attention = nn.LayerNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=1e-5)
        self.mlp_in, self.mlp_out = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(
        self, x: Tensor, present: Tensor, past: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend as ``ejax.policies.vla.network.Block`` does, but with keys and values [B, H, T, d]."""
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, self.size))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        keys, values, there = key, value, present
        if past is not None:
            keys, values = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
            there = torch.cat([past[2], present], dim=1)
        score = query @ keys.transpose(-1, -2) / math.sqrt(self.size)
        # finite: the softmax of a row of -inf would be NaN
        score = torch.where(there[:, None, None], score, -1e30)
        mixed = (torch.softmax(score, dim=-1) @ values).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        hidden = functional.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")
        return x + self.mlp_out(hidden), (key, value)


class KeypointTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, channels, width], places [B, 2·channels]: a token for where each channel is active.

    A convolution's weight is [out, rows·columns·in], as in JAX, where it is a product with patches.
    """

    _grid: Tensor

    def __init__(
        self, spec: ImageTokensSpec, convolutions: EncoderSpec, shape: tuple[int, int, int], width: int
    ) -> None:
        super().__init__()
        self.spec, self.convolutions, self.shape = spec, convolutions, shape
        inputs, count = 2 * shape[-1], convolutions.channels[-1]
        for i, (outputs, kernel) in enumerate(zip(convolutions.channels, convolutions.kernels, strict=True)):
            self.add_module(f"conv_{i}", nn.Linear(kernel * kernel * inputs, outputs))
            if i > 0:
                self.add_module(f"film_{i}", nn.Linear(width, 2 * outputs))
            inputs = outputs
        self.kernel = nn.Parameter(torch.zeros(count, 2, width))
        self.bias = nn.Parameter(torch.zeros(count, width))
        rows, columns = convolutions.places(*shape[:2])
        grid = torch.meshgrid(torch.linspace(-1.0, 1.0, rows), torch.linspace(-1.0, 1.0, columns), indexing="ij")
        self.register_buffer("_grid", torch.stack(grid, dim=-1).reshape(-1, 2), persistent=False)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        x = checked_image(image, self.shape).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0
        x = torch.cat([x, self.spec.colour * (x - x.mean(dim=1, keepdim=True))], dim=1)
        c = self.convolutions
        for i, (kernel, stride, (before, behind)) in enumerate(zip(c.kernels, c.strides, c.padding, strict=True)):
            linear = self.get_submodule(f"conv_{i}")
            weight = linear.weight.unflatten(1, (kernel, kernel, -1)).permute(0, 3, 1, 2)
            padded = functional.pad(functional.relu(x) if i > 0 else x, (before, behind, before, behind))
            x = functional.conv2d(padded, weight, linear.bias, stride)
            if i > 0:
                scale, shift = self.get_submodule(f"film_{i}")(text).chunk(2, dim=-1)
                x = x * (1.0 + scale)[..., None, None] + shift[..., None, None]
        place = torch.softmax(self.spec.sharpness * x.flatten(2), dim=-1) @ self._grid  # [B, channels, 2]
        tokens = (place[:, :, None] @ self.kernel)[:, :, 0] + self.bias[None]
        return tokens, place.transpose(1, 2).flatten(1)


class PatchTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, H/p·W/p, width]: a token for each square of p pixels."""

    def __init__(self, spec: ImageTokensSpec, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.size, self.shape = spec.patch_size, shape
        self.patch = nn.Linear(self.size * self.size * shape[-1], width)
        self.place = nn.Parameter(torch.zeros(spec.count(shape), width))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        del text
        x = checked_image(image, self.shape).to(torch.float32) / 127.5 - 1.0
        rows, columns = self.shape[0] // self.size, self.shape[1] // self.size
        x = x.reshape(-1, rows, self.size, columns, self.size, self.shape[2]).transpose(2, 3)
        x = x.reshape(-1, rows * columns, self.patch.in_features)
        return self.patch(x) + self.place[None], x[:, 0, :0]


class EfficientNetTokens(nn.Module):
    """uint8 [B, H, W, 3] -> [B, places, width]: a token for each place of the features."""

    def __init__(self, spec: ImageTokensSpec, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.shape = shape
        self.features = EfficientNetLite0(spec.blocks, shape[:2])
        self.project = nn.Linear(spec.blocks[-1].channels, width)
        self.place = nn.Parameter(torch.zeros(spec.count(shape), width))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        del text
        # as the published weights were trained, not as the other encoders
        x = (checked_image(image, self.shape).permute(0, 3, 1, 2).to(torch.float32) - 127.0) / 128.0
        x = self.features(x).flatten(2).transpose(1, 2)
        return self.project(x) + self.place[None], x[:, 0, :0]


class EfficientNetLite0(nn.Module):
    """[B, 3, H, W] -> [B, C, H/stride, W/stride]; batch norms are folded."""

    def __init__(self, blocks: tuple[BlockSpec, ...], size: tuple[int, int]) -> None:
        super().__init__()
        self.blocks = blocks
        self.stem = SameConv(3, 32, 3, 2, size)
        channels, size = 32, self.stem.size_after
        for i, block in enumerate(blocks):
            module = InvertedBottleneck(channels, block, size)
            self.add_module(f"block_{i}", module)
            channels, size = block.channels, module.depthwise.size_after

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self.stem(x))
        for i in range(len(self.blocks)):
            x = self.get_submodule(f"block_{i}")(x)
        return x


class InvertedBottleneck(nn.Module):
    """1×1 to more channels, depthwise, 1×1 to fewer; added to its input where shapes agree."""

    def __init__(self, channels: int, block: BlockSpec, size: tuple[int, int]) -> None:
        super().__init__()
        inside = block.expand * channels
        if block.expand > 1:
            self.expand = nn.Linear(channels, inside)
        self.depthwise = SameConv(inside, inside, block.kernel, block.stride, size, groups=inside)
        self.project = nn.Linear(inside, block.channels)
        self.expands, self.adds = block.expand > 1, block.stride == 1 and block.channels == channels

    def forward(self, x: Tensor) -> Tensor:
        inside = functional.relu6(_per_pixel(self.expand, x)) if self.expands else x
        out = _per_pixel(self.project, functional.relu6(self.depthwise(inside)))
        return out + x if self.adds else out


class SameConv(nn.Conv2d):
    """Padded as TensorFlow does, "SAME", for pictures of ``size`` (height, width)."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, size: tuple[int, int], groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups)
        rows, columns = (same_padding(length, kernel, stride) for length in size)
        self.zeros = (*columns, *rows)
        self.size_after = (-(-size[0] // stride), -(-size[1] // stride))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, self.zeros))


class SentenceTokens(nn.Module):
    """Word tokens int32 [B, L] -> [B, 1, width]: one token, of the known sentence that is these words."""

    sentences: Tensor
    _known: Tensor

    def __init__(self, spec: VLASpec) -> None:
        super().__init__()
        self.register_buffer("sentences", torch.zeros(len(spec.sentences), spec.sentence_width))
        known = torch.tensor(spec.sentence_tokens, dtype=torch.int32)
        self.register_buffer("_known", known, persistent=False)
        self.project = nn.Linear(spec.sentence_width, spec.width)

    def forward(self, token: Tensor) -> Tensor:
        same = (token[:, None] == self._known[None]).all(dim=-1)
        first = torch.argmax(same.to(torch.int32), dim=-1)
        embedding = torch.where(same.any(dim=-1)[:, None], self.sentences[first], 0.0)
        return self.project(embedding)[:, None]


class NumberNormalizer(nn.Module):
    """(x − mean) / (std + 1e-2). The statistics stay as they were loaded."""

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean[None]) / (self.variance.sqrt() + _EPSILON)[None]


def _critic(width: int, hidden_sizes: tuple[int, ...]) -> nn.Sequential:
    """[B, W] -> [B, 1]; SiLU between its layers."""
    layers = nn.Sequential()
    for i, size in enumerate(hidden_sizes):
        layers.add_module(f"linear_{i}", nn.Linear(width, size))
        layers.add_module(f"silu_{i}", nn.SiLU())
        width = size
    layers.add_module(f"linear_{len(hidden_sizes)}", nn.Linear(width, 1))
    return layers


def _image_tokens(spec: ImageTokensSpec, shape: tuple[int, int, int], width: int) -> nn.Module:
    if spec.convolutions is not None:
        return KeypointTokens(spec, spec.convolutions, shape, width)
    return (PatchTokens if spec.kind == "patches" else EfficientNetTokens)(spec, shape, width)


def _per_pixel(linear: nn.Linear, x: Tensor) -> Tensor:
    """Convolve by 1×1."""
    return functional.conv2d(x, linear.weight[..., None, None], linear.bias)
