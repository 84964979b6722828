"""Values from a config file, hashable: mappings as ``FrozenDict`` and lists as tuples, all the way down."""

from typing import Annotated, Any

from flax.core import FrozenDict
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from ejax.shorten import shown


def freeze(value: Any) -> Any:
    """A hashable value."""
    if isinstance(value, dict | FrozenDict):
        return FrozenDict({name: freeze(item) for name, item in value.items()})
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    """The inverse of ``freeze``, into what JSON can hold."""
    if isinstance(value, dict | FrozenDict):
        return {name: thaw(item) for name, item in value.items()}
    return list(map(thaw, value)) if isinstance(value, list | tuple) else value


def _frozen_kwargs(value: Any) -> FrozenDict:
    if not isinstance(value, dict | FrozenDict | None):
        raise ValueError(f"got {shown(value)}; must be a mapping of names to values")
    return freeze(value or {})


Kwargs = Annotated[
    FrozenDict,
    PlainValidator(_frozen_kwargs),
    PlainSerializer(thaw),
    WithJsonSchema({"type": "object"}),
]
"""Keyword arguments that a config gives to something else: any mapping, frozen; null is an empty one."""
