"""Checkpoints: a directory that appears whole or not at all, and knows when it was damaged.

``<name>/state`` (orbax; an array for each leaf), ``<name>/replay`` (``ejax.store.replay_rows``), ``<name>/meta.json``
(versions, counters, config), ``<name>/SHA256`` (digests of them and of itself; it completes the set). While it is
written it is called ``.partial-<name>``, and one that it replaces ``.replaced-<name>``: at each moment one of them is
whole. orbax's own manager would also decide which checkpoints stay, but it knows no digests: it deletes the older one
next to a newer one that is damaged.
"""

import functools
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, NonNegativeInt

import ejax
from ejax.algorithms.replay_buffer import replays_in, with_rows, without_rows
from ejax.logs.json_records import FactsError, read_facts
from ejax.runtime.sharding import is_main_process, wait_for_all
from ejax.schema.plain_files import is_side_file, to_json
from ejax.schema.registry import import_entry
from ejax.schema.writing import link_file, make_folder, move, replace_file, sync
from ejax.store.arrays import REPLAY, is_key, load_arrays, read_arrays
from ejax.store.arrays import CheckpointError as CheckpointError
from ejax.store.arrays import save_arrays as save_arrays
from ejax.store.digests import LISTING, DamagedError, ForeignError, check_digests, write_digests
from ejax.types import PyTree, with_networks

SCHEMA_VERSION = 2
_ROWS = {"save": "ejax.store.replay_rows:save_rows", "load": "ejax.store.replay_rows:load_rows"}
"""Rows of replay buffers, which few runs have."""
_PARTIAL, _REPLACED = ".partial-", ".replaced-"
_REMEDY = "Use the config it was made with."
_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "mujoco")  # those whose versions may change numbers


class CheckpointMeta(BaseModel):
    """The form of ``meta.json``, which may have more."""

    schema_version: int
    versions: dict[str, str]
    global_step: NonNegativeInt = 0
    num_updates: NonNegativeInt = 0
    config: dict[str, Any] = {}
    best_eval_value: float | None = None
    last_eval_metrics: dict[str, float | None] = {}
    policy_only: bool = False
    """The arrays are the policy's parameters alone: to act, and for ``policy.init_from``."""


def save_checkpoint(
    directory: Path,
    name: str,
    state: PyTree,
    meta: dict[str, Any] | None,
    save_arrays: Callable[[Path, PyTree], None] = save_arrays,
    previous: Path | None = None,
) -> Path:
    """Write ``directory/name`` and return it once it is complete on disk; one of that name stays until then.

    ``meta`` None: only this process's part of the state, whose checkpoint process 0 completes. ``previous``: a
    checkpoint of an earlier state of the same run, for ``ejax.store.replay_rows.save_rows``.
    """
    partial = directory / f"{_PARTIAL}{name}"
    if meta is not None:
        make_folder(directory, directory.parent)
        _tidy(directory)
    if is_main_process():
        make_folder(partial, directory)
    wait_for_all("the folder of a checkpoint")  # the first process tidies up before it makes the folder
    if replays := replays_in(state):
        there = previous if previous is not None and previous.is_dir() else None
        import_entry(_ROWS, "save")(partial, replays, there)
    save_arrays(partial / "state", without_rows(state))
    return directory / name if meta is None else _complete(partial, directory / name, meta, previous)


def rewrite_meta(path: Path, meta: dict[str, Any]) -> None:
    """Replace the meta of a checkpoint, as a whole or not at all."""
    _tidy(path.parent)
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    for name in ("state", REPLAY):
        if (path / name).is_dir():
            shutil.copytree(path / name, partial / name, copy_function=link_file)  # links: not written again
    _complete(partial, path, meta, path)


def recover_checkpoints(directory: Path) -> list[Path]:
    """Rename complete checkpoints that a kill left under another name, and return them.

    Only for a process that continues the run: one that is saving has such names as well.
    """
    recovered = []
    make_folder(directory, directory.parent)
    for partial in sorted(directory.glob(f"{_PARTIAL}?*")):
        final = partial.with_name(partial.name.removeprefix(_PARTIAL))
        if not os.path.lexists(final):
            with suppress(CheckpointError):
                verify_checkpoint(partial)
                recovered.append(move(partial, final, directory.parent))
    return recovered + _tidy(directory)


_PARAMS = "train.params."
_AVERAGE = re.compile(r"(train\.opt_state\.(?:[^.]+\.)*?)average\.")  # of ejax.numerics.weight_average


def load_checkpoint(path: Path, like: PyTree, part: str = "") -> tuple[PyTree, dict[str, Any]]:
    """Read ``(state, meta)``, the state with the structure of ``like``. ``part``: of the state that ``like`` is, such
    as ``train.``. Raises CheckpointError: incomplete, damaged, of another schema or structure than ``like``, or of
    other counts."""
    meta = verify_checkpoint(path)
    if meta.get("policy_only"):
        text = "holds a policy, without the rest of its training's state; policy.init_from starts a new run from it"
        raise CheckpointError(f"checkpoint {path} {text}")
    state = load_arrays(path, without_rows(like), part, _REMEDY)
    _check_counts(path, state, meta)
    if replays := replays_in(like):
        state = with_rows(state, import_entry(_ROWS, "load")(path, replays, replays_in(state)))
    return state, meta


