"""Networks of the twins: EmbodiChain's MLP and its normalizer, residual blocks, ``ejax.policies.vision``'s encoder,
recurrence, and the head's last step, numbers to an action. No jax."""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from interop.twin.spec import ActsInSpace, EncoderSpec, MemorySpec, NetworkSpec

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "none": nn.Identity,
}
_NORMALIZER_EPSILON, _RMS_EPSILON = 1e-2, 1e-6


def make_network(network: NetworkSpec, width: int, num_outputs: int) -> nn.Sequential:
    """Make [..., width] -> [..., num_outputs] of any structure that a spec has."""
    if not network.num_blocks:
        return make_mlp(network, width, num_outputs)
    outer, inner = network.hidden_sizes
    activation = ACTIVATIONS[network.activation]
    modules: list[nn.Module] = [nn.Linear(width, outer)]
    for _ in range(network.num_blocks):
        modules.append(_Block(nn.Linear(outer, inner), activation(), nn.Linear(inner, outer), activation()))
    modules += [_RMSNorm()] if network.rms_norm else []
    return nn.Sequential(*modules, nn.Linear(outer, num_outputs))


def make_mlp(network: NetworkSpec, width: int, num_outputs: int | tuple[int, ...]) -> nn.Sequential:
    """Make [..., width] -> [..., *num_outputs]; of a shape the outputs are put in place row by row."""
    modules: list[nn.Module] = []
    for size in network.hidden_sizes:
        modules.append(nn.Linear(width, size))
        if network.use_layernorm:
            modules.append(nn.LayerNorm(size))
        modules.append(ACTIVATIONS[network.activation]())
        if network.dropout_p > 0.0:
            modules.append(nn.Dropout(network.dropout_p))
        width = size
    shape = (num_outputs,) if isinstance(num_outputs, int) else tuple(num_outputs)
    modules.append(nn.Linear(width, math.prod(shape)))
    if not isinstance(num_outputs, int):
        modules.append(nn.Unflatten(-1, shape))
    if network.last_activation is not None:
        modules.append(ACTIVATIONS[network.last_activation]())
    return nn.Sequential(*modules)


class _Block(nn.Sequential):
    """x + f(x), f the modules one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _RMSNorm(nn.Module):
    """x/√(mean x² + 1e-6), without a scale; torch has its own since 2.4."""

    def forward(self, x: Tensor) -> Tensor:
        # not mean(): a graph in ONNX would have its name twice, an output is called mean
        return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) / x.shape[-1] + _RMS_EPSILON)


class ObsNormalizer(nn.Module):
    """(x − mean) / (std + 1e-2) with EmbodiChain's buffers. The statistics stay as they were loaded."""

    mean: Tensor
    standard_deviation: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, width))
        self.register_buffer("variance", torch.ones(1, width))
        self.register_buffer("standard_deviation", torch.ones(1, width))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor, entries: Tensor | None = None) -> Tensor:
        """Normalize features. ``entries``: which of the features x has. None: all."""
        mean, deviation = self.mean[0], self.standard_deviation[0]  # one row: x may have no batch
        if entries is not None:
            mean, deviation = mean[entries], deviation[entries]
        return (x - mean) / (deviation + _NORMALIZER_EPSILON)


def make_recurrence(spec: MemorySpec, num_inputs: int) -> nn.Module:
    """``torch.nn.GRU`` or ``LSTM``, whose weights ``recurrent_step`` reads."""
    make = nn.GRU if spec.type == "gru" else nn.LSTM
    return make(num_inputs, spec.width, spec.depth)


