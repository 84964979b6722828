"""The torch twins of ``ejax.policies.recurrence``: one step of a GRU, an LSTM or a window of past observations."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from interop.twin.spec import MemorySpec


def make_recurrence(spec: MemorySpec, num_inputs: int) -> nn.Module:
    """``torch.nn.GRU`` or ``LSTM``, whose weights ``recurrent_step`` reads."""
    make = nn.GRU if spec.type == "gru" else nn.LSTM
    return make(num_inputs, spec.width, spec.depth)


def recurrent_step(spec: MemorySpec, weights: nn.Module, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """``(features [..., H], memory after it [..., M])``, spelt out: a trace of torch's own holds its batch size.

    Args:
        x: [..., I]; ``memory``: [..., M].
    """
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
    """Return ``(the last K observations [..., K, F], the oldest first; memory after it)``.

    Args:
        x: [..., F]; ``memory``: [..., M].
    """
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
