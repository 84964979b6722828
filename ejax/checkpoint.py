"""Checkpoints: a directory that appears whole or not at all, and knows when it was damaged.

Layout: ``<name>/state`` (orbax; one array for each leaf, named by its path), ``<name>/meta.json`` (schema version,
library versions, counters, config), ``<name>/SHA256`` (a digest of each other file; its presence completes the set).
"""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from ejax.types import PyTree

SCHEMA_VERSION = 1
_REMEDY = "Use the config it was made with."
_MOST = 20
"""Arrays that an error names."""
_LIBRARIES = ("ejax", "jax", "flax", "optax", "orbax-checkpoint", "numpy", "mujoco")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    meta: dict[str, Any]


def save_checkpoint(directory: Path, name: str, state: PyTree, meta: dict[str, Any]) -> Path:
    """Write ``directory/name`` and return it once it is complete on disk.

    An interrupted save leaves only a ``.partial`` directory, which the next save removes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".partial-*"):
        shutil.rmtree(leftover)
    partial = directory / f".partial-{name}"
    with _silent_orbax():
        try:
            ocp.save(str((partial / "state").absolute()), _flatten(state))
        except ValueError as error:
            if (refused := _of_the_disk(error)) is None:
                raise
            raise refused from error
    meta = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), **meta}
    (partial / "meta.json").write_text(json.dumps(meta, indent=2))
    digests = {str(path.relative_to(partial)): _sha256(path) for path in _files(partial)}
    (partial / "SHA256").write_text("".join(f"{digest}  {path}\n" for path, digest in digests.items()))
    for path in [*_files(partial), partial]:
        _sync(path)
    final = directory / name
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    _sync(directory)
    return final


def load_checkpoint(path: Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """``(state, meta)``, the state with the structure of ``like``.

    Raises:
        CheckpointError: incomplete, damaged, of another schema, or of another structure than ``like``.
    """
    meta = verify_checkpoint(path).meta
    return _load(path, like, ""), meta


def load_train_state(path: Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Only the ``TrainState`` of a ``RunState``, and meta: without the environments, however many there are.

    Raises:
        CheckpointError: as ``load_checkpoint``.
    """
    meta = verify_checkpoint(path).meta
    return _load(path, like, "train."), meta


def load_params(path: Path, like: PyTree, remedy: str = _REMEDY) -> PyTree:
    """Only the policy's parameters of a ``RunState``: enough to act.

    Args:
        like: as the policy's ``init`` gives them (shapes suffice).
        remedy: what to do about other names or shapes, for the error.

    Raises:
        CheckpointError: as ``load_checkpoint``.
    """
    verify_checkpoint(path)
    return _load(path, like, "train.params.", remedy)


@contextmanager
def _silent_orbax() -> Iterator[None]:
    """Orbax warns that arrays saved without a mesh are loaded onto one device, which is what is wanted here; and its
    threads log, with tracebacks, what is raised here anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _of_the_disk(error: ValueError) -> OSError | None:
    """Orbax's error for a full disk and the like, as Python has it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return None if code is None else OSError(int(code[1]), os.strerror(int(code[1])))


def _load(path: Path, like: PyTree, prefix: str, remedy: str = _REMEDY) -> PyTree:
    state = str((path / "state").absolute())
    wanted = {prefix + name: leaf for name, leaf in _flatten(like).items()}
    everything = ocp.metadata(state).metadata
    saved = {name: leaf for name, leaf in everything.items() if name.startswith(prefix)}
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"has {name}, which this run does not" for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & saved.keys()):
        there, here = (saved[name].shape, saved[name].dtype), (wanted[name].shape, wanted[name].dtype)
        if there != here:
            problems.append(f"{name} is {there[1]}{list(there[0])}, this run needs {here[1]}{list(here[0])}")
    if problems:
        shown = "; ".join(problems[:_MOST]) + (f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else "")
        raise CheckpointError(f"checkpoint {path} does not fit the config: {shown}. {remedy}")
    abstract = dict.fromkeys(everything, ocp.PLACEHOLDER)  # not read
    abstract |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arrays = ocp.load(state, abstract)
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = [arrays[prefix + _name(p)] if x.size else jnp.zeros(x.shape, x.dtype) for p, x in paths]
    return jax.tree.unflatten(structure, leaves)


def verify_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``, every file of it checked against its digest.

    Raises:
        CheckpointError: it is missing, incomplete, damaged or of another schema.
    """
    listing = path / "SHA256"
    if not listing.is_file():
        what = "is incomplete (it has no SHA256 file)" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}")
    for line in listing.read_text().splitlines():
        digest, _, name = line.partition("  ")
        file = path / name
        if not file.is_file() or _sha256(file) != digest:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing or was changed")
    meta = json.loads((path / "meta.json").read_text())
    if meta["schema_version"] != SCHEMA_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has schema version {meta['schema_version']}, this ejax reads {SCHEMA_VERSION}"
        )
    return Checkpoint(path, meta)


def list_checkpoints(directory: Path, pattern: str) -> list[Path]:
    """Directories named ``<pattern>_step_<n>``, the newest (largest n) first; damaged ones too."""
    named = re.compile(re.escape(pattern) + r"_step_(\d+)")
    found = [(int(m[1]), path) for path in directory.glob("*") if (m := named.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def library_versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}


def _flatten(tree: PyTree) -> dict[str, Any]:
    """Leaves by name. Those without elements are left out: orbax refuses them, and their shape says all."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if leaf.size}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    """Force a file or directory to disk: after a power cut a renamed directory could else hold empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
