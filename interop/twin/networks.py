"""Networks of ``interop.policy.TorchPolicy``: EmbodiChain's MLP and its normalizer, residual blocks. No jax."""

import math

import torch
from torch import Tensor, nn

from interop.twin.spec import NetworkSpec

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
        """Normalize features.

        Args:
            entries: which of the features x has. None: all.
        """
        mean, deviation = self.mean[0], self.standard_deviation[0]  # one row: x may have no batch
        if entries is not None:
            mean, deviation = mean[entries], deviation[entries]
        return (x - mean) / (deviation + _NORMALIZER_EPSILON)
