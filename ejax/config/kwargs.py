"""Arguments that a config gives to something else's constructor: any mapping, frozen so that it can be hashed."""

from typing import Annotated, Any

from flax.core import FrozenDict
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from ejax.frozen import freeze, thaw
from ejax.shorten import shown


def _frozen_mapping(value: Any) -> FrozenDict:
    if not isinstance(value, dict | FrozenDict):
        raise ValueError(f"must be a mapping of names to values, got {shown(value)}")
    return freeze(value)


Kwargs = Annotated[
    FrozenDict,
    PlainValidator(_frozen_mapping),
    PlainSerializer(thaw),
    WithJsonSchema({"type": "object"}),
]
