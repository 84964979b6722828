"""Names of a package that are imported at their first use, so that one of its modules alone brings no other."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(package: str, places: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of ``package``, for ``{module: its names}``. It raises AttributeError for any other."""
    module_of = {name: module for module, names in places.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(module_of[name]), name)

    return get
