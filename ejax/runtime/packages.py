"""Installed packages, found without importing them."""

import importlib.util
from pathlib import Path


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, which is looked up, not imported. None: it is not installed.

    Args:
        name: of a top level.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # of a module that no file is the source of, such as __main__
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
