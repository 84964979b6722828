"""Torch files of tensors and plain data, read without running what else they may hold. No jax.

``torch.load(weights_only=True)`` refuses to import or call anything but what tensors and plain containers are made of.
"""

import pickle
import re
import reprlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_LONGEST = 300


def load_plain(path: Path) -> dict[str, Any]:
    """The mapping in a .pt file of tensors and plain data.

    Raises:
        ValueError: something else is in it; it is not run. Or the file is damaged.
        FileNotFoundError: there is none.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        if zipfile.is_zipfile(path):  # torch reads a damaged tensor as it is
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not hold")
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f": it names {named[1][:_LONGEST]}" if named else ""
        raise ValueError(f"{path} holds more than tensors and plain data, and is not read{what}") from error
    except Exception as error:  # what is no file of torch fails in it anywhere
        raise ValueError(f"{path} is no torch file, or a damaged one: {repr(error)[:_LONGEST]}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} holds a {type(payload).__name__}, a checkpoint is a mapping")
    return payload


def odd_tensor(x: Any) -> str | None:
    """What keeps ``x`` from being a dense tensor of finite real numbers, or None."""
    if not isinstance(x, torch.Tensor):
        return describe(x)
    if x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta or x.is_complex():
        return describe(x)
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        return f"{describe(x)} that the file holds {x.untyped_storage().nbytes()} bytes of"
    try:
        x.numpy(force=True) if x.dtype != torch.bfloat16 else None
    except TypeError:  # a type of floats that NumPy lacks
        return describe(x)
    return None if not x.is_floating_point() or bool(x.isfinite().all()) else f"{describe(x)} with NaN or infinity"


def describe(x: Any) -> str:
    """A value of any kind in a few words, for messages."""
    if isinstance(x, torch.Tensor):
        layout = "" if x.layout is torch.strided else f" {str(x.layout).removeprefix('torch.')}"
        return f"a{layout} tensor {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, int) and x.bit_length() > 64:
        return f"an integer of {x.bit_length()} bits"
    if x is None or isinstance(x, bool | int | float | str | bytes | complex):
        return _SHOWN.repr(x)
    return (
        f"a {type(x).__name__} of {len(x)}" if isinstance(x, Mapping | list | tuple | set) else f"a {type(x).__name__}"
    )
