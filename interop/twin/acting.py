"""The base of the torch twins of all kinds of policies: ``act`` on an observation, and ``reset``. No jax."""

from typing import Any

import torch
from torch import Tensor, nn

from interop.dense import as_floats, as_tensor
from interop.twin.kinds import Spec
from interop.twin.parts import check_remembered, policy_inputs
from interop.twin.text import TextReader


class Twin(nn.Module):
    """A deployed policy in torch; ``forward``, or ``deployed()`` where that differs, takes ``spec.inputs``."""

    spec: Spec
    tokenizer: TextReader | None = None
    """Makes tokens of texts, of a policy that reads them."""
    memory: Tensor | None = None
    """[..., M], of the rows of the last ``act``. None: an episode starts."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the weights. Raises ValueError: to 16 bits, in which layers and inputs would not fit."""
        if (dtype := fn(torch.zeros(())).dtype) in (torch.float16, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            text = f"got {name} for the weights, but a policy has float32, by which its export was verified. Keep them"
            raise ValueError(f"{text}, and act within torch.autocast(device_type, {dtype}) for the speed of {name}")
        return super()._apply(fn, recurse)

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    def deployed(self) -> nn.Module:
        """Return the function of plain tensors: ``spec.inputs`` in, ``spec.outputs`` out, all by position."""
        return self

    @torch.no_grad()
    def act(self, obs: Any, noise: Any = None) -> Any:
        """Return the deterministic action, in the environment's space as the spec has it: float32, or int32 choices.

        A policy with memory remembers the observation; where an episode ended, ``reset`` comes before the next one's.

        Args:
            obs: ``spec.reads`` by name, leading axes [...]: images uint8, numbers, and a text as a str for all rows,
                strs in the shape of the leading axes, or bytes [..., L] uint8.
            noise: [..., K·A], that a flow starts from, N(0, 1) for a sample. None: zeros, the flow's mode.

        Returns:
            A tensor; a NumPy array if no image and no numbers of ``obs`` are tensors.

        Raises:
            ValueError: ``obs`` lacks a part that the policy reads, or has one of another shape or kind; or its leading
                axes are not those of what the policy remembers.
        """
        spec, device, given = self.spec, self.device, list[Any]()

        def as_array(x: Any, name: str) -> Tensor:
            given.append(x)
            tensor = as_tensor(x, name, device)
            return tensor if name in spec.images else as_floats(tensor, name)

        leaves, batch = policy_inputs(spec, obs, self.tokenizer, noise, as_array)
        if spec.memory is not None:
            leaves.append(self._remembered(batch, spec.memory.size))
        dtypes = [getattr(torch, spec.input_dtype(name)) for name in spec.inputs]
        tensors = [torch.as_tensor(x, dtype=dtype, device=device) for x, dtype in zip(leaves, dtypes, strict=True)]
        action, *_, last = self.deployed()(*tensors)
        if spec.memory is not None:
            self.memory = last.reshape((*batch, -1))
        action = action.reshape((*batch, *action.shape[1:]))
        return action if any(isinstance(x, Tensor) for x in given) else action.numpy(force=True)

    def reset(self, rows: Any = None) -> None:
        """Forget: new episodes start, in all rows or in those where ``rows`` [...] is true. The next ``act`` may be of
        another batch, if it is all."""
        if rows is None:
            self.memory = None
        elif self.memory is not None:
            ended = as_tensor(rows, "rows", self.memory.device).to(self.memory.device, torch.bool)
            self.memory = torch.where(ended[..., None], 0.0, self.memory)

    def _remembered(self, batch: tuple[int, ...], size: int) -> Tensor:
        if self.memory is None:
            self.memory = torch.zeros((*batch, size), device=self.device)
        check_remembered(self.memory, batch)
        return self.memory.reshape(-1, size)
