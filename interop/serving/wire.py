"""Messages of the policy server: msgpack with NumPy arrays, as openpi's client packs them.

An array is the map ``{b"__ndarray__": True, b"data", b"dtype", b"shape"}``, a NumPy scalar ``{b"__npgeneric__": True,
b"data", b"dtype"}``. Nothing is unpickled: arrays hold truth values, integers and real numbers alone.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np

_DTYPE = re.compile(r"[<>|=]?[biuf]\d")
_MAX_AXES = 8


def pack(message: Mapping[str, Any]) -> bytes:
    return msgpack.packb(message, default=_pack_array)


def _pack_array(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        return {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}
    raise TypeError(f"cannot send {type(x).__name__}")


def unpack(data: bytes | str) -> dict[str, Any]:
    """Read an observation: its arrays and texts by dotted path.

    Raises:
        ValueError: it is none; the text names the part that cannot be read.
    """
    try:
        message = msgpack.unpackb(data)  # a text is a TypeError
        pairs = list(_parts(message, "")) if isinstance(message, dict) else None
    except (TypeError, ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"the message cannot be read: {str(error)[:300] or type(error).__name__}") from None
    if pairs is None:
        raise ValueError(f"the message is {type(message).__name__} in msgpack; must be a map of an observation's parts")
    parts = dict(pairs)
    if len(parts) < len(pairs):
        raise ValueError("a part is there twice, by its path and in a map")
    return parts


def _parts(message: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, x in message.items():
        path = f"{prefix}{name}"
        if isinstance(x, dict) and not x.keys() & {b"__ndarray__", b"__npgeneric__"}:
            yield from _parts(x, f"{path}.")
            continue
        try:
            yield path, x if isinstance(x, str) else _read(x)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"'{path[:100]}': {str(error)[:200]}") from None


def _read(x: Any) -> Any:
    if not isinstance(x, dict) or b"__npgeneric__" in x:
        array = np.asarray(x[b"data"], _dtype(x)) if isinstance(x, dict) else np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"it is {repr(x)[:60]}; give an array of numbers, or a text")
        return array
    dtype, data, shape = _dtype(x), x[b"data"], x[b"shape"]
    sizes = [n for n in shape if type(n) is int and n >= 0]
    if len(sizes) < len(shape) or len(sizes) > _MAX_AXES or len(data) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"its {len(data)} bytes are not {dtype}{repr(shape)[:60]}")
    return np.ndarray(sizes, dtype, data)


def _dtype(x: dict[Any, Any]) -> np.dtype[Any]:
    name = str(x[b"dtype"])
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"its dtype is {name[:60]}; allowed are truth values, integers and real numbers")
    return np.dtype(name)
