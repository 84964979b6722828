"""The arrays of a checkpoint, by orbax: written by all processes, read on one device, compared by shape and type."""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ejax.runtime.tree_text import named_leaves
from ejax.schema.writing import make_folder
from ejax.types import PyTree

REPLAY = "replay"
"""The folder of a checkpoint that has the rows of replay buffers, which are not among the arrays."""
_MAX_NAMED = 20
_NARROW = (jnp.uint2, jnp.uint4, jnp.float8_e4m3)
"""Types that orbax cannot store; as bytes they lose nothing."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the text has the reason and the remedy."""


def save_arrays(folder: Path, state: PyTree) -> None:
    """Write this process's share of a state's arrays; CheckpointError: orbax stored something else."""
    make_folder(folder.parent, folder.parents[1])
    with _silent_orbax() as ocp, _plain_path(folder) as path:
        try:
            ocp.save(path, {name: _storable(leaf) for name, leaf in _flatten(state).items()})
        except ValueError as error:
            code = re.search(r"os_error_code='(\d+)'", str(error))  # of a disk that refused
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    # one reader is enough: all arrays are on the one disk
    if jax.process_index() == 0 and (problems := _differences(read_arrays(folder.parent, None), _flatten(state))):
        raise CheckpointError(f"{folder} was not stored correctly: {'; '.join(problems[:_MAX_NAMED])}")


def load_arrays(path: Path, like: PyTree, prefix: str, remedy: str) -> PyTree:
    """Read the arrays of ``like``, whose names on disk begin with ``prefix``. Raises CheckpointError: they are not
    there, or have other forms; the text ends with ``remedy``."""
    wanted = {prefix + name: leaf for name, leaf in _flatten(like).items()}
    everything = read_arrays(path, None)
    saved = {name: leaf for name, leaf in everything.items() if name.startswith(prefix)}
    arrays: dict[str, Any] = {}
    if not (problems := _differences(saved, wanted)):
        arrays = read_arrays(path, wanted)
        problems = _differences(arrays, wanted)  # only what was read shows whether it is a PRNG key, and which one
    if problems:
        more = [f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
        text = "; ".join(problems[:_MAX_NAMED] + more)
        raise CheckpointError(f"checkpoint {path} does not fit the config: {text}. {remedy}")
    leaves = [
        arrays[prefix + name] if x.size else (jnp if _fits_jax(x) else np).zeros(x.shape, x.dtype)
        for name, x in named_leaves(like).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_arrays(path: Path, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Read arrays onto one device of this process, whoever wrote them; those of 64 bits stay on the host. ``wanted``:
    name -> shape and type. None: read the shapes of all. Raises CheckpointError: orbax cannot read them, although the
    digests agree."""
    try:
        with _silent_orbax() as ocp, _plain_path(path / "state") as state:
            if wanted is None:
                return dict(ocp.metadata(state).metadata)
            rest = dict.fromkeys(ocp.metadata(state).metadata, ocp.PLACEHOLDER)  # not read
            here = SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])  # type: ignore[attr-defined]
            stored = {name: _stored_form(x) for name, x in wanted.items()}
            forms: dict[str, Any] = {  # 64 bits, as environments outside JAX may have, are not cut to 32
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
                if _fits_jax(x)
                else np.empty(x.shape, x.dtype)
                for name, x in stored.items()
            }
            read = dict(ocp.load(state, {**rest, **forms}))
            narrow = {name: _same_bits(read[name], x.dtype) for name, x in wanted.items() if x.dtype in _NARROW}
            return {name: read[name] for name in wanted} | narrow
    except Exception as error:  # a reader of foreign bytes may raise anything
        text = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"checkpoint {path} is damaged: state cannot be read: {text}") from error


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Compare arrays by name, shape and type; those of orbax's metadata in the form in which they are stored."""
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"has {name}, which this run does not" for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & saved.keys()):
        leaf = wanted[name] if isinstance(saved[name], jax.Array | np.ndarray) else _stored_form(wanted[name])
        there, here = (saved[name].shape, saved[name].dtype), (leaf.shape, leaf.dtype)
        if there != here:
            problems.append(f"{name} is {there[1]}{list(there[0])}, this run needs {here[1]}{list(here[0])}")
    return problems


@contextmanager
def _silent_orbax() -> Iterator[Any]:
    """Import orbax, which takes most of a second, and keep it from warning of what is wanted or raised here."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs each save through absl
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from orbax.checkpoint import v1

            yield v1
    finally:
        logger.setLevel(level)


@contextmanager
def _plain_path(folder: Path) -> Iterator[str]:
    """Name a folder for orbax by its parent's file descriptor, where its path would pass for a pattern or a bucket."""
    if re.fullmatch(r"[\w/.,+=@~ -]*", str(folder.absolute()), re.ASCII) or not os.path.isdir("/proc/self/fd"):
        yield str(folder.absolute())
        return
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)  # the folder itself may not be there yet
    try:
        yield f"/proc/self/fd/{descriptor}/{folder.name}"
    finally:
        os.close(descriptor)


def _flatten(tree: PyTree) -> dict[str, Any]:
    """Name leaves, but for those without elements, which orbax refuses."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if leaf.size}


def is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _fits_jax(leaf: Any) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True) == leaf.dtype)


def _storable(leaf: Any) -> Any:
    """Convert a leaf to a type that orbax has."""
    return _same_bits(leaf, jnp.uint8) if leaf.dtype in _NARROW else leaf


def _same_bits(leaf: Any, dtype: Any) -> Any:
    of_floats = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.floating)
    return jax.lax.bitcast_convert_type(leaf, dtype) if of_floats else leaf.astype(dtype)


def _stored_form(leaf: Any) -> Any:
    if is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.uint8) if leaf.dtype in _NARROW else leaf
