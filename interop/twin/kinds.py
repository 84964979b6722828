"""``policy.json`` of any kind: its spec, its twin and its ONNX graph. No jax; torch and onnx when they are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from interop.plain_files import parse_json
from interop.twin import spec, vla_spec
from interop.twin.spec import PolicySpec, spec_text
from interop.twin.vla_spec import VLASpec

Spec: TypeAlias = PolicySpec | VLASpec


@dataclass(frozen=True)
class SpecKind:
    """Forms that a spec of this kind takes; the functions import when they are called."""

    spec: type[PolicySpec] | type[VLASpec]
    make_twin: Callable[[Any], Any]
    """``spec -> torch module``, whose ``deployed()`` is a function of plain tensors, ``spec.inputs`` in,
    ``spec.outputs`` out, all by position."""
    make_onnx: Callable[[Any, Mapping[str, NDArray[Any]]], Any]
    """``(spec, state_dict) -> ModelProto``"""


def _network_twin(spec: PolicySpec) -> Any:
    from interop.policy import TorchPolicy

    return TorchPolicy(spec)


def _network_onnx(spec: PolicySpec, state_dict: Mapping[str, NDArray[Any]]) -> Any:
    from interop.artefacts.onnx_graph import make_onnx

    return make_onnx(spec, state_dict)


def _vla_twin(spec: VLASpec) -> Any:
    from interop.twin.vla import TorchVLA

    return TorchVLA(spec)


def _vla_onnx(spec: VLASpec, state_dict: Mapping[str, NDArray[Any]]) -> Any:
    from interop.artefacts.onnx_vla import make_vla_onnx

    return make_vla_onnx(spec, state_dict)


KINDS = {
    spec.KIND: SpecKind(PolicySpec, _network_twin, _network_onnx),
    vla_spec.KIND: SpecKind(VLASpec, _vla_twin, _vla_onnx),
}
"""Under ``kind`` in policy.json; files without it are of the first."""


def kind_of(spec: Spec) -> SpecKind:
    return next(kind for kind in KINDS.values() if isinstance(spec, kind.spec))


def load_spec(path: Path) -> Spec:
    """
    Raises:
        FileNotFoundError: there is none. ValueError: it is no spec.
    """
    text = spec_text(path)
    try:
        name = parse_json(text).get("kind")
    except (ValueError, AttributeError):
        name = None  # the reader of the oldest kind reports what is wrong with it
    return KINDS.get(name if isinstance(name, str) else "", KINDS[spec.KIND]).spec.from_json(text)
