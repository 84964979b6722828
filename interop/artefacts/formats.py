"""The files of an export: one ``ExportFormat`` each, that writes it and loads it as a function of plain arrays.

No jax, except for StableHLO: all others come from the spec and the state_dict.

Weights alone (pt, safetensors) and graphs of numeric operators (onnx, stablehlo) cannot run code of their maker; an
archive of ``torch.export`` (pt2) and TorchScript can.
"""

import contextlib
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import MAX_ARTEFACT, ParityError, RunArtefact, check_plain, load_onnx, read_bytes
from interop.twin.kinds import Spec, spec_to_json

_LIBRARIES = ("jax", "flax", "numpy", "torch", "safetensors", "onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True)
class Trained:
    """A policy in each form that a writer may need."""

    function: Callable[..., Any]
    """The deployed actor in JAX: ``spec.inputs`` in, ``spec.outputs`` out, all by position."""
    spec: Spec
    state_dict: Mapping[str, NDArray[Any]]
    """With EmbodiChain's keys, see ``interop.checkpoints.weights``, or of a ``ProgramSpec`` with those of JAX."""
    global_step: int
    """Environment steps it was trained for."""

    @cached_property
    def twin(self) -> Any:
        """The deployed actor in torch: ``spec.inputs`` in, ``spec.outputs`` out, all by position."""
        from interop.policy import deployed

        return deployed(self.spec, self.state_dict).eval()

    @cached_property
    def program(self) -> Any:
        """The twin's ``torch.export.ExportedProgram``, of any batch, of which two formats are made."""
        import torch

        leaves = example_leaves(self.spec)
        batch = torch.export.Dim("batch", min=1)
        shapes = (tuple({0: batch} for _ in leaves),)  # one entry for the variadic argument
        return torch.export.export(self.twin, leaves, dynamic_shapes=shapes)


@dataclass(frozen=True)
class ExportFormat:
    """One kind of artefact."""

    file: str
    load: Callable[[Path, Spec], RunArtefact]
    write: Callable[[Path, Trained], None]
    needs: tuple[str, ...]
    """Packages needed to load it, under pip's names."""
    written_with: tuple[str, ...] = ()
    """Further packages needed to write it."""
    runs_code: bool = False
    """Loading or running the file can execute its maker's code."""
    deprecated: str = ""
    """Reason not to begin with it, and what to use; printed where it is written."""

    def missing(self, *, to_write: bool = False) -> list[str]:
        """List the packages that are not installed here."""
        needs = self.needs + (self.written_with if to_write else ())
        return [name for name in needs if importlib.util.find_spec(name) is None]


def installed_versions() -> dict[str, str]:
    """List the installed libraries' versions; ejax's own is the code's, which may be a checkout's."""
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


def _write_pt(path: Path, trained: Trained) -> None:
    """Write the layout of EmbodiChain's checkpoints, critic included."""
    import torch

    tensors = {name: torch.from_numpy(np.array(x)) for name, x in trained.state_dict.items()}
    torch.save({"global_step": trained.global_step, "policy": tensors}, path)


def _load_pt(path: Path, spec: Spec) -> RunArtefact:
    from interop.policy import deployed, load_state_dict

    return _run_torch(deployed(spec, load_state_dict(path)))


def _write_safetensors(path: Path, trained: Trained) -> None:
    """Write the state_dict, critic included, with the spec in the file's metadata."""
    from safetensors.numpy import save

    arrays = {name: np.array(x, order="C") for name, x in trained.state_dict.items()}  # also of no axes
    metadata = {"global_step": str(trained.global_step), "policy": spec_to_json(trained.spec)}
    path.write_bytes(save(arrays, metadata=metadata))  # ``save_file`` makes a file that its owner alone may read


def _load_safetensors(path: Path, spec: Spec) -> RunArtefact:
    from safetensors.torch import load_file

    from interop.policy import check_state_dict, deployed

    check_plain(path)
    return _run_torch(deployed(spec, check_state_dict(path, load_file(path))))


def _write_pt2(path: Path, trained: Trained) -> None:
    import torch

    torch.export.save(trained.program, path)


def _load_pt2(path: Path, spec: Spec) -> RunArtefact:
    """Unpickles weights, constants and example inputs, and evaluates sizes as Python: only for trusted files."""
    import torch

    del spec
    return _run_torch(torch.export.load(path).module())


def example_leaves(spec: Spec) -> tuple[Any, ...]:
    """Make a batch of 3: a size of 1 would be taken for a constant."""
    import torch

    return tuple(
        torch.zeros(3, *spec.input_shape(name), dtype=getattr(torch, spec.input_dtype(name))) for name in spec.inputs
    )


def _run_torch(module: Callable[..., Any]) -> RunArtefact:
    import torch

    def run(leaves: list[NDArray[Any]]) -> list[NDArray[Any]]:
        with torch.no_grad():
            outputs = module(*map(torch.tensor, leaves))
        return [y.numpy(force=True) for y in outputs]  # forced: one may still require a gradient

    return run


@contextlib.contextmanager
def _torchscript_still_works() -> Iterator[None]:
    """Drop torch's own warning, which names its lines and not the remedy: ``ejax export`` prints a notice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _write_torchscript(path: Path, trained: Trained) -> None:
    """Trace the deployed actor."""
    import torch

    with _torchscript_still_works():
        torch.jit.trace(trained.twin, example_leaves(trained.spec)).save(path)


def _load_torchscript(path: Path, spec: Spec) -> RunArtefact:
    """Load a program, which can write files as soon as it is loaded (``__setstate__``): only for trusted files."""
    import torch

    del spec
    with _torchscript_still_works():
        return _run_torch(torch.jit.load(path, map_location="cpu"))


def _write_onnx(path: Path, trained: Trained) -> None:
    from interop.artefacts import onnx_model

    path.write_bytes(onnx_model.make_onnx(trained.program, trained.spec).SerializeToString())


def _write_stablehlo(path: Path, trained: Trained) -> None:
    """``jax.export`` of the deployed actor, for CPU and CUDA. jax promises to read it for six months."""
    import jax
    import jax.export

    spec = trained.spec
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [
        jax.ShapeDtypeStruct((batch, *spec.input_shape(name)), np.dtype(spec.input_dtype(name))) for name in spec.inputs
    ]
    path.write_bytes(jax.export.export(jax.jit(trained.function), platforms=("cpu", "cuda"))(*shapes).serialize())


def _load_stablehlo(path: Path, spec: Spec) -> RunArtefact:
    import jax
    import jax.export

    del spec
    exported = jax.export.deserialize(bytearray(read_bytes(path, MAX_ARTEFACT)))
    _refuse_calls_outside(exported.mlir_module())
    call = jax.jit(exported.call)
    return lambda leaves: [np.asarray(y) for y in call(*leaves)]


def _refuse_calls_outside(module: str) -> None:
    """StableHLO can call any function that jaxlib or a plugin has registered, some of which take pointers. Raises
    ParityError: it does, or exchanges data with the outside. An export asserts its batch size, and calls nothing."""
    calls = len(re.findall("custom_call", module))
    asserts = len(re.findall(r"\bstablehlo\.custom_call @shape_assertion\(", module))
    exchanges = re.findall(r"\b(?:stablehlo|mhlo|vhlo)\.(?:infeed|outfeed|send|recv)\w*", module)
    if calls != asserts or exchanges:
        names = ", ".join(sorted({*re.findall(r"custom_call @(\w+)", module), *exchanges} - {"shape_assertion"}))
        raise ParityError(
            f"it calls functions outside itself ({names[:200]}), which no export may; it was not run. In a policy of "
            "yours use operations that StableHLO has, so no factorization of jax.numpy.linalg"
        )


JAX_FORMAT = "stablehlo"
"""The one that is not made of the twin."""
FORMATS: dict[str, ExportFormat] = {
    "pt": ExportFormat("policy.pt", _load_pt, _write_pt, ("torch",)),
    "safetensors": ExportFormat("policy.safetensors", _load_safetensors, _write_safetensors, ("safetensors", "torch")),
    "pt2": ExportFormat("policy.pt2", _load_pt2, _write_pt2, ("torch",), runs_code=True),
    "onnx": ExportFormat("policy.onnx", load_onnx, _write_onnx, ("onnxruntime",), ("torch", "onnx", "onnxscript")),
    "torchscript": ExportFormat(
        "policy.torchscript",
        _load_torchscript,
        _write_torchscript,
        ("torch",),
        runs_code=True,
        deprecated="torch itself deprecates TorchScript, and so does ejax: use pt2 (torch.export), or onnx",
    ),
    JAX_FORMAT: ExportFormat("policy.stablehlo", _load_stablehlo, _write_stablehlo, ("jax", "flatbuffers")),
}
