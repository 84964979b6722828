"""The files of an export, and their loaders as functions of plain arrays. No jax, except for StableHLO.

Weights alone (pt, safetensors) and graphs of numeric operators (onnx, stablehlo) cannot run code of their maker; an
archive of ``torch.export`` (pt2) and TorchScript can.
"""

import contextlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.artefacts.parity import ParityError, Run
from interop.plain_files import MAX_ARTEFACT, check_plain, read_bytes
from interop.twin.kinds import Spec

_LIBRARIES = ("jax", "flax", "numpy", "torch", "safetensors", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Format:
    """One kind of artefact."""

    file: str
    load: Callable[[Path, Spec], Run]
    needs: tuple[str, ...]
    """Packages needed to load it, under pip's names."""
    written_with: tuple[str, ...] = ()
    """Further packages needed to write it."""
    runs_code: bool = False
    """Loading or running the file can execute its maker's code."""

    def missing(self, *, to_write: bool = False) -> list[str]:
        """The packages that are not installed here."""
        needs = self.needs + (self.written_with if to_write else ())
        return [name for name in needs if importlib.util.find_spec(name) is None]


def library_versions() -> dict[str, str]:
    """The versions of the libraries that are installed here; ejax's own is the code's, which may be a checkout's."""
    found = {}
    with contextlib.suppress(ImportError):  # a robot has the exported files without it
        import ejax

        found["ejax"] = ejax.__version__
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _load_pt(path: Path, spec: Spec) -> Run:
    from interop.policy import deployed, load_state_dict

    return _run_torch(deployed(spec, load_state_dict(path)))


def _load_safetensors(path: Path, spec: Spec) -> Run:
    from safetensors.torch import load_file

    from interop.policy import check_state_dict, deployed

    check_plain(path)
    return _run_torch(deployed(spec, check_state_dict(path, load_file(path))))


def _load_pt2(path: Path, spec: Spec) -> Run:
    """Unpickles weights, constants and example inputs, and evaluates sizes as Python: only for trusted files."""
    import torch

    del spec
    return _run_torch(torch.export.load(path).module())


def _load_torchscript(path: Path, spec: Spec) -> Run:
    """The program can write files as soon as it is loaded (``__setstate__``): only for trusted files."""
    import warnings

    import torch

    del spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates TorchScript; robots still load it
        return _run_torch(torch.jit.load(path, map_location="cpu"))


def _run_torch(module: Callable[..., Any]) -> Run:
    import torch

    def run(leaves: list[NDArray[Any]]) -> list[NDArray[Any]]:
        with torch.no_grad():
            outputs = module(*map(torch.tensor, leaves))
        return [y.numpy() for y in outputs]

    return run


def _load_onnx(path: Path, spec: Spec) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: it warns of an input that may be left out
    # from its bytes: weights in other files, which ONNX allows, have no digest
    session = onnxruntime.InferenceSession(read_bytes(path, MAX_ARTEFACT), options, providers=["CPUExecutionProvider"])
    return lambda leaves: session.run(list(spec.outputs), dict(zip(spec.inputs, leaves, strict=True)))


def _load_stablehlo(path: Path, spec: Spec) -> Run:
    import jax
    import jax.export

    del spec
    exported = jax.export.deserialize(bytearray(read_bytes(path, MAX_ARTEFACT)))
    _refuse_calls_outside(exported.mlir_module())
    call = jax.jit(exported.call)
    return lambda leaves: [np.asarray(y) for y in call(*leaves)]


def _refuse_calls_outside(module: str) -> None:
    """StableHLO can call any function that jaxlib or a plugin has registered, some of which take pointers.

    Raises:
        ParityError: it does, or exchanges data with the outside. An export asserts its batch size, and calls nothing.
    """
    calls = len(re.findall("custom_call", module))
    asserts = len(re.findall(r"\bstablehlo\.custom_call @shape_assertion\(", module))
    exchanges = re.findall(r"\b(?:stablehlo|mhlo|vhlo)\.(?:infeed|outfeed|send|recv)\w*", module)
    if calls != asserts or exchanges:
        raise ParityError("it calls functions outside itself, which no export does; it was not run")


FORMATS: dict[str, Format] = {
    "pt": Format("policy.pt", _load_pt, ("torch",)),
    "safetensors": Format("policy.safetensors", _load_safetensors, ("safetensors", "torch")),
    "pt2": Format("policy.pt2", _load_pt2, ("torch",), runs_code=True),
    "onnx": Format("policy.onnx", _load_onnx, ("onnxruntime",), written_with=("onnx",)),
    "torchscript": Format("policy.torchscript", _load_torchscript, ("torch",), runs_code=True),
    "stablehlo": Format("policy.stablehlo", _load_stablehlo, ("jax", "flatbuffers")),
}
