"""A worker's failure, as bytes that every consumer can read: the exception itself where it travels, else its text."""

import pickle
import sys
import traceback
from typing import Any, NoReturn

CAPACITY = 64 * 1024
"""Largest size of a packed failure, in bytes."""
_TEXT, _NAME = CAPACITY // 4, CAPACITY // 32
"""Shares of it, in bytes: message and traceback; the names and each part of the traceback."""


class OnlineDataWorkerError(RuntimeError):
    """The worker of an OnlineDataEngine failed. The message has its traceback where it left one."""


def pack_failure(error: BaseException) -> bytes:
    """At most ``CAPACITY`` bytes: type, message, the end of the traceback, and the pickled exception if it fits."""
    what = {
        "type": _start(f"{type(error).__module__}.{type(error).__qualname__}", _NAME),
        "module": _start(str(type(error).__module__), _NAME),
        "message": _start(_message(error), _TEXT),
        "traceback": _end("".join(_start(part, _NAME) for part in traceback.format_exception(error)), _TEXT),
        "pickled": _pickled(error),
    }
    packed = pickle.dumps(what)
    if len(packed) > CAPACITY:
        packed = pickle.dumps(what | {"pickled": None})
    return packed


def raise_failure(packed: bytes) -> NoReturn:
    """Raise the exception again, with the worker's traceback as its cause.

    An exception whose module this process has not imported comes as OnlineDataWorkerError: no consumer imports a
    simulator for the sake of an error.
    """
    what: dict[str, Any] = pickle.loads(packed)
    cause = OnlineDataWorkerError(f"in the worker:\n{what['traceback'].rstrip()}")
    if what["pickled"] is not None and what["module"] in sys.modules:
        try:
            error = pickle.loads(what["pickled"])
        except Exception:  # its __init__ or __setstate__ may do anything: the text has it all
            error = None
        if isinstance(error, BaseException):
            raise error from cause
    raise OnlineDataWorkerError(f"{what['type']}: {what['message']}") from cause


def _start(text: str, size: int) -> str:
    """The beginning of ``text``, at most ``size`` bytes: a character may have four."""
    return _encoded(text)[:size].decode(errors="ignore")


def _end(text: str, size: int) -> str:
    """The end of ``text``, likewise."""
    return _encoded(text)[-size:].decode(errors="ignore")


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # half a surrogate pair, as in a file's name, has no UTF-8


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the exception's own code, which may be what is broken
        return f"<its text cannot be made: str() of a {type(error).__qualname__} fails>"


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None  # a SystemExit of the worker must not end a consumer
    try:
        return pickle.dumps(error)
    except Exception:  # pickling runs the exception's own code
        return None
