"""EmbodiChain's methods of a config class, for classes whose objects are checked when they are made.

The standard library alone is needed.
"""

import dataclasses
from typing import Any, Self


class ConfigClass:
    """A frozen dataclass with ``replace``, ``copy``, ``to_dict`` and ``validate``; ``StrictModel`` has pydantic's."""

    def replace(self, **changes: Any) -> Self:
        """Make a new object with other values in these fields, checked as a new one is.

        Raises ValueError or TypeError: a field that is not there, or a value that it does not take.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # of dataclasses alone

    def copy(self, **changes: Any) -> Self:
        """Do as ``replace``."""
        return self.replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, those of the objects inside as mappings too."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # of dataclasses alone

    def validate(self, prefix: str = "") -> list[str]:
        """List the fields without a value, as ``prefix`` + name: none, since an object that lacks one is never made."""
        del prefix
        return []
