"""``policy.json`` of any kind. No jax, no torch."""

from pathlib import Path
from typing import TypeAlias

from interop.plain_files import parse_json
from interop.twin import vla_spec
from interop.twin.spec import PolicySpec, spec_text
from interop.twin.vla_spec import VLASpec

Spec: TypeAlias = PolicySpec | VLASpec


def load_spec(path: Path) -> Spec:
    """
    Raises:
        FileNotFoundError: there is none. ValueError: it is no spec.
    """
    text = spec_text(path)
    try:
        kind = parse_json(text).get("kind")
    except (ValueError, AttributeError):
        kind = None  # the reader of the oldest kind reports what is wrong with it
    return VLASpec.from_json(text) if kind == vla_spec.KIND else PolicySpec.from_json(text)
