"""The files of an export, and how each is loaded into a function of plain arrays. No jax, but for StableHLO."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.parity import Run
from interop.policy_spec import PolicySpec

_LIBRARIES = ("ejax", "jax", "flax", "numpy", "torch", "safetensors", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Format:
    """One kind of artefact."""

    file: str
    load: Callable[[Path, PolicySpec], Run]
    needs: tuple[str, ...]
    """Packages that it takes to load it; pip knows them by the same names."""
    written_with: tuple[str, ...] = ()
    """Further packages that it takes to write it."""

    def missing(self, *, to_write: bool = False) -> list[str]:
        """The packages that are not installed here."""
        needs = self.needs + (self.written_with if to_write else ())
        return [name for name in needs if importlib.util.find_spec(name) is None]


def library_versions() -> dict[str, str]:
    """Of the libraries that are installed here."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _load_pt(path: Path, spec: PolicySpec) -> Run:
    import torch

    from interop.policy import Deployed, make_policy

    state_dict = torch.load(path, weights_only=True, map_location="cpu")["policy"]
    return _run_torch(Deployed(make_policy(spec, state_dict)))


def _load_safetensors(path: Path, spec: PolicySpec) -> Run:
    from safetensors.torch import load_file

    from interop.policy import Deployed, make_policy

    return _run_torch(Deployed(make_policy(spec, load_file(path))))


def _load_pt2(path: Path, spec: PolicySpec) -> Run:
    import torch

    del spec
    return _run_torch(torch.export.load(path).module())


def _load_torchscript(path: Path, spec: PolicySpec) -> Run:
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


def _load_onnx(path: Path, spec: PolicySpec) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda leaves: session.run(list(spec.outputs), dict(zip(spec.inputs, leaves, strict=True)))


def _load_stablehlo(path: Path, spec: PolicySpec) -> Run:
    import jax
    import jax.export

    del spec
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    call = jax.jit(exported.call)
    return lambda leaves: [np.asarray(y) for y in call(*leaves)]


FORMATS: dict[str, Format] = {
    "pt": Format("policy.pt", _load_pt, ("torch",)),
    "safetensors": Format("policy.safetensors", _load_safetensors, ("safetensors", "torch")),
    "pt2": Format("policy.pt2", _load_pt2, ("torch",)),
    "onnx": Format("policy.onnx", _load_onnx, ("onnxruntime",), written_with=("onnx",)),
    "torchscript": Format("policy.torchscript", _load_torchscript, ("torch",)),
    "stablehlo": Format("policy.stablehlo", _load_stablehlo, ("jax", "flatbuffers")),
}
