"""Compiled programs, kept for the process: a run that is made again, with another seed or for longer, compiles nothing.

JAX keeps compiled programs on disk between processes, but none that calls back to the host, as those of MuJoCo's C
engine do; and finding one there means tracing the program first, which takes seconds too.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ejax.schema.frozen import is_hashable

_MOST = 8
"""Programs that are kept, the most recently used ones."""
_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def compiled(what: Hashable, given: Any, lower: Callable[[], jax.stages.Lowered]) -> Any:
    """``lower().compile()``, or what that gave for an equal program earlier in this process.

    Args:
        what: everything that the program depends on besides ``given``: two that are equal give equal programs. None, or
            what has no hash: it is compiled.
        given: the program's arguments, or their shapes.
    """
    leaves, structure = jax.tree.flatten(given)
    forms = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # jax defines it at run time
    return _shared(None if what is None else (what, structure, forms, precision), lambda: lower().compile())


def jitted(what: Hashable, function: Callable[..., Any]) -> Any:
    """``jax.jit(function)``, or what that gave for an equal function earlier in this process, with its programs.

    Args:
        what: as in ``compiled``.
    """
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
