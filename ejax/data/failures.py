"""A worker's failure, as bytes that every consumer can read."""

import pickle
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

CAPACITY = 64 * 1024
"""Largest size of a packed failure, in bytes."""
_TEXT, _NAME = CAPACITY // 4, CAPACITY // 32
"""Shares of it: message and traceback; the names and each part of the traceback."""


class OnlineDataWorkerError(RuntimeError):
    """A failure of an engine's worker. The message has its traceback if it left one."""


def pack_failure(error: BaseException) -> bytes:
    """Pack type, message, the end of the traceback, and the pickled exception if it fits, in ``CAPACITY`` bytes."""
    try:
        message = str(error)
    except Exception:  # the exception's own code, which may be what is broken
        message = f"<its text cannot be made: str() of a {type(error).__qualname__} fails>"
    what: dict[str, Any] = {
        "type": _cut(f"{type(error).__module__}.{type(error).__qualname__}", _NAME),
        "module": _cut(str(type(error).__module__), _NAME),
        "message": _cut(message, _TEXT),
        "traceback": _cut("".join(_cut(part, _NAME) for part in traceback.format_exception(error)), -_TEXT),
        "pickled": None,
    }
    if isinstance(error, Exception):  # a SystemExit of the worker must not end a consumer
        with suppress(Exception):  # pickling runs the exception's own code
            packed = pickle.dumps(what | {"pickled": pickle.dumps(error)})
            if len(packed) <= CAPACITY:
                return packed
    return pickle.dumps(what)


def raise_failure(packed: bytes) -> NoReturn:
    """Raise the exception again, with the worker's traceback as its cause. An exception whose module this process has
    not imported comes as OnlineDataWorkerError."""
    what: dict[str, Any] = pickle.loads(packed)
    cause = OnlineDataWorkerError(f"in the worker:\n{what['traceback'].rstrip()}")
    error = None
    if what["pickled"] is not None and what["module"] in sys.modules:
        with suppress(Exception):  # its __init__ or __setstate__ may do anything: the text has it all
            error = pickle.loads(what["pickled"])
    if isinstance(error, BaseException):
        raise error from cause
    raise OnlineDataWorkerError(f"{what['type']}: {what['message']}") from cause


def _cut(text: str, size: int) -> str:
    """Keep the first ``size`` bytes of ``text``, of a negative one the last."""
    # half a surrogate pair, as in a file's name, has no UTF-8
    encoded = text.encode(errors="backslashreplace")
    return (encoded[:size] if size > 0 else encoded[size:]).decode(errors="ignore")
