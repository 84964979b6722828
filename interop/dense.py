"""Plain tensors: checked, made of arrays, and any value in a few words for messages. No jax."""

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60


def is_dense(x: torch.Tensor) -> bool:
    """Return True unless x is sparse, nested, quantized, complex, or on torch's device ``meta``, without data."""
    odd = x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta or x.is_complex()
    return not odd


def odd_tensor(x: Any) -> str | None:
    """Explain why ``x``, read from a file, is not a dense tensor of finite numbers that NumPy knows; None if it is."""
    if not isinstance(x, torch.Tensor) or not is_dense(x):
        return in_words(x)
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        return f"{in_words(x)} that the file holds {x.untyped_storage().nbytes()} bytes of"
    if x.is_floating_point() and x.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return in_words(x)
    return None if not x.is_floating_point() or bool(x.isfinite().all()) else f"{in_words(x)} with NaN or infinity"


def as_tensor(x: Any, name: str, device: torch.device) -> torch.Tensor:
    """Make a dense tensor of real numbers of an array; other arrays than tensors are copied to ``device``. Raises
    ValueError: it is something else."""
    if not isinstance(x, torch.Tensor):
        try:
            array = np.asarray(x)
        except ValueError:  # rows of different lengths
            array = np.array(None)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"'{name}' must be a tensor or array of numbers, got a {type(x).__name__}")
        # torch takes neither the other byte order nor negative strides, nor floats beyond 64 bits
        kind = np.dtype(np.float64) if array.dtype.kind == "f" and array.itemsize > 8 else array.dtype.newbyteorder("=")
        return torch.tensor(np.array(array, kind, order="C"), device=device)
    if not is_dense(x):
        raise ValueError(f"'{name}' must be a dense tensor of real numbers, got {in_words(x)}")
    return x


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Return the numbers of a tensor, those of 16 bits as float32, which holds them all: NumPy has no bfloat16."""
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).detach().cpu().numpy()


def as_floats(x: torch.Tensor, name: str) -> torch.Tensor:
    """Cast to float32, as ``interop.twin.parts.in_type``: ValueError where it cannot hold a number."""
    cast = x.float()
    if x.dtype not in (torch.float32, torch.bool):
        kept = cast.isfinite() | ~x.isfinite() if x.is_floating_point() else cast.to(x.dtype) == x
        if not kept.all():
            raise ValueError(f"'{name}' has {x[~kept][0]} ({x.dtype}), which float32 cannot hold")
    return cast


def in_words(x: Any) -> str:
    """Describe a value of any kind in a few words, for messages."""
    if isinstance(x, torch.Tensor):
        return _tensor_described(x)
    if isinstance(x, int) and x.bit_length() > 64:
        return f"an integer of {x.bit_length()} bits"
    if x is None or isinstance(x, bool | int | float | str | bytes | complex):
        return _SHOWN.repr(x)
    return (
        f"a {type(x).__name__} of {len(x)}" if isinstance(x, Mapping | list | tuple | set) else f"a {type(x).__name__}"
    )


def _tensor_described(x: torch.Tensor) -> str:
    kinds = {"nested": x.is_nested, "quantized": x.is_quantized, "meta": x.is_meta}
    kind = "".join(f"{name} " for name, holds in kinds.items() if holds)
    if x.layout is not torch.strided:
        kind += f"{str(x.layout).removeprefix('torch.')} "
    return f"a {kind}tensor {str(x.dtype).removeprefix('torch.')}{'' if x.is_nested else list(x.shape)}"