def recurrent_step(spec: MemorySpec, weights: nn.Module, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """``(features [..., H], memory after it [..., M])``, spelt out: a trace of torch's own holds its batch size. ``x``:
    [..., I]; ``memory``: [..., M]."""
    step = _gru_step if spec.type == "gru" else _lstm_step
    after = []
    for layer, state in enumerate(memory.chunk(spec.depth, dim=-1)):
        x, state = step(x, state, *(getattr(weights, f"{name}_l{layer}") for name in _PARAMETERS))
        after.append(state)
    return x, torch.cat(after, dim=-1)


_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _gru_step(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    reset, update, new = linear(x, w, b).chunk(3, dim=-1)
    own_reset, own_update, own_new = linear(h, u, c).chunk(3, dim=-1)
    update = torch.sigmoid(update + own_update)
    new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
    h = (1.0 - update) * new + update * h
    return h, h


def _lstm_step(x: Tensor, state: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    h, cell = state.chunk(2, dim=-1)
    add, keep, new, show = (linear(x, w, b) + linear(h, u, c)).chunk(4, dim=-1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(add) * torch.tanh(new)
    h = torch.sigmoid(show) * torch.tanh(cell)
    return h, torch.cat([h, cell], dim=-1)


def history_step(spec: MemorySpec, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(the last K observations [..., K, F], the oldest first; memory after it)``. ``x``: [..., F]; ``memory``:
    [..., M]."""
    past = memory[..., :-1].unflatten(-1, (spec.length - 1, x.shape[-1]))
    # a runtime may return 2.9999998 for 3
    count = memory[..., -1:].round()
    together = torch.cat([past, x.unsqueeze(-2)], dim=-2)
    gap = (spec.length - 1 - count).unsqueeze(-1)
    oldest = torch.gather(together, -2, gap.long().expand_as(together[..., :1, :]))
    place = torch.arange(spec.length, dtype=x.dtype, device=x.device).unsqueeze(-1)
    window = torch.where(place < gap, oldest, together)
    kept = together[..., 1:, :].flatten(-2)
    return window, torch.cat([kept, (count + 1.0).clamp(max=spec.length - 1)], dim=-1)


class ImageEncoder(nn.Module):
    """uint8 [..., H, W, C] -> [..., 2·channels], float32. Its convolutions are called 0, 1, 2. Raises ValueError: an
    image of another shape or dtype."""

    _places: Tensor

    def __init__(self, spec: EncoderSpec, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape
        height, width, inputs = shape
        for i, (outputs, kernel, stride) in enumerate(zip(spec.channels, spec.kernels, spec.strides, strict=True)):
            self.add_module(str(i), nn.Conv2d(inputs, outputs, kernel, stride))
            inputs = outputs
        # rows and columns alike: F.pad takes the last axis first
        self.padding = [(before, behind, before, behind) for before, behind in spec.padding]
        rows, columns = spec.places(height, width)
        grid = torch.meshgrid(torch.linspace(-1.0, 1.0, rows), torch.linspace(-1.0, 1.0, columns), indexing="ij")
        self.register_buffer("_places", torch.stack(grid, dim=-1).reshape(-1, 2), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        image = checked_image(image, self.shape)
        x = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
        x = x.to(torch.float32) / 127.5 - 1.0
        for convolution, padding in zip(self.children(), self.padding, strict=True):
            x = torch.relu(convolution(pad(x, padding)))
        share = torch.softmax(x.flatten(2), dim=-1)
        row_and_column = share @ self._places  # [B, channels, 2]
        return row_and_column.transpose(1, 2).reshape(*image.shape[:-3], -1)


def checked_image(image: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Check the image [..., H, W, C], and return it. Raises ValueError: it is of another shape or dtype; a trace checks
    it too."""
    # in a trace plain Python would check once, for the example, and never again
    checked = _scripted() if torch.jit.is_tracing() else _checked
    return checked(image, list(shape))


def _checked(image: Tensor, shape: list[int]) -> Tensor:
    if image.dtype != torch.uint8 or list(image.shape[-3:]) != shape:
        raise ValueError(
            f"the image is {image.dtype} {list(image.shape)}, but the policy was made for torch.uint8 with rows, "
            f"columns and channels {shape}, bytes from 0 to 255; resize it, and do not scale it"
        )
    return image


@functools.cache
def _scripted() -> Any:
    """Compile ``_checked`` in TorchScript: a trace would drop plain Python."""
    return torch.jit.script(_checked)


class ToAction(nn.Module):
    """Clip, round, count from the start and shape numbers [..., A], or choices [...] of one dimension."""

    low: Tensor
    high: Tensor
    start: Tensor

    def __init__(self, spec: ActsInSpace) -> None:
        super().__init__()
        self.spec = spec
        # constants of the spec, not weights: they move with .to(device) but stay out of the state_dict
        for name, bound, end in zip(("low", "high"), spec.clip or ((), ()), (-torch.inf, torch.inf), strict=True):
            self.register_buffer(name, torch.tensor([end if x is None else x for x in bound]), persistent=False)
        self.register_buffer("start", torch.tensor(spec.start, dtype=torch.int32), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Make the actions [..., *action_shape]."""
        if self.spec.clip is not None:
            numbers = torch.clamp(numbers, self.low, self.high)
        if self.spec.whole:
            numbers = torch.round(numbers)
        if self.spec.start:
            numbers = numbers + (self.start if len(self.spec.start) > 1 else self.start[0])
        if self.spec.action_shape is None:
            return numbers
        return numbers.unflatten(-1, self.spec.action_shape) if self.spec.action_shape else numbers[..., 0]
