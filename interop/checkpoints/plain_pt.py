"""Torch files of tensors and plain data, read without running what else they may hold. No jax.

``torch.load(weights_only=True)`` refuses to import or call anything that tensors and plain containers do not need.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

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
    except Exception as error:  # an invalid file may fail anywhere in torch
        raise ValueError(f"{path} is not a torch file, or is damaged: {repr(error)[:_LONGEST]}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} holds a {type(payload).__name__}, a checkpoint is a mapping")
    return payload
