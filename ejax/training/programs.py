"""Compiled programs, kept for the process: a run that is made again, with another seed or for longer, compiles nothing.

JAX's cache on disk has no programs that call back to the host, and serves others only after seconds of tracing.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ejax.schema.frozen import is_hashable

_MOST = 8  # a sweep alternates between a few; each holds its constants
_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def key_of(what: Hashable, given: Any) -> Hashable:
    """Make the key of a compiled program; None: it cannot be shared.

    Args:
        what: everything that the program depends on besides ``given``. None or unhashable: it is not shared.
        given: the program's arguments, or their shapes.
    """
    leaves, structure = jax.tree.flatten(given)  # a program fits arguments of one form and place only
    forms = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # jax defines it at run time
    return None if what is None or not is_hashable(what) else (what, structure, forms, precision)


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the program that an equal part of this process keeps, else make one, and keep it if it has a key."""
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)  # the one that is not used for longest goes first
            return _kept[key]
    program = make()
    if key is not None:
        with _lock:
            _kept[key] = program
            while len(_kept) > _MOST:
                _kept.popitem(last=False)
    return program


def jitted(what: Hashable, function: Callable[..., Any], **options: Any) -> Any:
    """Return ``jax.jit(function, **options)``, or that of an equal ``what`` (``key_of``) earlier in this process."""
    key = ("jitted", what) if what is not None and is_hashable(what) else None
    return kept(key, lambda: jax.jit(function, **options))
