"""EmbodiChain's methods of a config class, for classes whose objects are checked when they are made.

The standard library alone is needed.
"""

import dataclasses
import math
from typing import Annotated, Any, Self, TypeAlias, TypeVar

T = TypeVar("T")
RESUMABLE = object()
MayChange: TypeAlias = Annotated[T, RESUMABLE]
"""Mark of a key that a resumed run may change, with all below it: it changes nothing that an update computes."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a number, ``Annotated[int, Range(ge=1)]``, which pydantic checks in a section of a config."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.ge <= value <= self.le and value > self.gt

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler(source) | {name: x for name, x in dataclasses.asdict(self).items() if math.isfinite(x)}


class ConfigClass:
    """A frozen dataclass with ``replace``, ``copy``, ``to_dict`` and ``validate``; ``StrictModel`` has pydantic's."""

    def replace(self, **changes: Any) -> Self:
        """Make a new object with other values in these fields, checked as a new one is.

        Raises ValueError or TypeError: a field that is not there, or a value that it does not take.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # of dataclasses alone

    def copy(self, **changes: Any) -> Self:
        """Make a new object, as ``replace`` does."""
        return self.replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, those of the objects inside as mappings too."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # of dataclasses alone

    def validate(self, prefix: str = "") -> list[str]:
        """List the fields without a value, as ``prefix`` + name: none, since an object that lacks one is never made."""
        del prefix
        return []
