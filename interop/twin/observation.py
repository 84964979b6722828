"""An observation's parts as the torch twin of a policy reads them: checked tensors. No jax."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.dense import describe, is_dense
from interop.twin.spec import PolicySpec


def as_tensor(x: Any, name: str, device: torch.device) -> Tensor:
    """Make a dense tensor of real numbers of an array; other arrays than tensors are copied to ``device``.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(x, Tensor):
        try:
            array = np.asarray(x)
        except ValueError:  # rows of different lengths
            array = np.array(None)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"'{name}' must be a tensor or array of numbers, got a {type(x).__name__}")
        return torch.tensor(array, device=device)
    if not is_dense(x):
        raise ValueError(f"'{name}' must be a dense tensor of real numbers, got {describe(x)}")
    return x


def narrow(x: Tensor, name: str, spec: PolicySpec) -> Tensor:
    """Select the entries of an array [..., F] that the actor reads, float32."""
    read, width = spec.read(name), spec.observation[name]
    if x.ndim == 0 or x.shape[-1] not in (width, len(read)):
        either = f" or, without those that the actor does not read, {len(read)}" if len(read) < width else ""
        numbers = f"{x.shape[-1]} numbers" if x.ndim else "no axis"
        raise ValueError(f"'{name}' has {numbers}, the policy was made for {width}{either}")
    x = x.float()
    return x[..., list(read)] if x.shape[-1] > len(read) else x