def _check_counts(path: Path, state: PyTree, meta: dict[str, Any]) -> None:
    """Compare a meta's counts with the state of a run, which alone decides where it continues."""
    if not is_dataclass(state) or (counter := vars(state).get("update")) is None:  # a part of a state
        return
    update, names = int(counter), ("global_step", "num_updates", "best_eval_step", "last_evaluated")
    step, made, best, evaluated = (meta.get(name) or 0 for name in names)
    if made != update or step < update or step % max(update, 1) or best > step or evaluated > update:
        text = ", ".join(f"{name} {meta.get(name)}" for name in names)
        raise CheckpointError(f"checkpoint {path} is damaged: meta.json has {text}, and its state {update} updates")


def load_params(path: Path, like: PyTree, remedy: str = _REMEDY) -> PyTree:
    """Read only the policy's parameters of a ``RunState``, by their shapes, the average of them if it has one (an
    optimizer with ``ema_decay``); errors as ``load_checkpoint``."""
    verify_checkpoint(path)
    params = load_arrays(path, like, _PARAMS, remedy)
    if (average := _average_of(path)) is None:
        return params
    names = [name.removeprefix(average) for name in read_arrays(path, None) if name.startswith(average)]
    averaged = {name.split(".")[0] for name in names}  # not a critic with an optimizer apart
    networks = {name: network for name, network in like["params"].items() if name in averaged}
    return with_networks(params, load_arrays(path, networks, average, remedy))


def _average_of(path: Path) -> str | None:
    """Return how the names of the average of a policy's weights begin. None: it has none, or not yet."""
    found = next((match for name in read_arrays(path, None) if (match := _AVERAGE.match(name))), None)
    if found is None:
        return None
    count = f"{found[1]}averaged_steps"
    begun = int(read_arrays(path, {count: jax.ShapeDtypeStruct((), np.int32)})[count]) > 0
    return found[0] if begun else None


def load_policy_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a policy's parameters, of any kind, by name, such as ``params.actor.linear_0.kernel``. Raises
    CheckpointError: incomplete, damaged, of another schema, or without a policy."""
    verify_checkpoint(path)
    every = read_arrays(path, None)
    places = {name.removeprefix(_PARAMS): name for name in every if name.startswith(_PARAMS)}
    if not places:
        raise CheckpointError(f"checkpoint {path} has no policy in it")
    if average := _average_of(path):
        places |= {f"params.{name.removeprefix(average)}": name for name in every if name.startswith(average)}
    arrays = read_arrays(path, {name: every[name] for name in places.values()})
    numbers = {name: jax.random.key_data(x) if is_key(x) else x for name, x in arrays.items()}
    return {name: np.asarray(numbers[place]) for name, place in places.items()}


def verify_checkpoint(path: Path, schema: type[CheckpointMeta] = CheckpointMeta) -> dict[str, Any]:
    """Check every file of a checkpoint against its digest, and its meta against ``schema``. Returns the meta. Raises
    CheckpointError: it is missing, incomplete, damaged or of another schema."""
    if not (path / LISTING).is_file():
        missing = "does not exist; name its folder, RUN/checkpoints/NAME, or for one of RUN: latest, best"
        raise CheckpointError(f"checkpoint {path} {f'is incomplete, without {LISTING}' if path.exists() else missing}")
    try:
        check_digests(path)
        meta = read_facts(path / "meta.json", schema)
        if all(is_side_file(each.name) for each in (path / "state").iterdir()):  # digests of nothing agree
            raise DamagedError("state is empty")
    except OSError:
        raise CheckpointError(f"checkpoint {path} is damaged: it has no folder state") from None
    except ForeignError as error:
        raise ForeignError(f"checkpoint {path}: {error}") from None
    except (DamagedError, FactsError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None
    if meta["schema_version"] != SCHEMA_VERSION:
        text = f"has schema version {meta['schema_version']}, this ejax reads {SCHEMA_VERSION}"
        raise CheckpointError(f"checkpoint {path} {text}; use the ejax of its meta.json")
    return meta


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
    """Return the versions of what computes; ejax's own is the code's, also where it is not installed."""
    return {"ejax": ejax.__version__} | {name: _version(name) for name in _LIBRARIES}


def _complete(partial: Path, final: Path, meta: dict[str, Any], linked: Path | None = None) -> Path:
    """Put a checkpoint in place; ``linked``: one that some of its files are links to."""
    meta = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), **meta}
    replace_file(partial / "meta.json", to_json(meta, indent=2))
    write_digests(partial, linked if linked is not None and (linked / LISTING).is_file() else None)
    sync(partial)
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if os.path.lexists(final):
        move(final, replaced)  # a kill here leaves both, of which recovery keeps the new one
    move(partial, final)
    remove(replaced)
    return final


def _tidy(directory: Path) -> list[Path]:
    """Remove what interrupted saves left, and put back what was replaced by nothing."""
    restored = []
    for leftover in directory.glob(f"{_PARTIAL}*"):
        remove(leftover)
    for replaced in sorted(directory.glob(f"{_REPLACED}?*")):
        final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if os.path.lexists(final):
            remove(replaced)
        else:
            restored.append(move(replaced, final, directory.parent))
    return restored


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
