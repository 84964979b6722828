"""Compiled programs, kept for the process: a run that is made again, with another seed or for longer, compiles nothing.

JAX's cache on disk has no programs that call back to the host, and serves others only after seconds of tracing.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ejax.schema.frozen import is_hashable

_MOST = 8
_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def compiled(what: Hashable, given: Any, lower: Callable[[], jax.stages.Lowered]) -> Any:
    """``lower().compile()``, or its result for an equal program earlier in this process.

    Args:
        what: everything that the program depends on besides ``given``. None or unhashable: it is compiled.
        given: the program's arguments, or their shapes.
    """
    leaves, structure = jax.tree.flatten(given)
    forms = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # jax defines it at run time
    return _shared(None if what is None else (what, structure, forms, precision), lambda: lower().compile())


def jitted(what: Hashable, function: Callable[..., Any]) -> Any:
    """``jax.jit(function)``, or its result for an equal ``what`` (see ``compiled``) earlier in this process."""
    return _shared(None if what is None else ("jitted", what), lambda: jax.jit(function))


def _shared(key: Hashable, make: Callable[[], Any]) -> Any:
    if key is None or not is_hashable(key):
        return make()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    program = make()  # others may compile meanwhile
    with _lock:
        _kept[key] = program
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    return program
