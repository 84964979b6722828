"""Networks of ``interop.policy.TorchPolicy``: EmbodiChain's MLP and its normalizer of observations. No jax."""

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
_NORMALIZER_EPSILON = 1e-2


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
