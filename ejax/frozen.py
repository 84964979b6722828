"""Values from a config file, hashable: mappings as ``FrozenDict`` and lists as tuples, all the way down."""

from typing import Any

from flax.core import FrozenDict


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
