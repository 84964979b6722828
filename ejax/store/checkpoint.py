"""Checkpoints: a directory that appears whole or not at all, and knows when it was damaged.

Layout: ``<name>/state`` (orbax; one array for each leaf, named by its path), ``<name>/meta.json`` (schema version,
library versions, counters, config), ``<name>/SHA256`` (a digest of each other file and of itself; its presence
completes the set). While it is written it is called ``.partial-<name>``, and one that it replaces ``.replaced-<name>``:
at each moment one of them is whole.
"""

import functools
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from pydantic import BaseModel, NonNegativeInt

import ejax
from ejax.logs.json_records import FactsError, read_facts
from ejax.store.digests import LISTING, DamagedError, check_digests, files_of, write_digests
from ejax.types import PyTree

SCHEMA_VERSION = 2
_READ_VERSIONS = (1, 2)
"""Version 1 differs by a ``SHA256`` without a digest of its own."""
_PARTIAL, _REPLACED = ".partial-", ".replaced-"
_REMEDY = "Use the config it was made with."
_MOST = 20
"""Arrays that an error names."""
_NARROW = (jnp.uint2, jnp.uint4, jnp.float8_e4m3)
"""Types that orbax cannot store; as bytes they lose nothing."""
_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "mujoco")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the text says why and what to do."""


class CheckpointMeta(BaseModel):
    """The form of ``meta.json``; what a caller adds besides is kept as it is."""

    schema_version: int
    versions: dict[str, str]
    global_step: NonNegativeInt = 0
    num_updates: NonNegativeInt = 0
    config: dict[str, Any] = {}
    best_eval_value: float | None = None
    last_eval_metrics: dict[str, float] = {}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    meta: dict[str, Any]


def save_arrays(folder: Path, state: PyTree) -> None:
    """Write the arrays of a state; each of several processes calls it, and writes those of its own devices.

    Raises:
        CheckpointError: orbax stored something else than the state.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _silent_orbax() as ocp, _plain_path(folder) as path:
        try:
            ocp.save(path, {name: _storable(leaf) for name, leaf in _flatten(state).items()})
        except ValueError as error:
            if (refused := _of_the_disk(error)) is None:
                raise
            raise refused from error
    if jax.process_index() == 0 and (problems := _differences(_read_arrays(folder.parent, None), _flatten(state))):
        raise CheckpointError(f"{folder} was not stored as it was given: {'; '.join(problems[:_MOST])}")


def save_checkpoint(
    directory: Path,
    name: str,
    state: PyTree,
    meta: dict[str, Any],
    save_arrays: Callable[[Path, PyTree], None] = save_arrays,
) -> Path:
    """Write ``directory/name`` and return it once it is complete on disk; one of that name stays until then.

    An interrupted save leaves only directories that ``recover_checkpoints`` or the next save takes care of.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _tidy(directory)
    arrays = arrays_under_way(directory, name)
    save_arrays(arrays, state)
    return _complete(arrays.parent, directory / name, meta)


def arrays_under_way(directory: Path, name: str) -> Path:
    """The folder of a checkpoint's arrays until it is complete."""
    return directory / f"{_PARTIAL}{name}" / "state"


def rewrite_meta(path: Path, meta: dict[str, Any]) -> None:
    """Replace the meta of a checkpoint, as a whole or not at all; its arrays are not written a second time."""
    _tidy(path.parent)
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    shutil.copytree(path / "state", partial / "state", copy_function=_link)
    _complete(partial, path, meta)


def recover_checkpoints(directory: Path) -> list[Path]:
    """Put in place what a kill left under another name: complete checkpoints that were about to get theirs.

    Only for a process that goes on with the run: a process that is saving has such names as well.

    Returns:
        The checkpoints that were put in place.
    """
    recovered = []
    for partial in sorted(directory.glob(f"{_PARTIAL}?*")):
        final = partial.with_name(partial.name.removeprefix(_PARTIAL))
        if not os.path.lexists(final) and _is_whole(partial):
            os.replace(partial, final)
            recovered.append(final)
    return recovered + _tidy(directory)


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


