"""Values and sections of a config, hashable: mappings as ``FrozenDict`` and lists as tuples, all the way down."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Self, TypeAlias, TypeVar, cast

from flax.core import FrozenDict
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic.functional_validators import AfterValidator

from ejax.schema.configclass import ConfigClass
from ejax.schema.configclass import MayChange as MayChange
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import expanded

F = TypeVar("F", bound=Callable[..., Any])

PathText: TypeAlias = Annotated[str, AfterValidator(expanded)]
"""A path, in which ``~`` and ``$NAME`` mean the same as in a shell."""
ANY_CASE = BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)
"""Reads a name of any case; with ``Annotated[Literal[...], ANY_CASE]``."""


class StrictModel(ConfigClass, BaseModel):  # type: ignore[misc]  # EmbodiChain's copy and validate, not pydantic's old
    """A section of a config: an unknown key, infinities and NaN are errors; a string below a field describes it."""

    # without use_attribute_docstrings, which parses the source of every class at its import, a tenth of start-up:
    # ejax.config.schema reads them when it makes the schema
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def replace(self, **changes: Any) -> Self:
        # without the defaults: one that depends on another field is found again
        return self.model_validate(given_fields(self) | changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the canonical form, ready for JSON or YAML."""
        return self.model_dump(mode="json")


def given_fields(model: BaseModel) -> dict[str, Any]:
    """Return the values that a model was made with, without the defaults."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def freeze(value: Any) -> Any:
    if isinstance(value, dict | FrozenDict):
        return FrozenDict({name: freeze(item) for name, item in value.items()})
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    """Invert ``freeze``, into what JSON can hold."""
    if isinstance(value, dict | FrozenDict):
        return {name: thaw(item) for name, item in value.items()}
    return list(map(thaw, value)) if isinstance(value, list | tuple) else value


def with_value(tree: Any, key: str, value: Any) -> Any:
    """Set another value at a dotted key, which is not checked; missing mappings are made."""
    first, _, rest = key.partition(".")
    if rest:
        child = getattr(tree, first) if isinstance(tree, ConfigClass) else tree.get(first)
        value = with_value({} if child is None else child, rest, value)
    if isinstance(tree, BaseModel):
        return tree.model_copy(update={first: value})
    return tree.replace(**{first: value}) if isinstance(tree, ConfigClass) else type(tree)({**tree, first: value})


def freeze_fields(record: Any, *names: str) -> None:
    """Freeze these fields of a frozen dataclass, in its ``__post_init__``."""
    for name in names:
        object.__setattr__(record, name, freeze(getattr(record, name)))


def _frozen_kwargs(value: Any) -> FrozenDict:
    if not isinstance(value, dict | FrozenDict | None):
        raise ValueError(f"got {short_repr(value)}; must be a mapping of names to values")
    return freeze(value or {})


Kwargs = Annotated[
    FrozenDict, PlainValidator(_frozen_kwargs), PlainSerializer(thaw), WithJsonSchema({"type": "object"})
]
"""Keyword arguments for something else: any mapping, frozen; null is an empty one."""


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def one_for_equal(make: F) -> F:
    """Return the same object for equal arguments: as a static argument, it finds what is compiled.

    Arguments that have no hash, such as options with arrays in them, give a new one.
    """
    kept = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def get(*args: Any, **kwargs: Any) -> Any:
        return (kept if is_hashable((args, *kwargs.values())) else make)(*args, **kwargs)

    return cast(F, get)
