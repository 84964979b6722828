"""The distributions of ``ejax.distributions`` in torch: the same formulas, term by term."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Normal:
    """Diagonal normal. ``mean``, ``log_std``: [..., A]."""

    mean: Tensor
    log_std: Tensor

    def sample(self) -> Tensor:
        """Reparameterized."""
        return self.mean + torch.exp(self.log_std) * torch.randn_like(self.mean)

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z.square() - self.log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        return (0.5 + _HALF_LOG_2PI + self.log_std).sum(-1)


@dataclass(frozen=True)
class TanhNormal:
    """center + half_width · tanh(u), u ~ Normal."""

    base: Normal
    low: Tensor
    high: Tensor

    def sample(self) -> Tensor:
        return self._squash(self.base.sample())

    def mode(self) -> Tensor:
        return self._squash(self.base.mean)

    def log_prob(self, action: Tensor) -> Tensor:
        unit = ((action - self._center) / self._half_width).clamp(-1.0 + 1e-6, 1.0 - 1e-6)
        u, most = torch.atanh(unit), torch.atanh(unit.new_tensor(1.0 - 1e-6))
        # as ejax's: neither is the mean farther out than any u
        base = Normal(self.base.mean.clamp(-most, most), self.base.log_std)
        return base.log_prob(u) - self._log_slope(u)

    def entropy(self) -> Tensor:
        """Entropy of the base plus E[log |slope|] taken at the mean."""
        return self.base.entropy() + self._log_slope(self.base.mean)

    @property
    def _center(self) -> Tensor:
        return (self.low + self.high) / 2.0

    @property
    def _half_width(self) -> Tensor:
        return (self.high - self.low) / 2.0

    def _squash(self, u: Tensor) -> Tensor:
        return self._center + self._half_width * torch.tanh(u)

    def _log_slope(self, u: Tensor) -> Tensor:
        return (2.0 * (math.log(2.0) - u - softplus(-2.0 * u)) + torch.log(self._half_width)).sum(-1)


@dataclass(frozen=True)
class Categorical:
    """``logits``: [..., K]; actions [...] int32."""

    logits: Tensor

    def sample(self) -> Tensor:
        uniform = torch.rand_like(self.logits).clamp_min(torch.finfo(self.logits.dtype).tiny)
        return torch.argmax(self.logits - torch.log(-torch.log(uniform)), dim=-1).int()  # Gumbel's trick

    def mode(self) -> Tensor:
        return torch.argmax(self.logits, dim=-1).int()

    def log_prob(self, action: Tensor) -> Tensor:
        return torch.log_softmax(self.logits, -1).gather(-1, action.long()[..., None])[..., 0]

    def entropy(self) -> Tensor:
        log_p = torch.log_softmax(self.logits, -1)
        return -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True)
class MultiCategorical:
    """Independent categoricals, one per action dimension; actions [..., A] int32."""

    parts: tuple[Categorical, ...]

    def sample(self) -> Tensor:
        return torch.stack([part.sample() for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return torch.stack([part.log_prob(action[..., i]) for i, part in enumerate(self.parts)]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


Distribution: TypeAlias = Normal | TanhNormal | Categorical | MultiCategorical
"""A batch of action distributions; log-probabilities and entropies are sums over action dimensions."""