def load_policy_arrays(path: Path) -> dict[str, np.ndarray]:
    """The policy's parameters of a ``RunState`` by name, ``params.actor.linear_0.kernel``, whichever policy it is.

    Raises:
        CheckpointError: incomplete, damaged, of another schema, or without a policy.
    """
    verify_checkpoint(path)
    prefix = "train.params."
    forms = {name: form for name, form in _read_arrays(path, None).items() if name.startswith(prefix)}
    if not forms:
        raise CheckpointError(f"checkpoint {path} has no policy in it")
    arrays = _read_arrays(path, forms)
    numbers = {name: jax.random.key_data(x) if _is_key(x) else x for name, x in arrays.items()}
    return {name.removeprefix(prefix): np.asarray(numbers[name]) for name in forms}


@contextmanager
def _silent_orbax() -> Iterator[Any]:
    """Orbax, which takes most of a second to import, and without its warnings: that arrays saved without a mesh are
    loaded onto one device is wanted here, and its threads log, with tracebacks, what is raised here anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from orbax.checkpoint import v1

            yield v1
    finally:
        logger.setLevel(level)


@contextmanager
def _plain_path(folder: Path) -> Iterator[str]:
    """Name a folder for orbax, which takes ``[…]`` and a backslash in a path for patterns, and ``gs:`` for a bucket:
    such a path is given by its parent's file descriptor."""
    if re.fullmatch(r"[\w/.,+=@~ -]*", str(folder.absolute()), re.ASCII) or not os.path.isdir("/proc/self/fd"):
        yield str(folder.absolute())
        return
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{folder.name}"
    finally:
        os.close(descriptor)


def _of_the_disk(error: ValueError) -> OSError | None:
    """Orbax's error for a full disk and the like, as Python has it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return None if code is None else OSError(int(code[1]), os.strerror(int(code[1])))


def _load(path: Path, like: PyTree, prefix: str, remedy: str = _REMEDY) -> PyTree:
    wanted = {prefix + name: leaf for name, leaf in _flatten(like).items()}
    everything = _read_arrays(path, None)
    saved = {name: leaf for name, leaf in everything.items() if name.startswith(prefix)}
    arrays: dict[str, Any] = {}
    if not (problems := _differences(saved, wanted)):
        arrays = _read_arrays(path, wanted)
        problems = _differences(arrays, wanted)  # only what was read shows whether it is a PRNG key, and which one
    if problems:
        shown = "; ".join(problems[:_MOST]) + (f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else "")
        raise CheckpointError(f"checkpoint {path} does not fit the config: {shown}. {remedy}")
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = [
        arrays[prefix + _name(p)] if x.size else (jnp if _fits_jax(x) else np).zeros(x.shape, x.dtype) for p, x in paths
    ]
    return jax.tree.unflatten(structure, leaves)


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Compare arrays by name, shape and type, those of orbax's metadata in the form in which they are stored."""
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"has {name}, which this run does not" for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & saved.keys()):
        leaf = wanted[name] if isinstance(saved[name], jax.Array | np.ndarray) else _stored_form(wanted[name])
        there, here = (saved[name].shape, saved[name].dtype), (leaf.shape, leaf.dtype)
        if there != here:
            problems.append(f"{name} is {there[1]}{list(there[0])}, this run needs {here[1]}{list(here[0])}")
    return problems


