"""A worker's failure, as bytes that every consumer can read."""

import pickle
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

CAPACITY = 64 * 1024
"""Largest size of a packed failure, in bytes."""
_TEXT, _TRACE, _PART = 2000, 4000, 1000
"""Largest sizes of the text, of the traceback and of each part of that, in characters of four bytes at most."""


class OnlineDataWorkerError(RuntimeError):
    """A failure of an engine's worker. The message has its traceback if it left one."""


def pack_failure(error: BaseException) -> bytes:
    """Pack the text, the end of the traceback, and the pickled exception if it fits, in ``CAPACITY`` bytes."""
    text = "".join(traceback.format_exception_only(error)).strip()[:_TEXT]
    trace = "".join(part[:_PART] for part in traceback.format_exception(error)).strip()[-_TRACE:]
    if isinstance(error, Exception):  # a SystemExit of the worker must not end a consumer
        with suppress(Exception):  # pickling runs the exception's own code
            packed = pickle.dumps((text, trace, type(error).__module__, pickle.dumps(error)))
            if len(packed) <= CAPACITY:
                return packed
    return pickle.dumps((text, trace, "", b""))


def raise_failure(packed: bytes) -> NoReturn:
    """Raise the exception again, with the worker's traceback as its cause. An exception whose module this process has
    not imported comes as OnlineDataWorkerError."""
    text, trace, module, pickled = pickle.loads(packed)
    cause, error = OnlineDataWorkerError(f"in the worker:\n{trace}"), None
    if module in sys.modules:
        with suppress(Exception):  # its __init__ or __setstate__ may do anything: the text has it all
            error = pickle.loads(pickled)
    raise (error if isinstance(error, Exception) else OnlineDataWorkerError(text)) from cause
