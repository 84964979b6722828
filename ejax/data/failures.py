"""A worker's failure, as bytes that every consumer can read: the exception itself where it travels, else its text."""

import pickle
import sys
import traceback
from typing import Any, NoReturn

CAPACITY = 64 * 1024
"""Bytes that a packed failure has at most."""


class OnlineDataWorkerError(RuntimeError):
    """The worker of an OnlineDataEngine failed. The message has its traceback where it left one."""


def pack_failure(error: BaseException) -> bytes:
    """At most ``CAPACITY`` bytes: type, message, the end of the traceback, and the pickled exception if it fits."""
    text = "".join(traceback.format_exception(error))
    what = {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "module": type(error).__module__,
        "message": str(error)[: CAPACITY // 8],
        "traceback": text[-CAPACITY // 8 :],
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
        except Exception:  # whatever its __init__ or __setstate__ does: the text says it all
            error = None
        if isinstance(error, BaseException):
            raise error from cause
    raise OnlineDataWorkerError(f"{what['type']}: {what['message']}") from cause


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None  # a SystemExit of the worker must not end a consumer
    try:
        return pickle.dumps(error)
    except Exception:  # pickling runs the exception's own code
        return None
