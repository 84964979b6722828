"""``policy.json`` of any kind: its spec, and the places of its twin and of its ONNX graph. No jax, no torch."""

import importlib
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
    """What a spec of this kind becomes; modules are imported when they are needed."""

    spec: type[PolicySpec] | type[VLASpec]
    twin: str
    """Place of its torch module, called with the spec; its ``deployed()`` is a function of plain tensors,
    ``spec.inputs`` in, ``spec.outputs`` out, all by position."""
    onnx: str
    """Place of ``make(spec, state_dict) -> ModelProto``."""

    def make_twin(self, spec: Spec) -> Any:
        return _imported(self.twin)(spec)

    def make_onnx(self, spec: Spec, state_dict: Mapping[str, NDArray[Any]]) -> Any:
        return _imported(self.onnx)(spec, state_dict)


KINDS = {
    spec.KIND: SpecKind(PolicySpec, "interop.policy:TorchPolicy", "interop.artefacts.onnx_graph:make_onnx"),
    vla_spec.KIND: SpecKind(VLASpec, "interop.twin.vla:TorchVLA", "interop.artefacts.onnx_vla:make_vla_onnx"),
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


def _imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
