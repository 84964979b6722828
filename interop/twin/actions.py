"""A head's numbers as the environment's action, in torch: what ``ejax.envs.actions.to_action`` is. No jax."""

import torch
from torch import Tensor, nn

from interop.twin.spec import ActsInSpace


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
