"""Torch files of tensors and plain data, read without running what else they may hold. No jax.

``torch.load(weights_only=True)`` refuses to import or call anything that tensors and plain containers do not need.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interop.dense import odd_tensor
from interop.plain_files import check_plain, check_unpacked

_MAX_CHARS = 300
_NESTED = ("state_dict", "model_state_dict", "model", "policy")
"""Keys under which training programs put the state dict, beside counters and optimizers; the last is EmbodiChain's."""


def load_plain(path: Path) -> dict[str, Any]:
    """Load the mapping in a .pt file of tensors and plain data.

    Raises:
        ValueError: something else is in it; it is not run. Or the file is damaged.
        FileNotFoundError: there is none.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        check_plain(path)
        if zipfile.is_zipfile(path):  # torch reads a damaged tensor as it is
            with zipfile.ZipFile(path) as archive:
                check_unpacked(archive)
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not hold")
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f": it names {named[1][:_MAX_CHARS]}" if named else ""
        raise ValueError(f"{path} holds more than tensors and plain data, and is not read{what}") from error
    except Exception as error:  # an invalid file may fail anywhere in torch
        raise ValueError(f"{path} is not a torch file, or is damaged: {repr(error)[:_MAX_CHARS]}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} holds a {type(payload).__name__}, a checkpoint is a mapping")
    return payload


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """Load the state dict of a torch file: its mapping, or the one under the first of ``_NESTED`` that it has.

    Numbers of 16 bits become float32, which holds all their values (NumPy has no bfloat16).

    Raises:
        ValueError: see ``load_plain``; or an entry is no dense tensor of finite numbers.
        FileNotFoundError: there is no such file.
    """
    payload = load_plain(path)
    tensors = next((payload[key] for key in _NESTED if isinstance(payload.get(key), dict)), payload)
    for name, x in tensors.items():
        if odd := odd_tensor(x) if isinstance(name, str) else "a key that is no text":
            raise ValueError(
                f"{path} is not a state dict: it has {odd} at {repr(name)[:_MAX_CHARS]}, where a tensor is expected. "
                f"Save model.state_dict(), by itself or under one of {', '.join(_NESTED)}"
            )
    # NumPy has no bfloat16
    half = (torch.float16, torch.bfloat16)
    return {name: (x.float() if x.dtype in half else x).detach().numpy() for name, x in tensors.items()}
