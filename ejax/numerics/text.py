"""Text in an observation: UTF-8 in an array of bytes, zeros after it."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def as_bytes(text: str, length: int) -> NDArray[np.uint8]:
    """Encode a text as an observation has it: uint8 [length]. Raises ValueError: it is longer, or holds a zero."""
    data = text.encode()
    if len(data) > length or 0 in data:
        raise ValueError(f"an instruction must have at most {length} bytes and no zero, got {len(data)}: {text[:80]!r}")
    return np.frombuffer(data.ljust(length, b"\0"), np.uint8).copy()


def as_text(data: ArrayLike) -> str:
    """Decode bytes [length] of ``as_bytes``; those that are not UTF-8 become U+FFFD."""
    return bytes(np.asarray(data, np.uint8)).rstrip(b"\0").decode(errors="replace")
