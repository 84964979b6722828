"""Exports under test: formats that can be written here, folders that are spoilt, processes without some packages."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ejax.store.run_dir import create_run_directory
from ejax.training.build import build
from interop.artefacts.formats import FORMATS
from interop.standalone_verify import Case, load_cases, sha256

ROOT = Path(__file__).parents[2]
HERE = [name for name, form in FORMATS.items() if not form.missing(to_write=True)]


def needs(name: str) -> Any:
    """Mark a test to be skipped where that format cannot be written."""
    missing = " ".join(FORMATS[name].missing(to_write=True))
    return pytest.mark.skipif(bool(missing), reason=f"{name} needs pip install {missing}")


def skip_without_formats() -> None:
    if not HERE:
        pytest.skip("no format can be written here: pip install -e '.[export]'")


def one_batch_size(patch: pytest.MonkeyPatch) -> None:
    """Check batches of one size alone: StableHLO is compiled for each."""
    patch.setattr("interop.standalone_verify.BATCH_SIZES", (1,))


def save_run(config: Any, folder: Path, state: Any = None) -> Path:
    """Make a run as if after one update, which would only take time."""
    directory = create_run_directory(config, folder)
    meta = {"global_step": 32, "num_updates": 1, "best_eval_value": None, "config": config.to_dict()}
    directory.save(build(config).state if state is None else state, meta, keep=1)
    return directory.path


def certificate(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "parity.json").read_text())


def contract_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "contract.json").read_text())


def case_of(folder: Path, name: str) -> Case:
    return next(case for case in load_cases(folder / "observations.npz") if case.name == name)


def copy_of(exported: Path, to: Path) -> Path:
    return Path(shutil.copytree(exported, to))


def seal(folder: Path, *names: str) -> None:
    """Write the new digests of changed files."""
    digests = {name: sha256(folder / name) for name in names}
    rewrite(folder, "parity.json", lambda report: report["sha256"].update(digests))


def rewrite(folder: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a file of facts, under a new digest."""
    facts = json.loads((folder / name).read_text())
    edit(facts)
    (folder / name).write_text(json.dumps(facts))
    if name != "parity.json":
        seal(folder, name)


def rewrite_arrays(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the observations, under a new digest."""
    with np.load(folder / "observations.npz") as file:
        arrays = dict(file)
    edit(arrays)
    np.savez(folder / "observations.npz", **arrays)
    seal(folder, "observations.npz")


def keep_only(folder: Path, *formats: str) -> None:
    """Take the other formats out of the folder and its lists."""

    def drop(report: dict[str, Any]) -> None:
        for name in report["artefacts"].keys() - set(formats):
            (folder / FORMATS[name].file).unlink()
            del report["artefacts"][name], report["sha256"][FORMATS[name].file]

    rewrite(folder, "parity.json", drop)


def add_to_weight(file: Path, key: str, shape: tuple[int, ...]) -> None:
    """Add a thousandth to the first number of a tensor: ``key`` in safetensors, the one of this shape in ONNX."""
    if file.suffix == ".safetensors":
        from safetensors.numpy import load_file, save_file

        weights = load_file(file)
        weights[key].flat[0] += 1e-3
        save_file(weights, file)
        return
    import onnx

    model = onnx.load(file)
    tensor = next(x for x in model.graph.initializer if tuple(x.dims) == shape)
    values = onnx.numpy_helper.to_array(tensor).copy()
    values.flat[0] += 1e-3
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, file)


def run_without(blocked: Iterable[str], code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which importing these packages raises."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({tuple(blocked)!r}))\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, **options)


def verify_without(blocked: Iterable[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``ejax verify`` in a process without these packages."""
    return run_without(blocked, f"from interop.verify import main\nsys.exit(main({[str(folder), *options]!r}))")
