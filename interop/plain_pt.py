"""Torch files of tensors and plain data, read without running what else they may hold. No jax.

``torch.load(weights_only=True)`` refuses to import or call anything that tensors and plain containers do not need.
"""

import contextlib
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interop.dense import odd_tensor, to_numpy
from interop.standalone_verify import MAX_ARTEFACT, check_plain

_MAX_CHARS = 300
_PLAIN = (
    "Save only tensors and plain values: float(x) or x.tolist() for NumPy's, module.state_dict() for a module; "
    "for a file that you trust, torch.load(FILE, weights_only=False) gives what to save again"
)
_NESTED = ("state_dict", "model_state_dict", "model", "policy")
"""Keys under which training programs put the state dict, next to counters and optimizers; the last is EmbodiChain's."""


def load_plain(path: Path) -> dict[str, Any]:
    """Load the mapping in a .pt file of tensors and plain data. Raises ValueError: something else is in it; it is not
    run. Or the file is damaged. FileNotFoundError: there is none."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        check_plain(path)
        if zipfile.is_zipfile(path):  # torch reads a damaged tensor as it is
            with zipfile.ZipFile(path) as archive:
                if (size := sum(part.file_size for part in archive.infolist())) > MAX_ARTEFACT:
                    raise ValueError(f"unpacked it has {size} bytes; at most {MAX_ARTEFACT} are read")
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not hold")
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f": it names {named[1][:_MAX_CHARS]}{_place(path, named[1])}" if named else ""
        raise ValueError(f"{path} holds more than tensors and plain data, and is not read{what}. {_PLAIN}") from error
    except Exception as error:  # an invalid file may fail anywhere in torch
        raise ValueError(f"{path} is not a torch file, or is damaged: {repr(error)[:_MAX_CHARS]}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} holds a {type(payload).__name__}, a checkpoint is a mapping")
    return payload


def _place(path: Path, name: str) -> str:
    """Name the text before the first mention of ``name`` in a torch file: the key of what is made by it."""
    key, text, memo = "", None, dict[Any, Any]()
    with contextlib.suppress(StopIteration, ValueError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        data = next(part for part in archive.namelist() if part.endswith("/data.pkl"))
        for code, arg, _ in pickletools.genops(archive.read(data)):
            if code.name == "GLOBAL" and str(arg).replace(" ", ".") == name:
                break
            memo |= {arg: text} if "PUT" in code.name else {}  # a text that comes again is a number in the pickle
            text = arg if "UNICODE" in code.name else memo.get(arg) if "GET" in code.name else None
            key = key if text is None else f", at the key {repr(text)[:_MAX_CHARS]}"
    return key


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """Load the state dict of a torch file: its mapping, or the one under the first of ``_NESTED`` that it has.

    Numbers of 16 bits become float32, which holds all their values.

    Raises ValueError: see ``load_plain``; or an entry is not a dense tensor of finite numbers. FileNotFoundError: there
    is no such file.
    """
    payload = load_plain(path)
    tensors = next((payload[key] for key in _NESTED if isinstance(payload.get(key), dict)), payload)
    for name, x in tensors.items():
        if odd := odd_tensor(x) if isinstance(name, str) else "a key that is not text":
            text = f"{path} is not a state dict: it has {odd} at {repr(name)[:_MAX_CHARS]}, where a tensor is expected."
            raise ValueError(f"{text} Save model.state_dict(), alone or under one of {', '.join(_NESTED)}")
    return {name: to_numpy(x) for name, x in tensors.items()}