def verify_checkpoint(path: Path, schema: type[CheckpointMeta] = CheckpointMeta) -> Checkpoint:
    """The checkpoint at ``path``, every file of it checked against its digest.

    Args:
        schema: of its meta, where more than the usual is needed.

    Raises:
        CheckpointError: it is missing, incomplete, damaged or of another schema.
    """
    if not (path / LISTING).is_file():
        what = f"is incomplete (it has no {LISTING} file)" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}")
    try:
        has_own_digest = check_digests(path)
        meta = read_facts(path / "meta.json", schema)
        if meta["schema_version"] >= SCHEMA_VERSION and not has_own_digest:
            raise DamagedError(f"{LISTING} was cut short")
        if not any((path / "state").iterdir()):
            raise DamagedError("state is empty")
    except OSError:
        raise CheckpointError(f"checkpoint {path} is damaged: it has no folder state") from None
    except (DamagedError, FactsError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None
    if meta["schema_version"] not in _READ_VERSIONS:
        readable = " and ".join(str(number) for number in _READ_VERSIONS)
        raise CheckpointError(
            f"checkpoint {path} has schema version {meta['schema_version']}, this ejax reads {readable}"
        )
    return Checkpoint(path, meta)


def list_checkpoints(directory: Path, pattern: str) -> list[Path]:
    """Directories named ``<pattern>_step_<n>``, the newest (largest n) first; damaged ones too."""
    named = re.compile(re.escape(pattern) + r"_step_(\d+)")
    found = [(int(m[1]), path) for path in directory.glob("*") if (m := named.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


@functools.cache  # ``version`` parses the package's whole description
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a vendored copy; ejax itself is that of a checkout
        return "not installed"


def library_versions() -> dict[str, str]:
    """Give the versions of what computes: ejax's own is the code's, also in a checkout that is not installed."""
    return {"ejax": ejax.__version__} | {name: _version(name) for name in _LIBRARIES}


def _flatten(tree: PyTree) -> dict[str, Any]:
    """Leaves by name. Those without elements are left out: orbax refuses them, and their shape says all."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if leaf.size}


def _is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _fits_jax(leaf: Any) -> bool:
    """Check that JAX keeps the leaf's type: not those of 64 bits, which it would cut to 32."""
    return bool(jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True) == leaf.dtype)


def _storable(leaf: Any) -> Any:
    """A leaf in a type that orbax has; it knows typed PRNG keys, and stores their numbers and their kind."""
    return _same_bits(leaf, jnp.uint8) if leaf.dtype in _NARROW else leaf


def _same_bits(leaf: Any, dtype: Any) -> Any:
    of_floats = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.floating)
    return jax.lax.bitcast_convert_type(leaf, dtype) if of_floats else leaf.astype(dtype)


def _stored_form(leaf: Any) -> Any:
    """Shape and type of a leaf on disk, as orbax's metadata gives them."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.uint8) if leaf.dtype in _NARROW else leaf


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _read_arrays(path: Path, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """The arrays that are asked for by their shapes, on one device of this process, whatever devices they were saved
    from; on the host those whose type JAX has not. None: the shapes of all.

    Raises:
        CheckpointError: orbax cannot read them, although the digests agree.
    """
    try:
        with _silent_orbax() as ocp, _plain_path(path / "state") as state:
            if wanted is None:
                return dict(ocp.metadata(state).metadata)
            rest = dict.fromkeys(ocp.metadata(state).metadata, ocp.PLACEHOLDER)  # not read
            here = SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])  # type: ignore[attr-defined]
            stored = {name: _stored_form(x) for name, x in wanted.items()}
            forms: dict[str, Any] = {
                name: np.empty(x.shape, x.dtype)  # of 64 bits, as environments outside JAX may have: not cut to 32
                if not _fits_jax(x)
                else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
                for name, x in stored.items()
            }
            read = dict(ocp.load(state, {**rest, **forms}))
            narrow = {name: _same_bits(read[name], x.dtype) for name, x in wanted.items() if x.dtype in _NARROW}
            return {name: read[name] for name in wanted} | narrow
    except Exception as error:  # whatever a reader of foreign bytes raises
        text = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"checkpoint {path} is damaged: state cannot be read: {text}") from error


def _complete(partial: Path, final: Path, meta: dict[str, Any]) -> Path:
    """Add meta and digests to the arrays in ``partial``, and give it its name."""
    meta = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), **meta}
    (partial / "meta.json").write_text(json.dumps(meta, indent=2))
    write_digests(partial)
    for path in [*files_of(partial), *(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _sync(path)
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if os.path.lexists(final):
        os.replace(final, replaced)
    os.replace(partial, final)
    _sync(final.parent)
    remove(replaced)
    return final


def _tidy(directory: Path) -> list[Path]:
    """Remove what interrupted saves left; one that was set aside and has no successor gets its name back."""
    restored = []
    for leftover in directory.glob(f"{_PARTIAL}*"):
        remove(leftover)
    for replaced in sorted(directory.glob(f"{_REPLACED}?*")):
        final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if os.path.lexists(final):
            remove(replaced)
        else:
            os.replace(replaced, final)
            restored.append(final)
    return restored


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _link(source: str, target: str) -> str:
    """The same file under a second name, where the file system can; a copy elsewhere."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, whichever it is; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Force a file or directory to disk: after a power cut a renamed directory could else hold empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
