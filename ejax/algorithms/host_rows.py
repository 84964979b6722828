"""Rows of a replay buffer outside the device: in arrays of this process, or in files mapped into its memory.

A program has a token in their place, and makes one call of the host in each update, which takes the token and gives the
next one. So the calls have one order, none is left out or made twice, and an older state's token is recognized.
"""

import itertools
import os
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.runtime.host_call import host_call
from ejax.runtime.tree_text import named_leaves
from ejax.types import Array, PyTree

_memories: "weakref.WeakValueDictionary[int, RowMemory]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@struct.dataclass(kw_only=True)
class HostRows:
    """Rows of one ring."""

    token: Array
    """[2] int32: the number of their memory in this process, 0 if it has none yet, and how often that was written."""
    forms: tuple[jax.ShapeDtypeStruct, ...] = struct.field(pytree_node=False)
    """Leaves of the rows, [1, C, ...]."""
    structure: Any = struct.field(pytree_node=False)
    folder: str | None = struct.field(pytree_node=False)
    """See ``ReplayConfig``. None: in arrays of the process."""

    @property
    def shapes(self) -> PyTree:
        return jax.tree.unflatten(self.structure, self.forms)

    def files(self, run: Path) -> list[Path]:
        """List the files of a run's rows, ``<field>.npy``; none: they are in arrays."""
        if self.folder is None:
            return []
        folder = run / self.folder
        if Path(self.folder).is_absolute():  # other runs may have theirs there
            folder /= f"{run.absolute().name}_{zlib.crc32(str(run.absolute()).encode()):08x}"
        return [folder / f"{quote(name, safe=' ')}.npy" for name in named_leaves(self.shapes)]

    def pages(self) -> list[NDArray[Any]]:
        """Return the rows of this state, leaves [1, C, ...]. RuntimeError: they are gone."""
        return [page[None] for page in _memory_of(self.token).pages]

    def exchange(self, places: Array, new: PyTree, wanted: Array) -> tuple["HostRows", PyTree]:
        """Write ``new`` rows, leaves [M, ...], at ``places`` [M] (C: nowhere), then take the ``wanted`` [...]: leaves
        [..., ...]."""
        shapes = [jax.ShapeDtypeStruct((*wanted.shape, *form.shape[2:]), form.dtype) for form in self.forms]
        results = (jax.ShapeDtypeStruct((2,), jnp.int32), *shapes)
        given = (self.token, places, wanted, *jax.tree.leaves(new))
        token, *taken = host_call(_exchange, results, *given, name="ejax replay rows")
        return replace(self, token=token), jax.tree.unflatten(self.structure, taken)


class RowMemory:
    """Memory of one ring's rows, leaves [C, ...], while somebody holds it. OSError: there is no room for the files."""

    def __init__(self, forms: Sequence[jax.ShapeDtypeStruct], files: Sequence[Path]) -> None:
        self.number, self.writes = next(_numbers), 0
        self.pages = [np.zeros(form.shape[1:], form.dtype) for form in (() if files else forms)]
        for file, form in zip(files, forms, strict=bool(files)):
            self.pages.append(np.lib.format.open_memmap(file, "w+", form.dtype, form.shape[1:]))
            # on Linux a full disk is an error here, and else a fault at a later write
            if hasattr(os, "posix_fallocate"):
                with file.open("ab") as opened:
                    os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
            weakref.finalize(self, _remove, file, file.stat().st_ino)
        _memories[self.number] = self

    @property
    def token(self) -> NDArray[Any]:
        return np.array([self.number, self.writes], np.int32)


def _remove(file: Path, number: int) -> None:
    with suppress(OSError):
        if file.stat().st_ino == number:  # else it is another run's
            file.unlink()
            file.parent.rmdir()


def _exchange(token: Any, places: Any, wanted: Any, *new: Any) -> tuple[NDArray[Any], ...]:
    memory, places, wanted = _memory_of(token), np.asarray(places), np.asarray(wanted)
    counts = places < len(memory.pages[0])
    for page, rows in zip(memory.pages, new, strict=True):
        page[places[counts]] = np.asarray(rows)[counts]
    memory.writes += 1
    return memory.token, *(page[wanted] for page in memory.pages)


def _memory_of(token: Any) -> RowMemory:
    number, writes = np.asarray(token).tolist()  # waits for the program that gives it
    memory = _memories.get(number)
    if memory is None or memory.writes != writes:
        why = "a later update wrote over them" if memory else "the parts of the run that held them are gone"
        raise RuntimeError(f"this state no longer has replay rows on the host: {why}; load them from a checkpoint")
    return memory
