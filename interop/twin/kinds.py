"""``policy.json`` of any kind. No jax, no torch."""

from pathlib import Path
from typing import TypeAlias

from interop.plain_files import parse_json
from interop.twin import spec, vla_spec
from interop.twin.spec import PolicySpec, spec_text
from interop.twin.vla_spec import VLASpec

Spec: TypeAlias = PolicySpec | VLASpec

_KINDS: dict[str, type[PolicySpec] | type[VLASpec]] = {spec.KIND: PolicySpec, vla_spec.KIND: VLASpec}
"""Under ``kind`` in policy.json; files without it are of the first. ``interop.policy.TWINS`` has their modules."""


def load_spec(path: Path) -> Spec:
    """Load a ``policy.json`` of any kind.

    Raises:
        FileNotFoundError: there is none. ValueError: it is no spec.
    """
    text = spec_text(path)
    try:
        name = parse_json(text).get("kind")
    except (ValueError, AttributeError):
        name = None  # the reader of the oldest kind reports what is wrong with it
    return _KINDS.get(name if isinstance(name, str) else "", PolicySpec).from_json(text)
