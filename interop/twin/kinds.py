"""``policy.json``: the spec of a policy of any kind, written and read. No jax, no torch."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from interop.standalone_verify import parse_json, read_bytes
from interop.twin.spec import PolicySpec, ProgramSpec

Spec: TypeAlias = PolicySpec | ProgramSpec

_KINDS: dict[str, tuple[type[Spec], tuple[int, ...]]] = {
    "network": (PolicySpec, (4, 3, 2, 1)),
    "program": (ProgramSpec, (2, 1)),
}
"""Kind -> its class and the schema versions that are read, the written one first. A network of version 1 had no images,
of version 2 no memory, of version 3 no blocks; 1 and 2 did not name their kind. A program of version 1 was JAX's alone.
"""


def spec_to_json(spec: Spec) -> str:
    name, versions = next((name, versions) for name, (kind, versions) in _KINDS.items() if isinstance(spec, kind))
    fields = {key: x for key, x in dataclasses.asdict(spec).items() if key != "paths"}
    # a program has thousands of numbers, one a line with indentation
    indent = None if fields.get("program") else 2
    return json.dumps({"schema_version": versions[0], "kind": name, **fields}, indent=indent, allow_nan=False)


def load_spec(path: Path) -> Spec:
    """Load a ``policy.json`` of any kind. Raises FileNotFoundError; ValueError: see ``spec_from_json``."""
    return spec_from_json(read_bytes(path).decode())


def spec_from_json(text: str) -> Any:
    """Read a ``Spec``. Raises ValueError: of another schema version or kind, or none: the text names key and value."""
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise ValueError(f"the policy spec is not JSON: {repr(error)[:200]}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"the policy spec must be a mapping, got {repr(raw)[:100]}")
    name, version = raw.pop("kind", "network"), raw.pop("schema_version", None)
    if not isinstance(name, str) or name not in _KINDS:
        text = f"the policy spec is of the kind {repr(name)[:100]}; there is {', '.join(_KINDS)}"
        raise ValueError(f"{text}. Export again from the run")
    kind, versions = _KINDS[name]
    if type(version) is not int or version not in versions:
        known = ", ".join(map(str, sorted(versions)))
        raise ValueError(f"the policy spec has schema version {repr(version)[:100]}, this interop reads {known}")
    spec = _typed(kind, raw, "")
    if lacking := spec.lacking():
        raise ValueError(f"the policy spec lacks {', '.join(lacking)[:200]}, which it needs")
    return spec


def _typed(kind: Any, raw: Any, key: str) -> Any:
    """Make a JSON value this type: a dataclass, or the type of one of its fields. Raises ValueError: naming key, type
    and value."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return raw
    if dataclasses.is_dataclass(origin) and isinstance(raw, dict):
        return _dataclass(origin, raw, key)
    if origin in (Union, UnionType):
        return None if raw is None else _typed(parts[0], raw, key)
    if origin is tuple and isinstance(raw, list):
        kinds = parts[:1] * len(raw) if parts[1:] == (...,) else parts
        if len(kinds) == len(raw):
            return tuple(_typed(each, x, f"{key}.{i}") for i, (each, x) in enumerate(zip(kinds, raw, strict=True)))
    if origin is Mapping and isinstance(raw, dict):
        return {name: _typed(parts[1], x, f"{key}.{name}") for name, x in raw.items()}
    if origin is Literal and raw in parts:
        return raw
    if type(raw) is kind or (kind is float and type(raw) is int):
        return raw
    raise ValueError(f"the policy spec's '{key}' must be {getattr(kind, '__name__', kind)}, got {repr(raw)[:100]}")


def _dataclass(kind: Any, raw: Mapping[str, Any], key: str) -> Any:
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    unknown = raw.keys() - hints.keys()
    missing = {x.name for x in fields if x.default is MISSING and x.default_factory is MISSING} - raw.keys()
    if unknown or missing:
        names, where = ", ".join(sorted(unknown or missing))[:200], f" under {key}" if key else ""
        raise ValueError(f"the policy spec{where} {'has unknown' if unknown else 'lacks'} {names}")
    return kind(**{name: _typed(hints[name], x, f"{key}.{name}".lstrip(".")) for name, x in raw.items()})
