"""Files that run code, or write files, when they are read without care. What ran has left a marker behind."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch


class Trap:
    """Leaves the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def saved(content: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes."""
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


def pickled(marker: Path) -> dict[str, bytes]:
    """Make ``.pt`` files that leave the marker where they are unpickled, by kind."""
    content = {"global_step": 0, "policy": {"log_std": torch.zeros(2)}, "metadata": Trap(marker)}
    kinds = {f"pickle {protocol}": pickle.dumps(Trap(marker), protocol=protocol) for protocol in range(6)}
    legacy = BytesIO()
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    return {**kinds, "torch": saved(content), "torch, its older format": legacy.getvalue()}


class _Writing(torch.nn.Module):
    """Writes its input; ``__setstate__`` writes while the file is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(1)

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.kept, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        torch.save(state[0], "MARKER")
        self.kept, self.training = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "MARKER")
        return x


def write_torchscript(path: Path, marker: Path) -> None:
    """TorchScript that leaves the marker when it is loaded."""
    plain = path.with_suffix(".without_marker")
    torch.jit.script(_Writing()).save(plain)
    _rewrite(plain, path, lambda files: {name: x.replace(b"MARKER", str(marker).encode()) for name, x in files.items()})
    plain.unlink()


def write_pt2(path: Path, good: Path, kind: str, marker: Path) -> None:
    """Copy the archive ``good`` of ``torch.export``, changed so that loading it leaves the marker."""
    _rewrite(good, path, lambda files: PT2_KINDS[kind](files, marker))


def _rewrite(source: Path, to: Path, change: Callable[[dict[str, bytes]], Mapping[str, bytes]]) -> None:
    with zipfile.ZipFile(source) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(to, "w") as archive:
        for name, content in {**files, **change(files)}.items():
            archive.writestr(name, content)


def _pickled_weight(files: dict[str, bytes], marker: Path) -> dict[str, bytes]:
    config, entry, config_name = _payload(files, "data/weights/model_weights_config.json")
    return {config_name: json.dumps(config).encode(), _sibling(config_name, entry["path_name"]): saved(Trap(marker))}


def _pickled_constant(files: dict[str, bytes], marker: Path) -> dict[str, bytes]:
    config, entry, config_name = _payload(files, "data/constants/model_constants_config.json")
    entry["path_name"] = "opaque_obj_0"
    return {config_name: json.dumps(config).encode(), _sibling(config_name, "opaque_obj_0"): pickle.dumps(Trap(marker))}


def _pickled_inputs(files: dict[str, bytes], marker: Path) -> dict[str, bytes]:
    return {_named(files, "data/sample_inputs/model.pt"): saved(Trap(marker))}


def _expression(files: dict[str, bytes], marker: Path) -> dict[str, bytes]:
    """Make a size of a shape a text that sympy evaluates as Python."""
    name = _named(files, "models/model.json")
    code = json.dumps(f"open({str(marker)!r}, 'w')")
    changed, count = re.subn(r'"expr_str": "[^"]*"', lambda _: f'"expr_str": {code}', files[name].decode())
    assert count
    return {name: changed.encode()}


PT2_KINDS: dict[str, Callable[[dict[str, bytes], Path], dict[str, bytes]]] = {
    "pickled weight": _pickled_weight,
    "pickled constant": _pickled_constant,
    "pickled example inputs": _pickled_inputs,
    "Python expression": _expression,
}


def _payload(files: dict[str, bytes], suffix: str) -> tuple[Any, dict[str, Any], str]:
    """Return the list of weights or constants, its first entry, marked as pickled, and the list's name."""
    name = _named(files, suffix)
    config = json.loads(files[name])
    entry = next(iter(config["config"].values()))
    entry["use_pickle"] = True
    return config, entry, name


def _named(files: dict[str, bytes], suffix: str) -> str:
    (name,) = [name for name in files if name.endswith(suffix)]
    return name


def _sibling(name: str, file: str) -> str:
    return f"{name.rpartition('/')[0]}/{file}"
